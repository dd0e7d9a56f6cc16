"""Keys: made, listed, revoked. Their secrets are shown once and kept nowhere."""

from typing import Annotated

import sqlalchemy as sa
from fastapi import APIRouter, Depends, Path, Request

from elastic.protocol.api import AccessRole, ApiKey, CreatedKey, Listed, NewKey, ProblemError
from elastic.server import ids
from elastic.server.api.auth import Caller
from elastic.server.api.routes.common import (
    CallerDep,
    Cursor,
    OnlyProject,
    StateDep,
    cursor_of,
    listing,
    project_of,
    rules,
    seen,
    seen_of,
)
from elastic.server.api.routes.model_route import ModelRoute
from elastic.server.api.writes import WriteDep, WriteResult, created
from elastic.server.permissions import Action, actions_of, may_grant
from elastic.server.problems import ApiProblem
from elastic.server.store import people
from elastic.server.store.database import now_us

router = APIRouter(prefix="/v1/keys", tags=["keys"], route_class=ModelRoute)
KeyId = Annotated[str, Path(max_length=64)]


@router.post(
    "",
    status_code=201,
    response_model=CreatedKey,
    **rules(Action.KEYS_WRITE, "not-found"),
)
def create(body: NewKey, write: WriteDep, tx: sa.Connection) -> WriteResult:
    """Make a key of the project itself, for programs. Its secret is in this answer and nowhere else."""
    if body.server_wide and write.caller.project is not None:
        raise ApiProblem("forbidden", "only a key of no project can make another one")
    project = None if body.server_wide else project_of(tx, write.caller, body.project)
    refuse_more(write.caller, body.role, body.scopes, server_wide=project is None)
    expires_us = None if body.expires_in_s is None else now_us() + body.expires_in_s * 1_000_000
    row, secret = people.new_key(
        tx, project=project, name=body.name, role=body.role, scopes=body.scopes, expires_us=expires_us
    )
    return key_made(row, secret, router.prefix, project)


def key_made(row: sa.RowMapping, secret: str | None, prefix: str, project: str | None = None) -> WriteResult:
    """Return the answer with a new key. Its secret is in this answer only, and not in repetitions."""
    made = people.as_key(row).model_dump()
    kept = CreatedKey(**made, secret=None)
    return created(f"{prefix}/{row['id']}", CreatedKey(**made, secret=secret), project, kept=kept)


@router.get("", **rules(Action.KEYS_READ, "invalid-cursor", "not-found"))
def list_keys(
    request: Request,
    caller: CallerDep,
    state: StateDep,
    cursor: Annotated[Cursor, Depends(cursor_of(ids.KEY))],
    project: OnlyProject = None,
) -> Listed[ApiKey]:
    """List keys, newest first, without their secrets."""
    with state.store.reading() as connection:
        where = seen_of(connection, caller, people.keys_seen, project)
        return listing(request, connection, people.keys_seen, where, cursor, people.as_key)


@router.get("/{key}", **rules(Action.KEYS_READ, "not-found"))
def show(key: KeyId, caller: CallerDep, state: StateDep) -> ApiKey:
    """Show a key, without its secret."""
    with state.store.reading() as connection:
        return people.as_key(key_of(connection, caller, key))


@router.delete("/{key}", status_code=204, **rules(Action.KEYS_WRITE, "not-found"))
def revoke(key: KeyId, write: WriteDep, tx: sa.Connection) -> WriteResult:
    """Revoke a key: from now on it opens nothing. It stays in the list."""
    found = key_of(tx, write.caller, key)
    people.revoke(tx, found["id"])
    return WriteResult(204, project=found["project"])


def key_of(connection: sa.Connection, caller: Caller, key: str) -> sa.RowMapping:
    """The key with this id, if the caller sees it. Raises `ApiProblem`."""
    return seen(caller, "key", key, people.key(connection, key))


def refuse_more(caller: Caller, role: AccessRole, scopes: list[str], *, server_wide: bool) -> None:
    """Raise `ApiProblem` if the caller would hand on more than they have."""
    if not may_grant(caller.role, role):
        raise ApiProblem("forbidden", f"the role {caller.role} cannot make a key of the role {role}")
    allowed = actions_of(role, [], server_wide=server_wide)
    unknown = [scope for scope in scopes if scope not in allowed]
    if unknown:
        errors = [ProblemError(pointer="#/scopes", detail=f"unknown, or not the role's: {', '.join(unknown)}")]
        raise ApiProblem("invalid-request", f"scopes: found {unknown[0]!r}; allowed: {', '.join(allowed)}", errors)
    granted = actions_of(role, scopes, server_wide=server_wide)
    beyond = [action for action in granted if action not in caller.actions]
    if beyond:
        raise ApiProblem("forbidden", f"this key cannot hand on {beyond[0]}, which it does not have itself")
