"""Leases that are held only while there are rollouts to do, and requests that wait for a turn on a shared pool."""

from typing import Any

import msgspec
import pytest

from elastic.core import commands as c
from elastic.core import events as e
from elastic.core import saved_state
from elastic.core.lease_manager import NO_ROLLOUTS
from elastic.core.ledger import CLOSED_KEPT
from elastic.core.policy import HoldingPolicy
from elastic.core.scheduler import Phase
from elastic.core.types import NS_PER_S, EndCause, EvaluationSet, FinishReason, Offer, PlannedEvaluation, WorkerRole
from policies.provisioning import HoldForRollouts
from tests.core.conftest import CoreHarness

SPOT = Offer(provider="spot", role=WorkerRole.ELASTIC, available=1, usd_per_gpu_hour=2.0)
POOL = msgspec.structs.replace(SPOT, provider="pool", grant_within_s=100.0)


class Holding(CoreHarness):
    def __init__(self, policy: HoldingPolicy | None, steps: int = 3, **plan: Any) -> None:
        super().__init__(steps=steps, **plan)
        run, _ = self.scheduler.pieces
        run.policies = msgspec.structs.replace(run.policies, holding=policy)

    def tell_offer(self, offer: Offer) -> list[c.Command]:
        return self.tell(e.OfferChanged(offer=offer))

    def begin(self) -> None:
        """The trainer's device sleeps, and a worker is there."""
        self.trainer()
        self.worker()
        self.end_seeding()

    def roll_out(self) -> None:
        """The step's rollouts come to their end."""
        step = self.scheduler.step
        assert step is not None
        for group in list(step.groups.values()):
            for number, trajectory in enumerate(group.unfinished):
                self.tell(e.TrajectoryFinished(trajectory=trajectory, reward=float(number), tokens=1))

    def train(self) -> None:
        """The trainer does what it is told until the step is over."""
        order, step = self.scheduler.trainer_order, self.scheduler.step
        assert isinstance(order, c.TrainGroup)
        self.tell(e.GroupTrained(worker="trainer", epoch=1, group=order.group))
        assert step is not None
        self.tell(e.WeightsPublished(worker="trainer", epoch=1, version=step.version + 1))

    def held(self, provider: str = "spot") -> int:
        return sum(not x.goes for x in self.scheduler.leases.leases.values() if x.provider == provider)

    def give_back(self) -> None:
        """Everything that is to be given back has gone."""
        for lease in [x for x in self.scheduler.leases.leases.values() if x.goes]:
            self.lease_ended(lease.id, EndCause.RELEASED)
            self.tell_offer(SPOT)


def test_leases_are_given_back_when_no_rollouts_are_left_and_asked_for_with_the_next() -> None:
    core = Holding(HoldForRollouts(foreseen=False))
    core.begin()
    core.roll_out()
    assert core.one(c.DrainWorker).reason == NO_ROLLOUTS
    core.give_back()
    assert core.held() == 0
    core.wait(5.0, beating=("trainer",))
    assert core.held() == 0
    core.train()
    assert core.one(c.AcquireLease).provider == "spot"


def test_leases_are_held_while_a_trajectory_may_still_ask_for_a_turn() -> None:
    core = Holding(HoldForRollouts(foreseen=False))
    core.begin()
    core.request("0/0/0")
    core.tell(e.TrajectoryFinished(trajectory="0/0/1", reward=1.0, tokens=1))
    assert core.held() == 1
    (turn,) = core.scheduler.turns.live.values()
    start = c.StartTurn(worker=turn.worker or "", epoch=1, turn=turn.id, attempt=turn.attempt, slot=turn.slot, start=0)
    core.tokens(start, 3, finish=FinishReason.STOP)
    assert core.held() == 1
    core.tell(e.RewardRequested(trajectory="0/0/0", tokens=3))
    assert core.held() == 0


def test_what_would_be_ready_again_too_late_is_kept_and_the_rest_comes_in_time() -> None:
    """Getting ready takes no time here: after the first pause, whose length nobody knew, everything can be foreseen."""
    core = Holding(HoldForRollouts())
    core.begin()
    core.roll_out()
    assert core.held() == 1
    core.wait(8.0, beating=tuple(core.scheduler.fleet.workers))
    core.train()
    core.end_seeding()
    core.roll_out()
    assert core.held() == 0
    core.give_back()
    core.wait(7.0, beating=("trainer",))
    assert core.held() == 0
    core.wait(2.0, beating=("trainer",))
    assert core.held() == 1
    assert core.scheduler.leases.lull_since_ns is not None


def test_in_the_last_step_leases_are_given_back_for_good() -> None:
    core = Holding(HoldForRollouts(), steps=1)
    core.begin()
    core.roll_out()
    assert core.held() == 0


def test_leases_are_held_for_the_evaluation_behind_the_last_step() -> None:
    held_out = EvaluationSet(environment="held", tasks=1)
    at_end = PlannedEvaluation(sets=(held_out,), samples=1, timeout_ns=NS_PER_S, at_start=False)
    core = Holding(HoldForRollouts(), steps=1, evaluation=at_end)
    core.begin()
    core.roll_out()
    assert core.held() == 1
    core.train()
    assert core.one(c.StartGroup).group == "e1/0"


def test_a_request_for_which_there_are_no_rollouts_any_more_is_no_failure() -> None:
    core = Holding(HoldForRollouts(foreseen=False))
    core.begin()
    core.lease_ended("spot-1")
    core.tell_offer(SPOT)
    assert core.scheduler.leases.asked("spot") == 1
    core.roll_out()
    assert core.one(c.ReleaseLease).reason == NO_ROLLOUTS
    core.tell(e.LeaseRefused(lease="spot-2", reason="withdrawn"))
    assert not core.scheduler.timers.waiting("back-off", "spot")
    core.train()
    assert core.one(c.AcquireLease).lease == "spot-3"


def test_without_the_policy_leases_are_held_for_the_whole_run() -> None:
    core = Holding(None)
    core.begin()
    core.roll_out()
    assert core.held() == 1
    core.train()
    assert core.held() == 1


# Turns on a shared pool


def alone(core: CoreHarness) -> None:
    """The trainer's device sleeps, since a worker was there to help, and that is gone."""
    core.trainer()
    core.worker()
    core.end_seeding()
    core.lease_ended("spot-1")


def test_a_turn_is_waited_for_by_its_name_and_neither_the_queue_nor_reseeding_ends_that() -> None:
    core = CoreHarness()
    alone(core)
    core.tell(e.OfferChanged(offer=POOL))
    core.request("0/0/0")
    (wait,) = (w for w in core.scheduler.timers.waits() if w.what == "slice")
    assert (wait.key, wait.until_ns - wait.since_ns) == ("pool-1", 100 * NS_PER_S)
    out = core.wait(95.0, beating=("trainer",))
    assert not [k for k in out if isinstance(k, c.WakeWorker | c.ReleaseLease)]
    assert core.scheduler.phase is Phase.RUNNING
    core.grant("pool-1")
    core.join("pool-1/w")
    core.beat("pool-1/w")
    assert core.one(c.StartTurn).worker == "pool-1/w"


def test_a_turn_that_does_not_come_is_given_up_at_its_deadline() -> None:
    core = CoreHarness()
    alone(core)
    core.tell(e.OfferChanged(offer=POOL))
    core.request("0/0/0")
    out = core.wait(102.0, beating=("trainer",))
    assert [k.reason for k in out if isinstance(k, c.ReleaseLease)][:1] == ["its turn did not come in time"]
    assert any(isinstance(k, c.WakeWorker) for k in out), "nobody else could take the queued turn"


def test_a_shared_pool_hears_how_far_the_rollouts_are() -> None:
    core = CoreHarness(group_size=3)
    core.tell(e.OfferChanged(offer=POOL))
    core.trainer()
    assert core.scheduler.step is not None
    told = [(core.one(c.TellProgress).done, core.one(c.TellProgress).of)] if core.sent(c.TellProgress) else []
    for number in range(3):
        core.tell(e.TrajectoryFinished(trajectory=f"0/0/{number}", reward=float(number), tokens=1))
        told += [(k.done, k.of) for k in core.sent(c.TellProgress)]
    assert told[-3:] == [(1, 3), (2, 3), (3, 3)]


# Thousands of slices


def test_what_a_run_remembers_does_not_grow_with_the_leases_that_have_ended() -> None:
    """Some hundred leases come and go: growth shows over many alone."""
    core = CoreHarness()
    alone(core)
    core.request("0/0/0", max_new_tokens=10**9)
    early: list[int] = []
    late: list[int] = []
    (turn,) = core.scheduler.turns.live.values()
    most = 2 * CLOSED_KEPT + 8
    for number in range(2, most + 2):
        core.now_s += 0.01
        core.lease_ended(f"spot-{number - 1}", EndCause.EXPIRED)
        core.offer("spot")
        core.tell(e.LeaseGranted(lease=f"spot-{number}", workers=(f"spot-{number}",)))
        core.join(f"spot-{number}")
        core.beat("trainer")
        core.beat(f"spot-{number}")
        assert turn.worker == f"spot-{number}"
        core.tokens(
            c.StartTurn(
                worker=f"spot-{number}",
                epoch=1,
                turn=turn.id,
                attempt=turn.attempt,
                slot=turn.slot,
                start=turn.accepted,
            ),
            1,
        )
        # Sizes go up and down by a thirtieth every thirty leases or so, with what objects share.
        for sizes, begin in ((early, most // 2), (late, most - 39)):
            if begin <= number < begin + 40 and (number - begin) % 3 == 0:
                sizes.append(len(saved_state.save(core.scheduler)))
    ledger = core.scheduler.ledger
    assert len(ledger.books) <= CLOSED_KEPT + 3
    assert ledger.folded["spot"].books == most - CLOSED_KEPT
    assert ledger.folded["spot"].nano_usd > 0
    assert ledger.imbalance_ns() == 0
    assert max(late) <= 1.02 * max(early)
    assert turn.accepted == most
    whole_nano_usd = round(core.scheduler.now_ns * 2.0 / 3600)
    assert 0.5 < ledger.bill_nano_usd(core.scheduler.now_ns)["spot"] / whole_nano_usd <= 1.0


@pytest.mark.parametrize("worker", ["spot-1", "somebody"])
def test_a_workers_name_counts_once_also_after_its_book_is_folded(worker: str) -> None:
    core = CoreHarness()
    ledger = core.scheduler.ledger
    ledger.open("spot-1", worker, "spot", 1, 2.0, 0)
    ledger.close(worker, 1, clean=True)
    for number in range(2, CLOSED_KEPT + 4):
        ledger.open(f"spot-{number}", f"spot-{number}", "spot", 1, 2.0, number)
        ledger.close(f"spot-{number}", number, clean=True)
    assert worker not in ledger.books
    assert ledger.knows(worker) is (worker == "somebody")
