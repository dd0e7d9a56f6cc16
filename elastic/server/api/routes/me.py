"""The requester, and a person's own keys: of one project each, never for more than their role in it."""

from typing import Annotated

import sqlalchemy as sa
from fastapi import APIRouter, Depends, Request

from elastic.protocol.api import ApiKey, CreatedKey, Listed, Me, NewOwnKey
from elastic.server import ids
from elastic.server.api.auth import Caller
from elastic.server.api.routes.common import CallerDep, Cursor, StateDep, cursor_of, listing, rules
from elastic.server.api.routes.keys import KeyId, key_made, key_of, refuse_more
from elastic.server.api.routes.model_route import ModelRoute
from elastic.server.api.writes import WriteDep, WriteResult
from elastic.server.permissions import Action
from elastic.server.problems import ApiProblem, not_found
from elastic.server.store import members, people
from elastic.server.store.database import now_us

router = APIRouter(prefix="/v1/me", tags=["me"], route_class=ModelRoute)


@router.get("", **rules(Action.RUNS_READ))
def me(caller: CallerDep, state: StateDep) -> Me:
    """Show who asks, by which key, and what they may do."""
    held = []
    if caller.member is not None:
        with state.store.reading() as connection:
            held = members.memberships(connection, caller.member)
    return Me(
        key=caller.key,
        member=caller.member,
        name=caller.name,
        project=caller.project,
        role=caller.role,
        actions=sorted(action.value for action in caller.actions),
        memberships=held,
        csrf_token=caller.csrf_token,
    )


@router.post(
    "/keys",
    status_code=201,
    response_model=CreatedKey,
    **rules(Action.ME_WRITE, "name-taken", "not-a-person"),
)
def create(body: NewOwnKey, write: WriteDep, tx: sa.Connection) -> WriteResult:
    """Make a key of one's own, for the project that one is signed in to. It ends with the membership."""
    member = _person(write.caller)
    role = body.role or write.caller.role
    refuse_more(write.caller, role, body.scopes, server_wide=False)
    if body.sha256 is not None and people.key_of_hash(tx, bytes.fromhex(body.sha256)) is not None:
        raise ApiProblem("name-taken", "there is a key with this secret already")
    row, secret = people.new_key(
        tx,
        project=write.caller.project,
        name=body.name,
        role=role,
        scopes=body.scopes,
        expires_us=now_us() + body.expires_in_s * 1_000_000,
        member=member,
        sha256=body.sha256,
    )
    return key_made(row, secret, f"{router.prefix}/keys")


@router.get("/keys", **rules(Action.RUNS_READ, "not-a-person", "invalid-cursor"))
def list_own(
    request: Request, caller: CallerDep, state: StateDep, cursor: Annotated[Cursor, Depends(cursor_of(ids.KEY))]
) -> Listed[ApiKey]:
    """List one's own keys of this project, newest first, without their secrets."""
    where = [people.keys_seen.c.member == _person(caller)]
    with state.store.reading() as connection:
        return listing(request, connection, people.keys_seen, where, cursor, people.as_key)


@router.delete("/keys/{key}", status_code=204, **rules(Action.ME_WRITE, "not-found", "not-a-person"))
def revoke(key: KeyId, write: WriteDep, tx: sa.Connection) -> WriteResult:
    """Revoke a key of one's own."""
    found = key_of(tx, write.caller, key)
    if found["member"] != _person(write.caller):
        raise not_found("key", key)
    people.revoke(tx, found["id"])
    return WriteResult(204)


def _person(caller: Caller) -> str:
    if caller.member is None:
        raise ApiProblem("not-a-person", "this key is of a project, and of no person")
    return caller.member
