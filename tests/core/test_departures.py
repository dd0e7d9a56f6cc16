"""A worker whose end is known is of use until then, and has handed over everything when it comes."""

import pytest

from elastic.core import commands as c
from elastic.core import events as e
from elastic.core.demand import Demand
from elastic.core.types import NS_PER_S, Account, EndCause, FinishReason, TurnState, WorkerState
from elastic.testing.faults.core.settings import SMALL_LIMITS

NOTICE_S = 120.0
MARGIN_S = 2 * SMALL_LIMITS.handover_timeout_ns / NS_PER_S
SPEED = 10
"""Tokens a second of each turn."""
A, B, C = "0/0/0", "0/0/1", "0/0/2"


class Fleet:
    """Two workers, on one of which turns run at `SPEED`; turns are known to have 100 tokens, or 5000."""

    def __init__(self, make_core) -> None:
        self.core = core = make_core(group_size=8)
        core.trainer()
        self.leaving = core.worker("spot", capacity=4)
        self.other = core.worker("serving", capacity=0)
        core.end_seeding()
        self.closed = True
        """Whether the other worker takes nothing."""
        self.progress = 0
        self.starts: dict[str, c.StartTurn] = {}
        self.at: dict[str, int] = {}
        for tag, length in (("short", 100), ("long", 5000)):
            demand = core.scheduler.turns.demands[tag] = Demand()
            demand.note(0, length)
        self.decoded = 0
        self.report(self.other, 0)

    def request(self, trajectory: str, tag: str) -> list[c.Command]:
        return self.take(
            self.core.tell(
                e.TurnRequested(
                    turn=f"{trajectory}#0", trajectory=trajectory, prompt_tokens=10, max_new_tokens=6000, tag=tag
                )
            )
        )

    def take(self, out: list[c.Command]) -> list[c.Command]:
        for command in out:
            if isinstance(command, c.StartTurn):
                self.starts[command.turn], self.at[command.turn] = command, command.start
            elif isinstance(command, c.AbortTurn):
                ended = self.starts.pop(command.turn)
                self.core.tokens(ended, 0, start=self.at[command.turn], finish=FinishReason.ABORTED)
                self.take(self.core.out)
        return out

    def go_on(self, seconds: int, finishing: tuple[str, ...] = ()) -> list[c.Command]:
        """Every turn that runs gets its tokens, second by second."""
        out: list[c.Command] = []
        for _ in range(seconds):
            out += self.take(self.core.wait(1, beating=("trainer",)))
            for turn, start in list(self.starts.items()):
                self.core.tokens(start, SPEED, start=self.at[turn])
                self.at[turn] += SPEED
                out += self.take(self.core.out)
            out += self.report(self.other, 0 if self.closed else 4)
            if self.core.scheduler.fleet.workers.get(self.leaving):
                out += self.report(self.leaving, 4)
        return out

    def report(self, worker: str, capacity: int) -> list[c.Command]:
        running = [s for s in self.starts.values() if s.worker == worker]
        self.progress += SPEED
        self.decoded += SPEED * len(running)
        return self.take(
            self.core.tell(
                e.WorkerReported(
                    worker=worker,
                    epoch=1,
                    capacity_turns=capacity,
                    pending=0,
                    executing=len(running),
                    progress=self.progress,
                    accounts_ns={Account.DECODE: self.progress * NS_PER_S // SPEED},
                    decoded_tokens=self.decoded,
                )
            )
        )

    def notice(self, seconds: float | None = NOTICE_S) -> list[c.Command]:
        deadline_ns = None if seconds is None else round((self.core.now_s + seconds) * NS_PER_S)
        return self.take(self.core.tell(e.LeaseNotice(lease="spot-1", deadline_ns=deadline_ns, reason="preemption")))


@pytest.fixture
def fleet(make_core) -> Fleet:
    fleet = Fleet(make_core)
    fleet.request(A, "long")
    fleet.go_on(3)
    return fleet


def aborted(out: list[c.Command]) -> list[str]:
    return [command.turn for command in out if isinstance(command, c.AbortTurn)]


def test_turn_that_ends_in_time_ends_where_it_is(fleet) -> None:
    fleet.request(B, "short")
    fleet.go_on(1)
    out = fleet.notice() + fleet.go_on(8)
    assert not aborted(out)
    start = fleet.starts.pop(f"{B}#0")
    fleet.core.tokens(start, SPEED, start=fleet.at[f"{B}#0"], finish=FinishReason.STOP)
    assert fleet.core.one(c.FinishTurn).turn == f"{B}#0"


def test_nothing_moves_to_wait_with_others(fleet) -> None:
    """Contexts take all of the notice to compute elsewhere: all but one would leave at once, were there a place."""
    core = fleet.core
    profile = core.scheduler.profiles[core.scheduler.fleet.workers[fleet.leaving].kind]
    profile.note_prefill(1, 100 * NS_PER_S)
    fleet.request(B, "long")
    for trajectory in (C, "0/0/3", "0/0/4", "0/0/5"):
        fleet.request(trajectory, "long")
    assert core.scheduler.turns.head() is not None
    assert not aborted(fleet.notice() + fleet.go_on(20))
    fleet.closed = False
    assert aborted(fleet.go_on(3))


def test_turn_that_does_not_is_called_back_late_and_in_time(fleet) -> None:
    begun_s = fleet.core.now_s
    out = fleet.notice()
    assert not aborted(out)
    while not aborted(out):
        assert fleet.core.now_s < begun_s + NOTICE_S
        out = fleet.go_on(1)
    left_s = begun_s + NOTICE_S - fleet.core.now_s
    assert MARGIN_S - 1 <= left_s <= 0.2 * NOTICE_S
    assert fleet.core.scheduler.turns.live[f"{A}#0"].accepted >= SPEED * (NOTICE_S - MARGIN_S - 2)
    assert any(isinstance(command, c.DrainWorker) for command in out)


def test_what_ends_in_time_may_begin_there_and_nothing_else(fleet) -> None:
    fleet.notice()
    assert [k.worker for k in fleet.request(B, "short") if isinstance(k, c.StartTurn)] == [fleet.leaving]
    assert not [k for k in fleet.request(C, "long") if isinstance(k, c.StartTurn)]
    fleet.closed = False
    out = fleet.report(fleet.other, 4)
    assert [k.worker for k in out if isinstance(k, c.StartTurn)] == [fleet.other]


def test_nothing_begins_there_at_the_end(fleet) -> None:
    fleet.notice(seconds=10.0)
    assert not [k for k in fleet.request(B, "short") if isinstance(k, c.StartTurn)]


def test_notice_without_an_end_moves_nothing(fleet) -> None:
    out = fleet.notice(seconds=None) + fleet.go_on(150)
    assert not aborted(out)
    assert fleet.core.scheduler.fleet.workers[fleet.leaving].leaves_ns is None
    assert fleet.core.scheduler.leases.leases["spot-1"].expires_at_ns is None


def test_earlier_end_counts(fleet) -> None:
    fleet.notice()
    fleet.notice(seconds=30.0)
    out = fleet.go_on(30)
    assert aborted(out) == [f"{A}#0"]
    assert fleet.core.scheduler.turns.live[f"{A}#0"].state is TurnState.QUEUED


def test_leaving_worker_that_is_cut_off_may_come_back(fleet) -> None:
    fleet.notice()
    fleet.take(fleet.core.tell(e.WorkerDisconnected(worker=fleet.leaving, epoch=1)))
    fleet.core.join(fleet.leaving, epoch=2)
    record = fleet.core.scheduler.fleet.workers[fleet.leaving]
    assert record.state is WorkerState.READY
    assert record.leaves_ns is not None


def test_without_a_leaving_worker_s_help_the_trainer_takes_turns_back(fleet) -> None:
    """What may not begin on the leaving worker is not waited with until it has left."""
    fleet.notice()
    fleet.request(C, "long")
    out = fleet.go_on(2)
    assert any(isinstance(command, c.WakeWorker) for command in out)


def test_lease_that_ends_by_time_is_used_to_its_end(make_core) -> None:
    fleet = Fleet(make_core)
    fleet.core.lease_ended("spot-1", EndCause.RELEASED)
    fleet.leaving = fleet.core.worker("spot", expires_s=fleet.core.now_s + 60)
    assert fleet.leaving == "spot-2/w"
    out = fleet.request(A, "long") + fleet.go_on(56)
    assert not aborted(out)
    assert aborted(fleet.go_on(4)) == [f"{A}#0"]
