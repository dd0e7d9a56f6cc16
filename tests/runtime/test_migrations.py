"""Journals of earlier schema versions are read as if they were of this one; `journals` has some as runs left them."""

import gzip
import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from elastic.core import events as e
from elastic.report import summarise
from elastic.runtime.journal import (
    SCHEMA_VERSION,
    CallRow,
    GroupRow,
    JournalReader,
    JournalRecord,
    MoveRow,
    PullRow,
    RunDirectory,
    SampleRow,
    SqliteJournal,
    StepRow,
    TrajectoryRow,
    TurnRow,
    event_row,
)
from elastic.runtime.journal.migrations import MIGRATIONS

KEPT = Path(__file__).parent / "journals"
RUNS = sorted(path.relative_to(KEPT).as_posix() for path in KEPT.glob("v*/*") if path.is_dir())
COUNTED: dict[str, type[JournalRecord]] = {
    "turns": TurnRow,
    "moves": MoveRow,
    "trajectories": TrajectoryRow,
    "groups": GroupRow,
    "steps": StepRow,
    "samples": SampleRow,
    "pulls": PullRow,
    "calls": CallRow,
}


@pytest.fixture(params=RUNS)
def kept(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[RunDirectory, dict[str, Any]]:
    """A run of an earlier version, and what was read of it then."""
    directory = KEPT / request.param
    run = RunDirectory(tmp_path / "run")
    run.path.mkdir()
    for packed in directory.glob("*.sqlite.gz"):
        (run.path / packed.stem).write_bytes(gzip.decompress(packed.read_bytes()))
    return run, json.loads((directory / "expected.json").read_text())


def test_every_version_has_a_run_and_a_step_to_the_next() -> None:
    versions = range(1, SCHEMA_VERSION)
    assert {int(run.partition("/")[0].removeprefix("v")) for run in RUNS} == set(versions)
    assert set(MIGRATIONS) == set(versions)


def test_rows_events_and_tokens_are_what_they_were(kept: tuple[RunDirectory, dict[str, Any]]) -> None:
    run, expected = kept
    with run.journals() as journals:
        assert {journal.path.name for journal in journals} == expected["journals"].keys()
        for journal in journals:
            wanted = expected["journals"][journal.path.name]
            entries = list(journal.entries())
            kinds = [type(event).__name__ for _, event, _ in entries]
            chunks = [chunk for _, _, accepted in entries for _, chunk in sorted(accepted.items())]
            assert len(entries) == wanted["events"]
            assert {kind: kinds.count(kind) for kind in sorted(set(kinds))} == wanted["kinds"]
            assert {name: len(journal.rows(kind)) for name, kind in COUNTED.items()} == wanted["rows"]
            assert [token for chunk in chunks for token in chunk.token_ids] == wanted["token_ids"]
            assert (msgspec.to_builtins(chunks[0]) if chunks else None) == wanted["first_chunk"]
            assert journal.last_ns() == wanted["last_ns"]
            assert journal.meta()["status"] == wanted["status"]
            assert "books" not in journal.meta()


def test_the_report_says_what_it_said(kept: tuple[RunDirectory, dict[str, Any]]) -> None:
    run, expected = kept
    found = json.loads(msgspec.json.encode(summarise(run)))
    wanted = expected["report"]
    found["gpu_s"], found["tokens"] = found["total"]["gpu_s"], found["total"]["tokens"]
    found["accounts_s"] = found["total"]["accounts_s"]
    weights = found["weights"]
    found["published"] = [[v["version"], v["bytes"], v["changed_by_layer"]] for v in weights["versions"]]
    found["pulled"] = [[p["worker"], p["version"], p["bytes"], p["split_s"]] for p in weights["pulls"]]
    assert what_was_asked(found, wanted) == wanted


def what_was_asked(found: Any, wanted: Any) -> Any:
    """Return of `found` what `wanted` has keys for: a report may say more than it said then."""
    if isinstance(found, dict) and isinstance(wanted, dict):
        return {key: what_was_asked(found[key], wanted[key]) for key in wanted}
    if isinstance(found, list) and isinstance(wanted, list) and len(found) == len(wanted):
        return [what_was_asked(*pair) for pair in zip(found, wanted, strict=True)]
    return found


def test_what_only_the_trainer_says_names_it(kept: tuple[RunDirectory, dict[str, Any]]) -> None:
    run, _ = kept
    with run.journals() as journals:
        for journal in journals:
            with closing(sqlite3.connect(journal.path)) as raw:
                (version,) = raw.execute("SELECT value FROM meta WHERE key = 'schema_version'").fetchone()
            assert int(version) < SCHEMA_VERSION  # the file is as it was
            bodies = journal._connection.execute("SELECT body FROM events WHERE kind = 'WeightsPublished'").fetchall()
            assert [msgspec.msgpack.decode(body)["worker"] for (body,) in bodies] == ["trainer-1"] * len(bodies)
            assert all(isinstance(event, e.WeightsPublished) for _, event in journal.events_of("WeightsPublished"))


def test_the_migrated_have_the_tables_of_today(kept: tuple[RunDirectory, dict[str, Any]], tmp_path: Path) -> None:
    run, _ = kept
    SqliteJournal(tmp_path / "today.sqlite").close()
    with JournalReader(tmp_path / "today.sqlite") as today, run.journals() as journals:
        for journal in journals:
            assert columns(journal) == columns(today)


def columns(journal: JournalReader) -> dict[str, list[tuple[str, str]]]:
    tables = journal._connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
    return {
        table: sorted((c[1], c[2]) for c in journal._connection.execute(f"PRAGMA table_info({table})").fetchall())
        for (table,) in tables
    }


def test_a_run_that_is_resumed_goes_on_beside_its_migrated_journals(kept: tuple[RunDirectory, dict[str, Any]]) -> None:
    run, expected = kept
    before = len(run.journal_paths())
    journal = SqliteJournal(run.next_journal_path())
    journal.meta("status", "finished")
    journal.append(event_row(e.Tick(), 5 * 10**9))
    journal.close()
    summary = summarise(run)
    assert len(run.journal_paths()) == before + 1
    assert summary.segments == expected["report"]["segments"] + 1
    assert summary.usd == pytest.approx(expected["report"]["usd"])
    assert summary.wall_s == pytest.approx(expected["report"]["wall_s"] + 5.0)


@pytest.mark.parametrize("kept", [run for run in RUNS if run.startswith("v1/")], indirect=True)
def test_tables_and_columns_that_came_while_version_1_lasted(kept: tuple[RunDirectory, dict[str, Any]]) -> None:
    run, expected = kept
    for path in run.journal_paths():
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("DROP TABLE groups")
            connection.execute("DROP TABLE calls")
            connection.execute("ALTER TABLE pulls DROP COLUMN body")
            connection.commit()
    summary = summarise(run)
    assert summary.weights.pulls == []
    assert summary.pulls.count == expected["report"]["pulls"]["count"]
    assert summary.batches.fates == []
