"""Retention in the store: the policies, and the runs of which something is over."""

from collections.abc import Iterator, Mapping
from typing import Any

import sqlalchemy as sa

from elastic.resources import ENDED
from elastic.server.retention import REMOVING, RetentionRow, due, needed_by
from elastic.server.store import runs
from elastic.server.store.runs import HostedRunRow
from elastic.server.store.tables import retention
from elastic.server.store.tables import runs as runs_table

SERVER = "server"
"""The scope of the policy that holds where a project's says nothing."""


def policy(connection: sa.Connection, scope: str) -> RetentionRow:
    row = connection.execute(sa.select(retention).where(retention.c.scope == scope)).mappings().first()
    return RetentionRow(scope=scope) if row is None else RetentionRow(**row)


def change(tx: sa.Connection, scope: str, changes: Mapping[str, Any]) -> None:
    if policy(tx, scope).version:
        tx.execute(
            sa.update(retention).where(retention.c.scope == scope).values(**changes, version=retention.c.version + 1)
        )
    else:
        tx.execute(sa.insert(retention).values(scope=scope, version=1, **changes))


def over(connection: sa.Connection, project: str | None, now_us: int) -> Iterator[tuple[HostedRunRow, list[str]]]:
    """The runs, of one project or all, of which something is kept no longer, and what; the oldest first."""
    policies = {row["scope"]: RetentionRow(**row) for row in connection.execute(sa.select(retention)).mappings()}
    if not policies:
        return
    server, going = policies.get(SERVER, RetentionRow(scope=SERVER)), runs.managed(connection)
    ended = (
        sa.select(runs_table)
        .where(~runs_table.c.managed, runs_table.c.phase.in_([phase.value for phase in ENDED]))
        .order_by(runs_table.c.id)
    )
    if project is not None:
        ended = ended.where(runs_table.c.project == project)
    for row in connection.execute(ended).mappings():
        run = runs.as_record(row)
        parts = due(run, policies.get(run.project, RetentionRow(scope=run.project)), server, now_us)
        if parts and needed_by(run, going) is None:
            yield run, parts


def half_removed(connection: sa.Connection) -> list[HostedRunRow]:
    """Runs of which the removal of something has begun."""
    begun = sa.select(runs_table).where(sa.cast(runs_table.c.retired, sa.Text).like(f"%{REMOVING}%"))
    return [runs.as_record(row) for row in connection.execute(begun).mappings()]
