"""Limits count from the last progress: nobody is given up for waiting for others."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.core import commands as c
from elastic.core import events as e
from elastic.core.scheduler import Phase
from elastic.core.types import EndCause, FinishReason, LoadPhase, WorkerState
from elastic.testing.faults.core.settings import SMALL_LIMITS
from policies.seeding import FixedWindow
from tests.core.conftest import CoreHarness

A, B = "3/0/0", "3/0/1"
LOAD_S = SMALL_LIMITS.load_timeout_ns / 1e9
TOKEN_S = SMALL_LIMITS.turn_stall_timeout_ns / 1e9
QUEUE_S = SMALL_LIMITS.queue_timeout_ns / 1e9


def behind(make_core) -> tuple:
    """A worker that serves version 2 with a turn on it, and loads version 3; the trainer's device sleeps."""
    core = make_core(steps=9, staleness_bound=1)
    core.trainer(version=3)
    lease = core.offer("spot")[-1].lease
    core.grant(lease)
    orders = core.join(worker := f"{lease}/w", version=2)
    assert c.LoadWeights(worker=worker, epoch=1, version=3) in orders
    core.beat("trainer", capacity=0)
    core.beat(worker, loading=LoadPhase.PULLING)
    core.request(A)
    return core, worker, core.one(c.StartTurn)


def go_on(core, worker: str, start: c.StartTurn, seconds: float, tokens: int, **beat) -> int:
    """The turn gets a token every half second, and the worker beats; returns how many it has."""
    for _ in range(round(2 * seconds)):
        core.wait(0.5, beating=("trainer",))
        core.tokens(start, 1, start=tokens, version=2)
        tokens += 1
        core.beat(worker, executing=1, **beat)
        assert not core.sent(c.FenceWorker)
    return tokens


class TestLoading:
    def test_waiting_for_a_running_turn_is_no_loading(self, make_core) -> None:
        core, worker, start = behind(make_core)
        go_on(core, worker, start, 5 * LOAD_S, 0, loading=LoadPhase.WAITING)
        assert core.scheduler.fleet.workers[worker].state is WorkerState.READY
        assert core.scheduler.turns.live[start.turn].attempt == 1

    def test_time_to_load_counts_from_the_last_progress(self, make_core) -> None:
        core, worker, start = behind(make_core)
        tokens = 0
        for pieces in range(5):
            tokens = go_on(core, worker, start, LOAD_S - 1, tokens, loading=LoadPhase.PULLING, load_progress=pieces)
        assert core.scheduler.fleet.workers[worker].state is WorkerState.READY

    @pytest.mark.parametrize("phase", [LoadPhase.PULLING, LoadPhase.APPLYING, LoadPhase.NONE])
    def test_load_that_hangs_is_found_in_time_also_while_turns_run(self, make_core, phase: LoadPhase) -> None:
        core, worker, start = behind(make_core)
        tokens = go_on(core, worker, start, 2 * LOAD_S, 0, loading=LoadPhase.WAITING)
        tokens = go_on(core, worker, start, LOAD_S - 0.5, tokens, loading=phase)
        out = core.wait(1.1, beating=("trainer",))
        assert c.FenceWorker(worker=worker, reason=EndCause.FENCED) in out

    def test_engine_that_waits_to_apply_with_nothing_to_wait_for_hangs(self, make_core) -> None:
        core, worker, start = behind(make_core)
        core.tokens(start, 1, finish=FinishReason.STOP, version=2)
        out: list[c.Command] = []
        for _ in range(round(2 * LOAD_S) + 2):
            core.beat(worker, loading=LoadPhase.WAITING)
            out += core.wait(0.5, beating=("trainer",))
        assert c.FenceWorker(worker=worker, reason=EndCause.FENCED) in out

    def test_engine_that_hangs_with_the_turns_that_weights_wait_for_is_found(self, make_core) -> None:
        core, worker, _ = behind(make_core)
        out: list[c.Command] = []
        for _ in range(12):
            out += core.beat(worker, executing=1, progress=7, loading=LoadPhase.WAITING)
            out += core.wait(0.5, beating=("trainer",))
        assert c.FenceWorker(worker=worker, reason=EndCause.FENCED) in out


def two_on_one(core) -> tuple[c.StartTurn, c.StartTurn]:
    """Two turns on one worker that executes one at a time."""
    core.trainer()
    worker = core.worker()
    core.end_seeding()
    core.request("0/0/0")
    first = core.one(c.StartTurn)
    core.request("0/0/1")
    second = core.one(c.StartTurn)
    assert first.worker == second.worker == worker
    return first, second


class TestWaitingInAnEngine:
    def test_turn_that_waits_in_a_full_engine_is_not_stalled(self, core) -> None:
        first, second = two_on_one(core)
        for token in range(round(8 * TOKEN_S)):
            core.wait(0.5, beating=("trainer",))
            core.tokens(first, 1, start=token)
            core.beat(first.worker, executing=1, pending=1)
            assert not core.sent(c.AbortTurn)
        assert core.scheduler.turns.live[second.turn].attempt == 1

    def test_its_limit_counts_from_when_the_engine_began_it(self, core) -> None:
        first, second = two_on_one(core)
        for token in range(round(4 * TOKEN_S)):
            core.wait(0.5, beating=("trainer",))
            core.tokens(first, 1, start=token)
            core.beat(first.worker, executing=1, pending=1)
        core.tokens(first, 1, start=token + 1, finish=FinishReason.STOP)
        out = core.wait(TOKEN_S - 0.5, beating=("trainer", second.worker))
        assert not [k for k in out if isinstance(k, c.AbortTurn)]
        out = core.wait(1, beating=("trainer", second.worker))
        assert [k.turn for k in out if isinstance(k, c.AbortTurn)] == [second.turn]

    def test_engine_that_begins_nothing_is_not_excused(self, core) -> None:
        first, second = two_on_one(core)
        core.tokens(first, 1, finish=FinishReason.STOP)
        out: list[c.Command] = []
        for _ in range(round(2 * TOKEN_S) + 2):
            core.beat(first.worker, executing=0, pending=1, progress=7)
            out += core.wait(0.5, beating=("trainer",))
        assert [k.turn for k in out if isinstance(k, c.AbortTurn)] == [second.turn]

    def test_what_was_never_prefilled_is_not_paid_again(self, core) -> None:
        first, second = two_on_one(core)
        core.tokens(first, 3)
        core.beat(first.worker, executing=1, pending=1)
        core.worker("serving")
        core.lease_ended("spot-1")
        again = {k.turn: k.recompute for k in core.sent(c.StartTurn)}
        assert again == {first.turn: True, second.turn: False}


@pytest.fixture
def busy(make_core):
    """A core whose trainer's device stays awake, without credit."""
    core = make_core(seeding=FixedWindow(10**15))
    core.trainer(capacity=0)
    return core


def pass_seconds(core, worker: str, start: c.StartTurn, seconds: int) -> None:
    """The worker goes on with its only turn."""
    for token in range(seconds):
        core.wait(1)
        core.beat("trainer", capacity=0)
        core.tokens(start, 1, start=token)
        core.beat(worker, capacity=1, executing=1)


class TestSaturation:
    def test_run_whose_workers_are_all_busy_goes_on(self, busy) -> None:
        worker = busy.worker(capacity=1)
        busy.request("0/0/0", max_new_tokens=10_000)
        start = busy.one(c.StartTurn)
        busy.request("0/0/1")
        pass_seconds(busy, worker, start, round(3 * QUEUE_S))
        assert busy.scheduler.phase is Phase.RUNNING
        (wait,) = [wait for wait in busy.scheduler.timers.waits() if wait.key == "queue"]
        assert wait.what == "place"

    def test_workers_that_never_come_are_not_waited_for_for_ever(self, busy) -> None:
        busy.request("0/0/0")
        out = busy.offer("spot")
        while not busy.scheduler.failed and busy.now_s < 2 * QUEUE_S:
            for command in out:
                if isinstance(command, c.AcquireLease):
                    busy.grant(command.lease)
                elif isinstance(command, c.ReleaseLease) and command.lease in busy.scheduler.leases.leases:
                    busy.lease_ended(command.lease, EndCause.RELEASED)
                    busy.offer("spot")
            out = busy.wait(1)
            busy.beat("trainer", capacity=0)
        assert "no progress" in busy.scheduler.failed

    def test_worker_that_may_come_is_waited_for(self, busy) -> None:
        busy.request("0/0/0")
        busy.offer("spot")
        assert {wait.what for wait in busy.scheduler.timers.waits() if wait.key == "queue"} == {"place"}

    def test_absence_counts_from_when_the_last_one_left(self, busy) -> None:
        worker = busy.worker(capacity=1)
        busy.request("0/0/0", max_new_tokens=10_000)
        pass_seconds(busy, worker, busy.one(c.StartTurn), round(QUEUE_S))
        busy.lease_ended("spot-1")
        busy.tell(e.LeaseRefused(lease="spot-2", reason="none left"))
        busy.offer("spot", available=0)
        gone_s = busy.now_s
        while not busy.scheduler.failed and busy.now_s < gone_s + 2 * QUEUE_S:
            busy.wait(1)
            busy.beat("trainer", capacity=0)
        assert "no capacity" in busy.scheduler.failed
        assert QUEUE_S <= busy.now_s - gone_s <= QUEUE_S + 2

    @given(asked=st.lists(st.tuples(st.integers(0, 5), st.sampled_from(("0/0/0", "0/0/1"))), min_size=1, max_size=6))
    @settings(max_examples=20, deadline=None)
    def test_where_agents_wait_their_turns_are_given_up_and_the_run_goes_on(self, asked) -> None:
        """Each of them in time; who asks again later, with a worker there, has a turn."""
        core = CoreHarness(seeding=FixedWindow(10**15), driven_outside=True)
        core.trainer(capacity=0)
        core.offer("spot", available=0)
        asked_s, given_up_s = dict[str, float](), dict[str, float]()
        for number, (pause_s, trajectory) in enumerate(asked):
            wait_until_given_up(core, pause_s, given_up_s)
            turn = f"{trajectory}#{number}"
            core.request(trajectory, turn)
            asked_s[turn] = core.now_s
        wait_until_given_up(core, 2 * QUEUE_S, given_up_s)
        assert core.scheduler.phase is Phase.RUNNING
        assert given_up_s.keys() == asked_s.keys()
        assert all(given_up_s[turn] - asked_s[turn] <= QUEUE_S + 2 for turn in asked_s)
        assert not any(wait.key == "queue" for wait in core.scheduler.timers.waits())
        core.worker()
        core.request("0/0/0", "0/0/0#again")
        assert core.one(c.StartTurn).turn == "0/0/0#again"


def wait_until_given_up(core: CoreHarness, seconds: float, given_up_s: dict[str, float]) -> None:
    for _ in range(round(seconds)):
        told = core.wait(1)
        core.beat("trainer", capacity=0)
        for order in told:
            if isinstance(order, c.FailTurn):
                assert order.cause.startswith("no capacity")
                given_up_s.setdefault(order.turn, core.now_s)
