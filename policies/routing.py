"""Routing of turns. Source: ROSE §4.3 (turns, prefixes, own devices first); RollArt, mechanism 1 (hardware)."""

import math
from collections.abc import Sequence

import msgspec

from elastic.core.policy import FleetView, TurnView, WorkerView
from elastic.core.types import WorkerId, WorkerKind, WorkerRole

FALL_BACK = (WorkerRole.DEDICATED, WorkerRole.TRAINER, WorkerRole.ELASTIC)
"""Devices the run owns come before borrowed ones; the trainer's own is among them only while it seeds."""

KV_SHARE = 1e-5
"""Memory read per iteration for a token of context, as a share of the weights: 0.9e-5 for Qwen3-8B, 0.4e-5 for
Qwen3-32B."""


class PinnedRouting(msgspec.Struct, frozen=True):
    """A trajectory stays where its first turn was, as long as that worker lives: the baseline of ROSE §6.4."""

    def route(self, turn: TurnView, fleet: FleetView) -> WorkerId | None:
        pinned = _affine(turn, fleet)
        return _least_loaded(turn, fleet) if pinned is None else pinned.id


class TurnWiseRouting(msgspec.Struct, frozen=True):
    """Routes each turn to the least loaded dedicated worker, else to an elastic one, else leaves it queued. Ignores
    prefixes.

    A worker with a free place in its batch comes first, whatever its role. Credits bound how many turns a worker holds,
    and at most Θ of them may wait for a place (the delayed dispatch of RLBoost Algorithm 2). The fleet's view omits
    workers without room.
    """

    def route(self, turn: TurnView, fleet: FleetView) -> WorkerId | None:
        return _least_loaded(turn, fleet)


class AffinityRouting(msgspec.Struct, frozen=True):
    """As `TurnWiseRouting`, but the worker that caches the trajectory's prefix comes first, unless the turn would wait
    there for a place that another worker has free.

    Where workers declare compute and bandwidth, `hardware` weighs both: the turn goes to the worker whose device gets
    the least additional work from its prefill and decoding, as turns of its tag needed them. A cached prefix is prefill
    saved.
    """

    hardware: bool = True

    def route(self, turn: TurnView, fleet: FleetView) -> WorkerId | None:
        affine = _affine(turn, fleet)
        begins = affine is not None and affine.has_place
        if affine is not None and begins and not (self.hardware and _declared(affine.kind)):
            return affine.id
        candidates = _candidates(turn, fleet)
        if not candidates:
            return None
        first = candidates[0]
        if affine is not None and affine is not first and (begins or not first.has_place):
            candidates = [affine, *candidates]
        return (_cheapest(turn, candidates) if self.hardware and len(candidates) > 1 else candidates[0]).id


def _cheapest(turn: TurnView, workers: Sequence[WorkerView]) -> WorkerView:
    """Return the worker to which the turn adds the least work, which counts for more if it has lately given turns back;
    the first where one does not declare what it can do."""
    context, decode_tokens, holder = turn.prompt_tokens + turn.accepted, turn.expected_tokens, turn.affine_worker
    cheapest, least_s = workers[0], math.inf
    for worker in workers:
        cached = turn.affine_tokens if worker.id == holder else 0
        # Turns that are done sooner are not in the batch all the time.
        batch = min(float(worker.outstanding), worker.due_tokens / decode_tokens)
        added_s = added_work_s(worker.kind, batch, max(1, context - cached), decode_tokens, context)
        if added_s is None:
            return workers[0]
        if added_s / worker.reputation < least_s:
            cheapest, least_s = worker, added_s / worker.reputation
    return cheapest


def added_work_s(
    kind: WorkerKind, batch: float, prefill_tokens: float, decode_tokens: float, context_tokens: float = 0.0
) -> float | None:
    """Return the time until the turn is done on a device that decodes `batch` others, plus the delay that it causes for
    them.

    The time is that of a model of half a parameter, since the model's size does not change which kind is better; None
    if the kind does not declare its capabilities. Prefill is arithmetic, two operations per parameter and token, and
    delays the whole batch. An iteration of decoding reads the weights once for the whole batch, two bytes per
    parameter, until the batch has so many tokens that arithmetic takes longer; each turn adds its own KV to what is
    read.
    """
    if kind.tflops is None or kind.memory_gb_per_s is None:
        return None
    token_s, read_s = 1 / (kind.tflops * 1e12), 1 / (kind.memory_gb_per_s * 1e9)
    kv_s = read_s * KV_SHARE * (context_tokens + decode_tokens / 2)
    alone_s, together_s = batch * token_s, (batch + 1) * token_s
    if alone_s < read_s:  # Each turn asks, of each kind: without calls.
        alone_s = read_s
        together_s = max(read_s, together_s)
    iteration_s = together_s + (batch + 1) * kv_s
    delay_s = together_s - alone_s + kv_s
    return (1 + batch) * prefill_tokens * token_s + decode_tokens * (iteration_s + batch * delay_s)


def _declared(kind: WorkerKind) -> bool:
    return kind.tflops is not None and kind.memory_gb_per_s is not None


def _affine(turn: TurnView, fleet: FleetView) -> WorkerView | None:
    return fleet.with_room(turn.affine_worker, turn.oldest_version) if turn.affine_worker is not None else None


def _candidates(turn: TurnView, fleet: FleetView) -> Sequence[WorkerView]:
    """Return the workers with a free place, of the first role that has any; else the workers of the first role where
    the turn would wait for a place."""
    waiting: Sequence[WorkerView] = ()
    for role in FALL_BACK:
        workers = fleet.least_loaded(role, turn.oldest_version)
        if begin := [worker for worker in workers if worker.has_place]:
            return begin
        waiting = waiting or workers
    return waiting


def _least_loaded(turn: TurnView, fleet: FleetView) -> WorkerId | None:
    candidates = _candidates(turn, fleet)
    return candidates[0].id if candidates else None
