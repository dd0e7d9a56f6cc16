"""What is written is read again in order, and nothing is lost in between; what cannot be written is said."""

import asyncio
import contextlib
import errno
import math
import os
import resource
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.core import commands as c
from elastic.core import events as e
from elastic.core.evaluation import EvaluationRecord
from elastic.core.ledger import DeviceBook, Ledger
from elastic.core.policy import StepRecord
from elastic.core.types import Account, Chunk, EndCause, FinishReason
from elastic.protocol import wire
from elastic.runtime.journal import (
    SCHEMA_VERSION,
    BookRow,
    EvaluatedRow,
    EvaluationRow,
    JournalError,
    JournalReader,
    MoveRow,
    NoteRow,
    PullRow,
    RunDirectory,
    SampleRow,
    SqliteJournal,
    StepRow,
    TrajectoryRow,
    TurnRow,
    event_row,
    frame_row,
)
from elastic.runtime.journal.records import FREQUENT, KINDS, TABLES
from elastic.runtime.journal.tables import ROWS_AT_ONCE, JournalTable
from elastic.system.host import Host, here, on
from tests.journal_rows import run_status, step_record, trajectory_row

SAID = [
    (Chunk(0, 0, 3, 3, FinishReason.STOP), [5, 6, 7], [-0.5, -1.0, -1.5]),
    (Chunk(1, 3, 2, 3), [8, 9], [-0.25, -2.0]),
]
FRAME = wire.Tokens.of(SAID)
TOKENS = e.TokensReceived(worker="w", epoch=2, chunks=FRAME.chunks)
STATUS = run_status(run="r")


def accepting(*places: int) -> c.AcceptTokens | None:
    return c.AcceptTokens(chunks=places, turns=tuple(f"0/0/{place}/0" for place in places)) if places else None


def connecting(opened: list[sqlite3.Connection]) -> Callable[..., sqlite3.Connection]:
    """Opens databases, and notes them in `opened`."""

    def connect(*arguments: Any, **options: Any) -> sqlite3.Connection:
        opened.append(sqlite3.connect(*arguments, **options))
        return opened[-1]

    return connect


def until(condition) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.sqlite"


@pytest.fixture
def journal(path: Path) -> Iterator[SqliteJournal]:
    """Commits when it must: at its end, or when it is asked to."""
    journal = SqliteJournal(path, 3600.0, lock_timeout_s=20.0)
    yield journal
    if journal.failed is None:
        journal.close()


@contextmanager
def reading(path: Path) -> Iterator[JournalReader]:
    with JournalReader(path) as reader:
        yield reader


def turn(name: str = "0/0/0/0", finished_ns: int = 4, tokens: int = 1) -> TurnRow:
    return TurnRow(
        turn=name,
        trajectory="0/0/0",
        requested_ns=0,
        first_token_ns=None,
        finished_ns=finished_ns,
        prompt_tokens=1,
        tokens=tokens,
        attempts=1,
        cached_tokens=0,
        worker="w",
    )


def pull(**changed: object) -> PullRow:
    row = PullRow(t_ns=1, worker="w", version=1, bytes=1, pull_s=0.5, apply_s=0.5, error="")
    return msgspec.structs.replace(row, **changed)


class TestEvents:
    def test_come_back_in_order_with_their_times(self, path: Path) -> None:
        ended = e.LeaseEnded(lease="spot-1", cause=EndCause.PREEMPTED, detail="gone")
        journal = SqliteJournal(path)
        journal.append(event_row(e.Tick(), 1))
        journal.append(frame_row(TOKENS, FRAME, accepting(0, 1), 2))
        journal.append(event_row(ended, 3))
        journal.close()
        with reading(path) as reader:
            expected = [(1, e.Tick()), (2, TOKENS), (3, ended)]
            assert list(reader.events()) == expected
            assert [(t, event) for t, event, _ in reader.entries()] == expected
            assert [tokens for _, _, tokens in reader.entries()] == [None, FRAME, None]
            assert list(reader.events_of("LeaseEnded")) == [(3, ended)]

    @pytest.mark.parametrize("accepted", [(), (0,), (1,), (0, 1)])
    def test_a_frame_is_kept_as_far_as_it_was_accepted(self, path: Path, accepted: tuple[int, ...]) -> None:
        """What the core saw is whole: a replay decides the same, and what it refuses it need not have."""
        journal = SqliteJournal(path)
        journal.append(frame_row(TOKENS, FRAME, accepting(*accepted), 1))
        journal.close()
        with reading(path) as reader:
            ((t_ns, event, tokens),) = reader.entries()
            turns = [frame.turns for frame in reader.frames()]
        assert (t_ns, event) == (1, TOKENS)
        assert (tokens is None) == (not accepted)
        assert turns == ([[f"0/0/{at}/0" if at in accepted else "" for at in range(2)]] if accepted else [])
        if tokens is not None:
            said = list(tokens.said())
            assert [said[at] for at in accepted] == [SAID[at] for at in accepted]

    def test_a_worthless_frame_takes_no_room_for_its_tokens(self, path: Path) -> None:
        chunk = Chunk(0, 0, 10_000, 3, FinishReason.ERROR, "x" * 1000)
        large = wire.Tokens.of([(chunk, [5] * chunk.count, [-0.5] * chunk.count)])
        journal = SqliteJournal(path)
        journal.append(frame_row(e.TokensReceived(worker="w", epoch=2, chunks=large.chunks), large, None, 1))
        journal.close()
        with closing(sqlite3.connect(path)) as connection:
            assert connection.execute("SELECT length(body) FROM events").fetchone()[0] < 200


class TestRecords:
    @pytest.mark.parametrize("rows", [1, ROWS_AT_ONCE - 1, ROWS_AT_ONCE, 2 * ROWS_AT_ONCE + 3])
    def test_come_back_in_order(self, path: Path, rows: int) -> None:
        moves = [
            MoveRow(
                turn="t",
                attempt=n,
                from_worker="a",
                to_worker="b",
                left_ns=n,
                started_ns=n + 1,
                accepted_tokens=2**53 - n,
            )
            for n in range(rows)
        ]
        journal = SqliteJournal(path)
        for move in moves:
            journal.append(move)
        journal.close()
        with reading(path) as reader:
            assert reader.rows(MoveRow) == moves

    def test_the_last_one_of_a_key_stands(self, path: Path) -> None:
        journal = SqliteJournal(path)
        for tokens in (1, 2):
            journal.append(turn(tokens=tokens))
            journal.meta("status", str(tokens))
        journal.close()
        with reading(path) as reader:
            assert [row.tokens for row in reader.rows(TurnRow)] == [2]
            assert reader.meta()["status"] == "2"

    def test_have_what_is_no_number_or_text_as_json(self, path: Path) -> None:
        record = StepRecord(step=3, duration_ns=1, seeding_ns=2, rollout_ns=3, groups_trained=4, groups_dropped=5)
        step = StepRow(step=3, t_ns=9, record=record, success_rate=0.5, trainer={"loss": 0.25, "clip": None})
        refused = pull(refused=[wire.UnverifiedWeights("manifest", "signature")], split_s={"wire": 0.5})
        journal = SqliteJournal(path)
        journal.append(step)
        journal.append(refused)
        journal.append(SampleRow(t_ns=5, status=STATUS))
        journal.close()
        with reading(path) as reader:
            assert reader.rows(StepRow) == [step]
            assert reader.rows(PullRow) == [refused]
            assert reader.rows(SampleRow) == [SampleRow(t_ns=5, status=STATUS)]

    def test_are_as_they_were_when_they_were_appended(self, path: Path) -> None:
        book = DeviceBook("spot-1", "spot-1", "spot", 1, 7, 0, 0)
        journal = SqliteJournal(path, 3600.0)
        journal.append(BookRow(worker="spot-1", book=book))
        book.add(Account.DECODE, 5)
        journal.close()
        with reading(path) as reader:
            assert [found.cursor_ns for found in reader.books()] == [0]

    def test_each_kind_has_a_table_with_a_column_for_each_field(self, path: Path, journal: SqliteJournal) -> None:
        with closing(sqlite3.connect(path)) as connection:
            for kind in KINDS:
                columns = [c[1] for c in connection.execute(f"PRAGMA table_info({kind.TABLE})")]
                expected = [] if kind.LATER else list(kind.__struct_fields__)
                assert [name for name in columns if name != "seq"] == expected

    def test_a_table_that_is_made_later_comes_with_its_first_record(self, path: Path) -> None:
        journal = SqliteJournal(path, 3600.0)
        with reading(path) as reader:
            assert reader.rows(EvaluationRow) == []
            assert reader.last(EvaluationRow) is None
            assert reader.by_key(EvaluatedRow, ["e0/0/0"]) == {}
        record = EvaluationRecord(version=3, started_ns=1, ended_ns=2, timed_out=False, metrics={}, sets={})
        row = EvaluationRow(version=3, t_ns=2, record=record)
        journal.append(row, msgspec.structs.replace(row, version=4))
        journal.close()
        with reading(path) as reader:
            assert reader.rows(EvaluationRow) == [row, msgspec.structs.replace(row, version=4)]
            assert reader.by_key(EvaluatedRow, ["e0/0/0"]) == {}


class TestBooks:
    def books(self, reader: JournalReader) -> dict[str, DeviceBook]:
        return {book.worker: book for book in reader.books()}

    def test_closed_ones_are_written_once(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        written: list[str] = []
        kept = JournalTable.kept

        def noted(table: JournalTable, record: object) -> object:
            if isinstance(record, BookRow):
                written.append(record.worker)
            return kept(table, record)  # type: ignore[arg-type]

        monkeypatch.setattr(JournalTable, "kept", noted)
        ledger = Ledger()
        for number in (1, 2):
            ledger.open(f"spot-{number}", f"spot-{number}", "spot", 1, 1.0, number)
        journal = SqliteJournal(path)
        journal.books(ledger.books.values())
        ledger.close("spot-1", 10, clean=True)
        for _ in range(3):
            journal.books(ledger.books.values())
        assert written == ["spot-1", "spot-2", "spot-1", *["spot-2"] * 3]
        journal.close()
        with reading(path) as reader:
            assert self.books(reader) == ledger.books

    def test_a_closed_one_that_changes_is_written_again(self, path: Path) -> None:
        """Tokens of a worker may turn out to be lost after its lease has ended."""
        ledger = Ledger()
        ledger.open("spot-1", "spot-1", "spot", 1, 1.0, 0)
        ledger.report("spot-1", {Account.DECODE: 100}, 10, 100)
        ledger.close("spot-1", 200, clean=False)
        journal = SqliteJournal(path)
        journal.books(ledger.books.values())
        ledger.lose("spot-1", 5)
        journal.books(ledger.books.values())
        journal.close()
        with reading(path) as reader:
            assert self.books(reader) == ledger.books

    @given(
        st.lists(
            st.one_of(
                st.tuples(st.just("open"), st.integers(0, 4)),
                st.tuples(st.just("close"), st.integers(0, 4)),
                st.tuples(st.just("report"), st.integers(0, 4)),
                st.tuples(st.just("lose"), st.integers(0, 4)),
                st.tuples(st.just("write"), st.just(0)),
            ),
            max_size=30,
        )
    )
    def test_the_last_state_of_each_is_what_the_journal_has(self, acts: list[tuple[str, int]]) -> None:
        """Of a ledger whose leases are never opened twice, as the core's."""
        ledger, written = Ledger(), Written()
        for t_ns, (act, number) in enumerate(acts, 1):
            name = f"spot-{number}"
            if act == "open" and name not in ledger.books:
                ledger.open(name, name, "spot", 1, 1.0, t_ns)
            elif act == "report":
                ledger.report(name, {Account.DECODE: t_ns}, t_ns, t_ns)
            elif act == "lose":
                ledger.lose(name, 1)
            elif act == "close":
                ledger.close(name, t_ns, clean=True)
            elif act == "write":
                SqliteJournal.books(written, ledger.books.values())  # type: ignore[arg-type]
        SqliteJournal.books(written, ledger.books.values())  # type: ignore[arg-type]
        assert written.last == {name: msgspec.to_builtins(book) for name, book in ledger.books.items()}


class Written:
    """Takes books as a journal does."""

    def __init__(self) -> None:
        self._books: dict[str, tuple[int, int]] = {}
        self.last: dict[str, object] = {}

    def append(self, record: BookRow) -> None:
        self.last[record.worker] = msgspec.to_builtins(record.book)


class TestDurability:
    def test_what_is_appended_is_durable_without_a_close(self, path: Path) -> None:
        journal = SqliteJournal(path, 0.01)
        journal.append(event_row(e.Tick(), 1))
        with reading(path) as reader:
            until(lambda: list(reader.events()))
        journal.close()

    def test_is_waited_for_without_the_interval(self, path: Path, journal: SqliteJournal) -> None:
        with reading(path) as reader:
            for t_ns in range(1, 4):
                journal.append(event_row(e.Tick(), t_ns))
                journal.durable().result(timeout=20)
                assert [at_ns for at_ns, _ in reader.events()] == list(range(1, t_ns + 1))

    async def test_is_awaited(self, path: Path, journal: SqliteJournal) -> None:
        journal.append(event_row(e.Tick(), 1))
        async with asyncio.timeout(20):
            await asyncio.wrap_future(journal.durable())
        with reading(path) as reader:
            assert len(list(reader.events())) == 1

    def test_of_nothing_is_at_once(self, journal: SqliteJournal) -> None:
        journal.durable().result(timeout=20)

    def test_holds_after_the_close(self, path: Path) -> None:
        journal = SqliteJournal(path, 3600.0)
        journal.append(event_row(e.Tick(), 1))
        waiting = journal.durable()
        journal.close()
        assert waiting.result(timeout=0) is None
        assert journal.durable().result(timeout=0) is None

    @pytest.mark.parametrize(("against", "synchronous"), [("process", 1), ("power", 2)])
    def test_is_against_a_dead_process_or_a_power_failure(self, path: Path, against: str, synchronous: int) -> None:
        opened: list[sqlite3.Connection] = []
        with on(Host(connect=connecting(opened))):
            journal = SqliteJournal(path, durable_against=against)
        assert opened[-1].execute("PRAGMA synchronous").fetchone() == (synchronous,)
        journal.close()

    def test_no_row_is_lost_between_threads(self, path: Path) -> None:
        """Appended from several threads while the writer commits as fast as it can; each one's rows stay in order."""
        threads, rows = 4, 3000
        journal = SqliteJournal(path, 0.0001)
        begin = threading.Barrier(threads)

        def hammer(number: int) -> None:
            begin.wait()
            for count in range(rows):
                journal.append(event_row(e.StopRequested(reason=str(number)), count))
                journal.append(turn(f"{number}/{count}"))
                if count % 200 == 0:
                    journal.durable().result(timeout=60)

        hammering = [threading.Thread(target=hammer, args=(number,)) for number in range(threads)]
        for thread in hammering:
            thread.start()
        for thread in hammering:
            thread.join()
        journal.close()
        found: dict[str, list[int]] = {}
        with reading(path) as reader:
            for t_ns, event in reader.events():
                assert isinstance(event, e.StopRequested)
                found.setdefault(event.reason, []).append(t_ns)
            turns = {row.turn for row in reader.rows(TurnRow)}
        assert found == {str(number): list(range(rows)) for number in range(threads)}
        assert turns == {f"{number}/{count}" for number in range(threads) for count in range(rows)}

    def test_nothing_is_lost_that_is_appended_while_the_writer_takes_what_is_there(self, path: Path) -> None:
        """The writer takes what has gathered at the very moment between two halves of an append."""
        journal = SqliteJournal(path, 3600.0)
        table = TABLES[NoteRow]
        kept = table.kept

        def taken_meanwhile(record: NoteRow) -> object:
            journal.durable().result(timeout=20)
            return kept(record)

        table.kept = taken_meanwhile  # type: ignore[method-assign]
        try:
            for number in range(50):
                journal.meta(str(number), "")
        finally:
            del table.kept
        journal.close()
        with reading(path) as reader:
            assert {str(number) for number in range(50)} <= reader.meta().keys()

    def test_a_closed_journal_takes_nothing(self, path: Path) -> None:
        journal = SqliteJournal(path)
        journal.close()
        with pytest.raises(JournalError, match="closed"):
            journal.append(event_row(e.Tick(), 1))

    def test_each_has_a_file_of_its_own(self, path: Path) -> None:
        SqliteJournal(path).close()
        with pytest.raises(JournalError, match=r"journal\.sqlite: there is a journal already"):
            SqliteJournal(path)
        with reading(path) as reader:
            assert list(reader.events()) == []


WILD: dict[str, Callable[[SqliteJournal], None]] = {
    "integer beyond 64 bits": lambda journal: journal.append(pull(bytes=2**63)),
    "negative beyond 64 bits": lambda journal: journal.append(turn(tokens=-(2**63) - 1)),
    "infinite": lambda journal: journal.append(pull(pull_s=math.inf)),
    "minus infinite": lambda journal: journal.append(pull(apply_s=-math.inf)),
    "not a number": lambda journal: journal.append(pull(pull_s=math.nan)),
    "missing": lambda journal: journal.append(turn(finished_ns=None)),  # type: ignore[arg-type]
    "a text that is none": lambda journal: journal.meta("key", "\ud800"),
    "of no type": lambda journal: journal.append(turn(tokens=object())),  # type: ignore[arg-type]
}


class TestFailures:
    @pytest.mark.parametrize("name", WILD)
    def test_whatever_cannot_be_written_is_the_journals_failure(self, path: Path, name: str) -> None:
        """What was committed stays, the rest of its batch goes with it, and nothing comes after."""
        told = threading.Event()
        journal = SqliteJournal(path, 3600.0)
        journal.on_change = told.set
        journal.append(event_row(e.Tick(), 1))
        journal.durable().result(timeout=20)
        journal.append(event_row(e.Tick(), 2))
        WILD[name](journal)
        with pytest.raises(JournalError, match=r"journal\.sqlite: ."):
            journal.durable().result(timeout=20)
        assert told.wait(20)
        assert journal.failed is not None
        journal.append(event_row(e.Tick(), 3))
        with pytest.raises(JournalError):
            journal.durable().result(timeout=20)
        with pytest.raises(JournalError):
            journal.close()
        with reading(path) as reader:
            assert [t_ns for t_ns, _ in reader.events()] == [1]

    def test_a_disk_that_fills_up(self, path: Path) -> None:
        opened: list[sqlite3.Connection] = []
        with on(Host(connect=connecting(opened))):
            journal = SqliteJournal(path, 0.01)
        opened[-1].execute("PRAGMA max_page_count = 30")
        for t_ns in range(2000):
            journal.append(event_row(e.StopRequested(reason="x" * 100), t_ns))
        until(lambda: journal.failed is not None)
        assert str(path) in str(journal.failed)
        assert "full" in str(journal.failed)
        with pytest.raises(JournalError, match="full"):
            journal.close()

    def test_directory_that_is_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(JournalError, match="nosuch"):
            SqliteJournal(tmp_path / "nosuch" / "journal.sqlite")


class TestForeignLock:
    @contextmanager
    def locked(self, path: Path) -> Iterator[sqlite3.Connection]:
        with closing(sqlite3.connect(path, isolation_level=None, check_same_thread=False)) as foreign:
            foreign.execute("BEGIN IMMEDIATE")
            yield foreign

    def test_is_waited_for(self, path: Path, journal: SqliteJournal) -> None:
        with self.locked(path) as foreign:
            journal.append(event_row(e.Tick(), 1))
            waiting = journal.durable()
            # The writer has taken what there was, and waits for the lock.
            until(lambda: not journal._batch.waiting)
            assert not waiting.done()
            foreign.execute("ROLLBACK")
            waiting.result(timeout=20)
        assert journal.failed is None

    def test_is_not_waited_for_for_ever(self, path: Path) -> None:
        journal = SqliteJournal(path, 3600.0, lock_timeout_s=0.05)
        with self.locked(path):
            journal.append(event_row(e.Tick(), 1))
            with pytest.raises(
                JournalError, match=r"locked by another process for 0\.05 s \(journal\.lock_timeout_s\)"
            ):
                journal.durable().result(timeout=20)
            with pytest.raises(JournalError):
                journal.close()


class TestBehind:
    def test_is_told_and_over_once_it_has_caught_up(self, path: Path) -> None:
        journal = SqliteJournal(path, 3600.0, lock_timeout_s=20.0, pending_bytes=10_000)
        told: list[bool] = []
        caught_up = threading.Event()

        def changed() -> None:
            told.append(journal.behind)
            if not journal.behind:
                caught_up.set()

        journal.on_change = changed
        with TestForeignLock().locked(path) as foreign:
            written = 0
            while not journal.behind:
                journal.append(event_row(e.StopRequested(reason="x" * 100), written))
                written += 1
                assert written < 1000
            assert told == [True]
            for _ in range(10):
                journal.append(event_row(e.Tick(), written))
            foreign.execute("ROLLBACK")
            assert caught_up.wait(20)
        assert told == [True, False]
        journal.close()
        with reading(path) as reader:
            assert len(list(reader.events())) == written + 10

    def test_who_can_wait_is_held(self, path: Path) -> None:
        """What waits to be written never grows beyond its bound by more than what one thread appends at once."""
        journal = SqliteJournal(path, 3600.0, pending_bytes=10_000, waits=True)
        most = 0
        for t_ns in range(2000):
            journal.append(event_row(e.StopRequested(reason="x" * 100), t_ns))
            most = max(most, journal.waiting_bytes)
        assert most <= 10_000
        journal.close()
        with reading(path) as reader:
            assert len(list(reader.events())) == 2000

    def test_a_journal_that_fails_holds_nobody(self, path: Path) -> None:
        journal = SqliteJournal(path, 3600.0, lock_timeout_s=0.01, pending_bytes=1000, waits=True)
        with TestForeignLock().locked(path):
            for t_ns in range(100):
                journal.append(event_row(e.StopRequested(reason="x" * 100), t_ns))
            assert journal.failed is not None
            assert not journal.behind
            with pytest.raises(JournalError):
                journal.close()


class TestReading:
    @pytest.mark.parametrize("content", [None, b"not a database, but long enough to be taken for one" * 20, b""])
    def test_what_is_no_journal(self, path: Path, content: bytes | None) -> None:
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(JournalError, match="journal"):
            JournalReader(path)

    @pytest.mark.parametrize("version", ["1", "99", "x"])
    def test_another_schema_is_named(self, path: Path, version: str) -> None:
        SqliteJournal(path).close()
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("UPDATE meta SET value = ? WHERE key = 'schema_version'", (version,))
            connection.commit()
        with pytest.raises(
            JournalError, match=f"version {version}, written by another version.*reads {SCHEMA_VERSION}"
        ):
            JournalReader(path)

    def test_a_torn_tail_takes_only_what_was_not_committed_with_it(self, path: Path) -> None:
        """As a power failure leaves it: the log of the last commits is cut anywhere."""
        journal = SqliteJournal(path, 3600.0)
        for t_ns in range(1, 6):
            journal.append(event_row(e.Tick(), t_ns))
            journal.durable().result(timeout=20)
        log = path.with_name("journal.sqlite-wal").read_bytes()
        sizes = range(0, len(log), 997)
        journal.close()
        whole = path.with_name("whole")
        whole.mkdir()
        lasts: list[int] = []
        for size in sizes:
            torn = whole / f"{size}.sqlite"
            SqliteJournal(torn, 3600.0).close()
            torn.with_name(f"{torn.name}-wal").write_bytes(log[:size])
            with reading(torn) as reader:
                times = [t_ns for t_ns, _ in reader.events()]
            assert times == list(range(1, len(times) + 1))
            lasts.append(len(times))
        assert lasts == sorted(lasts)
        assert lasts[-1] >= 3

    BEGIN_MANY: ClassVar[str] = """
import sys
from pathlib import Path
from elastic.system.imports import importing
with importing():
    from elastic.runtime.journal import RunDirectory, SqliteJournal
while True:
    SqliteJournal(RunDirectory(Path(sys.argv[1])).next_journal_path(), notes={"run": "r"}).close()
    print("begun", flush=True)
"""

    def test_a_process_that_is_killed_as_it_begins_one_leaves_a_whole_one_or_none(self, tmp_path: Path) -> None:
        """Three processes are killed at drawn moments: no other way leaves files half written."""
        rng, run = Random(3), RunDirectory(tmp_path)
        for _ in range(3):
            process = subprocess.Popen([sys.executable, "-c", self.BEGIN_MANY, tmp_path], stdout=subprocess.PIPE)
            assert process.stdout is not None
            with process.stdout:
                for _ in range(rng.randint(1, 5)):
                    assert process.stdout.readline() == b"begun\n"
                time.sleep(rng.uniform(0.0, 0.02))
                process.kill()
                process.wait()
            with run.journals() as journals:
                assert {journal.meta()["run"] for journal in journals} == {"r"}
        assert len(run.journal_paths()) > 3

    def test_without_room_for_its_index_a_sound_journal_is_not_called_damaged(
        self, path: Path, small_disk: Path
    ) -> None:
        journal = SqliteJournal(path)
        journal.meta("run", "r")
        journal.durable().result(timeout=20)
        killed = small_disk / path.name
        for suffix in ("", "-wal"):
            shutil.copy(path.with_name(path.name + suffix), killed.with_name(killed.name + suffix))
        journal.close()
        ballast = small_disk / "ballast"
        with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(1024))
        with pytest.raises(OSError, match=r"No space left on device.*journal"):
            JournalReader(killed)
        ballast.unlink()
        with reading(killed) as reader:
            assert reader.meta()["run"] == "r"

    READERS: ClassVar[dict[str, Callable[[JournalReader], object]]] = {
        "rows": lambda reader: reader.rows(SampleRow),
        "entries": lambda reader: list(reader.entries()),
        "events_of": lambda reader: list(reader.events_of("Tick")),
        "last_ns": lambda reader: reader.last_ns(),
    }

    @pytest.mark.parametrize("name", READERS)
    def test_a_damaged_journal_is_named(self, path: Path, name: str) -> None:
        page_bytes, sound_pages = 4096, 40
        journal = SqliteJournal(path, 3600.0)
        for t_ns in range(3000):
            journal.append(event_row(e.Tick(), t_ns))
            journal.append(SampleRow(t_ns=t_ns, status=STATUS))
        journal.close()
        sound = path.read_bytes()[: sound_pages * page_bytes]
        path.write_bytes(sound + b"\xff" * (path.stat().st_size - len(sound)))
        with reading(path) as reader, pytest.raises(JournalError, match=f"{path.name}: .*malformed"):
            self.READERS[name](reader)

    @pytest.mark.parametrize(("table", "name"), [("samples", "rows"), ("events", "events_of"), ("events", "entries")])
    def test_damage_within_a_row_is_named(self, path: Path, table: str, name: str) -> None:
        journal = SqliteJournal(path)
        journal.append(event_row(e.Tick(), 1))
        journal.append(SampleRow(t_ns=1, status=STATUS))
        journal.close()
        column, kind = ("body", "BLOB") if table == "events" else ("status", "TEXT")
        with closing(sqlite3.connect(path)) as connection:
            connection.execute(f"UPDATE {table} SET {column} = CAST('damaged' AS {kind})")
            connection.commit()
        with reading(path) as reader, pytest.raises(JournalError, match=path.name):
            self.READERS[name](reader)

    def test_a_number_where_a_text_belongs_is_named(self, path: Path) -> None:
        journal = SqliteJournal(path)
        journal.append(turn())
        journal.close()
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("UPDATE turns SET tokens = 'many'")
            connection.commit()
        with reading(path) as reader, pytest.raises(JournalError, match=path.name):
            reader.rows(TurnRow)

    def test_the_last_moment_is_that_of_whatever_came_last(self, tmp_path: Path) -> None:
        ledger = Ledger()
        ledger.open("spot-1", "spot-1", "spot", 1, 1.0, 2)
        step = StepRow(step=0, t_ns=3, record=step_record(0), success_rate=None, trainer={})
        acts: tuple[Callable[[SqliteJournal], None], ...] = (
            lambda journal: None,
            lambda journal: journal.append(event_row(e.Tick(), 1)),
            lambda journal: journal.books(ledger.books.values()),
            lambda journal: journal.append(step),
            lambda journal: journal.append(turn()),
            lambda journal: journal.append(SampleRow(t_ns=5, status=STATUS)),
        )
        for count in range(len(acts)):
            path = tmp_path / f"{count}.sqlite"
            journal = SqliteJournal(path)
            for act in acts[: count + 1]:
                act(journal)
            journal.close()
            with reading(path) as reader:
                assert reader.last_ns() == count

    def test_reward_that_is_none(self, path: Path) -> None:
        row = trajectory_row(0, 0, 0, reward=None, cause="reset")
        journal = SqliteJournal(path)
        journal.append(row)
        journal.close()
        with reading(path) as reader:
            assert reader.rows(TrajectoryRow) == [row]


def test_a_sound_journal_is_not_blamed_for_descriptors_that_have_run_out(path: Path) -> None:
    SqliteJournal(path, 0.1).close()
    used, (soft, hard) = len(list(Path("/proc/self/fd").iterdir())), resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (used, hard))
    try:
        with contextlib.ExitStack() as opened:
            while not here().out_of_descriptors():
                opened.enter_context(Path("/dev/null").open())
            with pytest.raises(OSError, match=os.strerror(errno.EMFILE)):
                JournalReader(path)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    JournalReader(path).close()


class TestRemoved:
    @pytest.mark.parametrize("what", ["", "-wal", "directory", "another"])
    def test_a_journal_that_is_removed_fails_at_the_next_commit(self, tmp_path: Path, what: str) -> None:
        path = tmp_path / "run" / "journal.sqlite"
        path.parent.mkdir()
        journal = SqliteJournal(path, 3600.0)
        journal.append(event_row(e.Tick(), 1))
        journal.durable().result(20)
        if what == "directory":
            path.parent.rename(tmp_path / "elsewhere")
        elif what == "another":
            shutil.copy(path, copy := tmp_path / "copy")
            copy.replace(path)
        else:
            path.with_name(path.name + what).unlink()
        journal.append(event_row(e.Tick(), 2))
        with pytest.raises(JournalError, match=r"journal\.sqlite(-wal)? was (removed|replaced)"):
            journal.durable().result(20)
        assert journal.failed is not None
        with pytest.raises(JournalError):
            journal.close()


def test_a_journal_of_a_former_version_without_indexes_is_read_as_one_with_them(path: Path) -> None:
    journal = SqliteJournal(path)
    for number in range(20):
        rare = e.LeaseEnded(lease=f"l{number}", cause=EndCause.PREEMPTED)
        scored = trajectory_row(number // 4, 0, number % 4, reward=float(number), policy_tokens=number)
        journal.append(event_row(e.Tick(), number), event_row(rare, number), scored)
        journal.append(event_row(e.GroupTrained(worker="t", epoch=1, group="0/0"), number))
    journal.close()

    def told() -> list[Any]:
        with JournalReader(path) as reader:
            return [
                *(list(reader.events_of(*kinds)) for kinds in (("LeaseEnded",), ("LeaseEnded", "GroupTrained"))),
                list(reader.events_between(10, 40, "LeaseEnded")),
                *(list(reader.scan(7, 50, 9, unread)) for unread in ((), ("Tick",), FREQUENT)),
                *(reader.behind_last(most, FREQUENT, 31) for most in (1, 5, 20)),
                reader.reward_sums([1, 3]),
                reader.step_sums([0, 4, 9]),
                reader.age_sums([0]),
            ]

    indexed = told()
    with contextlib.closing(sqlite3.connect(path)) as database:
        for (name,) in database.execute("SELECT name FROM sqlite_schema WHERE type = 'index' AND sql != ''").fetchall():
            database.execute(f'DROP INDEX "{name}"')
        assert not database.execute("SELECT 1 FROM sqlite_schema WHERE name = 'events_index'").fetchall()
    assert told() == indexed
    assert [len(one) for one in indexed[:6]] == [20, 40, 10, 9, 9, 9]


def test_rare_events_are_read_from_the_index_alone(path: Path) -> None:
    SqliteJournal(path).close()
    rare = {event.__name__ for event in e.Event.__args__} - {*FREQUENT}
    assert {"LeaseEnded", "OfferChanged", "WorkerJoined", "StopRequested"} <= rare
    statements: list[str] = []
    with JournalReader(path) as reader:
        reader._connection.set_trace_callback(statements.append)
        assert [*reader.events_of(*rare), *reader.scan(0, 9, 9, FREQUENT)] == []
        assert reader.behind_last(1, FREQUENT, 9) == 0
        reader._connection.set_trace_callback(None)
        for statement in statements:
            ((*_, plan),) = reader._connection.execute(f"EXPLAIN QUERY PLAN {statement}").fetchall()
            assert "COVERING INDEX events_index" in plan
    assert len(statements) == 3
