"""The audit log: one entry for each request that changes something, and for each that was refused."""

import sqlalchemy as sa

from elastic.protocol.api import AuditEntry
from elastic.server import ids
from elastic.server.clock import rfc3339
from elastic.server.store.database import now_us
from elastic.server.store.rows import told
from elastic.server.store.tables import audit

RESOURCE_CHARACTERS = 200


def write(
    tx: sa.Connection, *, actor: str, action: str, resource: str, project: str | None, status: int, request_id: str
) -> None:
    tx.execute(
        sa.insert(audit).values(
            id=ids.new_id(ids.AUDIT),
            at_us=now_us(),
            actor=actor,
            action=action,
            resource=resource[:RESOURCE_CHARACTERS],
            project=project,
            status=status,
            request_id=request_id,
        )
    )


def as_entry(row: sa.RowMapping, actor_name: str) -> AuditEntry:
    return told(AuditEntry, row, at=rfc3339(row["at_us"]), actor_name=actor_name)
