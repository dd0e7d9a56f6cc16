"""Retention in the store: the policies, and the runs and jobs of which something is over."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import sqlalchemy as sa

from elastic.protocol.api import ENDED
from elastic.server.intake.upload_files import UploadStatus
from elastic.server.retention.rules import REMOVING, Left, RetentionRow, due, is_over
from elastic.server.store import jobs, runs, uploads
from elastic.server.store.database import now_us
from elastic.server.store.rows import columns, first, put
from elastic.server.store.runs import Attempting, HostedRunRow
from elastic.server.store.tables import jobs as jobs_table
from elastic.server.store.tables import retention
from elastic.server.store.tables import runs as runs_table
from elastic.server.store.tables import uploads as uploads_table

SERVER = "server"
"""The scope of the policy that holds where a project's says nothing."""


def policy(connection: sa.Connection, scope: str) -> RetentionRow:
    row = first(connection, sa.select(retention).where(retention.c.scope == scope))
    return RetentionRow(scope=scope) if row is None else RetentionRow(**columns(row))


def change(tx: sa.Connection, scope: str, changes: Mapping[str, Any]) -> None:
    put(tx, retention, scope, changes, {})


class _Policies(dict[str, RetentionRow]):
    """Those of the server and of projects, by their scopes."""

    def __init__(self, connection: sa.Connection) -> None:
        rows = connection.execute(sa.select(retention)).mappings()
        super().__init__({row["scope"]: RetentionRow(**columns(row)) for row in rows})

    def of(self, project: str) -> RetentionRow:
        """Return what holds of a project."""
        own, server = (self.get(scope, RetentionRow(scope=scope)) for scope in (project, SERVER))
        return own.or_else(server)


def needed_by(connection: sa.Connection, left: Left) -> str | None:
    """Return a run or job that goes on and whose configuration names something of this one's; None where there is
    none."""
    return runs.naming(connection, left.id) or jobs.naming(connection, left.project, left.id)


def _of_run(run: HostedRunRow) -> Left:
    ended_us = run.ended_us if run.ended and not run.managed else None
    return Left(id=run.id, project=run.project, ended_us=ended_us, retired=run.retired or {}, name=run.name)


def _of_jobs(
    connection: sa.Connection, *where: sa.ColumnElement[bool], attempting: Attempting = nullcontext
) -> list[Left]:
    """Return jobs; one whose row cannot be read is an attempt that failed."""
    of = jobs_table.c
    retired = sa.cast(of.retired, sa.Text)
    wanted = sa.select(of.id, of.project, of.ended_us, retired, of.pool).where(*where).order_by(of.id)
    found: list[Left] = []
    for id_, project, ended_us, said, pool in connection.execute(wanted).all():
        with attempting(f"{id_}: its row"):
            gone = json.loads(said or "{}") or {}
            found.append(Left(id=id_, project=project, ended_us=ended_us, retired=gone, pool=pool))
    return found


def again(connection: sa.Connection, left: Left) -> Left | None:
    """Return the run or job as it is now; None for one that is no more, or is being deleted."""
    if left.pool:
        return next(iter(_of_jobs(connection, jobs_table.c.id == left.id)), None)
    run = runs.find(connection, left.id)
    return None if run is None else _of_run(run)


def note(tx: sa.Connection, left: Left, retired: Mapping[str, str]) -> None:
    """Note what has been removed of a run or job, or is about to be."""
    if left.pool:
        jobs.note_retired(tx, left.id, retired)
    else:
        runs.observe(tx, left.id, retired=retired)


def over(
    connection: sa.Connection, project: str | None, at_us: int, attempting: Attempting = nullcontext
) -> Iterator[tuple[Left, list[str]]]:
    """The runs, of one project or all, of which something is kept no longer, and what, and then such jobs; the oldest
    first. For unreadable runs see `runs.read`."""
    policies = _Policies(connection)
    if not policies:
        return
    ended = (
        sa.select(runs_table)
        .where(~runs_table.c.managed, runs_table.c.phase.in_([phase.value for phase in ENDED]))
        .order_by(runs_table.c.id)
    )
    jobs_ended: list[sa.ColumnElement[bool]] = [jobs_table.c.ended_us.is_not(None)]
    if project is not None:
        ended = ended.where(runs_table.c.project == project)
        jobs_ended.append(jobs_table.c.project == project)
    for left in (
        *map(_of_run, runs.read(connection, ended, attempting)),
        *_of_jobs(connection, *jobs_ended, attempting=attempting),
    ):
        parts = due(left, policies.of(left.project), at_us)
        if parts and needed_by(connection, left) is None:
            yield left, parts


def uploads_over(
    connection: sa.Connection, project: str | None, status: Callable[[str, str], UploadStatus], open_days: int
) -> Iterator[tuple[sa.RowMapping, UploadStatus, int]]:
    """The uploads, of one project or all, that are kept no longer: how each stands, and when it was last used; oldest
    first. One that a run names which has not ended is in use."""
    policies, at_us = _Policies(connection), now_us()
    wanted = sa.select(uploads_table).order_by(uploads_table.c.id)
    if project is not None:
        wanted = wanted.where(uploads_table.c.project == project)
    for row in connection.execute(wanted).mappings():
        found = status(row["project"], row["id"])
        days = policies.of(row["project"]).uploads_days if found.ready else open_days
        last_us = max(row["created_us"], found.touched_us)
        # The runs are only asked where it matters.
        if is_over(last_us, days, at_us) and uploads.user_of(connection, row["project"], row["id"]) is None:
            last_us = max(last_us, uploads.last_use_us(connection, row["project"], row["id"]))
            if is_over(last_us, days, at_us):
                yield row, found, last_us


def half_removed(connection: sa.Connection, attempting: Attempting = nullcontext) -> list[Left]:
    """Runs and jobs of which the removal of something has begun."""

    def begun(table: sa.Table) -> sa.ColumnElement[bool]:
        return sa.cast(table.c.retired, sa.Text).like(f"%{REMOVING}%")

    found = runs.read(connection, sa.select(runs_table).where(begun(runs_table)), attempting)
    return [*map(_of_run, found), *_of_jobs(connection, begun(jobs_table), attempting=attempting)]
