"""A run that a new process takes up: nobody is blamed for what nobody could hear."""

from elastic.core import commands as c
from elastic.core import events as e
from elastic.core.scheduler import Phase
from elastic.core.types import WorkerState

AWAY_S = 3600.0


def test_silent_workers_are_waited_for_once_more(desk) -> None:
    desk.trainer()
    worker = desk.worker()
    desk.now_s += AWAY_S
    desk.tell(e.Resumed())
    desk.tell(e.WorkerDisconnected(worker=worker, epoch=1))
    assert desk.scheduler.phase is Phase.RUNNING
    desk.join(worker, epoch=2)
    assert desk.scheduler.fleet.workers[worker].state is WorkerState.READY
    assert not desk.sent(c.FenceWorker)
    desk.wait(60.0, beating=("trainer",))
    assert worker not in desk.scheduler.fleet.workers or desk.scheduler.fleet.workers[worker].state is WorkerState.GONE


def test_turns_go_on_from_what_was_accepted(desk) -> None:
    desk.trainer()
    worker = desk.worker()
    desk.end_seeding()
    desk.request("0/0/0")
    desk.tokens(desk.one(c.StartTurn), 5)
    desk.now_s += AWAY_S
    desk.tell(e.Resumed())
    desk.tell(e.WorkerDisconnected(worker=worker, epoch=1))
    desk.join(worker, epoch=2)
    desk.beat(worker, epoch=2)
    start = desk.one(c.StartTurn)
    assert (start.start, start.attempt, start.epoch) == (5, 2, 2)


def test_leases_end_when_they_end(desk) -> None:
    desk.trainer()
    worker = desk.worker(expires_s=600.0)
    desk.now_s += AWAY_S
    desk.tell(e.Resumed())
    assert desk.one(c.FenceWorker).worker == worker
    assert desk.one(c.ReleaseLease).lease == "spot-1"
