"""Whoever holds a worker's session can harm that worker's turns and nothing else (invariant 14)."""

import pytest

from elastic.core import commands as c
from elastic.core import events as e
from elastic.core.digest import digest
from elastic.core.scheduler import Phase
from elastic.core.types import EndCause

OTHERS = [("spot-1/w", 1), ("nobody", 1), ("trainer", 0), ("trainer", 2)]
"""A worker, one of another run, and the trainer's worker of epochs that are not the current one."""


def about_to_train(core) -> str:
    """The trainer has a group to train, and another worker is there; returns the group."""
    core.trainer()
    core.worker()
    for member, reward in enumerate((0.0, 1.0)):
        core.tell(e.TrajectoryFinished(trajectory=f"0/0/{member}", reward=reward, tokens=1))
    core.tell(e.WorkerSlept(worker="trainer", epoch=1))
    return core.one(c.TrainGroup).group


@pytest.mark.parametrize(("worker", "epoch"), OTHERS)
def test_nobody_but_the_trainers_worker_of_now_trains_steps_or_fails(make_core, worker: str, epoch: int) -> None:
    core = make_core(steps=2)
    group = about_to_train(core)
    assert not core.tell(e.GroupTrained(worker=worker, epoch=epoch, group=group))
    assert core.scheduler.training == group
    core.tell(e.GroupTrained(worker="trainer", epoch=1, group=group))
    assert core.one(c.UpdateWeights).version == 1
    assert not core.tell(e.WeightsPublished(worker=worker, epoch=epoch, version=1))
    assert core.scheduler.version == 0
    assert not core.tell(e.TrainerFailed(worker=worker, epoch=epoch, error="because I say so"))
    assert core.scheduler.phase is Phase.RUNNING
    core.tell(e.WeightsPublished(worker="trainer", epoch=1, version=1))
    assert core.scheduler.version == 1


def test_a_trainer_that_fails_ends_the_run(core) -> None:
    core.trainer()
    core.tell(e.TrainerFailed(worker="trainer", epoch=1, error="no memory left"))
    assert core.scheduler.failed == "the trainer failed: no memory left"


def test_a_barred_workers_turns_move_and_its_lease_is_given_back_for_good(make_core) -> None:
    core = make_core(group_size=2)
    core.trainer(capacity=1)
    worker = core.worker(capacity=2)
    for member in range(2):
        core.request(f"0/0/{member}")
    assert any(record.worker == worker for record in core.scheduler.turns.live.values())
    out = core.tell(e.WorkerBarred(worker=worker, epoch=1, cause="log-probability above 0"))
    assert c.FenceWorker(worker=worker, reason=EndCause.BARRED) in out
    assert c.BarLease(lease="spot-1", provider="spot") in out
    assert [k.lease for k in out if isinstance(k, c.ReleaseLease)] == ["spot-1"]
    assert all(record.worker != worker for record in core.scheduler.turns.live.values())
    assert core.scheduler.phase is Phase.RUNNING


def test_the_others_of_a_lease_and_of_a_provider_go_on(core) -> None:
    core.trainer()
    (acquire,) = [k for k in core.offer("spot", available=2) if isinstance(k, c.AcquireLease)][:1]
    core.grant(acquire.lease, workers=("byzantine", "honest"))
    for worker in ("byzantine", "honest"):
        core.join(worker)
        core.beat(worker)
    out = core.tell(e.WorkerBarred(worker="byzantine", epoch=1, cause="capacity"))
    assert not [k for k in out if isinstance(k, c.ReleaseLease)]
    assert core.scheduler.fleet.workers["honest"].connected
    assert [k.provider for k in core.offer("spot", available=2) if isinstance(k, c.AcquireLease)]


@pytest.mark.parametrize(("worker", "epoch"), [("nobody", 1), ("spot-1/w", 0)])
def test_barring_an_unknown_worker_or_a_former_epoch_changes_nothing(core, worker: str, epoch: int) -> None:
    core.trainer()
    core.worker()
    before = digest(core.scheduler)
    assert not core.tell(e.WorkerBarred(worker=worker, epoch=epoch, cause="lies"))
    assert digest(core.scheduler) == before


def test_a_worker_that_is_barred_before_it_was_ready_is_given_back(core) -> None:
    core.trainer()
    acquire = core.offer("spot")[-1]
    core.grant(acquire.lease)
    out = core.tell(e.WorkerBarred(worker=f"{acquire.lease}/w", epoch=1, cause="Tokens before Ready"))
    assert [k.lease for k in out if isinstance(k, c.ReleaseLease)] == [acquire.lease]


def test_a_trainer_that_cannot_be_believed_ends_the_run(core) -> None:
    core.trainer()
    core.tell(e.WorkerBarred(worker="trainer", epoch=1, cause="accounts of more time than has passed"))
    assert "accounts of more time than has passed" in core.scheduler.failed
