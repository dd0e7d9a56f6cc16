"""Workers whose lease is going to end: who stays on them until when, and who may still begin there.

The policy decides, on what the run has measured; what is left when the time is up is called back in any case, early
enough to be handed over. Source: RLBoost §4.2 (migration on preemption); docs/design.md, "A lease".
"""

from elastic.core.fleet import Worker
from elastic.core.leaving import Leaving
from elastic.core.run_state import Deadlines, Handlers, RunState
from elastic.core.turn_manager import TurnManager
from elastic.core.turns import Turn
from elastic.core.types import NS_PER_S, Nanoseconds, TurnState, WorkerRole, WorkerState
from elastic.core.worker_manager import WorkerManager

HANDOVERS = 2
"""Times the limit of a hand-over that everything is called back before a lease's end: one for the hand-over itself,
one for what is late on the way."""
LOOK_NS = NS_PER_S
"""How often, at the least, a leaving worker is looked at: estimates change."""


class Departures:
    def __init__(self, run: RunState, turns: TurnManager, workers: WorkerManager) -> None:
        self._run = run
        self._turns = turns
        self._workers = workers
        self.handlers: Handlers = {}
        self.due: Deadlines = {"departure": self._look}

    def begin(self, worker: Worker, end_ns: Nanoseconds, reason: str) -> None:
        """The worker is gone at `end_ns`: from now on it gets only what ends before that, and empties in time.

        One that serves nothing yet drains at once, and so does any where no policy says better.
        """
        run = self._run
        leaves_ns = end_ns - HANDOVERS * run.patience.limit_ns("handover", run.now_ns)
        if worker.leaves_ns is not None:
            leaves_ns = min(leaves_ns, worker.leaves_ns)
        stays = run.policies.departure is not None and worker.role is not WorkerRole.TRAINER
        if not stays or worker.state is not WorkerState.READY or leaves_ns <= run.now_ns:
            self._workers.drain(worker, reason)
            return
        worker.leaves_ns, worker.leaves_why = leaves_ns, reason
        run.fleet.reindex(worker)
        self._look(worker.id)

    def _look(self, worker_id: str) -> None:
        run, worker = self._run, self._run.fleet.workers[worker_id]
        assert worker.leaves_ns is not None
        left_ns = worker.leaves_ns - run.now_ns
        if left_ns <= 0:
            self._workers.drain(worker, worker.leaves_why)
            return
        stays = self._stays(worker)
        for turn, stay_ns in stays:
            # While others wait for a place, it would only wait with them.
            if stay_ns <= 0 and run.turns.head() is None:
                self._turns.call_back_turn(turn, worker.leaves_why)
        later_ns = [stay_ns for _, stay_ns in stays if stay_ns > 0]
        run.wait("departure", worker.id, min(left_ns, LOOK_NS, *later_ns))

    def _stays(self, worker: Worker) -> list[tuple[Turn, Nanoseconds]]:
        """The turns that run there, and how much longer each is to."""
        run, policy = self._run, self._run.policies.departure
        turns = [turn for turn in map(run.turns.live.__getitem__, worker.turns) if turn.state is TurnState.RUNNING]
        if policy is None or not turns:
            return []
        stays_ns = policy.stays_ns(turns, Leaving(run, worker))
        return [(turn, stays_ns[turn.id]) for turn in turns]
