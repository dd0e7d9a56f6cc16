"""Callers of fronts: the credentials of a request, and the trajectory or session that it names.

A key is shown as a bearer token, as `x-api-key`, as a part of a URL's userinfo, or in the path (`/t/KEY/…`). A
trajectory's key names the trajectory, whatever else a request says. A driver's key names none: the path does
(`/t/ID/…`, `/sessions/ID/…`), else the header `X-Session-ID`, else the body's `session_id`. A viewer's key names none:
its calls are chats, outside of trajectories.
"""

import base64
import binascii
from collections.abc import Iterator
from typing import NamedTuple

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from elastic.core.ids import agent_id
from elastic.protocol.front_messages import NAME_MAX, AgentCaller
from elastic.protocol.openai.errors import FrontError
from elastic.protocol.run_secrets import RunSecrets

TRAJECTORY, SESSION = "/t/", "/sessions/"
"""What stands before a trajectory, or a session, in the path of a route for agents."""
AGENT_ROUTES = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/inference/v1/generate",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/models",
    "/tokenize",
    "/detokenize",
    "/health",
)
MODEL = "/v1/models/"
"""A model's name is behind this route for agents."""
SESSION_HEADER = "x-session-id"


class NamedInPath(NamedTuple):
    """What the path of a request names: `prefix` tells which kind of name it is; both are empty where it names none."""

    prefix: str = ""
    name: str = ""


def split(path: str) -> tuple[NamedInPath, str]:
    """What a path names, and the route behind that. A session's name may have slashes."""
    path = path.rstrip("/") or "/"
    for prefix in (TRAJECTORY, SESSION):
        if not path.startswith(prefix):
            continue
        for route in AGENT_ROUTES:
            name = path[len(prefix) : -len(route)]
            if path.endswith(route) and name:
                return NamedInPath(prefix, name), route
        name, of_model, model = path.removeprefix(prefix).partition(MODEL)
        if name and model:
            return NamedInPath(prefix, name), of_model + model
    return NamedInPath(), path


class NamesInPaths:
    """ASGI middleware: takes what a path names out of it, and slashes at its end, before the path is routed.

    `named_in_path` tells what it was.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            named, route = split(scope["path"])
            scope["path"] = route
            scope.setdefault("state", {})["named_in_path"] = named
        await self._app(scope, receive, send)


def named_in_path(scope: Scope) -> NamedInPath:
    return scope.get("state", {}).get("named_in_path", NamedInPath())


NOWHERE = NamedInPath()


def find_caller(secrets: RunSecrets, headers: Headers, path: NamedInPath = NOWHERE, session: str = "") -> AgentCaller:
    """In whose name a request asks; `session` is the one that its body names.

    Raises `FrontError`: 401 without a key of the run, 403 if its key is of another trajectory than its path, 404 for
    a name that can be none.
    """
    callers = [caller for key in shown_keys(headers, path) if (caller := secrets.caller_of(key)) is not None]
    if not callers:
        raise FrontError(401, "the key is missing or none of this run's; send it as Authorization: Bearer KEY")
    of_trajectory = next((caller for caller in callers if caller.trajectory), None)
    if of_trajectory is not None:
        return _checked(of_trajectory, secrets, path)
    if not callers[0].driver:
        return callers[0]
    named = path.name or headers.get(SESSION_HEADER, "") or session
    if len(named) > NAME_MAX:
        raise FrontError(404, f"no trajectory or session has a name of {len(named)} characters")
    return AgentCaller(driver=callers[0].driver, named=named)


def _checked(caller: AgentCaller, secrets: RunSecrets, path: NamedInPath) -> AgentCaller:
    own = agent_id(caller.trajectory)
    if path.prefix == TRAJECTORY and path.name != own and secrets.caller_of(path.name) != caller:
        raise FrontError(403, f"the key is that of trajectory {own}; the path names another one")
    return caller


def shown_keys(headers: Headers, path: NamedInPath = NOWHERE) -> Iterator[str]:
    """Whatever could be a key. Clients that can send none of their own send one that is made up."""
    scheme, _, value = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        yield value.strip()
    elif scheme.lower() == "basic":
        user, _, password = _decoded(value).partition(":")
        yield from (password, user)
    yield headers.get("x-api-key", "")
    yield path.name


def _decoded(value: str) -> str:
    try:
        return base64.b64decode(value, validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return ""
