"""Tables made of record types: one column a field, its SQL type that of the field.

Integers, floats, texts and bytes are stored as such, everything else as JSON. A record type with a key has one row for
each key, and a later record replaces the earlier one; rows of the others are numbered in the order in which they came.
"""

import sqlite3
import types
import typing
from collections.abc import Callable, Collection, Iterator, Sequence
from enum import Enum
from itertools import chain
from typing import Any, ClassVar, Generic, TypeVar, Union, dataclass_transform

import msgspec

Row: typing.TypeAlias = tuple[Any, ...]

ROWS_AT_ONCE = 250
"""Rows that one statement inserts: for each statement the writer gives up the interpreter's lock once and waits for it,
which takes longer than all else where the run is busy."""
ROW_BYTES = 300
"""Memory of a row besides its JSON and bytes."""
FLOAT_MAX = "1.7976931348623157e308"
_PLAIN: dict[Any, str] = {int: "INTEGER", bool: "INTEGER", str: "TEXT", bytes: "BLOB", float: "REAL"}


@dataclass_transform(frozen_default=True, field_specifiers=(msgspec.field,))
class JournalRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the journal's table of this name. A table that is made `LATER` comes with its first row.

    `INDEX` has, in SQL, the columns of the table's index, and which rows are in it; empty without one.
    """

    TABLE: ClassVar[str]
    KEY: ClassVar[str] = ""
    LATER: ClassVar[bool] = False
    INDEX: ClassVar[str] = ""


R = TypeVar("R", bound=JournalRecord)


class JournalTable(Generic[R]):
    """The table of one record type."""

    def __init__(self, kind: type[R]) -> None:
        self.kind = kind
        self.name = kind.TABLE
        self.columns = kind.__struct_fields__
        hints = typing.get_type_hints(kind)
        self._as_json = [index for index, name in enumerate(self.columns) if _sql_type(hints[name])[0] is None]
        self._decoders: list[tuple[str, Callable[[str], Any]]] = [
            (self.columns[index], msgspec.json.Decoder(hints[self.columns[index]]).decode) for index in self._as_json
        ]
        self._large = [index for index, name in enumerate(self.columns) if _sql_type(hints[name])[0] in (None, "BLOB")]
        self.create = self._create(hints)
        self.index = f"{self.name}_index" if kind.INDEX else ""
        index = f'CREATE INDEX "{self.index}" ON "{self.name}" {kind.INDEX}'
        self.schema = (self.create, index) if kind.INDEX else (self.create,)
        """The statements that make it, as SQLite keeps them."""
        self._insert_one = self._insert(1)
        self._insert_many = self._insert(ROWS_AT_ONCE)
        self._select = f'SELECT {_names(self.columns)} FROM "{self.name}"'

    def kept(self, record: R) -> Row:
        """What to keep of a record until it is inserted: its values, as they are now."""
        row = msgspec.structs.astuple(record)
        if not self._as_json:
            return row
        values = list(row)
        for index in self._as_json:
            if values[index] is not None:
                values[index] = _encode_json(values[index]).decode()
        return tuple(values)

    def size_bytes(self, row: Row) -> int:
        """About what it takes in memory."""
        size_bytes = ROW_BYTES
        for index in self._large:
            size_bytes += len(row[index] or "")
        return size_bytes

    def insert(self, connection: sqlite3.Connection, rows: Sequence[Row]) -> None:
        """Insert rows, in order."""
        if self.kind.LATER:
            connection.execute(self.create.replace("CREATE TABLE", "CREATE TABLE IF NOT EXISTS", 1))
        whole = len(rows) - len(rows) % ROWS_AT_ONCE
        for begin in range(0, whole, ROWS_AT_ONCE):
            values = tuple(chain.from_iterable(rows[begin : begin + ROWS_AT_ONCE]))
            connection.execute(self._insert_many, values)
        connection.executemany(self._insert_one, rows[whole:])

    def lacks(self, connection: sqlite3.Connection) -> bool:
        """Whether the journal has no such table, as none of its records came yet."""
        there = "SELECT 1 FROM sqlite_schema WHERE type = 'table' AND name = ?"
        return self.kind.LATER and connection.execute(there, (self.name,)).fetchone() is None

    def read(self, connection: sqlite3.Connection) -> Iterator[R]:
        """Every record, in order. Raises `msgspec.ValidationError` or `msgspec.DecodeError` for a damaged one."""
        if self.lacks(connection):
            return
        for row in connection.execute(f"{self._select} ORDER BY rowid"):
            yield self._record(row)

    def read_where(self, connection: sqlite3.Connection, clause: str, values: Sequence[float]) -> Iterator[R]:
        """The records that a condition, and an order, in SQL say. Raises as `read` does."""
        if self.lacks(connection):
            return
        for row in connection.execute(f"{self._select} WHERE {clause}", values):
            yield self._record(row)

    def last(self, connection: sqlite3.Connection) -> R | None:
        """The record that was written last. Raises as `read` does."""
        if self.lacks(connection):
            return None
        row = connection.execute(f"{self._select} ORDER BY rowid DESC LIMIT 1").fetchone()
        return None if row is None else self._record(row)

    def read_at(
        self, connection: sqlite3.Connection, rows: Sequence[int], without: Collection[str] = ()
    ) -> Iterator[R]:
        """The records with these numbers, in their order; columns of bytes that are left out are empty. Raises as
        `read` does."""
        chosen = ", ".join("x''" if name in without else f'"{name}"' for name in self.columns)
        query = f'SELECT {chosen} FROM "{self.name}" WHERE rowid = ?'
        for number in rows:
            for row in connection.execute(query, (number,)):
                yield self._record(row)

    def find(self, connection: sqlite3.Connection, key: str) -> R | None:
        """The record with this key, of a kind that has keys. Raises as `read` does."""
        if self.lacks(connection):
            return None
        row = connection.execute(f'{self._select} WHERE "{self.kind.KEY}" = ?', (key,)).fetchone()
        return None if row is None else self._record(row)

    def _record(self, row: Row) -> R:
        values = dict(zip(self.columns, row, strict=True))
        for name, decode in self._decoders:
            if (value := values[name]) is not None:
                if not isinstance(value, str):
                    raise msgspec.ValidationError(f"Expected `str`, got `{type(value).__name__}` - at `$.{name}`")
                values[name] = decode(value)
        return msgspec.convert(values, self.kind, strict=False)

    def _create(self, hints: dict[str, Any]) -> str:
        columns = [_column(name, hints[name]) for name in self.columns]
        columns = (
            [*columns, f'PRIMARY KEY ("{self.kind.KEY}")'] if self.kind.KEY else ["seq INTEGER PRIMARY KEY", *columns]
        )
        return f'CREATE TABLE "{self.name}" ({", ".join(columns)})'

    def _insert(self, rows: int) -> str:
        marks = f"({', '.join('?' * len(self.columns))})"
        verb = "INSERT OR REPLACE" if self.kind.KEY else "INSERT"
        return f'{verb} INTO "{self.name}" ({_names(self.columns)}) VALUES {", ".join([marks] * rows)}'


def _names(columns: Sequence[str]) -> str:
    return ", ".join(f'"{name}"' for name in columns)


def _column(name: str, hint: Any) -> str:
    """A float must be finite: SQLite would keep infinity, and takes what is undefined for NULL."""
    sql_type, optional = _sql_type(hint)
    finite = f' CHECK (abs("{name}") <= {FLOAT_MAX})' if sql_type == "REAL" else ""
    return f'"{name}" {sql_type or "TEXT"}{"" if optional else " NOT NULL"}{finite}'


def _sql_type(hint: Any) -> tuple[str | None, bool]:
    """The SQL type of a field, None for JSON, and whether it may be NULL."""
    members = [hint]
    if typing.get_origin(hint) in (Union, types.UnionType):
        members = list(typing.get_args(hint))
    optional = type(None) in members
    kinds = [member for member in members if member is not type(None)]
    kind = kinds[0] if len(kinds) == 1 else None
    if isinstance(kind, type) and issubclass(kind, Enum):
        kind = str
    return (_PLAIN.get(kind) if kind is not None and typing.get_origin(kind) is None else None), optional


_encode_json = msgspec.json.Encoder().encode
