"""Whoever holds a worker's session can harm that worker's turns and nothing else (invariant 14)."""

import pytest

from elastic.core import commands as c
from elastic.core import events as e
from elastic.core.digest import digest
from elastic.core.scheduler import Phase
from elastic.core.types import EndCause

OTHERS = [("spot-1/w", 1), ("nobody", 1), ("trainer", 0), ("trainer", 2)]
"""A worker, a stranger, and the trainer's worker of epochs that are not the current one."""


def about_to_train(desk) -> str:
    """The trainer has a group to train, and another worker is there; returns the group."""
    desk.trainer()
    desk.worker()
    for member, reward in enumerate((0.0, 1.0)):
        desk.tell(e.TrajectoryFinished(trajectory=f"0/0/{member}", reward=reward, tokens=1))
    desk.tell(e.WorkerSlept(worker="trainer", epoch=1))
    return desk.one(c.TrainGroup).group


@pytest.mark.parametrize(("worker", "epoch"), OTHERS)
def test_nobody_but_the_trainers_worker_of_now_trains_steps_or_fails(make_desk, worker: str, epoch: int) -> None:
    desk = make_desk(steps=2)
    group = about_to_train(desk)
    assert not desk.tell(e.GroupTrained(worker=worker, epoch=epoch, group=group))
    assert desk.scheduler.training == group
    desk.tell(e.GroupTrained(worker="trainer", epoch=1, group=group))
    assert desk.one(c.UpdateWeights).version == 1
    assert not desk.tell(e.WeightsPublished(worker=worker, epoch=epoch, version=1))
    assert desk.scheduler.version == 0
    assert not desk.tell(e.TrainerFailed(worker=worker, epoch=epoch, error="because I say so"))
    assert desk.scheduler.phase is Phase.RUNNING
    desk.tell(e.WeightsPublished(worker="trainer", epoch=1, version=1))
    assert desk.scheduler.version == 1


def test_a_trainer_that_fails_ends_the_run(desk) -> None:
    desk.trainer()
    desk.tell(e.TrainerFailed(worker="trainer", epoch=1, error="no memory left"))
    assert desk.scheduler.failed == "the trainer failed: no memory left"


def test_a_barred_workers_turns_move_and_its_lease_is_given_back_for_good(make_desk) -> None:
    desk = make_desk(group_size=2)
    desk.trainer(capacity=1)
    worker = desk.worker(capacity=2)
    for member in range(2):
        desk.request(f"0/0/{member}")
    assert any(record.worker == worker for record in desk.scheduler.turns.live.values())
    out = desk.tell(e.WorkerBarred(worker=worker, epoch=1, cause="log-probability above 0"))
    assert c.FenceWorker(worker=worker, reason=EndCause.BARRED) in out
    assert c.BarLease(lease="spot-1", provider="spot") in out
    assert [k.lease for k in out if isinstance(k, c.ReleaseLease)] == ["spot-1"]
    assert all(record.worker != worker for record in desk.scheduler.turns.live.values())
    assert desk.scheduler.phase is Phase.RUNNING


def test_the_others_of_a_lease_and_of_a_provider_go_on(desk) -> None:
    desk.trainer()
    (acquire,) = [k for k in desk.offer("spot", available=2) if isinstance(k, c.AcquireLease)][:1]
    desk.grant(acquire.lease, workers=("liar", "honest"))
    for worker in ("liar", "honest"):
        desk.join(worker)
        desk.beat(worker)
    out = desk.tell(e.WorkerBarred(worker="liar", epoch=1, cause="capacity"))
    assert not [k for k in out if isinstance(k, c.ReleaseLease)]
    assert desk.scheduler.fleet.workers["honest"].connected
    assert [k.provider for k in desk.offer("spot", available=2) if isinstance(k, c.AcquireLease)]


@pytest.mark.parametrize(("worker", "epoch"), [("nobody", 1), ("spot-1/w", 0)])
def test_barring_a_stranger_or_a_former_epoch_changes_nothing(desk, worker: str, epoch: int) -> None:
    desk.trainer()
    desk.worker()
    before = digest(desk.scheduler)
    assert not desk.tell(e.WorkerBarred(worker=worker, epoch=epoch, cause="lies"))
    assert digest(desk.scheduler) == before


def test_a_worker_that_is_barred_before_it_was_ready_is_given_back(desk) -> None:
    desk.trainer()
    acquire = desk.offer("spot")[-1]
    desk.grant(acquire.lease)
    out = desk.tell(e.WorkerBarred(worker=f"{acquire.lease}/w", epoch=1, cause="Tokens before Ready"))
    assert [k.lease for k in out if isinstance(k, c.ReleaseLease)] == [acquire.lease]


def test_a_trainer_that_cannot_be_believed_ends_the_run(desk) -> None:
    desk.trainer()
    desk.tell(e.WorkerBarred(worker="trainer", epoch=1, cause="accounts of more time than has passed"))
    assert "accounts of more time than has passed" in desk.scheduler.failed
