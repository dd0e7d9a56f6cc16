"""People sign in with an identity provider: to it, and back with a session.

The cookie of a sign-in that goes on is SameSite=Lax, as the browser comes back from another site. The session's is
Strict: the page that it is set for asks by itself, and so sends it from its first request on.
"""

import hmac
import re
import time
from typing import Annotated, Any
from urllib.parse import urlsplit

import msgspec
import structlog
from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import RedirectResponse

from elastic.server.api.routes.common import StateDep, problem_responses
from elastic.server.api.routes.model_route import ModelRoute
from elastic.server.api.routes.session import hand_cookie, is_https
from elastic.server.api.state import ServerState
from elastic.server.identity.oidc import (
    IdentityProvider,
    IssuerUnavailable,
    SignedIn,
    SignInAttempt,
    SignInRefused,
)
from elastic.server.identity.sign_ins import admitted
from elastic.server.permissions import Action
from elastic.server.problems import ApiProblem, not_found, problem_response
from elastic.server.store import audit, members, sessions
from elastic.server.store.vault import Vault, VaultError

log = structlog.get_logger(__name__)

router = APIRouter(prefix="/v1/session/oidc", tags=["session"], route_class=ModelRoute)
COOKIE = "elastic_sign_in"
LASTS_S = 600
"""How long a person may stay at the issuer."""
_NEXT = re.compile(r"[A-Za-z0-9/._-]{0,200}")
_PROBLEMS = problem_responses(
    *("invalid-request", "not-found", "sign-in-refused", "no-membership", "issuer-unavailable", "misdirected"),
    *("internal", "unavailable"),
)
_REDIRECTS: dict[int | str, dict[str, Any]] = {303: {"description": "where the browser goes next"}}
_FOR_BROWSERS: dict[str, Any] = {
    "status_code": 303,
    "response_class": RedirectResponse,
    "responses": _PROBLEMS | _REDIRECTS,
    "openapi_extra": {"security": []},
}
"""Arguments of routes to which a browser comes from another site, without a key."""


@router.get("", **_FOR_BROWSERS)
def begin(
    request: Request,
    state: StateDep,
    next: Annotated[str, Query(max_length=200, description="the part of the page to come back to")] = "",
) -> Response:
    """Send a browser to the identity provider."""
    provider = _provider(state)
    if not _NEXT.fullmatch(next):
        raise ApiProblem("invalid-request", "next: allowed: a part of the page, such as /runs/run_01JD…")
    try:
        url, attempt = provider.begin(_callback(request), next, LASTS_S)
    except IssuerUnavailable as error:
        return _refused(request, _unavailable(error))
    answer = RedirectResponse(url, 303)
    sealed = Vault(state.settings.home).sealed(msgspec.json.encode(attempt).decode()).decode()
    answer.set_cookie(
        COOKIE, sealed, max_age=LASTS_S, path=router.prefix, httponly=True, samesite="lax", secure=is_https(request)
    )
    return answer


@router.get("/callback", **_FOR_BROWSERS)
def finish(
    request: Request,
    state: StateDep,
    code: Annotated[str, Query(max_length=4_096)] = "",
    returned: Annotated[str, Query(alias="state", max_length=256)] = "",
    error: Annotated[str, Query(max_length=256)] = "",
    iss: Annotated[str, Query(max_length=256)] = "",
) -> Response:
    """Take a browser back from the identity provider: the person has a session from now on."""
    provider = _provider(state)
    try:
        attempt = _attempt(request, state, returned)
        if iss and iss != provider.settings.issuer:
            raise SignInRefused("the answer is of another issuer")
        if error or not code:
            said = error if re.fullmatch(r"[a-z_]{1,60}", error) else "no code"
            raise SignInRefused(f"the issuer let nobody in: {said}")
        who = provider.finish(attempt, code)
        secret = _session(request, state, provider, attempt, who)
    except SignInRefused as refusal:
        log.info("sign-in refused", reason=str(refusal))
        answer = _refused(request, ApiProblem("sign-in-refused", str(refusal)))
    except IssuerUnavailable as problem:
        answer = _refused(request, _unavailable(problem))
    except ApiProblem as problem:
        answer = _refused(request, problem)
    else:
        answer = RedirectResponse(f"/#{attempt.next}", 303)
        hand_cookie(request, answer, state, secret)
    answer.delete_cookie(COOKIE, path=router.prefix, httponly=True, samesite="lax")
    return answer


def _session(
    request: Request, state: ServerState, provider: IdentityProvider, attempt: SignInAttempt, who: SignedIn
) -> str:
    """Begin a session for a person who signed in; returns its secret. Raises `SignInRefused`, and `ApiProblem` for a
    person without membership."""
    with state.store.writing() as tx:
        if not sessions.use_nonce(tx, attempt.nonce, 2 * LASTS_S):
            raise SignInRefused("this sign-in was finished before")
        person = admitted(tx, provider.settings, Vault(state.settings.home), who)
        member = members.first_of(tx, person)
        secret = None if member is None else sessions.begin(tx, state.settings.session_s, member=member["id"])
        audit.write(
            tx,
            actor=person if member is None else member["id"],
            action=Action.RUNS_READ,
            resource=router.prefix,
            project=None if member is None else member["project"],
            status=403 if member is None else 201,
            request_id=request.state.request_id,
        )
    if secret is None:
        raise ApiProblem("no-membership", "you are a member of no project yet: ask an admin of one")
    return secret


def _attempt(request: Request, state: ServerState, returned: str) -> SignInAttempt:
    """Return this browser's sign-in attempt if it matches the return. Raises `SignInRefused`."""
    sealed = request.cookies.get(COOKIE, "")
    try:
        attempt = msgspec.json.decode(Vault(state.settings.home).opened(sealed.encode()), type=SignInAttempt)
    except (VaultError, msgspec.DecodeError, UnicodeError):
        raise SignInRefused("this browser has begun no sign-in, or long ago") from None
    if attempt.expires_s < time.time():
        raise SignInRefused("it took too long")
    if not hmac.compare_digest(attempt.state.encode(), returned.encode()):
        raise SignInRefused("the answer is of another sign-in")
    return attempt


def _provider(state: ServerState) -> IdentityProvider:
    if state.provider is None:
        raise not_found("identity provider", "oidc")
    return state.provider


def _callback(request: Request) -> str:
    """The address that the issuer sends browsers back to; it has to know it."""
    scheme = "https" if is_https(request) else "http"
    return f"{scheme}://{urlsplit(str(request.url)).netloc}{router.prefix}/callback"


def _unavailable(error: IssuerUnavailable) -> ApiProblem:
    log.error("the identity provider does not answer", reason=str(error))
    return ApiProblem("issuer-unavailable", "the identity provider does not answer as one; the server's log says more")


def _refused(request: Request, problem: ApiProblem) -> Response:
    """Return the refusal: the page for browsers, the problem for programs."""
    if "text/html" in request.headers.get("accept", ""):
        return RedirectResponse(f"/#/refused/{problem.kind}", 303)
    return problem_response(request, problem)
