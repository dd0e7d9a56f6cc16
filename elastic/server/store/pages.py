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


@dataclass(frozen=True)
class Order:
    """An order of entries by a value, largest first unless `ascending`; equal ones newest first. Values may change
    while one walks through the list: then an entry may come twice, or not."""

    value: sa.ColumnElement[Any]
    ascending: bool = False


def page(
    connection: sa.Connection,
    table: sa.FromClause,
    where: Sequence[sa.ColumnElement[bool]],
    cursor: Cursor,
    columns: Sequence[sa.ColumnElement[Any]] = (),
    order: Order | None = None,
) -> tuple[list[sa.RowMapping], bool]:
    """The entries of a table that are wanted, newest first or in an `order`, and whether there are more in that
    direction. Of each its `columns`, or all of them."""
    id_: sa.ColumnElement[Any] = table.c.id
    chosen = sa.select(*(columns or table.c)).where(*where)
    if order is not None:
        return _ordered(connection, chosen, id_, cursor, order)
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


def _ordered(
    connection: sa.Connection,
    chosen: sa.Select[*tuple[Any, ...]],
    id_: sa.ColumnElement[Any],
    cursor: Cursor,
    order: Order,
) -> tuple[list[sa.RowMapping], bool]:
    value = order.value
    if cursor.starting_after:
        last = connection.execute(sa.select(value).where(id_ == cursor.starting_after)).scalar()
        beyond = value > last if order.ascending else value < last
        chosen = chosen.where(sa.or_(beyond, sa.and_(value == last, id_ < cursor.starting_after)))
    chosen = chosen.order_by(value.asc() if order.ascending else value.desc(), id_.desc())
    rows = list(connection.execute(chosen.limit(cursor.limit + 1)).mappings())
    return rows[: cursor.limit], len(rows) > cursor.limit
