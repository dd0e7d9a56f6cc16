"""Projects: what runs, keys and files belong to."""

import sqlalchemy as sa
from fastapi import APIRouter, Request, Response

from elastic.protocol.api import Listed, NewProject, Project, ProjectChange
from elastic.server.api.routes.common import (
    CallerDep,
    IfMatch,
    StateDep,
    check_etag,
    etag_of,
    project_of,
    rules,
)
from elastic.server.api.routes.model_route import ModelRoute
from elastic.server.api.writes import WriteDep, WriteResult, created, edited
from elastic.server.permissions import Action
from elastic.server.problems import ApiProblem
from elastic.server.store import people

router = APIRouter(prefix="/v1/projects", tags=["projects"], route_class=ModelRoute)


@router.post(
    "",
    status_code=201,
    response_model=Project,
    **rules(Action.SERVER_WRITE, "name-taken", "untrusted-neighbours"),
)
def create(body: NewProject, write: WriteDep, tx: sa.Connection) -> WriteResult:
    """Make a project. Its runs' processes have a Unix user of their own, unless the server was told to trust all."""
    _refuse_taken(tx, body.name)
    if body.unix_user is None and not write.state.settings.shared_trust:
        raise ApiProblem(
            "untrusted-neighbours",
            "its runs would be processes of the same user as other projects': give it a unix_user, or start the "
            "server with --shared-trust",
        )
    made = people.new_project(tx, body.name, body.unix_user)
    return created(f"{router.prefix}/{made['id']}", people.as_project(made), made["id"], made["version"])


@router.get("", **rules(Action.PROJECTS_READ))
def list_projects(request: Request, caller: CallerDep, state: StateDep) -> Listed[Project]:
    """List the projects that the key sees."""
    with state.store.reading() as connection:
        rows = people.all_projects(connection)
    seen = [people.as_project(row) for row in rows if caller.sees(row["id"])]
    return Listed(url=request.url.path, data=seen, has_more=False)


@router.get("/{project}", **rules(Action.PROJECTS_READ, "not-found"))
def show(project: str, caller: CallerDep, state: StateDep, response: Response) -> Project:
    """Show a project, by its id or its name."""
    with state.store.reading() as connection:
        row = people.project(connection, project_of(connection, caller, project))
    assert row is not None
    response.headers["etag"] = etag_of(row["version"])
    return people.as_project(row)


@router.patch(
    "/{project}",
    response_model=Project,
    **rules(Action.SERVER_WRITE, "not-found", "name-taken", "precondition-failed", "precondition-required"),
)
def change(
    project: str, body: ProjectChange, write: WriteDep, tx: sa.Connection, if_match: IfMatch = None
) -> WriteResult:
    """Rename a project, or give it a Unix user."""
    found = people.project(tx, project_of(tx, write.caller, project))
    assert found is not None
    check_etag(if_match, found["version"])
    changes = body.model_dump(exclude_unset=True, exclude_none=True)
    if changes.get("name", found["name"]) != found["name"]:
        _refuse_taken(tx, changes["name"])
    people.change_project(tx, found["id"], changes)
    now = people.project(tx, found["id"])
    assert now is not None
    return edited(people.as_project(now), now["version"], now["id"])


def _refuse_taken(tx: sa.Connection, name: str) -> None:
    if people.project(tx, name) is not None:
        raise ApiProblem("name-taken", f"there is a project {name!r} already")
