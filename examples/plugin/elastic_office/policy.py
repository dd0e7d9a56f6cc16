"""A policy: turns go to some providers' workers first, as long as one of them can begin at once.

Its fields are its settings. It is frozen, asks nothing but what it is given, and so decides the same in a replay.
"""

import msgspec

from elastic.core.policy import FleetView, TurnView, WorkerView
from elastic.core.types import WorkerId, WorkerRole


class Preferred(msgspec.Struct, frozen=True):
    providers: tuple[str, ...] = ()
    """From the one that is liked best."""

    def route(self, turn: TurnView, fleet: FleetView) -> WorkerId | None:
        candidates = [worker for role in WorkerRole for worker in fleet.least_loaded(role, turn.oldest_version)]
        best = min(candidates, key=self._rank, default=None)
        return None if best is None else best.id

    def _rank(self, worker: WorkerView) -> tuple[bool, int, float, WorkerId]:
        """Lower ranks come first. The id is the last word, so that equals are never in an order of chance."""
        liked = self.providers.index(worker.provider) if worker.provider in self.providers else len(self.providers)
        return not worker.has_place, liked, worker.outstanding / max(1, worker.capacity), worker.id
