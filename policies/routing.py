"""Where a turn goes. Source: ROSE §4.3 (turns, prefixes, own devices first); RollArt, mechanism 1 (hardware)."""

from collections.abc import Sequence

import msgspec

from elastic.core.policy import FleetView, TurnView, WorkerView
from elastic.core.types import WorkerId, WorkerKind, WorkerRole

FALL_BACK = (WorkerRole.DEDICATED, WorkerRole.TRAINER, WorkerRole.ELASTIC)
"""Devices the run owns come before borrowed ones; the trainer's own is among them only while it seeds."""

DECODE_BATCH = 16
"""Sequences among which one read of the weights is shared, in estimates of what decoding costs."""


class PinnedRouting:
    """A trajectory stays where its first turn was, as long as that worker lives: the baseline of ROSE §6.4."""

    def route(self, turn: TurnView, fleet: FleetView) -> WorkerId | None:
        pinned = _affine(turn, fleet)
        return _least_loaded(turn, fleet) if pinned is None else pinned.id


class TurnWiseRouting:
    """Each turn anew to the least loaded dedicated worker, else elastic, else the queue; prefixes do not count.

    Credits bound how many turns a worker holds, and at most Θ of them may be waiting to begin there (the delayed
    dispatch of RLBoost Algorithm 2); the fleet's view leaves out workers without room.
    """

    def route(self, turn: TurnView, fleet: FleetView) -> WorkerId | None:
        return _least_loaded(turn, fleet)


class AffinityRouting(msgspec.Struct, frozen=True):
    """Turn-wise, but the worker that holds the trajectory's prefix comes first.

    Where workers declare compute and bandwidth, `hardware` weighs both affinities against each other: the turn goes
    where its prefill and decoding, as turns of its tag have needed them, take the least time on that kind of
    device, shared with the turns that are there already. A prefix counts as prefill that is not needed.
    """

    hardware: bool = True

    def route(self, turn: TurnView, fleet: FleetView) -> WorkerId | None:
        affine = _affine(turn, fleet)
        if affine is not None and not (self.hardware and _declared(affine.kind)):
            return affine.id
        for role in FALL_BACK:
            workers = fleet.least_loaded(role, turn.oldest_version)
            if workers and self._weighs(workers):
                candidates = workers if affine is None else [affine, *workers]
                return min(candidates, key=lambda worker: cost(turn, worker)).id
            if workers:
                return (affine or workers[0]).id
        return affine.id if affine is not None else None

    def _weighs(self, workers: Sequence[WorkerView]) -> bool:
        return self.hardware and all(_declared(worker.kind) for worker in workers)


def cost(turn: TurnView, worker: WorkerView) -> float:
    """The turn's work on the worker in relative seconds, as if everything there took its turns."""
    cached = turn.affine_tokens if worker.id == turn.affine_worker else 0
    context = turn.prompt_tokens + turn.accepted
    decode_tokens = turn.demand.decode_tokens if turn.demand.turns else turn.max_new_tokens
    own_s = work_s(worker.kind, max(1, context - cached), max(1.0, decode_tokens - turn.accepted))
    return (own_s or 0.0) * (1 + worker.outstanding)


def work_s(kind: WorkerKind, prefill_tokens: float, decode_tokens: float) -> float | None:
    """What the work takes on a kind of device, for a model of half a parameter; None where that is not declared.

    A token costs two operations a parameter to prefill, and two bytes a parameter to decode, which a batch shares:
    so the size of the model does not change which kind is better.
    """
    if kind.tflops is None or kind.memory_gb_per_s is None:
        return None
    return prefill_tokens / (kind.tflops * 1e12) + decode_tokens / (DECODE_BATCH * kind.memory_gb_per_s * 1e9)


def _declared(kind: WorkerKind) -> bool:
    return kind.tflops is not None and kind.memory_gb_per_s is not None


def _affine(turn: TurnView, fleet: FleetView) -> WorkerView | None:
    return fleet.with_room(turn.affine_worker, turn.oldest_version) if turn.affine_worker is not None else None


def _least_loaded(turn: TurnView, fleet: FleetView) -> WorkerId | None:
    found = (fleet.least_loaded(role, turn.oldest_version) for role in FALL_BACK)
    return next((workers[0].id for workers in found if workers), None)
