"""An identity provider on this machine: it signs what tests tell it to, as a provider that is honest or is not."""

import base64
import functools
import hashlib
import hmac
import html
import json
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

from joserfc import jwt
from joserfc.jwk import KeySet, RSAKey

CLIENT_ID, CLIENT_SECRET = "elastic-tests", "s3cr3t of the client's"


@functools.cache
def _first_key() -> Any:
    """Of every issuer, since making one takes a while."""
    return RSAKey.generate_key(2048, {"kid": "first"}, auto_kid=False)


class Issuer:
    """Its `claims` replace those that an honest one would give; None takes one away."""

    def __init__(self, host: str) -> None:
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.server.daemon_threads = True
        self.url = f"http://{host}:{self.server.server_address[1]}"
        self.keys: list[Any] = [_first_key()]
        self.subject, self.email = "ada", "ada@example.com"
        self.claims: dict[str, Any] = {}
        self.sign_with: Any = None
        self.algorithm = "RS256"
        self.asked: list[str] = []
        self.broken = False
        self.refreshes = False
        """Whether it gives refresh tokens, each for one use."""
        self.refused: dict[str, Any] | None = None
        """What it answers to refresh tokens instead of honouring them."""
        self.refresh_tokens: list[str] = []
        self._codes: dict[str, dict[str, str]] = {}

    def rotate(self) -> None:
        self.keys = [RSAKey.generate_key(2048, {"kid": secrets.token_hex(4)}, auto_kid=False)]

    def token(self, nonce: str | None) -> str:
        now = int(time.time())
        claims: dict[str, Any] = {
            "iss": self.url,
            "aud": CLIENT_ID,
            "sub": self.subject,
            "iat": now,
            "exp": now + 300,
            "nonce": nonce,
            "email": self.email,
            "email_verified": True,
            "name": "Ada",
            **self.claims,
        }
        claims = {name: value for name, value in claims.items() if value is not None}
        if self.algorithm in ("none", "HS256"):  # No library makes these; HS256 with the public key for a secret.
            header = {"alg": self.algorithm, "typ": "JWT", "kid": self.keys[0].kid}
            signed = ".".join(_base64(json.dumps(part).encode()) for part in (header, claims))
            mark = hmac.digest(self.keys[0].as_pem(private=False), signed.encode(), "sha256")
            return f"{signed}.{_base64(mark) if self.algorithm == 'HS256' else ''}"
        key = self.sign_with or self.keys[0]
        return jwt.encode({"alg": self.algorithm, "kid": self.keys[0].kid}, claims, key, algorithms=[self.algorithm])

    def authorize(self, query: dict[str, str]) -> str:
        """Where it sends a browser back to, once whoever it is has shown who they are."""
        code = secrets.token_urlsafe(16)
        self._codes[code] = query
        return f"{query['redirect_uri']}?{urlencode({'code': code, 'state': query['state']})}"

    def exchange(self, form: dict[str, str], authorization: str) -> tuple[int, dict[str, Any]]:
        basic = base64.b64encode(f"{CLIENT_ID}:{'s3cr3t+of+the+client%27s'}".encode()).decode()
        if form["grant_type"] == "refresh_token":
            if self.refused is not None:
                return 400, self.refused
            if authorization != f"Basic {basic}" or self.refresh_tokens[-1:] != [form["refresh_token"]]:
                return 400, {"error": "invalid_grant"}
            return 200, self._tokens(None)
        asked = self._codes.pop(form.get("code", ""), None)
        challenge = base64.urlsafe_b64encode(hashlib.sha256(form.get("code_verifier", "").encode()).digest())
        if (
            asked is None
            or authorization != f"Basic {basic}"
            or form["redirect_uri"] != asked["redirect_uri"]
            or asked["code_challenge_method"] != "S256"
            or challenge.rstrip(b"=").decode() != asked["code_challenge"]
        ):
            return 400, {"error": "invalid_grant"}
        return 200, self._tokens(asked["nonce"])

    def _tokens(self, nonce: str | None) -> dict[str, Any]:
        made = {"access_token": "a", "token_type": "Bearer", "id_token": self.token(nonce)}
        if self.refreshes:
            self.refresh_tokens.append(secrets.token_urlsafe(16))
            made["refresh_token"] = self.refresh_tokens[-1]
        return made

    def document(self, path: str) -> dict[str, Any] | None:
        return {
            "/.well-known/openid-configuration": {
                "issuer": self.url,
                "authorization_endpoint": f"{self.url}/authorize?tenant=x",
                "token_endpoint": f"{self.url}/token",
                "jwks_uri": f"{self.url}/keys",
            },
            "/keys": KeySet(self.keys).as_dict(private=False),
        }.get(path)


def _base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _handler(issuer: Issuer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            parsed = urlsplit(self.path)
            issuer.asked.append(parsed.path)
            if parsed.path == "/authorize" and not issuer.broken:
                query = {name: values[0] for name, values in parse_qs(parsed.query).items()}
                place, is_person = issuer.authorize(query), "text/html" in self.headers.get("accept", "")
                page = f'<a id="go" href="{html.escape(place)}">Go on</a>'.encode() if is_person else b""
                self.send_response(200 if is_person else 302)
                self.send_header("content-type", "text/html")
                self.send_header("content-length", str(len(page)))
                if not is_person:
                    self.send_header("location", place)
                self.end_headers()
                self.wfile.write(page)
                return
            self._answer(200, issuer.document(parsed.path))

        def do_POST(self) -> None:
            issuer.asked.append(self.path)
            body = self.rfile.read(int(self.headers["content-length"])).decode()
            form = {name: values[0] for name, values in parse_qs(body).items()}
            self._answer(*issuer.exchange(form, self.headers.get("authorization", "")))

        def _answer(self, status: int, body: dict[str, Any] | None) -> None:
            content = b"down" if issuer.broken else json.dumps(body).encode()
            self.send_response(500 if issuer.broken else status)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    return Handler


@contextmanager
def serving_issuer(host: str = "127.0.0.1") -> Iterator[Issuer]:
    """By another name than the server's it is another site, for browsers."""
    made = Issuer(host)
    thread = threading.Thread(target=made.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield made
    finally:
        made.server.shutdown()
        thread.join(30)
        made.server.server_close()
