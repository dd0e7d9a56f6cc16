"""Pages of lists, newest first, by the ids of what stands on them: entries that come or go meanwhile move nothing."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

LIMIT, LIMIT_MAX = 20, 100


@dataclass(frozen=True)
class Cursor:
    """Which part of a list is wanted: up to `limit` entries older than `starting_after`, or newer than
    `ending_before`."""

    limit: int = LIMIT
    starting_after: str = ""
    ending_before: str = ""


def page(
    connection: sa.Connection,
    table: sa.FromClause,
    where: Sequence[sa.ColumnElement[bool]],
    cursor: Cursor,
    columns: Sequence[sa.ColumnElement[Any]] = (),
) -> tuple[list[sa.RowMapping], bool]:
    """The entries of a table that are wanted, newest first, and whether there are more in that direction. Of each its
    `columns`, or all of them."""
    id_: sa.ColumnElement[Any] = table.c.id
    chosen = sa.select(*(columns or table.c)).where(*where)
    if cursor.ending_before:
        chosen = chosen.where(id_ > cursor.ending_before).order_by(id_.asc())
    else:
        chosen = chosen.order_by(id_.desc())
        if cursor.starting_after:
            chosen = chosen.where(id_ < cursor.starting_after)
    rows = list(connection.execute(chosen.limit(cursor.limit + 1)).mappings())
    has_more = len(rows) > cursor.limit
    rows = rows[: cursor.limit]
    return (rows[::-1] if cursor.ending_before else rows), has_more
