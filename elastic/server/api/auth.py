"""Who a request comes from, and whether they may do what it asks."""

import base64
import binascii
import hmac
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated

import sqlalchemy as sa
from fastapi import Depends, Request
from fastapi.concurrency import run_in_threadpool

from elastic.resources import AccessRole
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
    """The key that a request came with, or the key or member that its browser was signed in by.

    A key of no project stands above all of them. `actor` is the key, or without one the member.
    """

    actor: str
    key: str | None
    member: str | None
    name: str
    project: str | None
    role: AccessRole
    actions: frozenset[Action]
    csrf_token: str | None = None
    """What a signed-in browser shows with its writes."""

    def sees(self, project: str | None) -> bool:
        """Whether things of this project are there for them at all."""
        return self.project is None or self.project == project


def presented_key(request: Request) -> str:
    """The key of a request: a bearer token, an `x-api-key`, or the password of basic authentication."""
    scheme, _, value = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return value.strip()
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(value, validate=True).decode().partition(":")[2]
        except (binascii.Error, UnicodeDecodeError):
            return ""
    return request.headers.get("x-api-key", "")


@dataclass(frozen=True)
class Requester:
    """Who a request comes from, and the run that its path names, where they see one of that id."""

    caller: Caller
    run: HostedRunRow | None


async def asking(request: Request) -> Requester:
    """What almost every request begins with, read in one go. Raises `ApiProblem` for who shows no valid key."""
    return await run_in_threadpool(_asking, request, await state_of(request))


def _asking(request: Request, state: ServerState) -> Requester:
    run = request.path_params.get("run")
    with state.store.reading() as connection:
        caller = authenticated(connection, request)
        found = None if run is None else runs.find(connection, run)
    return Requester(caller, found if found is not None and caller.sees(found.project) else None)


RequesterDep = Annotated[Requester, Depends(asking)]


async def caller_of(asking: RequesterDep) -> Caller:
    """Whoever is let in."""
    return asking.caller


def authenticated(connection: sa.Connection, request: Request) -> Caller:
    """Who shows a key, or was signed in by one. Raises `ApiProblem` for anybody else."""
    secret, session = presented_key(request), request.cookies.get(COOKIE, "")
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


def _signed_in(connection: sa.Connection, request: Request, session: str) -> Caller:
    """Who a browser was signed in as. Its writes show that they come from a page of that session."""
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
    """A person in the project that their session is in."""
    role, name = AccessRole(member["role"]), member["email"] or member["person_name"] or "somebody"
    actions = frozenset(actions_of(role, [], server_wide=False))
    return Caller(member["id"], None, member["id"], name, member["project"], role, actions, csrf_token)


CallerDep = Annotated[Caller, Depends(caller_of)]


def requires(action: Action) -> Callable[..., Awaitable[None]]:
    """A dependency that lets pass only who may do this; whoever else is noted in the audit log."""

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
        raise ApiProblem("forbidden", f"{action} is not allowed to {caller.name!r}, a {caller.role}", action=action)

    return check
