"""Failures of requests: one documented type for each cause, as problem+json (RFC 9457)."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import structlog
from fastapi import FastAPI, Request
from fastapi.encoders import jsonable_encoder
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.routing import compile_path

from elastic.compose.plan import PROVIDERS_OPTION
from elastic.config import ConfigProblem
from elastic.protocol.api import Problem, ProblemError
from elastic.server.store import StoreUnavailable
from elastic.server.store.vault import VaultError

log = structlog.get_logger(__name__)

MEDIA_TYPE = "application/problem+json"
RETRY_AFTER_S = 2


class ProblemType(NamedTuple):
    """A kind of problem. `advice` is what to do about it, for the documentation."""

    status: int
    title: str
    advice: str


TYPES: Mapping[str, ProblemType] = {
    "invalid-request": ProblemType(400, "The request is not valid", "`errors` points to each fault of it."),
    "invalid-configuration": ProblemType(
        400, "The configuration is not valid", "`errors` has all of its faults, each with a pointer."
    ),
    "invalid-cursor": ProblemType(400, "The cursor is of no entry of this list", "Begin the list again."),
    "checksum-mismatch": ProblemType(400, "It is not what was announced", "Send the file again."),
    "unauthenticated": ProblemType(
        401, "No valid key", "Send `Authorization: Bearer KEY` with a key that is neither expired nor revoked."
    ),
    "forbidden": ProblemType(403, "The key does not allow this", "Ask an admin for a key with this role and scope."),
    "stale-page": ProblemType(403, "The page is stale", "Reload it: a write needs the `csrf_token` of its session."),
    "sign-in-refused": ProblemType(403, "The sign-in does not hold", "Sign in again, in one browser."),
    "no-membership": ProblemType(403, "A member of no project", "Ask a project's admin to add you."),
    "not-found": ProblemType(404, "There is no such thing", "Of other projects' things nothing is said either."),
    "method-not-allowed": ProblemType(405, "This cannot be done here", "The `allow` header has what can."),
    "request-timeout": ProblemType(408, "The body did not come in time", "Send it faster, or less of it."),
    "name-taken": ProblemType(409, "The name is taken", "Choose another."),
    "run-finished": ProblemType(409, "Run has finished", "Resume it with more steps, or leave it."),
    "run-stopped": ProblemType(409, "Run is stopped already", "Resume it to go on."),
    "run-active": ProblemType(409, "Run is still going on", "Stop it first, and wait until it has ended."),
    "upload-in-use": ProblemType(409, "A run uses it", "Wait until that run has ended, or stop it."),
    "last-admin": ProblemType(409, "The project would have no admin", "Make another member admin first."),
    "not-a-person": ProblemType(409, "The key is of no person", "Sign in as somebody, or use a person's own key."),
    "run-retired": ProblemType(
        409, "What it would go on from is kept no longer", "Submit it anew; its report and figures are still there."
    ),
    "too-many-requests": ProblemType(
        429, "Too many requests of this caller are in work", "Wait for answers, or close streams, before asking again."
    ),
    "quota-exceeded": ProblemType(
        409, "The project's quota does not allow this", "Ask for less, or ask an admin of the server for more."
    ),
    "untrusted-neighbours": ProblemType(
        409,
        "Projects' processes would not be apart",
        "Give the project a `unix_user`, or start the server with --shared-trust.",
    ),
    "job-rejected": ProblemType(
        409, "No pool like this can take the job", "`detail` has what it needs, and what is allowed."
    ),
    "job-conflict": ProblemType(
        409, "The job or node is not in that state", "Read it again: `state` and `reason`, or `joined`, say more."
    ),
    "events-gone": ProblemType(410, "These events are gone", "Begin the stream again, without Last-Event-ID."),
    "precondition-failed": ProblemType(412, "It has changed meanwhile", "Read it again, and use its new ETag."),
    "too-large": ProblemType(413, "The body is too large", "Send less."),
    "unsupported-media-type": ProblemType(415, "The body is of another type", "Send application/json."),
    "invalid-range": ProblemType(416, "The file has no such range", "`content-range` has its size."),
    "misdirected": ProblemType(421, "This server has another name", "Use its address, or add the name by --host-name."),
    "idempotency-mismatch": ProblemType(
        422, "The Idempotency-Key was used for another request", "Use a key once for each thing to be done."
    ),
    "precondition-required": ProblemType(428, "If-Match is missing", "Send the ETag of what you have read."),
    "internal": ProblemType(500, "The server failed", "The server's log has the cause, under the request's id."),
    "unavailable": ProblemType(503, "The server cannot do that now", "Try again after `retry-after` seconds."),
    "journal-unreadable": ProblemType(
        503, "The journal cannot be read", "`detail` names the file; what needs no journal is still there."
    ),
    "pool-away": ProblemType(503, "The pool's process does not answer now", "Try again: it is started again."),
    "issuer-unavailable": ProblemType(
        503, "The identity provider does not answer", "Try again, or sign in with a key."
    ),
    "storage-full": ProblemType(507, "There is no room", "Delete uploads, or have more room made."),
}
_BY_STATUS = {
    400: "invalid-request",
    404: "not-found",
    405: "method-not-allowed",
    408: "request-timeout",
    413: "too-large",
    415: "unsupported-media-type",
}


ERRORS_MAX, ERROR_CHARACTERS, DETAIL_CHARACTERS = 100, 1_000, 4_000
"""What a problem tells at most, whatever was sent."""


def _shortened(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _short(error: ProblemError) -> ProblemError:
    pointer, detail = (_shortened(one, ERROR_CHARACTERS) for one in (error.pointer, error.detail))
    return ProblemError(pointer=pointer, detail=detail)


class ApiProblem(Exception):
    """Ends a request with a problem. `kind` is a key of `TYPES`; `further` are additional members of the body."""

    def __init__(
        self,
        kind: str,
        detail: str,
        errors: list[ProblemError] | None = None,
        headers: Mapping[str, str] | None = None,
        **further: Any,
    ) -> None:
        super().__init__(detail)
        self.kind = kind
        self.detail = _shortened(detail, DETAIL_CHARACTERS)
        self.errors = None if errors is None else [_short(one) for one in errors[:ERRORS_MAX]]
        self.headers = dict(headers or {})
        self.further = further

    def __reduce__(self) -> tuple[Any, ...]:
        return _made, (self.kind, self.detail, self.errors, self.headers, self.further)


def _made(
    kind: str, detail: str, errors: list[ProblemError] | None, headers: Mapping[str, str], further: Mapping[str, Any]
) -> ApiProblem:
    return ApiProblem(kind, detail, errors, headers, **further)


def not_found(what: str, name: str) -> ApiProblem:
    return ApiProblem("not-found", f"no {what} {name[:100]!r}")


def pointer_to(*parts: int | str) -> str:
    """Return the JSON pointer to a part of a request's body."""
    return "#" + "".join(f"/{str(part).replace('~', '~0').replace('/', '~1')}" for part in parts)


def configuration_errors(problems: Iterable[ConfigProblem]) -> list[ProblemError]:
    """Return what is wrong with a submission, each with its place in the body."""
    return [
        ProblemError(
            pointer="#/providers" if one.where.startswith(PROVIDERS_OPTION) else pointer_to("config", *one.key),
            detail=one.detail,
        )
        for one in problems
    ]


def invalid_configuration(errors: list[ProblemError]) -> ApiProblem:
    detail = "; ".join(f"{one.pointer}: {one.detail}" for one in errors)
    return ApiProblem("invalid-configuration", detail, errors)


def problem_of(problem: ApiProblem, instance: str = "", request_id: str = "") -> Problem:
    """Return what is told of a problem."""
    kind = TYPES[problem.kind]
    return Problem(
        type=f"/problems/{problem.kind}",
        title=kind.title,
        status=kind.status,
        detail=problem.detail,
        instance=instance,
        request_id=request_id,
        errors=problem.errors,
        **problem.further,
    )


def problem_response(request: Request, problem: ApiProblem) -> Response:
    """Return the response for a failed request."""
    return early_response(problem, request.url.path, getattr(request.state, "request_id", ""))


def early_response(problem: ApiProblem, instance: str = "", request_id: str = "") -> JSONResponse:
    """Return the response for a request that may never have reached the application, or that made it fail."""
    body, headers = problem_of(problem, instance, request_id), dict(problem.headers)
    if body.status == 401:
        headers["www-authenticate"] = "Bearer"
    if body.status == 503:
        headers["retry-after"] = str(RETRY_AFTER_S)
    said = jsonable_encoder(body, exclude_none=True)
    return JSONResponse(said, status_code=body.status, headers=headers, media_type=MEDIA_TYPE)


def install(app: FastAPI) -> None:
    """Answer every error of the application with a problem."""

    @app.exception_handler(ApiProblem)
    def _ours(request: Request, error: ApiProblem) -> Response:  # pyright: ignore[reportUnusedFunction]
        return problem_response(request, error)

    @app.exception_handler(VaultError)
    def _vault(request: Request, error: VaultError) -> Response:  # pyright: ignore[reportUnusedFunction]
        log.error("the key of the server's secrets cannot be used", error=str(error))
        return problem_response(request, ApiProblem("internal", "the server cannot keep secrets; its log says why"))

    @app.exception_handler(StoreUnavailable)
    def _store(request: Request, error: StoreUnavailable) -> Response:  # pyright: ignore[reportUnusedFunction]
        return problem_response(request, ApiProblem("unavailable", f"the database: {error}"))

    @app.exception_handler(RequestValidationError)
    def _invalid(request: Request, error: RequestValidationError) -> Response:  # pyright: ignore[reportUnusedFunction]
        media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if media_type != "application/json" and any(one["loc"] == ("body",) for one in error.errors()):
            said = f"content-type: found {media_type or 'none'!r}; allowed: application/json"
            return problem_response(request, ApiProblem("unsupported-media-type", said))
        errors = [ProblemError(pointer=_pointer(one["loc"]), detail=one["msg"]) for one in error.errors()]
        detail = "; ".join(f"{one.pointer}: {one.detail}" for one in errors[:3])
        return problem_response(request, ApiProblem("invalid-request", detail, errors))

    @app.exception_handler(HTTPException)
    def _http(request: Request, error: HTTPException) -> Response:  # pyright: ignore[reportUnusedFunction]
        kind = _BY_STATUS.get(error.status_code, "internal" if error.status_code >= 500 else "invalid-request")
        headers = {name.lower(): value for name, value in (error.headers or {}).items()}
        if error.status_code == 405 and (allowed := _allowed(request)):
            headers["allow"] = allowed
        return problem_response(request, ApiProblem(kind, str(error.detail), headers=headers))


def _allowed(request: Request) -> str:
    """Return the methods of this path. Each route knows its own methods only."""
    described: dict[str, dict[str, Any]] = request.app.openapi()["paths"]
    exact = described.get(request.url.path)
    matching = [exact] if exact else [one for path, one in described.items() if _matches(path, request.url.path)]
    return ", ".join(sorted({method.upper() for item in matching for method in item}))


def _matches(described: str, path: str) -> bool:
    return compile_path(described)[0].match(path) is not None


def _pointer(location: tuple[int | str, ...]) -> str:
    """Return where a fault is: a JSON pointer within the body, else the kind and name of the parameter."""
    first, *rest = location
    if first == "body":
        return pointer_to(*rest)
    return "/".join(map(str, location))
