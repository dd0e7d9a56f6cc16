"""Authentication and authorisation of requests."""

import hmac
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import sqlalchemy as sa
from fastapi import Depends, Request
from fastapi.concurrency import run_in_threadpool

from elastic.protocol.api import AccessRole
from elastic.protocol.http_server import presented_key
from elastic.server.api.state import ServerState, state_of
from elastic.server.permissions import Action, actions_of
from elastic.server.problems import ApiProblem
from elastic.server.store import audit, members, people, runs, sessions
from elastic.server.store.runs import HostedRunRow

KEY_CHARACTERS_MAX = 256
COOKIE = "elastic_session"
CSRF_HEADER = "x-csrf-token"
_SAFE = frozenset({"GET", "HEAD", "OPTIONS"})


@dataclass(frozen=True)
class Caller:
    """The key of a request, or the key or member by which its browser was signed in.

    A key of no project may act in all projects. `actor` is the key, or the member if there is no key.
    """

    actor: str
    key: str | None
    member: str | None
    name: str
    project: str | None
    role: AccessRole
    actions: frozenset[Action]
    csrf_token: str | None = None
    """The token that a signed-in browser must send with its writes."""

    def sees(self, project: str | None) -> bool:
        """Return whether the caller may know of things of this project."""
        return self.project is None or self.project == project


@dataclass(frozen=True)
class Requester:
    """The caller of a request, and the run that its path names, if the caller may see it."""

    caller: Caller
    run: HostedRunRow | None


async def asking(request: Request) -> Requester:
    """Return who asks, as it was judged before the request's body was read."""
    found: Requester | None = getattr(request.state, "requester", None)
    return found or await identified(request)


async def identified(request: Request) -> Requester:
    """Authenticate the request and read its run. Raises `ApiProblem` without a valid key."""
    state = await state_of(request)
    return await state.reads.read(partial(_asking, request))


def _asking(request: Request, connection: sa.Connection) -> Requester:
    run = request.path_params.get("run")
    caller = authenticated(connection, request)
    found = None if run is None else runs.find(connection, run)
    return Requester(caller, found if found is not None and caller.sees(found.project) else None)


RequesterDep = Annotated[Requester, Depends(asking)]


async def caller_of(asking: RequesterDep) -> Caller:
    """Return the authenticated caller."""
    return asking.caller


def authenticated(connection: sa.Connection, request: Request) -> Caller:
    """Return the caller, by a key or by a session. Raises `ApiProblem` if there is neither."""
    secret, session = presented_key(request.headers), request.cookies.get(COOKIE, "")
    if not secret and session:
        return _signed_in(connection, request, session)
    known = secret and len(secret) <= KEY_CHARACTERS_MAX
    found = people.key_of_secret(connection, secret) if known else None
    if found is None:
        raise ApiProblem(
            "unauthenticated",
            "the key is not valid, expired or revoked, or its person has to sign in again"
            if secret
            else "the request has no key",
        )
    return _caller(found)


def refuse_changed(connection: sa.Connection, request: Request, caller: Caller) -> None:
    """Raises `ApiProblem` where the request's caller, as it was judged at its head, may not do the same any more."""
    now = authenticated(connection, request)
    if (now.role, now.actions) != (caller.role, caller.actions):
        raise ApiProblem("forbidden", "what the caller may do has changed since this request was begun: ask again")


def admits(connection: sa.Connection, request: Request, action: Action, project: str) -> bool:
    """Return whether the request's caller may do this in this project now. Raises `ApiProblem` without a valid key."""
    caller = authenticated(connection, request)
    return action in caller.actions and caller.sees(project)


def credentials_of(request: Request) -> str:
    """Return what a request shows of who asks, to tell callers apart. It is a secret."""
    return presented_key(request.headers) or request.cookies.get(COOKIE, "")


def _signed_in(connection: sa.Connection, request: Request, session: str) -> Caller:
    """Return the caller of a browser's session. Writes must prove that they come from a page of that session."""
    found = sessions.find(connection, session) if len(session) <= KEY_CHARACTERS_MAX else None
    key = people.key(connection, found["key"]) if found is not None and found["key"] else None
    member = members.find(connection, found["member"]) if found is not None and found["member"] else None
    if member is not None and people.lapsed(member):
        member = None
    if member is None and (key is None or not people.usable(key)):
        raise ApiProblem("unauthenticated", "the session is over: sign in again")
    token = sessions.csrf_token(session)
    if request.method not in _SAFE and not hmac.compare_digest(request.headers.get(CSRF_HEADER, ""), token):
        raise ApiProblem("stale-page", "this page is of another session, or was open since before: reload it")
    if member is not None:
        return _member_caller(member, token)
    assert key is not None
    return _caller(key, token)


def _caller(key: sa.RowMapping, csrf_token: str | None = None) -> Caller:
    role, project = people.role_of(key), key["project"]
    actions = actions_of(role, key["scopes"], server_wide=project is None)
    return Caller(key["id"], key["id"], key["member"], key["name"], project, role, frozenset(actions), csrf_token)


def _member_caller(member: sa.RowMapping, csrf_token: str) -> Caller:
    """Return the caller for a person in the project of the session."""
    role, name = AccessRole(member["role"]), member["email"] or member["person_name"] or "somebody"
    actions = frozenset(actions_of(role, [], server_wide=False))
    return Caller(member["id"], None, member["id"], name, member["project"], role, actions, csrf_token)


CallerDep = Annotated[Caller, Depends(caller_of)]


def requires(action: Action) -> Callable[..., Awaitable[None]]:
    """Return a dependency that admits callers with this action only. It notes refusals in the audit log."""

    async def check(request: Request, asking: RequesterDep) -> None:
        if action not in asking.caller.actions:
            await run_in_threadpool(refuse, request, asking.caller, await state_of(request))

    def refuse(request: Request, caller: Caller, state: ServerState) -> None:
        with state.store.writing() as tx:
            audit.write(
                tx,
                actor=caller.actor,
                action=action,
                resource=request.url.path,
                project=caller.project,
                status=403,
                request_id=request.state.request_id,
            )
        raise ApiProblem(
            "forbidden", f"{action} is not allowed to {caller.name!r}, whose role is {caller.role}", action=action
        )

    return check
