"""Who a request comes from, and whether they may do what it asks."""

import base64
import binascii
import hmac
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import sqlalchemy as sa
from fastapi import Depends, Request

from elastic.resources import AccessRole
from elastic.server.permissions import Action, actions_of
from elastic.server.problems import ApiProblem
from elastic.server.state import ServerState, state_of
from elastic.server.store import audit, people, sessions

KEY_CHARACTERS_MAX = 256
COOKIE = "elastic_session"
CSRF_HEADER = "x-csrf-token"
_SAFE = frozenset({"GET", "HEAD", "OPTIONS"})


@dataclass(frozen=True)
class Caller:
    """The key that a request came with, or its browser was signed in by. One of no project stands above all of them."""

    key: str
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


def caller_of(request: Request, state: Annotated[ServerState, Depends(state_of)]) -> Caller:
    """Raises `ApiProblem` for who shows no valid key, and is signed in by none."""
    secret, session = presented_key(request), request.cookies.get(COOKIE, "")
    if not secret and session:
        return _signed_in(request, state, session)
    found = None
    if secret and len(secret) <= KEY_CHARACTERS_MAX:
        with state.store.reading() as connection:
            found = people.key_of_secret(connection, secret)
    if found is None:
        raise ApiProblem(
            "unauthenticated", "the key is not valid, expired or revoked" if secret else "the request has no key"
        )
    return _caller(found)


def _signed_in(request: Request, state: ServerState, session: str) -> Caller:
    """Who a browser was signed in as. Its writes show that they come from a page of that session."""
    with state.store.reading() as connection:
        found = sessions.key_of_session(connection, session) if len(session) <= KEY_CHARACTERS_MAX else None
    if found is None:
        raise ApiProblem("unauthenticated", "the session is over: sign in again")
    token = sessions.csrf_token(session)
    if request.method not in _SAFE and not hmac.compare_digest(request.headers.get(CSRF_HEADER, ""), token):
        raise ApiProblem("stale-page", "this page is of another session, or was open since before: reload it")
    return _caller(found, token)


def _caller(row: sa.RowMapping, csrf_token: str | None = None) -> Caller:
    role, project = AccessRole(row["role"]), row["project"]
    actions = actions_of(role, row["scopes"], server_wide=project is None)
    return Caller(row["id"], row["name"], project, role, frozenset(actions), csrf_token)


CallerDep = Annotated[Caller, Depends(caller_of)]


def requires(action: Action) -> Callable[..., None]:
    """A dependency that lets pass only who may do this; whoever else is noted in the audit log."""

    def check(request: Request, caller: CallerDep, state: Annotated[ServerState, Depends(state_of)]) -> None:
        if action in caller.actions:
            return
        with state.store.writing() as tx:
            audit.write(
                tx,
                actor=caller.key,
                action=action,
                resource=request.url.path,
                project=caller.project,
                status=403,
                request_id=request.state.request_id,
            )
        raise ApiProblem("forbidden", f"{action} is not allowed to key {caller.name!r}, a {caller.role}", action=action)

    return check
