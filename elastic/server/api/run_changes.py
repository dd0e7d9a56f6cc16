"""Which runs have changed since when, for any number of streams: the store is asked once for all of them.

Changes are numbered. A reader who knows the last number that it has heard of misses nothing, until this process ends or
has forgotten what came so long ago: then it begins anew.
"""

import secrets
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from elastic.server.store import Store, runs
from elastic.server.store.tables import runs as table

KEPT = 5_000
"""Runs whose last change is remembered."""
_COLUMNS = [*runs.LISTED, table.c.wanted]
_COMPARED = sa.select(
    table.c.id,
    table.c.project,
    table.c.generation,
    table.c.phase,
    table.c.cause,
    table.c.restarts,
    table.c.started_us,
    table.c.ended_us,
    sa.cast(table.c.conditions, sa.Text),
    sa.cast(table.c.figures, sa.Text),
).where(table.c.managed)
"""What changes of runs that go on; whatever else is wanted of one, it has another generation then. JSON stays text: it
need not be read to be compared."""
AT_ONCE = 500
"""Runs that are named in one question."""


@dataclass(frozen=True)
class ChangedRun:
    """A run as it is since the change of this number, as JSON; None where it is no more."""

    number: int
    id: str
    project: str
    told: str | None


class RunChanges:
    """The changes that this process has seen. Threads may share it."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._name = secrets.token_hex(4)
        self._lock = threading.Lock()
        self._rows: dict[str, tuple[Any, ...]] = {}
        self._changes: OrderedDict[str, ChangedRun] = OrderedDict()
        self._number = 0
        self._forgotten = 0

    @property
    def last(self) -> int:
        """The number of the last change."""
        return self._number

    def id_of(self, number: int) -> str:
        """Return what a reader is told of a number, to come back with."""
        return f"{self._name}-{number}"

    def number_of(self, id_: str) -> int | None:
        """Return the number of what a reader came back with; None where its changes are not known here any more."""
        name, _, number = id_.rpartition("-")
        if name != self._name or not number.isdecimal() or len(number) > 18:
            return None
        return int(number) if self._forgotten <= int(number) <= self._number else None

    def look(self) -> int:
        """Look what has changed, and return the number of the last change. Raises `StoreUnavailable`."""
        with self._lock, self._store.reading() as connection:
            rows = {row[0]: tuple(row) for row in connection.execute(_COMPARED).all()}
            former = self._rows
            gone = [id_ for id_ in former if id_ not in rows]
            changed = [id_ for id_, row in rows.items() if former.get(id_) != row]
            found = self._read(connection, [*gone, *changed]) if gone or changed else {}
            self._rows = rows
            for id_ in [*gone, *changed]:
                row = found.get(id_)
                if row is not None:
                    told = None if row["wanted"] == runs.DELETE else runs.as_listed_run(row).model_dump_json()
                    self._note(ChangedRun(self._number + 1, id_, row["project"], told))
                elif id_ in former:
                    self._note(ChangedRun(self._number + 1, id_, former[id_][1], None))
            return self._number

    def behind(self, number: int, project: str | None) -> tuple[int, list[ChangedRun]]:
        """Return the number of the last change, and that of each run that changed behind this number, of one project or
        of all."""
        with self._lock:
            found: list[ChangedRun] = []
            for change in reversed(self._changes.values()):
                if change.number <= number:
                    break
                if project in (None, change.project):
                    found.append(change)
            return self._number, found[::-1]

    def _read(self, connection: sa.Connection, ids: Sequence[str]) -> dict[str, sa.RowMapping]:
        chunks = (ids[first : first + AT_ONCE] for first in range(0, len(ids), AT_ONCE))
        asked = (sa.select(*_COLUMNS).where(table.c.id.in_(chunk)) for chunk in chunks)
        return {row["id"]: row for question in asked for row in connection.execute(question).mappings()}

    def _note(self, change: ChangedRun) -> None:
        self._number = change.number
        self._changes[change.id] = change
        self._changes.move_to_end(change.id)
        while len(self._changes) > KEPT:
            self._forgotten = self._changes.popitem(last=False)[1].number
