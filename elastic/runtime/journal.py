"""The run's journal: every event, every token and every outcome, durable in one SQLite file.

Writers append to memory and return; a writer thread commits what has gathered every `commit_interval_s`, so a
token frame costs one row and no wait.
"""

import re
import sqlite3
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from elastic import wire
from elastic.core import events as e
from elastic.core.ledger import DeviceBook, Ledger
from elastic.core.types import Nanoseconds, Progress

SCHEMA_VERSION = 1
_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS events (seq INTEGER PRIMARY KEY, t_ns INTEGER NOT NULL, kind TEXT NOT NULL,
    body BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS turns (turn TEXT PRIMARY KEY, trajectory TEXT NOT NULL, requested_ns INTEGER NOT NULL,
    first_token_ns INTEGER, finished_ns INTEGER NOT NULL, prompt_tokens INTEGER NOT NULL, tokens INTEGER NOT NULL,
    attempts INTEGER NOT NULL, cached_tokens INTEGER NOT NULL, worker TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS moves (turn TEXT NOT NULL, attempt INTEGER NOT NULL, from_worker TEXT NOT NULL,
    to_worker TEXT NOT NULL, left_ns INTEGER NOT NULL, started_ns INTEGER NOT NULL, accepted_tokens INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS trajectories (trajectory TEXT PRIMARY KEY, step INTEGER NOT NULL, group_id TEXT NOT NULL,
    started_ns INTEGER NOT NULL, ended_ns INTEGER NOT NULL, reward REAL, cause TEXT NOT NULL, turns INTEGER NOT NULL,
    policy_tokens INTEGER NOT NULL, token_ids BLOB NOT NULL, truncated INTEGER NOT NULL DEFAULT 0);
CREATE TABLE IF NOT EXISTS groups (t_ns INTEGER NOT NULL, group_id TEXT PRIMARY KEY, step INTEGER NOT NULL,
    version INTEGER NOT NULL, dropped TEXT NOT NULL, body TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS steps (step INTEGER PRIMARY KEY, t_ns INTEGER NOT NULL, body TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS samples (t_ns INTEGER PRIMARY KEY, body TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS pulls (t_ns INTEGER NOT NULL, worker TEXT NOT NULL, version INTEGER NOT NULL,
    bytes INTEGER NOT NULL, pull_s REAL NOT NULL, apply_s REAL NOT NULL, error TEXT NOT NULL, body TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS calls (t_ns INTEGER NOT NULL, function TEXT NOT NULL, key TEXT NOT NULL,
    outcome TEXT NOT NULL, queued_s REAL NOT NULL, cold_start_s REAL NOT NULL, duration_s REAL NOT NULL,
    usd REAL NOT NULL);
"""
_TABLES = ("turns", "moves", "trajectories", "groups", "steps", "samples", "pulls", "calls")
_encode = msgspec.msgpack.Encoder().encode
_decode_event = msgspec.msgpack.Decoder(e.Event).decode


class _Frame(msgspec.Struct, frozen=True, array_like=True):
    worker: str
    epoch: int
    chunks: list[wire.Chunk]


_decode_frame = msgspec.msgpack.Decoder(_Frame).decode


class JournalError(Exception):
    """The journal cannot be written or read; the message names the file and the reason."""


def tokens_event(worker: str, epoch: int, chunks: list[wire.Chunk]) -> e.TokensReceived:
    """A token frame as the core sees it: positions and counts, no ids."""
    return e.TokensReceived(
        worker=worker,
        epoch=epoch,
        chunks=tuple(
            Progress(
                k.turn,
                k.attempt,
                k.start,
                len(k.token_ids),
                k.weights_version,
                k.finish,
                k.detail,
                k.prefilled_tokens,
                k.cached_tokens,
            )
            for k in chunks
        ),
    )


class Journal:
    """Appends to a run's journal. `failed` holds the first error of the writer thread."""

    def __init__(self, path: Path, commit_interval_s: float) -> None:
        self.path = path
        self.failed: JournalError | None = None
        self._interval_s = commit_interval_s
        self._pending: list[tuple[str, tuple[Any, ...]]] = []
        self._stop = threading.Event()
        try:
            connection = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("PRAGMA synchronous=NORMAL")
            connection.executescript(_SCHEMA)
            connection.execute("INSERT OR REPLACE INTO meta VALUES ('schema_version', ?)", (str(SCHEMA_VERSION),))
            last = connection.execute("SELECT COALESCE(MAX(seq), 0) FROM events").fetchone()[0]
        except sqlite3.Error as error:
            raise JournalError(f"{path}: {error}") from error
        self._connection = connection
        self._sequence = int(last)
        self._thread = threading.Thread(target=self._write_loop, name="journal", daemon=True)
        self._thread.start()

    def event(self, event: e.Event, t_ns: Nanoseconds) -> None:
        self._append_event(t_ns, type(event).__name__, _encode(event))

    def frame(self, worker: str, epoch: int, chunks: list[wire.Chunk], t_ns: Nanoseconds) -> None:
        """A token frame with its ids and log-probabilities; `tokens_event` makes the core's event of it."""
        self._append_event(t_ns, "frame", _encode(_Frame(worker, epoch, chunks)))

    def _append_event(self, t_ns: Nanoseconds, kind: str, body: bytes) -> None:
        self._sequence += 1
        self._pending.append(("INSERT INTO events VALUES (?, ?, ?, ?)", (self._sequence, t_ns, kind, body)))

    def meta(self, key: str, value: str) -> None:
        self._pending.append(("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, value)))

    def books(self, ledger: Ledger) -> None:
        """The ledger's books as they are now, instead of those before."""
        self.meta("books", _json([msgspec.to_builtins(book) for book in ledger.books.values()]))

    def turn(self, *row: Any) -> None:
        self._pending.append((f"INSERT OR REPLACE INTO turns VALUES ({_marks(10)})", row))

    def move(self, *row: Any) -> None:
        self._pending.append((f"INSERT INTO moves VALUES ({_marks(7)})", row))

    def trajectory(self, *row: Any, truncated: bool = False) -> None:
        self._pending.append((f"INSERT OR REPLACE INTO trajectories VALUES ({_marks(11)})", (*row, truncated)))

    def group(self, t_ns: Nanoseconds, group: str, step: int, version: int, dropped: str, body: dict[str, Any]) -> None:
        """What became of a group in `step`, the trainer being at `version`: why it was `dropped`, or trained ("")."""
        row = (t_ns, group, step, version, dropped, _json(body))
        self._pending.append((f"INSERT OR REPLACE INTO groups VALUES ({_marks(6)})", row))

    def unusable(self, group: str, reason: str) -> None:
        """The trainer got no usable gradient from a group that was journaled as trained."""
        self._pending.append(("UPDATE groups SET dropped = ? WHERE group_id = ?", (f"unusable: {reason}", group)))

    def step(self, step: int, t_ns: Nanoseconds, body: dict[str, Any]) -> None:
        self._pending.append(("INSERT OR REPLACE INTO steps VALUES (?, ?, ?)", (step, t_ns, _json(body))))

    def sample(self, t_ns: Nanoseconds, body: dict[str, Any]) -> None:
        self._pending.append(("INSERT OR REPLACE INTO samples VALUES (?, ?)", (t_ns, _json(body))))

    def pull(
        self,
        *row: Any,
        full_bytes: int = 0,
        split_s: Mapping[wire.PullPart, float] | None = None,
        refused: Sequence[wire.Refusal] = (),
    ) -> None:
        """`split_s` and `refused` as in `elastic.wire.WeightsReport`."""
        body = {"full_bytes": full_bytes, "split_s": dict(split_s or {}), "refused": msgspec.to_builtins(refused)}
        self._pending.append((f"INSERT INTO pulls VALUES ({_marks(8)})", (*row, _json(body))))

    def call(self, *row: Any) -> None:
        self._pending.append((f"INSERT INTO calls VALUES ({_marks(8)})", row))

    def close(self) -> None:
        """Commit what is left and close. Raises `JournalError` if anything could not be written."""
        self._stop.set()
        self._thread.join()
        self._connection.close()
        if self.failed is not None:
            raise self.failed

    def _write_loop(self) -> None:
        while not self._stop.wait(self._interval_s):
            self._commit()
        self._commit()

    def _commit(self) -> None:
        pending, self._pending = self._pending, []
        if not pending or self.failed is not None:
            return
        try:
            self._connection.execute("BEGIN")
            for statement, row in pending:
                self._connection.execute(statement, row)
            self._connection.execute("COMMIT")
        except sqlite3.Error as error:
            self.failed = JournalError(f"{self.path}: {error}")


class JournalReader:
    """Read-only access to a journal, also while the run writes it. What cannot be read raises `JournalError`."""

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise JournalError(f"{path}: no such journal")
        self.path = path
        with self._reading():
            self._connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
        self._connection.row_factory = sqlite3.Row
        try:
            found = self.meta().get("schema_version")
            if found != str(SCHEMA_VERSION):
                raise JournalError(f"{path}: schema version {found}; this elastic reads {SCHEMA_VERSION}")
        except JournalError:
            self.close()
            raise

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, msgspec.DecodeError) as error:
            raise JournalError(f"{self.path}: {error}") from error

    def meta(self) -> dict[str, str]:
        with self._reading():
            return dict(self._connection.execute("SELECT key, value FROM meta").fetchall())

    def last_ns(self) -> Nanoseconds:
        """The last moment that the journal knows of."""
        columns = (("t_ns", "events"), ("finished_ns", "turns"), ("t_ns", "steps"), ("t_ns", "samples"))
        with self._reading():
            lasts = [self._connection.execute(f"SELECT MAX({c}) FROM {table}").fetchone()[0] for c, table in columns]
        ends = [book.cursor_ns if book.closed_ns is None else book.closed_ns for book in self.books()]
        return max((t_ns for t_ns in (*lasts, *ends) if t_ns is not None), default=0)

    def books(self) -> list[DeviceBook]:
        """The ledger's books as they were written last."""
        with self._reading():
            return msgspec.json.decode(self.meta().get("books", "[]"), type=list[DeviceBook])

    def events(self) -> Iterator[tuple[Nanoseconds, e.Event]]:
        """Every event in order, as the core took it."""
        return ((t_ns, event) for t_ns, event, _ in self.entries())

    def entries(self) -> Iterator[tuple[Nanoseconds, e.Event, list[wire.Chunk]]]:
        """Every event in order, a token frame's with its chunks."""
        with self._reading():
            for t_ns, kind, body in self._connection.execute("SELECT t_ns, kind, body FROM events ORDER BY seq"):
                if kind == "frame":
                    frame = _decode_frame(body)
                    yield t_ns, tokens_event(frame.worker, frame.epoch, frame.chunks), frame.chunks
                else:
                    yield t_ns, _decode_event(body), []

    def events_of(self, *kinds: str) -> Iterator[tuple[Nanoseconds, e.Event]]:
        """Events of the named kinds, in order; token frames are not among them."""
        query = f"SELECT t_ns, body FROM events WHERE kind IN ({_marks(len(kinds))}) ORDER BY seq"
        with self._reading():
            for t_ns, body in self._connection.execute(query, kinds):
                yield t_ns, _decode_event(body)

    def rows(self, table: str) -> list[dict[str, Any]]:
        """A table whole, in order; `body` columns of JSON are decoded into the row.

        One that came to journals after this one was written is empty.
        """
        if table not in _TABLES:
            raise ValueError(f"no table {table!r}")
        with self._reading():
            if not self._connection.execute("SELECT 1 FROM sqlite_master WHERE name = ?", (table,)).fetchone():
                return []
            rows = [dict(row) for row in self._connection.execute(f"SELECT * FROM {table} ORDER BY rowid")]
            return [row | msgspec.json.decode(row.pop("body")) if "body" in row else row for row in rows]

    def close(self) -> None:
        self._connection.close()


def earlier_journals(path: Path) -> list[Path]:
    """The journals of a run's earlier lives, oldest first: those numbered beside `path`, that of the latest."""
    numbered = re.compile(rf"{re.escape(path.stem)}-(\d+){re.escape(path.suffix)}")
    found = {int(m[1]): p for p in path.parent.iterdir() if (m := numbered.fullmatch(p.name))}
    return [found[number] for number in sorted(found)]


def next_archive(path: Path) -> Path:
    """Where the journal at `path` goes to make room for that of the run's next life."""
    earlier = earlier_journals(path)
    number = int(earlier[-1].stem.rpartition("-")[2]) + 1 if earlier else 1
    return path.with_name(f"{path.stem}-{number}{path.suffix}")


def _json(body: Any) -> str:
    return msgspec.json.encode(body).decode()


def _marks(count: int) -> str:
    return ", ".join("?" * count)
