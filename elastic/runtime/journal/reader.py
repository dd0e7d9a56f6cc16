"""Reading a journal: its tables as records, its events as the core took them."""

import errno
import json
import math
import os
import resource
import sqlite3
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Literal, Self, TypeVar

import msgspec

from elastic.core import events as e
from elastic.core.ledger import DeviceBook
from elastic.core.steps import CUT_OFF
from elastic.core.types import Nanoseconds
from elastic.protocol import wire
from elastic.runtime.journal.frames import JournaledFrame, read_frame
from elastic.runtime.journal.records import (
    FRAME,
    FREQUENT,
    NOT_SCORED,
    RARE,
    TABLES,
    BookRow,
    EventRow,
    GroupRow,
    NoteRow,
    TrajectoryFilter,
    TrajectoryPlace,
    TrajectoryRow,
)
from elastic.runtime.journal.tables import R
from elastic.runtime.journal.writer import SCHEMA_VERSION, JournalError, no_room
from elastic.system.host import here
from elastic.system.sqlite import open_sqlite

T = TypeVar("T")

EVENT_NUMBER_MAX = 2**63 - 1
LAST_EVENTS = 1_000
"""Among which the one of the last moment is, where threads that wrote at once were not in the order of their times."""
_AMONG = "step IN (SELECT value FROM json_each(?))"
_EVENTS = TABLES[EventRow]
_decode_event = msgspec.msgpack.Decoder(e.Event).decode


def _event(number: int, body: object) -> e.Event:
    """Decode the event of a number; of a journal that was cut some have no body."""
    if not isinstance(body, bytes):
        raise sqlite3.DatabaseError("database disk image is malformed")
    try:
        return _decode_event(body)
    except msgspec.DecodeError as error:
        raise sqlite3.DatabaseError(f"event {number} is garbled: {error}") from error


def why_unreadable(error: Exception) -> str:
    """Why a journal that a run needs could not be read, and what to do before the run is resumed; empty for an error
    of another kind than `JournalReader` raises."""
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return (
            f"the journal {error.filename} could not be read, because no file descriptor was left: the process may "
            f"have {allowed}; raise that limit (`ulimit -n`, `LimitNOFILE=`) and resume the run"
        )
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return f"the journal {error.filename} could not be read, because its disk is full: make room and resume the run"
    return f"the journal could not be read: {error}" if isinstance(error, JournalError) else ""


def open_journal(path: Path, mode: Literal["ro", "rw"], *, cut: bool = False) -> sqlite3.Connection:
    """Open a journal as a database, even a `cut` one, of which what is missing cannot be read. Raises `sqlite3.Error`.

    It has nothing but a journal's own tables and indexes: a view, a trigger or a column that is computed would have its
    reader run what somebody else wrote. Its files are regular ones: a pipe would be waited for.
    """
    for suffix in ("", "-journal", "-wal", "-shm"):
        beside = path.with_name(path.name + suffix)
        if beside.exists() and not beside.is_file():
            raise sqlite3.DatabaseError(f"{beside.name} is no file")
    made = open_sqlite(path, mode)
    try:
        if cut:
            made.execute("PRAGMA writable_schema=ON")  # SQLite refuses no more a file that ends too early.
        found = made.execute("SELECT sql FROM sqlite_schema WHERE sql IS NOT NULL").fetchall()
        own = {statement for table in TABLES.values() for statement in table.schema}
        if any(sql not in own for (sql,) in found):
            raise sqlite3.DatabaseError("it has other tables than a journal of this version of elastic")
    except BaseException:
        made.close()
        raise
    return made


class JournalReader:
    """Read-only access to a journal, also while the run writes it. What cannot be read raises `JournalError`.

    Of a journal that a killed process has left SQLite makes an index first; without room for that, or without
    descriptors, it is an `OSError`, for the journal is sound. One of another schema version is refused by its number.
    """

    CUT: ClassVar[bool] = False
    """Whether a journal is opened of which a part is missing."""

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise JournalError(f"{path}: no such journal")
        self.path = path
        self.broken: list[str] = []
        """What could not be read of a journal that is only shown, each with its file."""
        with self._reading():
            self._connection = open_journal(path, "ro", cut=self.CUT)
        try:
            self._check_version()
            with self._reading():
                there = "SELECT 1 FROM sqlite_schema WHERE type = 'index' AND name = ?"
                self._is_indexed = self._connection.execute(there, (_EVENTS.index,)).fetchone() is not None
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, msgspec.DecodeError, UnicodeDecodeError) as error:
            if isinstance(error, sqlite3.OperationalError) and no_room(self.path):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path)) from error
            if isinstance(error, sqlite3.OperationalError) and here().out_of_descriptors():
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(self.path)) from error
            raise JournalError(f"{self.path}: {error}") from error

    def _check_version(self) -> None:
        found = self.meta().get("schema_version", "none")
        if found != str(SCHEMA_VERSION):
            raise JournalError(
                f"{self.path}: schema version {found}, written by another version of elastic; this one reads "
                f"{SCHEMA_VERSION}: read it with the version that wrote it"
            )

    def meta(self) -> dict[str, str]:
        return {note.key: note.value for note in self.rows(NoteRow)}

    def rows(self, kind: type[R]) -> list[R]:
        """Every record of a kind, in order."""
        return self._listed(TABLES[kind].read(self._connection))

    def _listed(self, records: Iterator[T]) -> list[T]:
        with self._reading():
            return list(records)

    def _asked(self, query: str, values: Sequence[object] = ()) -> list[Any]:
        """The rows that a query finds."""

        def found() -> Iterator[Any]:
            yield from self._connection.execute(query, values)

        return self._listed(found())

    def last(self, kind: type[R]) -> R | None:
        """The record of a kind that was written last."""
        with self._reading():
            return TABLES[kind].last(self._connection)

    def since(self, kind: type[R], key: int, most: int) -> list[R]:
        """The first records of a kind, at `most` so many, whose key, a whole number, is at least this, in its order."""
        clause = f'"{kind.KEY}" >= ? ORDER BY "{kind.KEY}" LIMIT ?'
        return self._listed(TABLES[kind].read_where(self._connection, clause, (key, most)))

    def last_until(self, kind: type[R], key: int) -> R | None:
        """The record of a kind with the largest key, a whole number, up to this one."""
        clause = f'"{kind.KEY}" <= ? ORDER BY "{kind.KEY}" DESC LIMIT 1'
        with self._reading():
            return next(TABLES[kind].read_where(self._connection, clause, (key,)), None)

    def group_places(self, behind: int, most: int) -> list[tuple[int, int]]:
        """The place of each group's end behind a place, with the step in which it was: at `most` so many, in order."""
        return self._asked("SELECT rowid, step FROM groups WHERE rowid > ? ORDER BY rowid LIMIT ?", (behind, most))

    def groups_at(self, places: Sequence[int]) -> list[GroupRow]:
        """The ends of groups that stand there."""
        return self._listed(TABLES[GroupRow].read_at(self._connection, places))

    def thinned(self, kind: type[R], most: int, behind: int = -1) -> list[R]:
        """Return at most `most` evenly spaced records of a kind whose key, a whole number, is more than `behind`, with
        the last one. Reads only these."""
        table = TABLES[kind]
        rows = [
            row for (row,) in self._asked(f'SELECT rowid FROM "{table.name}" WHERE rowid > ? ORDER BY rowid', (behind,))
        ]
        stride = max(1, -(-len(rows) // most))
        return self._listed(table.read_at(self._connection, [*rows[:-1][::stride], *rows[-1:]]))

    def first_step(self) -> float:
        """The first step with a result, infinity where none has any."""
        found = self._asked("SELECT MIN(step) FROM steps UNION ALL SELECT MIN(step) FROM groups")
        return min((step for (step,) in found if isinstance(step, int)), default=math.inf)

    def reward_sums(self, steps: Sequence[int]) -> list[tuple[int, int, float]]:
        """Each of these steps with how many of its trajectories were scored, and the sum of their rewards."""
        query = (
            "SELECT step, count(*), sum(reward) FROM trajectories "
            f"WHERE {_AMONG} AND cause = '' AND reward IS NOT NULL GROUP BY step"
        )
        return self._asked(query, (json.dumps(steps),))

    def step_sums(self, steps: Sequence[int]) -> list[tuple[int, int, int, int, int, int]]:
        """Each of these steps with how many of its trajectories are over, failed and were truncated, and the sum and
        the most of their policy tokens; those that were cut off, or wait for their score, do not count."""
        query = (
            "SELECT step, count(*), sum(cause != ''), sum(truncated), sum(policy_tokens), max(policy_tokens) "
            f"FROM trajectories WHERE {_AMONG} AND cause NOT IN (?, ?) GROUP BY step"
        )
        return self._asked(query, (json.dumps(steps), CUT_OFF, NOT_SCORED))

    def age_sums(self, steps: Sequence[int]) -> list[tuple[int, int, int, int]]:
        """Each of these steps with how many tokens were trained in it, the sum of their ages in versions, and the
        highest age."""
        query = (
            "SELECT step, sum(e.value), sum(e.key * e.value), max(CAST(e.key AS INTEGER)) "
            f"FROM groups, json_each(groups.tokens_by_age) AS e WHERE {_AMONG} AND dropped = '' GROUP BY step"
        )
        return self._asked(query, (json.dumps(steps),))

    def behind_last(self, most: int, unread: Collection[str], end: int) -> int:
        """The number behind which the last `most` events up to number `end` are that are neither token frames nor of
        `unread` kinds; 0 if there are no more."""
        where, values = self._besides(unread)
        query = f"SELECT seq FROM {where} AND seq <= ? ORDER BY seq DESC LIMIT 1 OFFSET ?"
        with self._reading():
            found = self._connection.execute(query, (*values, end, most)).fetchone()
        return 0 if found is None else found[0]

    def trajectories(
        self, wanted: TrajectoryFilter, behind: TrajectoryPlace | None, limit: int
    ) -> list[tuple[TrajectoryPlace, TrajectoryRow | None]]:
        """Return the wanted trajectories behind a place in their order, each with its place and without its tokens;
        None in place of one that cannot be read, of a journal that is only shown."""
        with self._moment():
            with self._reading():
                if TABLES[wanted.kind].lacks(self._connection):
                    return []
            return self._rows_at(wanted, self._places(wanted, behind, limit))

    def _places(self, wanted: TrajectoryFilter, behind: TrajectoryPlace | None, limit: int) -> list[TrajectoryPlace]:
        where, values = wanted.clauses(behind)
        order = "rowid DESC" if wanted.order == "newest" else "1 DESC, rowid DESC"  # Rows stand so: nothing is sorted.
        query = f'SELECT {wanted.rank}, rowid FROM "{TABLES[wanted.kind].name}" WHERE {where} ORDER BY {order} LIMIT ?'

        def found() -> Iterator[TrajectoryPlace]:
            last = behind
            for row in self._connection.execute(query, (*values, limit)):
                place = msgspec.convert(row, TrajectoryPlace)
                if last is not None and place >= last:  # Who goes on behind the last one would never come to an end.
                    raise sqlite3.DatabaseError(f"trajectory {place.row} stands behind trajectory {last.row}")
                last = place
                yield place

        return self._listed(found())

    def trajectory_place(self, wanted: TrajectoryFilter, trajectory: str) -> TrajectoryPlace | None:
        """Return the place that a trajectory has in the order of the wanted ones, wanted or not."""
        table = TABLES[wanted.kind]
        query = f'SELECT {wanted.rank}, rowid FROM "{table.name}" WHERE trajectory = ?'
        with self._reading():
            if table.lacks(self._connection):
                return None
            row = self._connection.execute(query, (trajectory,)).fetchone()
        return None if row is None else TrajectoryPlace(*row)

    @contextmanager
    def _moment(self) -> Iterator[None]:
        """Reads of one moment: what is written meanwhile is not seen."""
        with self._reading():
            self._connection.execute("BEGIN")
        try:
            yield
        finally:
            self._connection.rollback()

    def _rows_at(
        self, wanted: TrajectoryFilter, places: Sequence[TrajectoryPlace]
    ) -> list[tuple[TrajectoryPlace, TrajectoryRow | None]]:
        return [(place, self._row_at(wanted, place)) for place in places]

    def _row_at(self, wanted: TrajectoryFilter, place: TrajectoryPlace) -> TrajectoryRow:
        table = TABLES[wanted.kind]
        with self._reading():
            for row in table.read_at(self._connection, [place.row], without=("token_ids", "sampled")):
                return row
            raise sqlite3.DatabaseError(f"row {place.row} of its {table.name} is missing")

    def by_key(self, kind: type[R], keys: Sequence[str]) -> dict[str, R]:
        """Return the records of a kind with these keys."""
        table = TABLES[kind]
        with self._reading():
            found = {key: table.find(self._connection, key) for key in keys}
        return {key: record for key, record in found.items() if record is not None}

    def last_event(self) -> int:
        """The sequence number of its last event, 0 where it has none."""
        with self._reading():
            return self._connection.execute("SELECT MAX(seq) FROM events").fetchone()[0] or 0

    def first_event(self, behind: int) -> int:
        """The number of the first event behind a number; one behind all where there is none."""
        with self._reading():
            found = self._connection.execute("SELECT MIN(seq) FROM events WHERE seq > ?", (behind,)).fetchone()[0]
        return EVENT_NUMBER_MAX if found is None else found

    def last_ns(self) -> Nanoseconds:
        """The last moment that the journal knows of. Events are in the order of their times, so the last ones tell."""
        events = f"(SELECT t_ns FROM events ORDER BY seq DESC LIMIT {LAST_EVENTS})"
        columns = (("t_ns", events), ("finished_ns", "turns"), ("t_ns", "steps"), ("t_ns", "samples"))
        lasts = [self._largest(column, table) for column, table in columns]
        ends = [book.cursor_ns if book.closed_ns is None else book.closed_ns for book in self.books()]
        return max((t_ns for t_ns in (*lasts, *ends) if t_ns is not None), default=0)

    def _largest(self, column: str, table: str) -> int | None:
        with self._reading():
            return self._connection.execute(f"SELECT MAX({column}) FROM {table}").fetchone()[0]

    def books(self) -> list[DeviceBook]:
        """The ledger's books as they were written last, in the order in which they were opened."""
        books = [row.book for row in self.rows(BookRow)]
        return sorted(books, key=lambda book: book.opened_ns)

    def events(self) -> Iterator[tuple[Nanoseconds, e.Event]]:
        """Every event in order, as the core took it."""
        return ((t_ns, event) for t_ns, event, _ in self.entries())

    def entries(self, after: int = 0) -> Iterator[tuple[Nanoseconds, e.Event, wire.Tokens | None]]:
        """Every event in order, but for the first `after`; a token frame's with its accepted tokens."""
        query = "SELECT t_ns, kind, body FROM events WHERE seq > ? ORDER BY seq"
        with self._reading():
            for t_ns, kind, body in self._connection.execute(query, (after,)):
                if kind == FRAME:
                    frame = read_frame(body)
                    yield t_ns, frame.event, frame.tokens
                else:
                    yield t_ns, _decode_event(body), None

    def frames(self) -> Iterator[JournaledFrame]:
        """The token frames of which something was accepted, in order."""
        with self._reading():
            for (body,) in self._connection.execute("SELECT body FROM events WHERE kind = ? ORDER BY seq", (FRAME,)):
                yield read_frame(body)

    def scan(
        self, behind: int, end: int, limit: int, unread: Collection[str]
    ) -> Iterator[tuple[int, Nanoseconds, e.Event]]:
        """The first events behind one number and up to another, each with its own, at most `limit`; neither token
        frames nor `unread` kinds are among them."""
        where, values = self._besides(unread)
        query = f"SELECT seq, t_ns, body FROM {where} AND seq > ? AND seq <= ? ORDER BY seq LIMIT ?"
        last = behind
        with self._reading():
            for seq, t_ns, body in self._connection.execute(query, (*values, behind, end, limit)):
                event = _event(seq, body)
                if seq <= last:  # Who goes on behind the last one would never come to an end.
                    raise sqlite3.DatabaseError(f"event {seq} stands behind event {last}")
                last = seq
                yield seq, t_ns, event

    def _besides(self, unread: Collection[str]) -> tuple[str, tuple[str, ...]]:
        """The events that are neither token frames nor of `unread` kinds, for a query: with its values."""
        skipped = (FRAME, *unread)
        marks = ", ".join("?" * len(skipped))
        return f"{self._events(rare={*skipped} >= {*FREQUENT})} AND kind NOT IN ({marks})", skipped

    def _events(self, *, rare: bool) -> str:
        """The table of events and a condition, for a query: by the index of `rare` ones if there is one."""
        if rare and self._is_indexed:
            return f'events INDEXED BY "{_EVENTS.index}" WHERE {RARE}'
        return "events WHERE 1"

    def events_of(self, *kinds: str) -> Iterator[tuple[Nanoseconds, e.Event]]:
        """Events of the named kinds, in order; token frames are not among them."""
        yield from self.events_between(0, EVENT_NUMBER_MAX, *kinds)

    def events_between(self, behind: int, end: int, *kinds: str) -> Iterator[tuple[Nanoseconds, e.Event]]:
        """Events of the named kinds behind one number and up to another, in order; of none if none is named."""
        marks, events = ", ".join("?" * len(kinds)), self._events(rare=bool(kinds) and not {*kinds} & {*FREQUENT})
        query = f"SELECT seq, t_ns, body FROM {events} AND kind IN ({marks}) AND seq > ? AND seq <= ? ORDER BY seq"
        with self._reading():
            for seq, t_ns, body in self._connection.execute(query, (*kinds, behind, end)):
                yield t_ns, _event(seq, body)

    def close(self) -> None:
        self._connection.close()


class ShownJournal(JournalReader):
    """A journal that is only shown: of one that was cut or garbled, as far as it goes. Of what is read in an order
    all before what is `broken` is there."""

    CUT: ClassVar[bool] = True

    def _listed(self, records: Iterator[T]) -> list[T]:
        found: list[T] = []
        with self._as_far_as_it_goes(), self._reading():
            found.extend(records)
        return found

    def _places(self, wanted: TrajectoryFilter, behind: TrajectoryPlace | None, limit: int) -> list[TrajectoryPlace]:
        """As of any journal. The index of steps tells of those that the table has lost."""
        places, table = super()._places(wanted, behind, limit), TABLES[wanted.kind]
        newest = TrajectoryFilter(step=wanted.step, step_end=wanted.step_end, evaluation=wanted.evaluation)
        if wanted == newest and table.index and self._is_indexed:
            first = places[-1].row if len(places) == limit else 0
            end = EVENT_NUMBER_MAX if behind is None else behind.row
            steps = (0, wanted.step_end) if wanted.step is None else (wanted.step, wanted.step + 1)
            within = "step >= ? AND step < ? AND rowid >= ? AND rowid < ?"
            query = f'SELECT COUNT(*) FROM "{table.name}" INDEXED BY "{table.index}" WHERE {within}'
            for (known,) in self._asked(query, (*steps, first, end)):
                if known > len(places):
                    self._note(f"{known - len(places)} of {known} trajectories are missing")
        return places

    def _rows_at(
        self, wanted: TrajectoryFilter, places: Sequence[TrajectoryPlace]
    ) -> list[tuple[TrajectoryPlace, TrajectoryRow | None]]:
        found, why = list[tuple[TrajectoryPlace, TrajectoryRow | None]](), list[JournalError]()
        for place in places:
            try:
                row = self._row_at(wanted, place)
                if self.trajectory_place(wanted, row.trajectory) != place:
                    raise JournalError(f"{self.path}: trajectory {row.trajectory} is found elsewhere by its name")
            except JournalError as error:
                found.append((place, None))
                why.append(error)
            else:
                found.append((place, row))
        if why:
            self._note(f"{len(why)} of {len(places)} trajectories cannot be read: {self._without_place(why[0])}")
        return found

    def events_between(self, behind: int, end: int, *kinds: str) -> Iterator[tuple[Nanoseconds, e.Event]]:
        with self._as_far_as_it_goes():
            yield from super().events_between(behind, end, *kinds)

    def _largest(self, column: str, table: str) -> int | None:
        with self._as_far_as_it_goes():
            return super()._largest(column, table)
        return None

    @contextmanager
    def _as_far_as_it_goes(self) -> Iterator[None]:
        try:
            yield
        except JournalError as error:
            self._note(self._without_place(error))

    def _without_place(self, error: JournalError) -> str:
        return str(error).removeprefix(f"{self.path}: ")

    def _note(self, words: str) -> None:
        """What cannot be read, told once."""
        if (told := f"{self.path.name}: {words}") not in self.broken:
            self.broken.append(told)
