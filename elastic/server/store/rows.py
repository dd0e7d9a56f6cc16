"""Rows of tables: found, made, changed, and told as resources of the API."""

from collections.abc import Mapping
from typing import Any, TypeVar

import sqlalchemy as sa
from pydantic import BaseModel

from elastic.server.clock import rfc3339

R = TypeVar("R", bound=BaseModel)


def first(connection: sa.Connection, wanted: sa.Select[Any], **values: Any) -> sa.RowMapping | None:
    """Return the first row that is found, with these values of the query's parameters."""
    return connection.execute(wanted, values).mappings().first()


def columns(row: sa.RowMapping) -> dict[str, Any]:
    """Return a row's values by the names of its columns."""
    return {str(name): value for name, value in row.items()}


def inserted(tx: sa.Connection, table: sa.Table, **values: Any) -> sa.RowMapping:
    """Insert a row and return it, with the defaults of its other columns."""
    return tx.execute(sa.insert(table).values(**values).returning(*table.c)).mappings().one()


def changed(tx: sa.Connection, table: sa.Table, key: str, changes: Mapping[str, Any]) -> None:
    """Change the row whose primary key this is; it is of the next version then."""
    (column,) = table.primary_key
    tx.execute(sa.update(table).where(column == key).values(**changes, version=table.c.version + 1))


def put(tx: sa.Connection, table: sa.Table, key: str, changes: Mapping[str, Any], otherwise: Mapping[str, Any]) -> None:
    """Change the row of settings whose primary key this is, or make it: `otherwise` has what `changes` does not say."""
    (column,) = table.primary_key
    if first(tx, sa.select(column).where(column == key)) is not None:
        changed(tx, table, key, changes)
    else:
        inserted(tx, table, **{**otherwise, **changes, column.name: key, "version": 1})


def told(kind: type[R], row: Mapping[Any, Any], **more: Any) -> R:
    """Return a row as a resource: its fields are columns of their names, times of the microseconds in columns with
    `_us` in place of `_at`; and `more`."""
    moments = {name: f"{name.removesuffix('_at')}_us" for name in kind.model_fields if name.endswith("_at")}
    times = {name: rfc3339(row[column]) for name, column in moments.items() if column in row}
    return kind(**{name: row[name] for name in kind.model_fields if name in row} | times | more)
