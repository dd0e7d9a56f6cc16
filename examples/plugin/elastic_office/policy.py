"""Two policies: of a run, turns go to some providers' workers first; of a pool, jobs pay by what they use.

A policy's fields are its settings. It is frozen and asks nothing but what it is given, so it decides the same in a
replay.
"""

from collections.abc import Mapping, Sequence

import msgspec

from elastic.core.cluster.policy import BillShare
from elastic.core.cluster.types import JobId
from elastic.core.policy import FleetView, TurnView, WorkerView
from elastic.core.types import WorkerId, WorkerRole


class Preferred(msgspec.Struct, frozen=True):
    """Sends a turn to a worker of the first of these providers that can begin it at once."""

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


class ByUse(msgspec.Struct, frozen=True):
    """Divides a group's cost by what each member used, up to what it would pay alone; the pool pays the rest."""

    def bills(self, shares: Sequence[BillShare], cost: int) -> Mapping[JobId, int]:
        used = sum(share.used for share in shares) or 1
        return {share.job: min(cost * share.used // used, share.alone) for share in shares}
