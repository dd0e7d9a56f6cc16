"""What the core did without need, by the world's own knowledge and not by the core's opinion.

Modelled engines never hang: a worker whose process lives is healthy, and a turn that its engine holds would go on.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from elastic.core import commands as c
from elastic.core.scheduler import Scheduler
from elastic.core.types import WorkerId, WorkerState
from elastic.runtime.ports import WorkerOrder
from elastic.sim.performance.worker import WorkerModel


@dataclass(slots=True)
class Acts:
    """What the core has done to workers and turns so far.

    - `needless_fences`: workers that were fenced while their process lived, or was booting.
    - `needless_moves`: turns that were taken from a worker while its engine held them. There is need where the worker
      drains, since its lease ends, and where a turn is balanced to one in whose engine fewer wait, or which decodes
      faster.
    - `resent_turns`: dispatches of turns beyond the first of each.
    """

    needless_fences: int = 0
    needless_moves: int = 0
    resent_turns: int = 0

    def note(self, order: WorkerOrder, workers: Mapping[WorkerId, WorkerModel], scheduler: Scheduler) -> None:
        """The core has just given this order, which its worker has not heard yet."""
        if type(order) is c.StartTurn:
            self.resent_turns += order.attempt > 1
        elif type(order) is c.AbortTurn:
            worker = self._meant_to_stay(order.worker, workers, scheduler)
            if worker is not None and worker.holds(order.turn, order.attempt):
                turn = scheduler.turns.live.get(order.turn)  # None: it is over, and not moved.
                to = workers.get(turn.destination or "") if turn is not None else None
                balanced = to is not None and (worker.waiting > to.waiting or worker.decode_s > to.decode_s)
                self.needless_moves += turn is not None and not balanced

    def note_fence(self, name: WorkerId, workers: Mapping[WorkerId, WorkerModel], scheduler: Scheduler) -> None:
        worker = self._meant_to_stay(name, workers, scheduler)
        if worker is not None:
            self.needless_fences += 1
            self.needless_moves += worker.held_turns

    def _meant_to_stay(
        self, name: WorkerId, workers: Mapping[WorkerId, WorkerModel], scheduler: Scheduler
    ) -> WorkerModel | None:
        """The worker, if its process lives and it does not drain."""
        record, worker = scheduler.fleet.workers.get(name), workers.get(name)
        return None if record is not None and record.state is WorkerState.DRAINING else worker
