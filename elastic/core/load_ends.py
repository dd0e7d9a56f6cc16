"""Ready workers in the order of what they have to do: those with the most and with the least of it are at hand."""

from collections.abc import Container, Iterable, Iterator
from itertools import islice
from typing import TypeAlias

from elastic.core.types import WorkerId, WorkerKind

Load: TypeAlias = tuple[int, int]
"""Turns that wait on a worker for room, and turns that it executes."""
_Alike: TypeAlias = dict[WorkerId, int]
"""Each with how many had come to the fleet before it."""


class LoadEnds:
    """Workers by kind and load; of equal ones the first that came to the fleet. A change costs O(1): only who asks for
    the ends puts equal ones in order."""

    def __init__(self) -> None:
        self._alike: dict[WorkerKind, dict[Load, _Alike]] = {}
        self._placed: dict[WorkerId, tuple[WorkerKind, Load]] = {}

    def place(self, worker: WorkerId, order: int, kind: WorkerKind, load: Load | None) -> None:
        """Note a worker's load; None takes it out. It was the `order`-th to come."""
        former = self._placed.get(worker)
        if former is not None:
            former_kind, former_load = former
            if former_load == load and former_kind == kind:
                return
            loads = self._alike[former_kind]
            alike = loads[former_load]
            del alike[worker]
            if not alike:
                del loads[former_load]
            if load is None:
                del self._placed[worker]
        if load is not None:
            loads = self._alike.get(kind)
            if loads is None:
                loads = self._alike[kind] = {}
            alike = loads.get(load)
            if alike is None:
                loads[load] = {worker: order}
            else:
                alike[worker] = order
            self._placed[worker] = kind, load

    def ends(self, count: int, but: Container[WorkerId] = ()) -> Iterator[WorkerId]:
        """Yield `count` workers of each kind with the least to do, and `count` with the most, without those in `but`; a
        worker may come twice."""
        for loads in self._alike.values():
            in_order = sorted(loads)
            for way in (in_order, reversed(in_order)):
                yield from islice(_but((loads[load] for load in way), but), count)

    def stale(self, loads: dict[WorkerId, tuple[WorkerKind, Load]]) -> str:
        """How this differs from the workers' true kinds and loads; empty where it does not."""
        if loads != self._placed:
            return f"to do {self._placed}, should be {loads}"
        in_order = {
            (worker, (kind, load))
            for kind, of_kind in self._alike.items()
            for load, alike in of_kind.items()
            for worker in alike
        }
        return "" if in_order == set(loads.items()) else f"by what is to do {self._alike}, should be {loads}"


def _but(all_alike: Iterable[_Alike], but: Container[WorkerId]) -> Iterator[WorkerId]:
    return (worker for alike in all_alike for worker in sorted(alike, key=alike.__getitem__) if worker not in but)
