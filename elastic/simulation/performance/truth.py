"""Unnecessary acts of the core, judged by the world's knowledge instead of the core's.

Modelled engines never hang: a worker with a living process is healthy, and its engine would finish its turns.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from elastic.core import commands as c
from elastic.core.scheduler import Scheduler
from elastic.core.types import WorkerId, WorkerState
from elastic.runtime.ports import WorkerOrder
from elastic.simulation.performance.worker import WorkerModel


@dataclass(slots=True)
class Acts:
    """Counts of unnecessary acts on workers and turns.

    - `needless_fences`: fences of workers whose process lived or booted.
    - `needless_moves`: turns taken from a worker while its engine held them. A move is necessary if the worker drains,
      since its lease ends, or if balancing moves the turn to a worker with fewer waiting turns or with faster decoding.
    - `resent_turns`: dispatches of turns beyond the first of each.
    """

    needless_fences: int = 0
    needless_moves: int = 0
    resent_turns: int = 0

    def note(self, order: WorkerOrder, workers: Mapping[WorkerId, WorkerModel], scheduler: Scheduler) -> None:
        """Judge an order that the core has just given and that its worker has not received."""
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
        """Return the worker if its process lives and it does not drain; else None."""
        record, worker = scheduler.fleet.workers.get(name), workers.get(name)
        return None if record is not None and record.state is WorkerState.DRAINING else worker
