"""The audit log: who did what, and who was not let."""

import functools
from typing import Annotated

import sqlalchemy as sa
from fastapi import APIRouter, Depends, Request

from elastic.protocol.api import AuditEntry, Listed
from elastic.server import ids
from elastic.server.api.routes.common import (
    CallerDep,
    Cursor,
    OnlyProject,
    StateDep,
    cursor_of,
    listing,
    rules,
    seen_of,
)
from elastic.server.api.routes.model_route import ModelRoute
from elastic.server.permissions import Action
from elastic.server.store import audit, people
from elastic.server.store.tables import audit as audit_table

router = APIRouter(prefix="/v1/audit", tags=["audit"], route_class=ModelRoute)


@router.get("", **rules(Action.AUDIT_READ, "invalid-cursor", "not-found"))
def list_entries(
    request: Request,
    caller: CallerDep,
    state: StateDep,
    cursor: Annotated[Cursor, Depends(cursor_of(ids.AUDIT))],
    project: OnlyProject = None,
) -> Listed[AuditEntry]:
    """List what was done, newest first."""
    with state.store.reading() as connection:
        name_of = functools.cache(functools.partial(people.name_of, connection))

        def entry(row: sa.RowMapping) -> AuditEntry:
            return audit.as_entry(row, name_of(row["actor"]))

        where = seen_of(connection, caller, audit_table, project)
        return listing(request, connection, audit_table, where, cursor, entry)
