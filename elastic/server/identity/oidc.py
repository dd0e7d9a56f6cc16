"""Sign-in by OpenID Connect: the authorization code flow with PKCE, state and nonce, and verified ID tokens.

The server keeps a person's identity and, if the issuer gives one, a refresh token. With the refresh token it asks the
issuer from time to time whether the person may still sign in.
"""

import base64
import fnmatch
import hashlib
import re
import secrets
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast
from urllib.parse import quote_plus, urlencode

import httpx
import msgspec

from elastic.protocol.api import AccessRole
from elastic.protocol.endpoint import is_loopback
from elastic.protocol.http_clients import sync_client
from elastic.protocol.proxies import HttpSettingsError, through
from elastic.server.permissions import lesser
from elastic.server.settings import ClaimMapping, OidcSettings
from elastic.system.host import here

if TYPE_CHECKING:  # Only servers whose people sign in need it, and load it.
    from joserfc import jwt
    from joserfc.jwk import KeySet

ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
"""Accepted signatures: by a private key of the issuer, never by a shared secret, never none."""
_KEY_TYPES = ("RSA", "EC", "OKP")
JWKS_AGAIN_S = 5.0
"""Shortest time between two fetches of the issuer's keys. An unknown key causes a fetch."""
SUBJECT_CHARACTERS, NAME_CHARACTERS, EMAIL_CHARACTERS = 255, 200, 254


class SignInRefused(Exception):
    """A person who returned from the issuer is not let in. The message says why."""


class GrantEnded(Exception):
    """The issuer no longer lets a person in. The message has its answer."""


class IssuerUnavailable(Exception):
    """The issuer does not answer, or answers with nonsense."""


class SignInAttempt(msgspec.Struct, frozen=True):
    """A sign-in that a browser has begun. The browser keeps this, sealed, until it returns."""

    state: str
    nonce: str
    verifier: str
    redirect_uri: str
    next: str
    expires_s: float


class SignedIn(NamedTuple):
    """A person according to the issuer. `email` is set only if the issuer has verified it."""

    subject: str
    email: str | None
    name: str
    claims: Mapping[str, Any]
    refresh_token: str = ""


class IdentityProvider:
    """The issuer, with this server as its client. Threads may share it."""

    def __init__(self, settings: OidcSettings) -> None:
        self.settings = settings
        self._lock = threading.Lock()
        self._metadata: tuple[float, dict[str, Any]] | None = None
        self._keys: tuple[float, KeySet] | None = None

    def begin(self, redirect_uri: str, next_: str, lasts_s: float) -> tuple[str, SignInAttempt]:
        """Return the URL to send a browser to, and the attempt that it must bring back. Raises `IssuerUnavailable`."""
        state, nonce, verifier = (secrets.token_urlsafe(32) for _ in range(3))
        challenge = base64.urlsafe_b64encode(hashlib.sha256(verifier.encode()).digest()).rstrip(b"=").decode()
        asked = {
            "response_type": "code",
            "client_id": self.settings.client_id,
            "redirect_uri": redirect_uri,
            "scope": " ".join(self.settings.scopes),
            "state": state,
            "nonce": nonce,
            "code_challenge": challenge,
            "code_challenge_method": "S256",
        }
        place = self._endpoint("authorization_endpoint")
        url = f"{place}{'&' if '?' in place else '?'}{urlencode(asked)}"
        return url, SignInAttempt(state, nonce, verifier, redirect_uri, next_, time.time() + lasts_s)

    def finish(self, attempt: SignInAttempt, code: str) -> SignedIn:
        """Return the person who came back with this code. Raises `SignInRefused` and `IssuerUnavailable`."""
        said = {
            "grant_type": "authorization_code",
            "code": code,
            "redirect_uri": attempt.redirect_uri,
            "code_verifier": attempt.verifier,
        }
        status, answer = self._token_endpoint(said)
        if 400 <= status < 500:
            raise SignInRefused(f"the issuer does not take the code back (status {status})")
        if not isinstance(answer.get("id_token"), str):
            raise SignInRefused("the issuer gave no ID token")
        return self._who(answer, self._verified(answer["id_token"], attempt.nonce))

    def again(self, refresh_token: str, subject: str) -> SignedIn:
        """Return the person's present identity. Raises `GrantEnded` if the issuer no longer vouches for the person,
        and `IssuerUnavailable`."""
        status, answer = self._token_endpoint({"grant_type": "refresh_token", "refresh_token": refresh_token})
        if answer.get("error") == "invalid_grant":
            raise GrantEnded(f"status {status}, invalid_grant")
        if 400 <= status < 500:
            raise IssuerUnavailable(f"status {status} for a refresh token, {str(answer.get('error'))[:60]!r}")
        token = answer.get("id_token")
        try:
            claims = (
                self._verified(token, None)
                if isinstance(token, str)
                else self._userinfo(answer.get("access_token"), subject)
            )
        except SignInRefused as error:
            raise IssuerUnavailable(str(error)) from None
        if claims.get("sub") != subject:
            raise IssuerUnavailable("for a refresh token it says nothing of whom it is about, or of somebody else")
        who = self._who(answer, claims)
        return who if who.refresh_token else who._replace(refresh_token=refresh_token)

    def _who(self, answer: dict[str, Any], claims: dict[str, Any]) -> SignedIn:
        if "email" not in claims and "userinfo_endpoint" in self._discovered():
            claims = {**self._userinfo(answer.get("access_token"), claims["sub"]), **claims}
        email = claims.get("email")
        verified = claims.get("email_verified") is True and isinstance(email, str)
        name, refresh_token = claims.get("name"), answer.get("refresh_token")
        return SignedIn(
            claims["sub"],
            email.lower() if verified and isinstance(email, str) and len(email) <= EMAIL_CHARACTERS else None,
            name[:NAME_CHARACTERS] if isinstance(name, str) else "",
            claims,
            refresh_token if isinstance(refresh_token, str) else "",
        )

    def _token_endpoint(self, said: dict[str, str]) -> tuple[int, dict[str, Any]]:
        """Request tokens as this client; returns the status (200 or 4xx) and the answer."""
        id_, secret = self.settings.client_id, self.settings.client_secret
        auth: httpx.BasicAuth | None = None
        if secret and "client_secret_basic" in self._discovered().get(
            "token_endpoint_auth_methods_supported", ["client_secret_basic"]
        ):
            auth = httpx.BasicAuth(quote_plus(id_), quote_plus(secret))
        else:
            said |= {"client_id": id_, **({"client_secret": secret} if secret else {})}
        return self._answer("POST", self._endpoint("token_endpoint"), data=said, auth=auth)

    def _verified(self, token: str, nonce: str | None) -> dict[str, Any]:
        """Return the claims of an ID token after checking issuer, audience and age. With a nonce the token must
        answer that sign-in, else a refresh token."""
        from joserfc import jwt
        from joserfc.errors import JoseError

        settings = self.settings
        wanted = jwt.JWTClaimsRegistry(
            leeway=settings.leeway_s,
            iss={"essential": True, "value": settings.issuer},
            aud={"essential": True, "value": settings.client_id},
            sub={"essential": True},
            exp={"essential": True},
            iat={"essential": True},
            nonce={"essential": True, "value": nonce} if nonce is not None else {},
        )
        try:
            claims = self._decoded(token).claims
            wanted.validate(claims)
        except (JoseError, ValueError, KeyError, TypeError) as error:
            raise SignInRefused(f"the ID token does not hold: {error}") from None
        audience, party = claims["aud"], claims.get("azp")
        if (isinstance(audience, list) and len(audience) > 1 and party is None) or party not in (
            None,
            settings.client_id,
        ):
            raise SignInRefused("the ID token does not hold: it was made for another party")
        if len(claims["sub"]) > SUBJECT_CHARACTERS:
            raise SignInRefused(f"the ID token does not hold: sub has more than {SUBJECT_CHARACTERS} characters")
        return claims

    def _decoded(self, token: str) -> "jwt.Token":
        """Decode the token with the known keys, or else with the issuer's present keys."""
        from joserfc import jwt
        from joserfc.errors import BadSignatureError, InvalidKeyIdError

        known = self._signing_keys(here().monotonic() - self.settings.refresh_s)
        try:
            return jwt.decode(token, known, algorithms=ALGORITHMS)
        except (InvalidKeyIdError, BadSignatureError):
            fresh = self._signing_keys(here().monotonic() - JWKS_AGAIN_S)
            if fresh is known:
                raise
            return jwt.decode(token, fresh, algorithms=ALGORITHMS)

    def _userinfo(self, access_token: Any, subject: str) -> dict[str, Any]:
        if not isinstance(access_token, str):
            return {}
        headers = {"authorization": f"Bearer {access_token}"}
        found = self._json("GET", self._endpoint("userinfo_endpoint"), headers=headers)
        return found if found.get("sub") == subject else {}

    def _signing_keys(self, not_before_s: float) -> "KeySet":
        """Return the issuer's keys, fetched after `not_before_s`. Raises `IssuerUnavailable`."""
        from joserfc.errors import JoseError
        from joserfc.jwk import KeySet

        place = self._endpoint("jwks_uri")
        with self._lock:
            if self._keys is None or self._keys[0] < not_before_s:
                found = self._json("GET", place).get("keys")
                listed = [key for key in cast(list[Any], found if isinstance(found, list) else []) if _is_public(key)]
                try:
                    self._keys = here().monotonic(), KeySet.import_key_set({"keys": listed})
                except (JoseError, ValueError, KeyError, TypeError) as error:
                    raise IssuerUnavailable(f"{place}: no keys to be read ({error})") from None
            return self._keys[1]

    def _discovered(self) -> dict[str, Any]:
        """Return the issuer's metadata, cached for a while. Raises `IssuerUnavailable`."""
        issuer = self.settings.issuer
        with self._lock:
            known = self._metadata
            if known is not None and here().monotonic() - known[0] < self.settings.refresh_s:
                return known[1]
            try:
                found = self._json("GET", issuer.rstrip("/") + "/.well-known/openid-configuration")
            except IssuerUnavailable:
                if known is None:
                    raise
                return known[1]
            if found.get("issuer") != issuer:
                raise IssuerUnavailable(f"{issuer} says that it is {str(found.get('issuer'))[:200]!r}: give that one")
            self._metadata = here().monotonic(), found
            return found

    def _endpoint(self, name: str) -> str:
        place = self._discovered().get(name)
        if not isinstance(place, str) or not is_safe(place):
            raise IssuerUnavailable(f"{self.settings.issuer}: {name} is no URL with https")
        return place

    def _json(self, method: str, url: str, **options: Any) -> dict[str, Any]:
        status, body = self._answer(method, url, **options)
        if status != 200:
            raise IssuerUnavailable(f"{url}: status {status}")
        return body

    def _answer(self, method: str, url: str, **options: Any) -> tuple[int, dict[str, Any]]:
        """Return the status and the JSON object; an empty object for a refusal without one. Raises
        `IssuerUnavailable`."""
        try:
            with sync_client(url, by_proxy=True, timeout=self.settings.timeout_s) as client:
                answer = client.request(method, url, **options)
        except (httpx.HTTPError, httpx.InvalidURL, HttpSettingsError) as error:
            raise IssuerUnavailable(f"{url}: {error or type(error).__name__}{through(url)}") from None
        refused = 400 <= answer.status_code < 500
        try:
            body = answer.json() if answer.status_code == 200 or refused else None
        except ValueError:
            body = None
        if not isinstance(body, dict):
            if refused:
                return answer.status_code, {}
            raise IssuerUnavailable(f"{url}: status {answer.status_code}, and no JSON object")
        return answer.status_code, cast(dict[str, Any], body)


def is_safe(url: str) -> bool:
    """Return whether the URL is private: HTTPS, or on this machine."""
    parsed = httpx.URL(url) if re.fullmatch(r"https?://[^\s]+", url) else None
    return parsed is not None and (parsed.scheme == "https" or is_loopback(parsed.host))


def mapped_roles(mappings: Iterable[ClaimMapping], who: SignedIn) -> dict[str, AccessRole]:
    """Return the highest role that the claims give in each project, by the project's name in the mapping."""
    roles: dict[str, AccessRole] = {}
    for one in mappings:
        said: Any = who.email if one.claim == "email" else who.claims.get(one.claim)
        values = cast(Sequence[Any], said if isinstance(said, list) else [said])
        matches = any(isinstance(value, str) and _matches(one, value) for value in values)
        if matches and (one.project not in roles or lesser(roles[one.project], one.role) != one.role):
            roles[one.project] = one.role
    return roles


def _matches(mapping: ClaimMapping, value: str) -> bool:
    if mapping.claim == "email":
        return fnmatch.fnmatchcase(value, mapping.value.lower())
    return value == mapping.value


def _is_public(key: Any) -> bool:
    return isinstance(key, dict) and cast(dict[str, Any], key).get("kty") in _KEY_TYPES
