"""Each finished step is one row in each logger, whatever dies; and rows say what the journal says."""

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.core.types import NS_PER_S
from elastic.protocol.sampled import Sampled, pack_ids, pack_logprobs
from elastic.report.bounds import cut
from elastic.report.texts import Reading, with_texts
from elastic.report.tracking import (
    Delivery,
    LoggerDown,
    SampleBounds,
    StepSource,
    TrackedRow,
    Tracking,
    check_loggers,
    follow,
)
from elastic.report.tracking.names import NAMES
from elastic.report.tracking.rows import ROWS_AT_ONCE
from elastic.runtime.journal import (
    CONTINUES,
    GroupRow,
    RunDirectory,
    SampleRow,
    SqliteJournal,
    StepRow,
    StepWeights,
    TrajectoryFilter,
    TrajectoryRow,
)
from elastic.system.sqlite import open_sqlite
from tests.journal_rows import run_status, step_record
from tests.report.chat_run import ChatRun

NO_SAMPLES = SampleBounds(trajectories=0, bytes=1000)


class Dies(BaseException):
    """The process is gone; what its libraries held is lost."""


class Store:
    """What a logger has: rows that are there, and rows that its library still holds."""

    def __init__(self) -> None:
        self.there: list[int] = []
        self.held: list[int] = []


class FrailLogger:
    """Writes to a store and fails as it is told: before a row, behind it, or with what its library holds half lost."""

    def __init__(self, store: Store, fates: Iterator[str]) -> None:
        self._store = store
        self._fates = fates

    def open(self) -> set[int]:
        self._store.held = []
        if next(self._fates, "") == "down":
            raise ConnectionError("nobody answers")
        return set(self._store.there)

    def write(self, row: TrackedRow) -> None:
        store, fate = self._store, next(self._fates, "")
        if fate in ("dies before", "down before"):
            raise Dies if fate.startswith("dies") else ConnectionError("before")
        store.held.append(row.step)
        if fate == "dies amid":
            store.there += store.held[: len(store.held) // 2]
            raise Dies
        if fate != "held":
            self.close()
        if fate in ("dies behind", "down behind"):
            raise Dies if fate.startswith("dies") else ConnectionError("behind")

    def close(self) -> None:
        self._store.there += self._store.held
        self._store.held = []


FATES = ("", "held", "dies before", "dies amid", "dies behind", "down", "down before", "down behind")


def row_of(step: int) -> TrackedRow:
    return TrackedRow(step=step, at_s=0.0, figures={})


@given(st.lists(st.sampled_from(FATES), max_size=40), st.lists(st.integers(1, 4), min_size=1, max_size=8))
def test_no_row_comes_twice_and_none_is_missing(fates: list[str], growth: list[int]) -> None:
    store, told, finished = Store(), iter(fates), list[int]()
    delivery = Delivery(FrailLogger(store, told))
    for more in [*growth, *[0] * (len(fates) + 1)]:
        finished += range(len(finished), len(finished) + more)
        try:
            delivery.advance(finished, row_of)
        except LoggerDown:
            pass
        except Dies:
            delivery = Delivery(FrailLogger(store, told))
    delivery.close()
    assert store.there == finished
    assert delivery.lacking(finished) == len(finished), "after its end a logger is asked anew"


def test_a_logger_that_is_down_is_waited_for_in_words_and_holds_up_no_other(tmp_path: Path) -> None:
    with journal_of(tmp_path, "journal.sqlite") as journal:
        journal.append(step_row(0, published=True))
    said, now_s, slow, fast = list[str](), [0.0], Store(), Store()
    loggers = {"slow": FrailLogger(slow, iter(["down", "down"])), "fast": FrailLogger(fast, iter(()))}
    tracking = Tracking(source_of(tmp_path), loggers, said.append, lambda: now_s[0])
    for at_s in (0.0, 0.5, 1.0, 2.0, 2.5, 3.5):
        now_s[0] = at_s
        tracking.advance(over=True)
    assert said == ["slow cannot be written, and is waited for: nobody answers", "slow is there again"]
    assert slow.there == fast.there == [0]
    assert tracking.written == {"slow": 1, "fast": 1}


def test_a_step_is_final_with_its_weights_or_a_later_step_or_the_runs_end(tmp_path: Path) -> None:
    source = source_of(tmp_path)
    source.poll(over=False)
    with journal_of(tmp_path, "journal.sqlite") as journal:
        journal.append(step_row(0))
        journal.durable().result()
        source.poll(over=False)
        assert source.finished == []
        journal.append(step_row(0, published=True), step_row(1))
        journal.durable().result()
        source.poll(over=False)
        assert source.finished == [0]
        journal.append(step_row(2))
        journal.durable().result()
        source.poll(over=False)
        assert source.finished == [0, 1]
    source.poll(over=True)
    assert source.finished == [0, 1, 2]
    assert source.row(0).figures["elastic/weights_changed_share"] == 0.25


def test_incarnations_are_one_run_and_what_was_done_again_keeps_its_row(tmp_path: Path) -> None:
    with journal_of(tmp_path, "journal.sqlite") as journal:
        journal.append(step_row(0), trajectory("1/0/0", 1.0), status_row(usd=3.0))
    with journal_of(tmp_path, "journal.2.sqlite", continues="journal.sqlite") as journal:
        journal.append(trajectory("1/0/1", 0.0), step_row(1), status_row(usd=5.0))
    source = source_of(tmp_path)
    source.poll(over=False)
    assert source.finished == [0]
    with journal_of(tmp_path, "journal.3.sqlite") as journal:
        journal.append(step_row(1, loss=7.0), step_row(2), trajectory("2/0/0", 1.0), status_row(usd=1.0))
    source.poll(over=True)
    assert source.finished == [0, 1, 2]
    assert source.row(1).figures["critic/rewards/mean"] == 0.5
    assert source.row(1).figures["actor/pg_loss"] == 0.5
    assert [source.row(step).figures["elastic/usd"] for step in (0, 1, 2)] == [3.0, 5.0, 6.0]
    again = source_of(tmp_path)
    again.poll(over=True)
    assert again.finished == [0, 1, 2]


def test_a_journal_that_came_to_nothing_leaves_its_name_to_another(tmp_path: Path) -> None:
    source = source_of(tmp_path)
    with journal_of(tmp_path, "journal.sqlite"):
        pass
    source.poll(over=False)
    RunDirectory(tmp_path).discard_journal(tmp_path / "journal.sqlite")
    with journal_of(tmp_path, "journal.sqlite") as journal:
        journal.append(step_row(0))
    source.poll(over=True)
    assert source.finished == [0]


def test_a_row_says_what_the_journal_says(tmp_path: Path) -> None:
    with journal_of(tmp_path, "journal.sqlite") as journal:
        journal.append(
            trajectory("0/0/0", 1.0, turns=2, tokens=10),
            trajectory("0/0/1", 0.0, turns=4, tokens=30, truncated=True),
            trajectory("0/1/0", None, cause="timeout"),
            group("0/0"),
            group("0/1", dropped="stale: tokens of version 0, the trainer is at 3", lengths=[50, 70]),
            status_row(usd=2.0),
            step_row(0),
        )
    source = source_of(tmp_path)
    source.poll(over=True)
    row = source.row(0)
    assert row.at_s == pytest.approx(1_767_225_600 + 5)
    expected = {
        "critic/rewards/mean": 0.5,
        "reward_std": 0.5,
        "elastic/success_rate": 0.5,
        "response_length/max": 30.0,
        "num_turns/mean": 3.0,
        "is_truncated/mean": 0.5,
        "has_error/mean": pytest.approx(1 / 3),
        "off_policy/max": 2.0,
        "off_policy/dropped": 1.0,
        "elastic/dropped_response_length/mean": 60.0,
        "actor/pg_loss": 0.5,
        "trainer/of_its_own": 3.0,
        "time/step": 4.0,
        "fully_async/trainer/idle_ratio": 0.25,
        "perf/throughput": 25.0,
        "elastic/usd": 2.0,
    }
    assert {name: row.figures.get(name) for name in expected} == expected
    assert "unknown" not in " ".join(row.figures)


def test_names_are_told_apart() -> None:
    assert len(set(NAMES.values())) == len(NAMES)


def test_samples_have_messages_and_rewards_within_bounds(tmp_path: Path) -> None:
    logprobs = bytearray(pack_logprobs([-0.5] * 4))
    sampled = msgspec.msgpack.encode(Sampled(spans=[(2, 3), (6, 1)], logprobs=logprobs, versions=[(0, 4)]))
    with journal_of(tmp_path, "journal.sqlite") as journal:
        for member in range(8):
            journal.append(trajectory(f"0/0/{member}", float(member), ids=range(8), sampled=sampled))
        journal.append(step_row(0))
    source = source_of(tmp_path, SampleBounds(trajectories=2, bytes=1000))
    source.poll(over=True)
    samples = source.row(0).samples
    assert [(one.trajectory, one.reward) for one in samples] == [("0/0/0", 0.0), ("0/0/4", 4.0)]
    assert [(one["role"], one["content"]) for one in samples[0].messages] == [
        ("user", "0 1"),
        ("assistant", "2 3 4"),
        ("user", "5"),
        ("assistant", "6"),
        ("user", "7"),
    ]


@given(st.text(max_size=300), st.integers(0, 200))
def test_a_text_is_cut_to_its_bytes(text: str, most_bytes: int) -> None:
    found = cut(text, most_bytes)
    assert len(found.encode()) <= most_bytes or found == text
    assert found == text or len(text.encode()) > most_bytes


def test_a_logger_that_fails_comes_behind_the_others(tmp_path: Path) -> None:
    """To fail may take long: then the others have what there is, also at the run's end."""
    with journal_of(tmp_path, "journal.sqlite") as journal:
        journal.append(step_row(0), step_row(1))
    order = list[str]()

    class Asked(FrailLogger):
        def __init__(self, name: str, fates: Iterator[str]) -> None:
            super().__init__(Store(), fates)
            self._name = name

        def open(self) -> set[int]:
            order.append(self._name)
            return super().open()

        def write(self, row: TrackedRow) -> None:
            order.append(self._name)
            super().write(row)

    loggers = {"slow": Asked("slow", iter(["down"] * 9)), "fast": Asked("fast", iter(()))}
    now_s = iter(range(0, 1000, 100))
    tracking = Tracking(source_of(tmp_path), loggers, print, lambda: float(next(now_s)))
    tracking.advance(over=False)
    assert order == ["slow", "fast", "fast"]
    order.clear()
    tracking.advance(over=True)
    assert order == ["fast", "slow"]


def test_what_it_takes_to_read_a_row_does_not_grow_with_the_run(tmp_path: Path) -> None:
    steps = 2 * ROWS_AT_ONCE + 1
    with journal_of(tmp_path, "journal.sqlite") as journal:
        for step in range(steps):
            journal.append(step_row(step), trajectory(f"{step}/0/0", float(step)), group(f"{step}/0", step=step))
    source = source_of(tmp_path)
    source.poll(over=True)
    assert source.finished == list(range(steps))
    assert source.row(steps - 1).figures["critic/rewards/mean"] == steps - 1
    assert source.row(1).figures["critic/rewards/mean"] == 1
    assert source.row(1).figures["off_policy/max"] == 2
    with closing(open_sqlite(tmp_path / "journal.sqlite", "ro")) as connection:
        where, values = TrajectoryFilter(step=1).clauses(None)
        plan = connection.execute(f"EXPLAIN QUERY PLAN SELECT rowid FROM trajectories WHERE {where}", values)
        assert "SEARCH" in " ".join(str(row) for row in plan)


def test_following_ends_with_the_run_or_when_it_is_told_to(tmp_path: Path) -> None:
    store, stop = Store(), threading.Event()
    with journal_of(tmp_path, "journal.sqlite") as journal:
        journal.append(step_row(0), step_row(1))
    tracking = Tracking(source_of(tmp_path), {"one": FrailLogger(store, iter(()))}, print, lambda: 0.0)
    stop.set()
    follow(tracking, lambda: False, lambda: False, stop, 60.0)
    assert store.there == [0]
    ends = iter([False, True])
    tracking = Tracking(source_of(tmp_path), {"one": FrailLogger(store, iter(()))}, print, lambda: 0.0)
    follow(tracking, lambda: False, lambda: next(ends), threading.Event(), 0.001)
    assert store.there == [0, 1]


def test_a_logger_without_its_package_or_key_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("trackio", "tensorboard", "wandb", "mlflow"):
        problem = check_loggers([name], {})
        assert problem == "" or name in problem
    assert check_loggers([], {}) == ""


def test_samples_are_told_by_who_said_what(tmp_path: Path) -> None:
    chats = ChatRun(tmp_path / "run", tmp_path / "policy")
    chats.small()
    chats.append(step_row(2))
    reading = Reading.of(chats.config)
    source = StepSource(
        chats.close(), SampleBounds(trajectories=100, bytes=1000), lambda details: with_texts(details, reading)
    )
    source.poll(over=True)
    messages = {one.trajectory: one.messages for one in source.row(2).samples}["2/1/0"]
    assert [one["role"] for one in messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert [one["content"] for one in messages[-2:]] == ["2", "It is 2.<|im_end|>"]


@contextmanager
def journal_of(directory: Path, name: str, continues: str = "") -> Iterator[SqliteJournal]:
    notes = {"started_at": "2026-01-01T00:00:00+0000"} | ({CONTINUES: continues} if continues else {})
    journal = SqliteJournal(directory / name, notes=notes)
    try:
        yield journal
    finally:
        journal.close()


def source_of(directory: Path, samples: SampleBounds = NO_SAMPLES) -> StepSource:
    return StepSource(RunDirectory(directory), samples, lambda details: details)


def step_row(step: int, *, published: bool = False, loss: float = 0.5) -> StepRow:
    record = step_record(
        step,
        duration_ns=4 * NS_PER_S,
        rollout_ns=NS_PER_S,
        groups_trained=1,
        groups_dropped=1,
        train_wait_ns=NS_PER_S,
    )
    return StepRow(
        step=step,
        t_ns=(5 + step) * NS_PER_S,
        record=record,
        success_rate=None,
        trainer={"loss": loss, "tokens": 100.0, "of_its_own": 3.0, "unknown": None},
        weights=StepWeights(version=step + 1, changed={"0": 0.5, "1": 0.0}) if published else None,
    )


def trajectory(
    name: str,
    reward: float | None,
    cause: str = "",
    turns: int = 1,
    tokens: int = 1,
    truncated: bool = False,
    ids: range = range(0),
    sampled: bytes = b"",
) -> TrajectoryRow:
    return TrajectoryRow(
        trajectory=name,
        step=int(name.split("/")[0]),
        group=name.rpartition("/")[0],
        started_ns=0,
        ended_ns=1,
        reward=reward,
        cause=cause,
        turns=turns,
        policy_tokens=tokens,
        token_ids=pack_ids(ids),
        truncated=truncated,
        sampled=sampled,
    )


def group(name: str, dropped: str = "", lengths: list[int] | None = None, step: int = 0) -> GroupRow:
    ages = {0: 10, 2: 5}
    return GroupRow(
        group=name, t_ns=1, step=step, version=0, dropped=dropped, lengths=lengths or [10, 30], tokens_by_age=ages
    )


def status_row(usd: float) -> SampleRow:
    return SampleRow(t_ns=1, status=msgspec.structs.replace(run_status(run="r"), usd=usd))
