"""Retention: for how long what runs leave is kept, and what would go now."""

import itertools
from typing import Annotated, Any

import sqlalchemy as sa
from fastapi import APIRouter, Query, Response

from elastic.protocol.api import (
    RetentionChange,
    RetentionItem,
    RetentionJob,
    RetentionPlan,
    RetentionPolicy,
    RetentionUpload,
)
from elastic.server.api.routes.common import CallerDep, IfMatch, StateDep, check_etag, etag_of, project_of, rules
from elastic.server.api.routes.model_route import ModelRoute
from elastic.server.api.state import ServerState
from elastic.server.api.writes import WriteDep, WriteResult, edited
from elastic.server.clock import rfc3339
from elastic.server.intake.upload_files import UploadStorage
from elastic.server.permissions import Action
from elastic.server.retention import records
from elastic.server.retention.rules import Left, bytes_of
from elastic.server.store.database import now_us
from elastic.server.store.rows import told

router = APIRouter(prefix="/v1", tags=["retention"], route_class=ModelRoute)
ITEMS = 1_000
Limit = Annotated[
    int, Query(ge=1, le=ITEMS, description="most runs, jobs and uploads each to name; the sums are of these")
]
_EDITS = ("precondition-failed", "precondition-required")


@router.get("/retention", **rules(Action.PROJECTS_READ))
def show(caller: CallerDep, state: StateDep, response: Response) -> RetentionPolicy:
    """Show for how long the server keeps what runs leave, where a project says nothing else."""
    return _shown(state, records.SERVER, response)


@router.patch("/retention", response_model=RetentionPolicy, **rules(Action.SERVER_WRITE, *_EDITS))
def change(body: RetentionChange, write: WriteDep, tx: sa.Connection, if_match: IfMatch = None) -> WriteResult:
    """Set for how long the server keeps what runs leave."""
    return _changed(tx, records.SERVER, body, if_match, None)


@router.get("/retention/dry-run", **rules(Action.SERVER_WRITE))
async def dry_run(caller: CallerDep, state: StateDep, limit: Limit = ITEMS) -> RetentionPlan:
    """Say what of all projects' runs would go now, and how many bytes; nothing is removed."""
    return await state.readers.of("")(lambda: _plan(state, None, limit))


@router.get("/projects/{project}/retention", **rules(Action.PROJECTS_READ, "not-found"))
def show_of_project(project: str, caller: CallerDep, state: StateDep, response: Response) -> RetentionPolicy:
    """Show for how long a project keeps what its runs leave; what is null is as the server's."""
    with state.store.reading() as connection:
        id_ = project_of(connection, caller, project)
    return _shown(state, id_, response)


@router.patch(
    "/projects/{project}/retention",
    response_model=RetentionPolicy,
    **rules(Action.PROJECTS_WRITE, "not-found", *_EDITS),
)
def change_of_project(
    project: str, body: RetentionChange, write: WriteDep, tx: sa.Connection, if_match: IfMatch = None
) -> WriteResult:
    """Set for how long a project keeps what its runs leave."""
    id_ = project_of(tx, write.caller, project)
    return _changed(tx, id_, body, if_match, id_)


@router.get("/projects/{project}/retention/dry-run", **rules(Action.PROJECTS_READ, "not-found"))
async def dry_run_of_project(project: str, caller: CallerDep, state: StateDep, limit: Limit = ITEMS) -> RetentionPlan:
    """Say what of a project's runs would go now, and how many bytes; nothing is removed."""

    def plan() -> RetentionPlan:
        with state.store.reading() as connection:
            id_ = project_of(connection, caller, project)
        return _plan(state, id_, limit)

    return await state.readers.of(caller.project or "")(plan)


def _shown(state: ServerState, scope: str, response: Response) -> RetentionPolicy:
    with state.store.reading() as connection:
        found = records.policy(connection, scope)
    response.headers["etag"] = etag_of(found.version)
    return told(RetentionPolicy, vars(found))


def _changed(
    tx: sa.Connection, scope: str, body: RetentionChange, if_match: str | None, project: str | None
) -> WriteResult:
    check_etag(if_match, records.policy(tx, scope).version)
    records.change(tx, scope, body.model_dump(exclude_unset=True))
    now = records.policy(tx, scope)
    return edited(told(RetentionPolicy, vars(now)), now.version, project)


def _plan(state: ServerState, project: str | None, limit: int) -> RetentionPlan:
    with state.store.reading() as connection:
        found = list(records.over(connection, project, now_us()))
        status = UploadStorage(state.settings).status
        unused = records.uploads_over(connection, project, status, state.settings.open_upload_days)
        uploads = [
            RetentionUpload(
                upload=row["id"],
                name=row["name"],
                project=row["project"],
                state="ready" if stands.ready else "open",
                last_used_at=rfc3339(last_us) or "",
                bytes=stands.bytes,
            )
            for row, stands, last_us in itertools.islice(unused, limit)
        ]

    def item(left: Left, parts: list[str]) -> dict[str, Any]:
        freed = bytes_of(left.directory(state.settings), parts)
        return {
            "project": left.project,
            "ended_at": rfc3339(left.ended_us) or "",
            "removes": parts,
            "bytes": freed,
        }

    runs, jobs = ([(left, parts) for left, parts in found if bool(left.pool) is pooled] for pooled in (False, True))
    items = [RetentionItem(run=left.id, name=left.name, **item(left, parts)) for left, parts in runs[:limit]]
    of_jobs = [RetentionJob(job=left.id, pool=left.pool, **item(left, parts)) for left, parts in jobs[:limit]]
    freed = sum(one.bytes for one in (*items, *of_jobs, *uploads))
    return RetentionPlan(items=items, jobs=of_jobs, uploads=uploads, runs=len(runs), bytes=freed)
