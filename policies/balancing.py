"""Which turns move from overloaded workers to underloaded ones. Source: RLBoost §4.2.1, Algorithm 2.

Differences from the paper, which moves to workers without pending requests, and executing requests to idle workers
only: a receiver must be able to execute what it gets at once, so nothing goes back and forth between saturated
workers; and any worker below its own plateau may take what another executes above its own.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace

import msgspec

from elastic.core.policy import LoadView, Move
from elastic.core.profiles import BatchProfile
from elastic.core.types import TurnId, WorkerKind

MOVED = 128
"""Turns that one look moves: there is another before long, and nobody is to wait long for a decision."""
LEAST_SAMPLES = 2
"""Batch sizes that must have been seen before any of them can be called a plateau."""
LIKE = 2.0
"""Contexts that are longer or shorter by more than this factor make another profile."""


class ContinuousBalancing(msgspec.Struct, frozen=True):
    """First pending turns, one at a time, from whoever has most of them to whoever can begin them at once. Once
    nothing is pending, executing turns above the source's batching plateau, to receivers below their own.

    The plateau is the smallest batch with `plateau_share` of the best throughput seen.
    """

    plateau_share: float = 0.9

    def moves(self, loads: Sequence[LoadView], profiles: Mapping[WorkerKind, BatchProfile]) -> Sequence[Move]:
        if not any(load.room for load in loads):
            return ()
        if any(load.pending for load in loads):
            return _spread([_of_pending(load) for load in loads])
        return _spread(self._above_plateaus(loads, profiles))

    def _above_plateaus(
        self, loads: Sequence[LoadView], profiles: Mapping[WorkerKind, BatchProfile]
    ) -> list["_Balance"]:
        balances: list[_Balance] = []
        for load in loads:
            batch = self.plateau(profiles.get(load.kind), load)
            if batch is None:
                continue
            surplus, free = load.executing - batch, min(load.room, batch - load.executing)
            balances.append(_Balance(load, max(0, surplus), max(0, free), load.movable_executing))
        return balances

    def plateau(self, profile: BatchProfile | None, load: LoadView) -> int | None:
        """Up to which batch size more turns bring more throughput; None while that is not known, as when it still rose
        at the largest batch seen.

        What a batch reads grows with its contexts: one that was captured under shorter contexts is smaller now, and one
        under contexts of quite another length tells nothing.
        """
        if profile is None or len(profile.samples) < LEAST_SAMPLES:
            return None
        context_tokens = load.context_tokens()
        samples = {
            batch: sample
            for batch, sample in profile.samples.items()
            if not context_tokens or 1 / LIKE <= sample.context_tokens / context_tokens <= LIKE
        }
        if len(samples) < LEAST_SAMPLES:
            return None
        best = max(sample.tokens_per_ns for sample in samples.values())
        batch = min(batch for batch, sample in samples.items() if sample.tokens_per_ns >= self.plateau_share * best)
        if batch > self.plateau_share * max(samples):
            return None
        return max(1, round(batch * samples[batch].context_tokens / context_tokens)) if context_tokens else batch


@dataclass(slots=True)
class _Balance:
    """What a worker has too much of, and what it can still take."""

    load: LoadView
    surplus: int
    free: int
    movable: Callable[[], Sequence[TurnId]]


def _of_pending(load: LoadView) -> _Balance:
    return _Balance(load, load.pending, 0 if load.pending else load.room, load.movable_pending)


def _spread(balances: Sequence[_Balance]) -> list[Move]:
    """One turn at a time from the largest surplus to the most room, until either is used up."""
    moves: list[Move] = []
    movable: dict[int, list[TurnId]] = {}
    sources = [(-balance.surplus, place) for place, balance in enumerate(balances) if balance.surplus]
    receivers = [(-balance.free, place) for place, balance in enumerate(balances) if balance.free]
    heapify(sources)
    heapify(receivers)
    while sources and receivers and len(moves) < MOVED:
        (surplus, source), (free, receiver) = sources[0], receivers[0]
        if source not in movable:
            movable[source] = list(balances[source].movable())[::-1]
        if movable[source]:
            moves.append(Move(turn=movable[source].pop(), to=balances[receiver].load.id))
            _take_one(sources, surplus, source)
            _take_one(receivers, free, receiver)
        else:
            heappop(sources)
    return moves


def _take_one(heap: list[tuple[int, int]], negative: int, place: int) -> None:
    """The first of the heap has one less; it counts below zero, so that the largest comes first."""
    if negative < -1:
        heapreplace(heap, (negative + 1, place))
    else:
        heappop(heap)
