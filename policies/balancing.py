"""Which turns move from overloaded workers to underloaded ones. Source: RLBoost §4.2.1, Algorithm 2.

Differences from the paper, which moves to workers without pending requests, and executing requests to idle workers
only: a receiver must be able to execute what it gets at once, so nothing goes back and forth between saturated
workers; and any worker below its own plateau may take what another executes above its own.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace

import msgspec

from elastic.core.policy import LoadView, Move
from elastic.core.profiles import BatchProfile
from elastic.core.types import TurnId, WorkerKind

MOVED = 128
"""Turns that one round moves at most: the next round follows soon, and other decisions must not wait."""
LEAST_SAMPLES = 2
"""Batch sizes that must have been observed before one can be called the plateau."""
LIKE = 2.0
"""Contexts that are longer or shorter by more than this factor make another profile."""


class ContinuousBalancing(msgspec.Struct, frozen=True):
    """Moves pending turns first, one at a time, from the worker with the most to any that can begin them at once.
    Once nothing is pending, moves executing turns from workers above their batching plateau to workers below theirs."""

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
            context_tokens = load.context_tokens()
            balances.append(
                _Balance(
                    load,
                    surplus=max(0, load.executing - batch),
                    free=max(0, min(load.room, batch - load.executing)),
                    movable=load.movable_executing,
                    burden=load.executing * context_tokens,
                    of_a_turn=context_tokens,
                )
            )
        return balances

    def plateau(self, profile: BatchProfile | None, load: LoadView) -> int | None:
        """The batch size beyond which more turns bring no more throughput; None while unknown, as when throughput still
        rises at the largest batch observed.

        A batch's cost grows with its contexts, so samples with much shorter or longer contexts are left out.
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
    """What a worker has too much of, and what it can still take.

    A turn is no better off on a worker of the same kind with as much `burden`: what an iteration reads, of which each
    turn has its part, or how few places are left.
    """

    load: LoadView
    surplus: int
    free: int
    movable: Callable[[], Sequence[TurnId]]
    burden: float
    of_a_turn: float


def _of_pending(load: LoadView) -> _Balance:
    """Return whether a waiting turn gains: it does on any worker where it need not wait."""
    free = 0 if load.pending else load.room
    return _Balance(load, load.pending, free, load.movable_pending, math.inf if load.pending else -free, 1.0)


def _spread(balances: Sequence[_Balance]) -> list[Move]:
    """One turn at a time from the largest surplus to the least burdened, until either is used up."""
    moves: list[Move] = []
    movable: dict[int, list[TurnId]] = {}
    sources = [(-balance.surplus, place) for place, balance in enumerate(balances) if balance.surplus]
    heapify(sources)
    receivers = _Receivers(balances)
    while sources and len(moves) < MOVED:
        place = sources[0][1]
        source = balances[place]
        receiver = receivers.for_turn_of(source)
        if place not in movable:
            movable[place] = list(source.movable())[::-1]
        if receiver is None or not movable[place] or not source.surplus:
            heappop(sources)
            continue
        moves.append(Move(turn=movable[place].pop(), to=receiver.load.id))
        receivers.give(receiver, source)
        heapreplace(sources, (-source.surplus, place))
    return moves


class _Receivers:
    """Workers with room, the least burdened of each kind first."""

    def __init__(self, balances: Sequence[_Balance]) -> None:
        self._of_kind: dict[WorkerKind, list[tuple[float, int, _Balance]]] = {}
        for place, balance in enumerate(balances):
            if balance.free:
                self._of_kind.setdefault(balance.load.kind, []).append((balance.burden, place, balance))
        for alike in self._of_kind.values():
            heapify(alike)

    def for_turn_of(self, source: _Balance) -> _Balance | None:
        """Return the worker with the most room among the least loaded of each kind on which a turn of this source is
        better off."""
        found: list[tuple[int, int, _Balance]] = []
        for kind, alike in self._of_kind.items():
            burden, place, balance = alike[0]
            if kind != source.load.kind or burden + source.of_a_turn <= source.burden:
                found.append((-balance.free, place, balance))
        return min(found)[2] if found else None

    def give(self, receiver: _Balance, source: _Balance) -> None:
        """The receiver, which is the first of its kind, gets a turn."""
        source.surplus -= 1
        source.burden -= source.of_a_turn
        receiver.free -= 1
        receiver.burden += source.of_a_turn
        kind = receiver.load.kind
        _, place, _ = self._of_kind[kind][0]
        if receiver.free:
            heapreplace(self._of_kind[kind], (receiver.burden, place, receiver))
        else:
            heappop(self._of_kind[kind])
            if not self._of_kind[kind]:
                del self._of_kind[kind]
