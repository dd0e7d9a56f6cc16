"""A run that a new process takes up: nobody is blamed for what nobody could hear."""

from elastic.core import commands as c
from elastic.core import events as e
from elastic.core.scheduler import Phase
from elastic.core.types import WorkerState

AWAY_S = 3600.0


def test_silent_workers_are_waited_for_once_more(core) -> None:
    core.trainer()
    worker = core.worker()
    core.now_s += AWAY_S
    core.tell(e.Resumed())
    core.tell(e.WorkerDisconnected(worker=worker, epoch=1))
    assert core.scheduler.phase is Phase.RUNNING
    core.join(worker, epoch=2)
    assert core.scheduler.fleet.workers[worker].state is WorkerState.READY
    assert not core.sent(c.FenceWorker)
    core.wait(60.0, beating=("trainer",))
    assert worker not in core.scheduler.fleet.workers or core.scheduler.fleet.workers[worker].state is WorkerState.GONE


def test_turns_go_on_from_what_was_accepted(core) -> None:
    core.trainer()
    worker = core.worker()
    core.end_seeding()
    core.request("0/0/0")
    core.tokens(core.one(c.StartTurn), 5)
    core.now_s += AWAY_S
    core.tell(e.Resumed())
    core.tell(e.WorkerDisconnected(worker=worker, epoch=1))
    core.join(worker, epoch=2)
    core.beat(worker, epoch=2)
    start = core.one(c.StartTurn)
    assert (start.start, start.attempt, start.epoch) == (5, 2, 2)


def test_leases_end_when_they_end(core) -> None:
    core.trainer()
    worker = core.worker(expires_s=600.0)
    core.now_s += AWAY_S
    core.tell(e.Resumed())
    assert core.one(c.FenceWorker).worker == worker
    assert core.one(c.ReleaseLease).lease == "spot-1"
