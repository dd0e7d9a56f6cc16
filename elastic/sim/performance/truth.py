"""What the core did without need, by the world's own knowledge and not by the core's opinion.

Modelled engines never hang: a worker whose process lives is healthy, and a turn that its engine holds would go on.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from elastic.core import commands as c
from elastic.core.scheduler import Scheduler
from elastic.core.types import WorkerId, WorkerState
from elastic.sim.performance.worker import WorkerModel

JUDGED = frozenset({c.StartTurn, c.FenceWorker, c.AbortTurn})
"""Commands that may be without need."""


@dataclass(slots=True)
class Acts:
    """What the core has done to workers and turns so far.

    - `needless_fences`: workers that were fenced while their process lived, or was booting.
    - `needless_moves`: turns that were taken from a worker while its engine held them. There is need where the worker
      drains, since its lease ends, and where it holds more turns than the worker that a turn is balanced to.
    - `resent_turns`: dispatches of turns beyond the first of each.
    """

    needless_fences: int = 0
    needless_moves: int = 0
    resent_turns: int = 0

    def note(self, command: c.Command, workers: Mapping[WorkerId, WorkerModel], scheduler: Scheduler) -> None:
        """The core has just given this command, which nobody has heard yet."""
        if isinstance(command, c.StartTurn):
            self.resent_turns += command.attempt > 1
        elif isinstance(command, c.FenceWorker | c.AbortTurn):
            record, worker = scheduler.fleet.workers.get(command.worker), workers.get(command.worker)
            if worker is None or (record is not None and record.state is WorkerState.DRAINING):
                return
            if isinstance(command, c.FenceWorker):
                self.needless_fences += 1
                self.needless_moves += worker.held_turns
            elif worker.holds(command.turn, command.attempt):
                turn = scheduler.turns.live.get(command.turn)  # None: it is over, and not moved.
                to = workers.get(turn.destination or "") if turn is not None else None
                balanced = to is not None and worker.held_turns > to.held_turns
                self.needless_moves += turn is not None and not balanced
