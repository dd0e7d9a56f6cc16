"""What is written is read again in order; what cannot be written is said once, and the run told."""

import sqlite3
import time
from pathlib import Path

import pytest

from elastic import wire
from elastic.core import events as e
from elastic.core.ledger import Ledger
from elastic.core.types import EndCause, FinishReason
from elastic.runtime.journal import (
    SCHEMA_VERSION,
    Journal,
    JournalError,
    JournalReader,
    earlier_journals,
    next_archive,
    tokens_event,
)

CHUNK = wire.Chunk("0/0/0/0", 1, 0, [5, 6, 7], [-0.5, -1.0, -1.5], 3, FinishReason.STOP)


def until(condition) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.sqlite"


def test_events_and_frames_come_back_in_order_with_their_times(path: Path) -> None:
    ended = e.LeaseEnded(lease="spot-1", cause=EndCause.PREEMPTED, detail="gone")
    journal = Journal(path, 0.01)
    journal.event(e.Tick(), 1)
    journal.frame("w", 2, [CHUNK], 2)
    journal.event(ended, 3)
    journal.close()
    reader = JournalReader(path)
    expected = [(1, e.Tick()), (2, tokens_event("w", 2, [CHUNK])), (3, ended)]
    assert list(reader.events()) == expected
    assert [(t, event) for t, event, _ in reader.entries()] == expected
    assert [chunk.token_ids for _, _, chunks in reader.entries() for chunk in chunks] == [[5, 6, 7]]
    assert list(reader.events_of("LeaseEnded")) == [(3, ended)]
    reader.close()


def test_what_is_appended_is_durable_without_a_close(path: Path) -> None:
    journal = Journal(path, 0.01)
    journal.event(e.Tick(), 1)
    reader = JournalReader(path)
    until(lambda: list(reader.events()))
    reader.close()
    journal.close()


def test_a_journal_that_goes_on_keeps_its_order(path: Path) -> None:
    for t_ns in (1, 2):
        journal = Journal(path, 0.01)
        journal.event(e.Tick(), t_ns)
        journal.close()
    reader = JournalReader(path)
    assert [t_ns for t_ns, _ in reader.events()] == [1, 2]
    reader.close()


def test_a_group_that_was_of_no_use_says_why(path: Path) -> None:
    journal = Journal(path, 0.01)
    for group in ("0/0", "0/1"):
        journal.group(1, group, 0, 0, "", {"lengths": [3], "tokens_by_age": {0: 3}})
    journal.unusable("0/1", "token 99 is not in the vocabulary of 32")
    journal.close()
    reader = JournalReader(path)
    assert [row["dropped"] for row in reader.rows("groups")] == [
        "",
        "unusable: token 99 is not in the vocabulary of 32",
    ]
    reader.close()


def test_a_disk_that_fills_up_is_the_journals_failure(path: Path) -> None:
    journal = Journal(path, 0.01)
    journal._connection.execute("PRAGMA max_page_count = 30")
    for t_ns in range(2000):
        journal.frame("w", 1, [CHUNK], t_ns)
    until(lambda: journal.failed is not None)
    assert str(path) in str(journal.failed)
    assert "full" in str(journal.failed)
    with pytest.raises(JournalError, match="full"):
        journal.close()


def test_directory_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="nosuch"):
        Journal(tmp_path / "nosuch" / "journal.sqlite", 0.01)


@pytest.mark.parametrize("content", [None, b"not a database, but long enough to be taken for one" * 20, b""])
def test_what_is_no_journal_cannot_be_read(path: Path, content: bytes | None) -> None:
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(JournalError, match="journal"):
        JournalReader(path)


def test_another_schema_is_named(path: Path) -> None:
    Journal(path, 0.01).close()
    connection = sqlite3.connect(path)
    connection.execute("UPDATE meta SET value = '99' WHERE key = 'schema_version'")
    connection.commit()
    connection.close()
    with pytest.raises(JournalError, match=f"schema version 99; this elastic reads {SCHEMA_VERSION}"):
        JournalReader(path)


PAGE_BYTES = 4096
READERS = {
    "rows": lambda reader: reader.rows("samples"),
    "entries": lambda reader: list(reader.entries()),
    "events_of": lambda reader: list(reader.events_of("Tick")),
    "last_ns": lambda reader: reader.last_ns(),
}


@pytest.mark.parametrize("name", READERS)
def test_a_damaged_journal_is_named(path: Path, name: str) -> None:
    journal = Journal(path, 10.0)
    for t_ns in range(3000):
        journal.event(e.Tick(), t_ns)
        journal.sample(t_ns, {"much": "x" * 20})
    journal.close()
    sound = path.read_bytes()[: 15 * PAGE_BYTES]
    path.write_bytes(sound + b"\xff" * (path.stat().st_size - len(sound)))
    reader = JournalReader(path)
    with pytest.raises(JournalError, match=f"{path.name}: .*malformed"):
        READERS[name](reader)
    reader.close()


@pytest.mark.parametrize(("table", "name"), [("samples", "rows"), ("events", "events_of"), ("events", "entries")])
def test_damage_within_a_row_is_named(path: Path, table: str, name: str) -> None:
    journal = Journal(path, 10.0)
    journal.event(e.Tick(), 1)
    journal.sample(1, {})
    journal.close()
    connection = sqlite3.connect(path)
    connection.execute(f"UPDATE {table} SET body = CAST('damaged' AS {'BLOB' if table == 'events' else 'TEXT'})")
    connection.commit()
    connection.close()
    reader = JournalReader(path)
    with pytest.raises(JournalError, match=path.name):
        READERS[name](reader)
    reader.close()


def test_earlier_journals_are_numbered(path: Path) -> None:
    assert earlier_journals(path) == []
    assert next_archive(path).name == "journal-1.sqlite"
    for name in ("journal-10.sqlite", "journal-2.sqlite", "journal-2.sqlite-wal", "journal-x.sqlite", path.name):
        path.with_name(name).touch()
    assert [found.name for found in earlier_journals(path)] == ["journal-2.sqlite", "journal-10.sqlite"]
    assert next_archive(path).name == "journal-11.sqlite"


def test_the_last_moment_is_that_of_whatever_came_last(path: Path) -> None:
    ledger = Ledger()
    ledger.open("spot-1", "spot-1", "spot", 1, 1.0, 2)
    journal = Journal(path, 0.01)
    journal.close()
    lasts = []
    for write in (
        lambda journal: None,
        lambda journal: journal.event(e.Tick(), 1),
        lambda journal: journal.books(ledger),
        lambda journal: journal.step(0, 3, {}),
        lambda journal: journal.turn("t", "t", 0, None, 4, 1, 1, 1, 0, "w"),
        lambda journal: journal.sample(5, {}),
    ):
        journal = Journal(path, 0.01)
        write(journal)
        journal.close()
        reader = JournalReader(path)
        lasts.append(reader.last_ns())
        reader.close()
    assert lasts == [0, 1, 2, 3, 4, 5]
