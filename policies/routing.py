"""Where a turn goes: turn-wise, concurrency-aware routing with cache affinity. Source: ROSE §4.3."""

from elastic.core.policy import FleetView, TurnView
from elastic.core.types import WorkerId, WorkerRole

FALL_BACK = (WorkerRole.DEDICATED, WorkerRole.TRAINER, WorkerRole.ELASTIC)
"""Devices the run owns come before borrowed ones; the trainer's own is among them only while it seeds."""


class AffinityRouting:
    """The worker that holds the trajectory's prefix, else the least loaded dedicated, else elastic, else queue.

    Credits bound how many turns a worker holds, and at most Θ of them may be waiting to begin there (the delayed
    dispatch of RLBoost Algorithm 2); the fleet's view leaves out workers without room.
    """

    def route(self, turn: TurnView, fleet: FleetView) -> WorkerId | None:
        if turn.affine_worker is not None:
            affine = fleet.with_room(turn.affine_worker, turn.oldest_version)
            if affine is not None:
                return affine.id
        for role in FALL_BACK:
            worker = fleet.least_loaded(role, turn.oldest_version)
            if worker is not None:
                return worker.id
        return None
