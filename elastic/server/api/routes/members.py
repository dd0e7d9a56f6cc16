"""A project's members: people, and what each may do in it."""

from typing import Annotated

import sqlalchemy as sa
from fastapi import APIRouter, Depends, Path, Request, Response

from elastic.protocol.api import AccessRole, Listed, MemberChange, NewMember, ProjectMember
from elastic.server import ids
from elastic.server.api.auth import Caller
from elastic.server.api.routes.common import (
    CallerDep,
    Cursor,
    IfMatch,
    StateDep,
    check_etag,
    cursor_of,
    etag_of,
    listing,
    project_of,
    rules,
)
from elastic.server.api.routes.model_route import ModelRoute
from elastic.server.api.writes import WriteDep, WriteResult, created, edited
from elastic.server.permissions import Action, may_grant
from elastic.server.problems import ApiProblem, not_found
from elastic.server.store import members

router = APIRouter(prefix="/v1/projects/{project}/members", tags=["members"], route_class=ModelRoute)
MemberId = Annotated[str, Path(max_length=64)]


@router.post(
    "",
    status_code=201,
    response_model=ProjectMember,
    **rules(Action.MEMBERS_WRITE, "not-found", "name-taken"),
)
def add(project: str, body: NewMember, write: WriteDep, tx: sa.Connection) -> WriteResult:
    """Make somebody a member by their e-mail address. It is theirs once they sign in with it, now or later."""
    found = project_of(tx, write.caller, project)
    _refuse_more(write.caller, body.role)
    person = members.person_of_email(tx, body.email.lower())
    if members.of_person(tx, found, person) is not None:
        raise ApiProblem("name-taken", f"{body.email} is a member already")
    made = members.add(tx, found, person, body.role, members.GIVEN)
    return created(f"/v1/projects/{found}/members/{made['id']}", members.as_member(made), found, made["version"])


@router.get("", **rules(Action.MEMBERS_READ, "not-found", "invalid-cursor"))
def list_members(
    project: str,
    request: Request,
    caller: CallerDep,
    state: StateDep,
    cursor: Annotated[Cursor, Depends(cursor_of(ids.MEMBER))],
) -> Listed[ProjectMember]:
    """List a project's members, the newest first."""
    with state.store.reading() as connection:
        where = [members.with_person.c.project == project_of(connection, caller, project)]
        return listing(request, connection, members.with_person, where, cursor, members.as_member)


@router.get("/{member}", **rules(Action.MEMBERS_READ, "not-found"))
def show(project: str, member: MemberId, caller: CallerDep, state: StateDep, response: Response) -> ProjectMember:
    """Show a member."""
    with state.store.reading() as connection:
        found = _member_of(connection, project_of(connection, caller, project), member)
    response.headers["etag"] = etag_of(found["version"])
    return members.as_member(found)


@router.patch(
    "/{member}",
    response_model=ProjectMember,
    **rules(Action.MEMBERS_WRITE, "not-found", "last-admin", "precondition-failed", "precondition-required"),
)
def change(
    project: str, member: MemberId, body: MemberChange, write: WriteDep, tx: sa.Connection, if_match: IfMatch = None
) -> WriteResult:
    """Give a member another role. Their keys and sessions do no more than it allows, from now on."""
    found = _member_of(tx, project_of(tx, write.caller, project), member)
    check_etag(if_match, found["version"])
    _refuse_more(write.caller, body.role)
    if body.role is not AccessRole.ADMIN:
        _refuse_last(tx, found)
    members.change(tx, found["id"], body.role, members.GIVEN)
    now = _member_of(tx, found["project"], member)
    return edited(members.as_member(now), now["version"], now["project"])


@router.delete("/{member}", status_code=204, **rules(Action.MEMBERS_WRITE, "not-found", "last-admin"))
def remove(project: str, member: MemberId, write: WriteDep, tx: sa.Connection) -> WriteResult:
    """Remove a member: their keys and sessions of this project end at once. What they have submitted goes on."""
    found = _member_of(tx, project_of(tx, write.caller, project), member)
    _refuse_last(tx, found)
    members.remove(tx, found["id"])
    return WriteResult(204, project=found["project"])


def _member_of(connection: sa.Connection, project: str, member: str) -> sa.RowMapping:
    found = members.find(connection, member)
    if found is None or found["project"] != project:
        raise not_found("member", member)
    return found


def _refuse_last(tx: sa.Connection, member: sa.RowMapping) -> None:
    if members.is_last_admin(tx, member):
        raise ApiProblem("last-admin", "the project would have no admin among its members: make another one first")


def _refuse_more(caller: Caller, role: AccessRole) -> None:
    if not may_grant(caller.role, role):
        raise ApiProblem("forbidden", f"the role {caller.role} cannot give somebody the role {role}")
