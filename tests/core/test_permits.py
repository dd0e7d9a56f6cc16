"""A trainer whose device other jobs share: it computes by permit, and is parked otherwise."""

import pytest

from elastic.core import commands as c
from elastic.core import events as e
from elastic.core.trainer_permit import PermitState
from elastic.core.types import NS_PER_S, Account, EndCause, Offer, WorkerRole
from tests.core.conftest import CoreHarness

TRAINER = Offer(
    provider="trainer", role=WorkerRole.TRAINER, available=1, usd_per_gpu_hour=10.0, grant_within_s=50.0, by_permit=True
)


class Shared(CoreHarness):
    def grant_permit(self, permit: int, for_s: float = 100.0) -> list[c.Command]:
        return self.tell(e.PermitGranted(permit=permit, deadline_ns=round((self.now_s + for_s) * NS_PER_S)))

    def recall(self, permit: int, in_s: float = 10.0) -> list[c.Command]:
        return self.tell(e.PermitRecalled(permit=permit, until_ns=round((self.now_s + in_s) * NS_PER_S)))

    def begin(self) -> None:
        """The trainer has booted under a permit, seeded, and yielded it."""
        self.tell(e.OfferChanged(offer=TRAINER))
        self.grant("trainer-1", workers=("trainer",))
        assert self.sent(c.AskPermit)
        self.grant_permit(1)
        self.join("trainer", 0)
        self.beat("trainer")
        self.worker()
        out = self.wait(1.5, beating=("trainer", "spot-1/w"))
        assert any(isinstance(k, c.SleepWorker) for k in out)
        self.tell(e.WorkerSlept(worker="trainer", epoch=1))
        assert self.one(c.YieldPermit).permit == 1

    def roll_out(self) -> None:
        for number in range(2):
            self.tell(e.TrajectoryFinished(trajectory=f"0/0/{number}", reward=float(number), tokens=1))

    @property
    def state(self) -> PermitState:
        return self.scheduler.permit.state


@pytest.fixture
def core() -> Shared:
    core = Shared(steps=2)
    core.begin()
    return core


def test_a_step_is_trained_under_a_permit_that_is_yielded_after_the_update(core: Shared) -> None:
    assert core.state is PermitState.NONE
    core.roll_out()
    assert core.sent(c.AskPermit)
    assert not core.sent(c.TrainGroup)
    core.grant_permit(2)
    assert core.one(c.TrainGroup).group == "0/0"
    core.tell(e.GroupTrained(worker="trainer", epoch=1, group="0/0"))
    assert core.sent(c.UpdateWeights)
    core.tell(e.WeightsPublished(worker="trainer", epoch=1, version=1))
    assert core.sent(c.WakeWorker), "it seeds while it has the permit"
    core.recall(2)
    assert core.sent(c.SleepWorker)
    core.tell(e.WorkerSlept(worker="trainer", epoch=1))
    assert core.one(c.YieldPermit) == c.YieldPermit(permit=2, finished=True)


def test_a_recall_stops_training_between_groups() -> None:
    core = Shared(steps=2, groups=2)
    core.begin()
    for group in range(2):
        for number in range(2):
            core.tell(e.TrajectoryFinished(trajectory=f"0/{group}/{number}", reward=float(number), tokens=1))
    core.grant_permit(2)
    core.recall(2)
    assert not core.out
    core.tell(e.GroupTrained(worker="trainer", epoch=1, group="0/0"))
    assert core.one(c.YieldPermit) == c.YieldPermit(permit=2, finished=False)
    assert core.sent(c.AskPermit), "the other group is left"
    core.grant_permit(3)
    assert core.one(c.TrainGroup).group == "0/1"


def test_nothing_counts_after_the_permit_until_it_is_said_again_under_the_next(core: Shared) -> None:
    core.roll_out()
    core.grant_permit(2)
    core.tell(e.PermitEnded(permit=2, cause="not yielded in time"))
    assert core.sent(c.AskPermit)
    core.tell(e.GroupTrained(worker="trainer", epoch=1, group="0/0"))
    assert core.scheduler.training == "0/0"
    core.grant_permit(3)
    assert core.one(c.TrainGroup).group == "0/0"
    core.tell(e.GroupTrained(worker="trainer", epoch=1, group="0/0"))
    assert core.scheduler.training is None


def test_a_permit_ends_by_itself_at_its_time(core: Shared) -> None:
    core.roll_out()
    core.grant_permit(2, for_s=5.0)
    core.wait(5.5, beating=("trainer", "spot-1/w"))
    assert core.state is PermitState.ASKED
    assert core.scheduler.training == "0/0"


def test_turns_that_the_trainer_generates_go_on_elsewhere_when_its_permit_is_over() -> None:
    core = Shared()
    core.tell(e.OfferChanged(offer=TRAINER))
    core.grant("trainer-1", workers=("trainer",))
    core.grant_permit(1)
    core.join("trainer", 0)
    core.beat("trainer")
    core.request("0/0/0")
    start = core.one(c.StartTurn)
    core.tell(e.PermitEnded(permit=1, cause="taken"))
    assert core.sent(c.SleepWorker)
    assert core.scheduler.turns.head() is not None
    core.tokens(start, 2)
    assert not core.sent(c.AcceptTokens)


def test_what_is_granted_and_not_needed_any_more_is_yielded(core: Shared) -> None:
    core.roll_out()
    core.lease_ended("trainer-1", EndCause.LOST)
    assert core.one(c.YieldPermit).permit is None
    core.grant_permit(2)
    assert core.one(c.YieldPermit) == c.YieldPermit(permit=2, finished=True)
    core.grant_permit(2)
    assert not core.out


def test_who_waits_for_a_permit_does_so_by_name_until_a_deadline(core: Shared) -> None:
    core.roll_out()
    (wait,) = (w for w in core.scheduler.timers.waits() if w.what == "permit")
    assert wait.until_ns - wait.since_ns == 50 * NS_PER_S
    core.wait(51.0, beating=("trainer", "spot-1/w"))
    assert "not permitted" in core.scheduler.failed


def test_a_trainer_that_comes_without_a_permit_is_put_to_sleep_and_the_run_begins() -> None:
    core = Shared()
    core.tell(e.OfferChanged(offer=TRAINER))
    core.grant("trainer-1", workers=("trainer",))
    core.join("trainer", 0)
    assert core.sent(c.SleepWorker)
    assert core.sent(c.StartGroup)


def test_parked_time_has_no_price_and_switching_is_overhead(core: Shared) -> None:
    book = core.scheduler.ledger.books["trainer"]
    before = book.cost_nano_usd(core.scheduler.now_ns)
    core.now_s += 2.0
    accounts_ns = {Account.IDLE: 1, Account.PARKED: 15 * NS_PER_S // 10, Account.SWITCHING: NS_PER_S // 2}
    report = e.WorkerReported(
        worker="trainer",
        epoch=1,
        capacity_turns=0,
        pending=0,
        executing=0,
        progress=1,
        accounts_ns=accounts_ns,
        decoded_tokens=0,
    )
    core.tell(report)
    cost = book.cost_nano_usd(core.scheduler.now_ns) - before
    assert cost == pytest.approx(0.5 * 10.0 / 3600 * 1e9, rel=1e-6)
    assert sum(book.accounts_ns.values()) == book.cursor_ns - book.opened_ns


def test_nobody_else_is_believed_to_be_parked(core: Shared) -> None:
    book = core.scheduler.ledger.books["spot-1/w"]
    core.now_s += 2.0
    core.scheduler.ledger.report("spot-1/w", {Account.PARKED: NS_PER_S}, 0, round(core.now_s * NS_PER_S))
    assert book.unpriced_ns == 0
    assert book.accounts_ns[Account.IDLE] >= NS_PER_S - 1
