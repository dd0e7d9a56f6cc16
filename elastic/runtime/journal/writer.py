"""Appending to a journal: every event, every token and every outcome of one incarnation of a run.

- An append returns at once; a thread commits what has gathered, at the latest every `commit_interval_s`.
- Nothing that was appended is lost unless the journal fails, and then `failed` says why, and nothing more is written.
- What waits to be written is bounded. Beyond that the journal is `behind`, and producers must slow down.
- A file that is removed or replaced meanwhile fails the journal at the next commit.
- Another process that holds the file's lock is waited for, up to `lock_timeout_s`.
"""

import contextlib
import errno
import os
import sqlite3
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from shutil import disk_usage
from typing import Protocol

from elastic.core.ledger import DeviceBook
from elastic.core.types import Account, Nanoseconds, WorkerId
from elastic.runtime.journal.forgetting import forget
from elastic.runtime.journal.records import TABLES, BookRow, EventRow, NoteRow, StateRow
from elastic.runtime.journal.tables import JournalRecord, JournalTable, Row
from elastic.system.files import StandingFiles
from elastic.system.host import here
from elastic.system.sqlite import open_sqlite

SCHEMA_VERSION = 6
CAUGHT_UP_SHARE = 0.5
"""A journal that is behind has caught up once no more than this share of its bound waits."""
PENDING_BYTES = 64 * 2**20
BESIDE_BYTES = 2 * 32_768
"""Space that SQLite needs beside a journal at least, also to read the journal of a killed process."""

_EVENTS = TABLES[EventRow]


def no_room(path: Path) -> bool:
    """Whether the journal's disk is too full for SQLite, which then speaks of I/O errors."""
    with contextlib.suppress(OSError):
        return disk_usage(path.parent).free < BESIDE_BYTES
    return False


class JournalError(Exception):
    """The journal cannot be written or read; the message names the file and the reason."""


class JournalWriter(Protocol):
    """Writes what happens in a run. If it `keeps` nothing, callers need not make records for it."""

    keeps: bool

    def append(self, *records: JournalRecord) -> None:
        """All of them, or none, become durable."""
        ...

    def durable(self) -> "Future[None]": ...


class NullJournal:
    """A journal that keeps nothing."""

    keeps = False

    def append(self, *records: JournalRecord) -> None:
        return None

    def durable(self) -> "Future[None]":
        future: Future[None] = Future()
        future.set_result(None)
        return future


class _Batch:
    """Rows that are committed together, in order within each table."""

    def __init__(self) -> None:
        self.rows: dict[JournalTable, list[Row]] = {table: [] for table in TABLES.values()}
        self.bytes = 0
        self.waiting: list[Future[None]] = []
        self.forgotten: tuple[int, int, Nanoseconds] | None = None
        """What need not be kept, as `forget` has it."""


class SqliteJournal:
    """Writes the journal of one incarnation to a file that is not there yet, and has `notes` from its first moment on.

    `durable_against` is "process" (what is committed outlives the death of every process) or "power" (a power failure,
    too: each commit waits for the disk). `on_change` is called whenever `behind` or `failed` changes, from any thread.
    With `waits`, an append to a journal that is behind blocks until the journal has caught up.
    """

    keeps = True

    def __init__(
        self,
        path: Path,
        commit_interval_s: float = 0.05,
        *,
        durable_against: str = "process",
        lock_timeout_s: float = 30.0,
        pending_bytes: int = PENDING_BYTES,
        waits: bool = False,
        notes: Mapping[str, str] | None = None,
    ) -> None:
        self.path = path
        self.failed: JournalError | None = None
        self.behind = False
        self.events = 0
        """The number of events that were appended, which is the last event's sequence number."""
        self.appended_bytes = 0
        """About the size of all that was."""
        self.on_change: Callable[[], None] = lambda: None
        self._interval_s = commit_interval_s
        self._lock_timeout_s = lock_timeout_s
        self._bound_bytes = pending_bytes
        self._waits = waits
        self._lock = here().lock()
        self._work = here().condition(self._lock)
        self._batch = _Batch()
        self._committing_bytes = 0
        self._hurry = False
        self._closed = False
        self._forgotten = 0
        """What led to the last state that was kept are so many events."""
        self._books: dict[WorkerId, tuple[int, int]] = {}
        """The closed books that are written, as far as they can still change."""
        self._connection = self._open(durable_against, notes or {})
        self._standing = StandingFiles(path, path.with_name(f"{path.name}-wal"))
        self._standing.check()
        self._start()

    def append(self, *records: JournalRecord) -> None:
        """All of them, or none, become durable."""
        put: list[tuple[JournalTable, Row]] = []
        size_bytes = 0
        for record in records:
            table = TABLES[type(record)]
            row = table.kept(record)
            put.append((table, row))
            size_bytes += table.size_bytes(row)
        self._put(put, size_bytes)

    def forget(self, state: StateRow, before_ns: Nanoseconds) -> None:
        """Keep the state in place of what led to it, at once or not at all, and no figures of before a moment."""
        table = TABLES[StateRow]
        row = table.kept(state)
        self._put([(table, row)], table.size_bytes(row), (self._forgotten, state.events, before_ns))
        self._forgotten = state.events - 1

    def meta(self, key: str, value: str) -> None:
        """A text under a key; the last one stands."""
        self.append(NoteRow(key=key, value=value))

    def books(self, books: Iterable[DeviceBook]) -> None:
        """The ledger's books as they are now. A closed one is written again only if it changed."""
        written, self._books = self._books, {}
        for book in books:
            if book.closed_ns is None:
                self.append(BookRow(worker=book.worker, book=book))
                continue
            last = book.closed_ns, book.accounts_ns.get(Account.LOST, 0)
            self._books[book.worker] = last
            if written.get(book.worker) != last:
                self.append(BookRow(worker=book.worker, book=book))

    def durable(self) -> "Future[None]":
        """Done once all that was appended so far is on disk, which is hurried along; failed if it will never be.

        Wait with `result()`, or in a coroutine with `asyncio.wrap_future`.
        """
        future: Future[None] = Future()
        with self._lock:
            if self.failed is None and not self._closed:
                self._batch.waiting.append(future)
                self._hurry = True
                self._work.notify()
                return future
        if self.failed is not None:
            future.set_exception(self.failed)
        else:
            future.set_result(None)
        return future

    def close(self) -> None:
        """Commit what is left and close. Raises `JournalError` if anything could not be written."""
        with self._lock:
            self._closed = True
            self._work.notify()
        self._finish()
        self._connection.close()
        if self.failed is not None:
            raise self.failed

    @property
    def waiting_bytes(self) -> int:
        """The size of what was appended and is not committed yet."""
        return self._committing_bytes + self._batch.bytes

    def _put(
        self,
        put: Sequence[tuple[JournalTable, Row]],
        size_bytes: int,
        forgotten: tuple[int, int, Nanoseconds] | None = None,
    ) -> None:
        with self._lock:
            if self._closed:
                raise JournalError(f"{self.path}: closed")
            if self.failed is not None:
                return
            batch = self._batch
            for table, row in put:
                batch.rows[table].append(row)
                self.events += table is _EVENTS
            if forgotten is not None:
                since = forgotten if batch.forgotten is None else batch.forgotten
                batch.forgotten = (since[0], *forgotten[1:])
            self.appended_bytes += size_bytes
            batch.bytes += size_bytes
            if self._committing_bytes + batch.bytes <= self._bound_bytes:
                return
            fell_behind, self.behind = not self.behind, True
            self._hurry = True
            self._work.notify()
        if fell_behind:
            self.on_change()
        if self._waits:
            with contextlib.suppress(JournalError):  # `failed` tells the appending code
                self.durable().result()

    # The writer's thread

    def _start(self) -> None:
        self._thread = here().thread(target=self._write, name="journal")
        self._thread.start()

    def _finish(self) -> None:
        self._thread.join()

    def _write(self) -> None:
        while True:
            with self._lock:
                if not (self._hurry or self._closed):
                    self._work.wait(self._interval_s)
            if self._write_once():
                return

    def _write_once(self) -> bool:
        """Commit what has gathered; whether that was the last."""
        with self._lock:
            batch, self._batch = self._batch, _Batch()
            self._committing_bytes = batch.bytes
            self._hurry = False
            last = self._closed
        if self.failed is None:
            try:
                self._commit(batch)
            except Exception as error:
                self._fail(error)
        self._done(batch)
        return last

    def _commit(self, batch: _Batch) -> None:
        if not batch.bytes:
            return
        connection = self._connection
        try:
            connection.execute("BEGIN IMMEDIATE")
            for table, rows in batch.rows.items():
                if rows:
                    table.insert(connection, rows)
            if batch.forgotten is not None:
                forget(connection, *batch.forgotten)
            connection.execute("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                connection.rollback()
            raise
        self._standing.check()

    def _fail(self, error: Exception) -> None:
        what = str(error) or type(error).__name__
        if isinstance(error, sqlite3.OperationalError) and "locked" in what:
            what += f" by another process for {self._lock_timeout_s:g} s (journal.lock_timeout_s)"
        failed = JournalError(f"{self.path}: {what}")
        failed.__cause__ = error
        with self._lock:
            self.failed = failed
            left, self._batch = self._batch, _Batch()
            self.behind = False
        self._tell(left)
        self.on_change()

    def _done(self, batch: _Batch) -> None:
        with self._lock:
            self._committing_bytes = 0
            caught_up = self.behind and self._batch.bytes <= self._bound_bytes * CAUGHT_UP_SHARE
            if caught_up:
                self.behind = False
        self._tell(batch)
        if caught_up:
            self.on_change()

    def _tell(self, batch: _Batch) -> None:
        for future in batch.waiting:
            if self.failed is not None:
                future.set_exception(self.failed)
            else:
                future.set_result(None)

    def _open(self, durable_against: str, notes: Mapping[str, str]) -> sqlite3.Connection:
        synchronous = {"process": "NORMAL", "power": "FULL"}[durable_against]
        try:
            self._create(notes)
            connection = open_sqlite(self.path, "rw", timeout_s=self._lock_timeout_s, any_thread=True)
            try:
                connection.execute(f"PRAGMA synchronous={synchronous}")
            except BaseException:
                connection.close()
                raise
        except (OSError, sqlite3.Error) as error:
            why = os.strerror(errno.ENOSPC) if no_room(self.path) else str(error)
            raise JournalError(f"{self.path}: {why}") from error
        return connection

    def _create(self, notes: Mapping[str, str]) -> None:
        """Whenever this process dies, the journal's name belongs to a whole journal, or to nothing."""
        beside = self.path.with_name(f"{self.path.name}.new")
        for suffix in ("", "-journal", "-wal", "-shm"):
            beside.with_name(beside.name + suffix).unlink(missing_ok=True)
        try:
            with contextlib.closing(open_sqlite(beside, "rwc")) as connection:
                # From the first moment on: a reader could not repair a change of this that was broken off.
                connection.execute("PRAGMA journal_mode=WAL")
                connection.execute("BEGIN")
                for table in TABLES.values():
                    for statement in () if table.kind.LATER else table.schema:
                        connection.execute(statement)
                all_notes = {"schema_version": str(SCHEMA_VERSION), **notes}
                TABLES[NoteRow].insert(connection, list(all_notes.items()))
                connection.execute("COMMIT")
            os.link(beside, self.path)
        except FileExistsError as error:
            raise JournalError(f"{self.path}: there is a journal already; each has a file of its own") from error
        finally:
            beside.unlink(missing_ok=True)
