"""What is in journals, a page at a time: exactly what the whole history has, in its order, for any filter and page."""

import contextlib
import os
import sqlite3
import time
from pathlib import Path
from typing import Literal

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.config import JournalConfig
from elastic.core import events as e
from elastic.core.types import EndCause, Offer, WorkerRole
from elastic.report.history import history_of
from elastic.report.summary import CONFIGLESS
from elastic.report.trajectories import NoSuchTrajectory
from elastic.runtime.journal import (
    CONTINUES,
    JournalError,
    JournalReader,
    RunDirectory,
    SampleRow,
    StepRow,
    TrajectoryFilter,
    TrajectoryRow,
    event_row,
)
from elastic.runtime.status import RunStatus
from elastic.server.history.answers import ENTRY_BYTES, KeptAnswers
from elastic.server.history.journals import (
    SETTLED_S,
    Wanted,
    entries_of,
    history_in,
    leases_of,
    metrics_of,
    offers_of,
    report_of,
    version_of,
    workers_of,
)
from elastic.server.history.kept_events import KeepingReader
from elastic.server.history.trajectories import trajectories_of
from tests.journal_rows import run_status, step_record
from tests.seeds import examples
from tests.server.written_runs import WrittenRun

REWARDS = st.one_of(st.none(), st.sampled_from([0.0, -1.0, 0.5, 1.0]))
TRAJECTORIES = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3), REWARDS), max_size=12)


@st.composite
def runs(draw: st.DrawFn) -> list[tuple[bool, list[tuple[int, int, float | None]]]]:
    """Journals: whether each goes on from the one before, and its trajectories by number, step and reward."""
    return draw(st.lists(st.tuples(st.booleans(), TRAJECTORIES), min_size=1, max_size=3))


def row(name: str, step: int, reward: float | None) -> TrajectoryRow:
    return TrajectoryRow(
        trajectory=name,
        step=step,
        group="g",
        started_ns=1,
        ended_ns=2,
        reward=reward,
        cause="",
        turns=1,
        policy_tokens=3,
        token_ids=b"x" * 9,
        truncated=True,
        sampled=b"y",
    )


def written(run_dir: Path, journals: list[tuple[bool, list[tuple[int, int, float | None]]]]) -> RunDirectory:
    run_dir.mkdir()
    directory = RunDirectory(run_dir)
    segment = 0
    for number, (goes_on, trajectories) in enumerate(journals):
        notes = {"run": run_dir.name}
        if goes_on and number:
            notes[CONTINUES] = directory.journal_paths()[-1].name
        else:
            segment += 1
        journal = directory.begin_journal(JournalConfig(commit_interval_s=0.001), notes=notes)  # type: ignore[call-arg]
        for name, step, reward in trajectories:
            journal.append(row(f"{step}/{segment}/{name}", step, reward))
        if number:
            journal.append(StepRow(step=2, t_ns=1, record=step_record(2), success_rate=None, trainer={}))
        journal.durable().result()
        journal.close()
    return directory


def expected(directory: RunDirectory, wanted: TrajectoryFilter) -> set[tuple[str, int, float | None]]:
    with history_of(directory) as history:
        found = [(one.trajectory, one.step, one.reward) for one in history.rows(TrajectoryRow)]
    least = -float("inf") if wanted.reward_min is None else wanted.reward_min
    bounded = wanted.reward_min is not None
    return {
        one
        for one in found
        if (wanted.step is None or one[1] == wanted.step) and (not bounded or (one[2] is not None and one[2] >= least))
    }


@settings(max_examples=examples(7, 40), deadline=None)
@given(
    journals=runs(),
    step=st.none() | st.integers(0, 3),
    reward_min=st.none() | st.sampled_from([-1.0, 0.5]),
    order=st.sampled_from(["newest", "best", "worst"]),
    limit=st.integers(1, 5),
)
def test_pages_of_trajectories_are_the_whole(
    tmp_path_factory: pytest.TempPathFactory,
    journals: list[tuple[bool, list[tuple[int, int, float | None]]]],
    step: int | None,
    reward_min: float | None,
    order: Literal["newest", "best", "worst"],
    limit: int,
) -> None:
    directory = written(tmp_path_factory.mktemp("run") / "run", journals)
    wanted = TrajectoryFilter(step=step, reward_min=reward_min, order=order)
    whole, *_ = trajectories_of(directory.path, wanted, "", 1_000)
    told, after, has_more = list(whole[:0]), "", True
    while has_more:
        page, has_more, _ = trajectories_of(directory.path, wanted, after, limit)
        assert len(page) == limit if has_more else len(page) <= limit
        told += page
        after = page[-1].id if page else ""
    assert told == whole
    assert {(one.id, one.step, one.reward) for one in told} == expected(directory, wanted)
    assert len({one.id for one in told}) == len(told)
    if order != "newest":
        sign = 1 if order == "best" else -1
        ranks = [-float("inf") if one.reward is None else sign * one.reward for one in told]
        assert ranks == sorted(ranks, reverse=True)
    with pytest.raises(NoSuchTrajectory):
        trajectories_of(directory.path, wanted, "nobody", limit)


def status(at_s: int) -> RunStatus:
    return run_status(phase="rollout", elapsed_s=float(at_s), trainer="")


@pytest.mark.parametrize("most", [1, 3, 100, 1_000])
def test_a_long_series_is_thinned_and_ends_where_the_run_does(tmp_path: Path, most: int) -> None:
    directory = RunDirectory(tmp_path)
    journal = directory.begin_journal(JournalConfig(), notes={"run": "run"})  # type: ignore[call-arg]
    journal.append(*(SampleRow(t_ns=number, status=status(number)) for number in range(250)))
    journal.durable().result()
    told = [one.elapsed_s for one in metrics_of(tmp_path, "run", Wanted(most)).samples]
    journal.close()
    assert told[-1] == 249
    assert told == sorted(set(told))
    assert len(told) <= most + 1
    assert len(told) == 250 or len(told) > most // 2


@pytest.mark.parametrize("goes_on", [True, False])
def test_later_steps_are_those_of_the_whole_series(tmp_path: Path, goes_on: bool) -> None:
    """Also where a journal goes on from another, or where a segment has done steps of the one before again."""
    directory, told = RunDirectory(tmp_path), dict[str, str]()
    for first in (0, 2):
        notes = {"run": "run", **told}
        journal = directory.begin_journal(JournalConfig(), notes=notes)  # type: ignore[call-arg]
        for step in range(first, first + 4):
            journal.append(row(f"{step}/{first}/0", step, float(first)))
            journal.append(StepRow(step=step, t_ns=step, record=step_record(step), success_rate=None, trainer={}))
        journal.close()
        told = {CONTINUES: directory.journal_paths()[-1].name} if goes_on else {}
    whole = metrics_of(tmp_path, "run", Wanted(9)).steps
    assert {one.step for one in whole} == set(range(6))
    for behind in range(-1, 6):
        later = metrics_of(tmp_path, "run", Wanted(9, step=behind)).steps
        assert later == [one for one in whole if one.step > behind]


def test_events_that_are_kept_are_those_of_the_journal(tmp_path: Path) -> None:
    """Also as it grows, and where another has come in its place."""
    directory, kinds = RunDirectory(tmp_path), ("LeaseEnded", "StopRequested")
    path = tmp_path / "journal.sqlite"

    def read(reader: type[JournalReader]) -> list[tuple[int, e.Event]]:
        with reader(path) as journal:
            return list(journal.events_of(*kinds))

    for name in ("a", "b"):
        journal = directory.begin_journal(JournalConfig(), notes={"run": "run", "incarnation": name})  # type: ignore[call-arg]
        for number in range(4):
            ended = e.LeaseEnded(lease=f"{name}{number}", cause=EndCause.PREEMPTED)
            journal.append(event_row(e.Tick(), number), event_row(ended, number))
            journal.durable().result()
            assert read(KeepingReader) == read(KeepingReader) == read(JournalReader)
            assert len(read(KeepingReader)) == number + 1
        journal.close()
        directory.discard_journal(path)


def settled(run_dir: Path) -> None:
    """What was written there was written a while ago."""
    past_ns = time.time_ns() - round(2e9 * SETTLED_S)
    for path in run_dir.iterdir():
        os.utime(path, ns=(past_ns, past_ns))


def test_an_answer_is_kept_while_nothing_is_written(tmp_path: Path) -> None:
    journal = RunDirectory(tmp_path).begin_journal(JournalConfig(), notes={"run": "run"})  # type: ignore[call-arg]
    journal.durable().result()
    answers, made = KeptAnswers(), list[int]()

    def make() -> list[tuple[str, bytes]]:
        made.append(len(made))
        return [("", b"%d" % made[-1])]

    assert version_of(tmp_path) is None, "what was written this moment may go on"
    settled(tmp_path)
    assert [answers.get(tmp_path, "x", make)[0][1] for _ in range(3)] == [b"0"] * 3
    assert answers.get(tmp_path, "y", make)[0][1] == b"1"
    journal.append(row("1", 1, None))
    journal.durable().result()
    assert answers.get(tmp_path, "x", make)[0][1] == b"2"
    journal.close()


def test_answers_take_a_bounded_memory(tmp_path: Path) -> None:
    bytes_max = 10 * (ENTRY_BYTES + 1_000)
    answers = KeptAnswers(bytes_max)
    for number in range(100):
        run_dir = tmp_path / str(number % 30)
        run_dir.mkdir(exist_ok=True)
        entries = answers.get(run_dir, "x", lambda: [("", bytes(1_000))])
        assert len(entries[0][1]) == 1_000
        assert answers.size_bytes <= bytes_max
    assert answers.get(tmp_path / "0", "huge", lambda: [("", bytes(2 * bytes_max))])
    assert answers.size_bytes <= bytes_max


def test_a_fault_is_not_kept(tmp_path: Path) -> None:
    answers = KeptAnswers()
    with pytest.raises(OSError, match="once"):
        answers.get(tmp_path, "x", lambda: (_ for _ in ()).throw(OSError("once")))
    assert not answers, "whoever asks for what there is not takes no memory"
    assert answers.get(tmp_path, "x", lambda: [("", msgspec.json.encode(1))])[0][1] == b"1"


def test_offers_are_told_from_one_change_to_the_next_and_leases_with_what_they_gave(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path / "run", steps=20)
    repeated = Offer(provider="spot", role=WorkerRole.ELASTIC, available=1, usd_per_gpu_hour=3.1)
    run.append(event_row(e.OfferChanged(offer=repeated), 600 * 10**9))
    run.close()
    with history_in(tmp_path / "run") as history:
        (spot,), first = offers_of(history), leases_of(history)[-1]
    assert (spot.id, spot.gpus_per_lease) == ("spot", 1)
    assert [(one.at_s, one.available, one.usd_per_gpu_hour) for one in spot.moments] == [
        (0.0, 4, 2.4),
        (150.0, 1, 3.1),
        (300.0, 4, 2.4),
        (450.0, 1, 3.1),
    ]
    assert first.accounts_s == {"decode": 300.0, "booting": 150.0, "idle": 150.0}


def test_of_a_garbled_journal_what_stands_before_is_shown_and_where_it_is_broken(tmp_path: Path) -> None:
    """An event, a sample and the note of the configuration are garbled; each part tells of its own."""
    WrittenRun(tmp_path / "run", steps=20).close()
    path = tmp_path / "run" / "journal.sqlite"
    with contextlib.closing(sqlite3.connect(path)) as journal, journal:
        (number,) = journal.execute("SELECT MAX(seq) FROM events WHERE kind = 'OfferChanged'").fetchone()
        journal.execute("UPDATE events SET body = x'c1' WHERE seq = ?", (number,))
        journal.execute("UPDATE samples SET status = '{' WHERE rowid = (SELECT rowid FROM samples LIMIT 1 OFFSET 10)")
        journal.execute("UPDATE meta SET value = '' WHERE key = 'config'")
        journal.execute("UPDATE groups SET tokens_by_age = '{' WHERE step = 7")
        journal.execute("UPDATE trajectories SET turns = 'many' WHERE trajectory = '3/0/1'")
    garbled = f"journal.sqlite: event {number} is garbled: "
    *offers, (nothing, words) = entries_of(path.parent, offers_of)
    assert (len(offers), nothing) == (1, "")
    assert msgspec.json.decode(words).startswith(garbled)
    assert len(msgspec.json.decode(offers[0][1])["moments"]) == 3
    assert all(id_ for id_, _ in entries_of(path.parent, workers_of)), "of these nothing is broken"
    metrics = metrics_of(path.parent, "run", Wanted(100))
    assert (len(metrics.steps), len(metrics.samples), len(metrics.unreadable)) == (20, 10, 2)
    assert metrics.steps[0].mean_reward is not None, "what stands beside it is there"
    listed, _, (words,) = trajectories_of(path.parent, TrajectoryFilter(), "", 200)
    assert len(listed) == 159
    assert words.startswith("journal.sqlite: 1 of 160 trajectories cannot be read: Expected `int`")
    report = msgspec.json.decode(report_of(path.parent, "json") or b"")
    assert len(report["steps"]) == 20
    assert {one.partition(":")[0] for one in report["unreadable"]} == {"journal.sqlite", CONFIGLESS}
    assert b"A part cannot be shown" in (report_of(path.parent, "markdown") or b"")
    with JournalReader(path) as reader, pytest.raises(JournalError, match=f"event {number} is garbled"):
        list(reader.events_of("OfferChanged"))


def test_of_trajectories_that_a_journal_has_lost_their_number_is_told(tmp_path: Path) -> None:
    """As in one whose pages are out of place: its indexes have more than its table."""
    WrittenRun(tmp_path / "run", steps=3).close()
    path = tmp_path / "run" / "journal.sqlite"

    def change(*statements: str) -> None:
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as journal:
            for one in ("PRAGMA writable_schema=ON", *statements):
                journal.execute(one)

    change("CREATE TABLE kept AS SELECT * FROM sqlite_schema WHERE name = 'trajectories_index'")
    change("DELETE FROM sqlite_schema WHERE name = 'trajectories_index'")
    change("DELETE FROM trajectories WHERE step = 1")
    change("INSERT INTO sqlite_schema SELECT * FROM kept", "DELETE FROM sqlite_schema WHERE name = 'kept'")
    for wanted, there, known in ((TrajectoryFilter(), 16, 24), (TrajectoryFilter(step=1), 0, 8)):
        listed, _, told = trajectories_of(path.parent, wanted, "", 100)
        assert (len(listed), told) == (there, [f"journal.sqlite: 8 of {known} trajectories are missing"])


def test_of_no_kind_there_is_no_event(tmp_path: Path) -> None:
    WrittenRun(tmp_path / "run", steps=2).close()
    with JournalReader(tmp_path / "run" / "journal.sqlite") as reader:
        assert list(reader.events_between(0, 100)) == []
