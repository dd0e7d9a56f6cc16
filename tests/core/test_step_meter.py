"""The step's meter, and what of it comes into the step's record."""

from elastic.core import commands as c
from elastic.core import events as e
from elastic.core.policy import SeedingPlan
from elastic.core.step_meter import StepMeter
from elastic.core.types import NS_PER_S, FinishReason
from policies.provisioning import MarginalValue


def test_what_was_seen_holds_until_the_next_look() -> None:
    meter = StepMeter(100)
    meter.look(110, training=True, waiting=False, workers=2)
    meter.look(130, training=False, waiting=True, workers=1)
    meter.look(160, training=False, waiting=False, workers=0)
    meter.look(200, training=True, waiting=True, workers=9)
    assert (meter.train_ns, meter.train_wait_ns) == (20, 30)
    assert meter.worker_ns == 2 * 20 + 30


def test_record_tells_who_waited_for_whom(make_core) -> None:
    """The trainer waits a second for the second of two trajectories; the worker then waits for training and update."""
    core = make_core()
    core.trainer()
    worker = core.worker(capacity=4)
    core.end_seeding()
    began_s = core.now_s
    for trajectory in ("0/0/0", "0/0/1"):
        core.request(trajectory)
        core.now_s += 0.5
        core.tokens(core.one(c.StartTurn), 1, finish=FinishReason.STOP)
        core.tell(e.TrajectoryFinished(trajectory=trajectory, reward=float(trajectory[-1]), tokens=1))
    core.now_s += 0.25
    core.tell(e.GroupTrained(worker="trainer", epoch=1, group="0/0"))
    core.now_s += 0.25
    core.tell(e.WeightsPublished(worker="trainer", epoch=1, version=1))
    (record,) = core.scheduler.history
    assert began_s > 0
    assert record.seeding_ns == 1 * NS_PER_S
    assert record.train_wait_ns == 1 * NS_PER_S
    assert record.train_ns == NS_PER_S // 2
    assert record.remote_wait_ns == NS_PER_S // 2
    assert 0 < record.workers_mean <= record.workers_end == 1
    assert worker in core.scheduler.fleet.workers


def test_seeding_policy_sees_each_step_and_its_bound_is_kept(make_core) -> None:
    class Narrowing:
        def first(self) -> SeedingPlan:
            return SeedingPlan(window_ns=0)

        def following(self, plan: SeedingPlan, record: object) -> SeedingPlan:
            return SeedingPlan(window_ns=plan.window_ns + 7, worker_bound=1)

    core = make_core(steps=2, seeding=Narrowing())
    core.trainer()
    core.worker()
    core.tell(e.WorkerSlept(worker="trainer", epoch=1))
    for trajectory in ("0/0/0", "0/0/1"):
        core.tell(e.TrajectoryFinished(trajectory=trajectory, reward=float(trajectory[-1]), tokens=1))
    core.tell(e.GroupTrained(worker="trainer", epoch=1, group="0/0"))
    core.tell(e.WeightsPublished(worker="trainer", epoch=1, version=1))
    assert core.scheduler.seeding_plan == SeedingPlan(window_ns=7, worker_bound=1)
    assert core.scheduler.leases.worker_bound == 1


def test_providers_are_asked_again_when_more_workers_are_worth_having(make_core) -> None:
    class Widening:
        def first(self) -> SeedingPlan:
            return SeedingPlan(window_ns=0, worker_bound=1)

        def following(self, plan: SeedingPlan, record: object) -> SeedingPlan:
            return SeedingPlan(window_ns=0, worker_bound=(plan.worker_bound or 0) + 1)

    core = make_core(steps=2, seeding=Widening(), provisioning=MarginalValue())
    core.scheduler.leases.worker_bound = 1
    core.trainer()
    core.offer("spot", available=3)
    assert [k.lease for k in core.sent(c.AcquireLease)] == ["spot-1"]
    core.grant("spot-1")
    core.join("spot-1/w")
    core.beat("spot-1/w")
    core.offer("spot", available=2)
    assert not core.sent(c.AcquireLease)
    core.tell(e.WorkerSlept(worker="trainer", epoch=1))
    for trajectory in ("0/0/0", "0/0/1"):
        core.tell(e.TrajectoryFinished(trajectory=trajectory, reward=float(trajectory[-1]), tokens=1))
    core.tell(e.GroupTrained(worker="trainer", epoch=1, group="0/0"))
    core.tell(e.WeightsPublished(worker="trainer", epoch=1, version=1))
    assert [k.lease for k in core.sent(c.AcquireLease)] == ["spot-2"]
