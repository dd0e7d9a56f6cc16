"""Plans a pull: the objects that lead from the version a worker holds to the one it is to serve. Pure."""

import heapq
from collections.abc import Collection, Iterable
from typing import NamedTuple

KEYFRAME_COST = 16
"""In deltas: a keyframe is some 20 to 60 times as large as one, but a chain as long would be slower to decode."""


class PublishedUpdate(NamedTuple):
    """A published object. It takes a worker from `base` (None: from nothing) to `version`."""

    version: int
    base: int | None


def shortest_path(updates: Iterable[PublishedUpdate], held: int | None, wanted: int) -> list[PublishedUpdate] | None:
    """The cheapest sequence of `updates` from `held` (None for nothing) to `wanted`; None if there is none.

    A delta costs one, whatever it spans, so that a merged one beats those it merges; ties go to the longest first
    step. Versions may be skipped.
    """
    by_base: dict[int | None, list[PublishedUpdate]] = {}
    for update in sorted(updates, key=lambda update: -update.version):
        by_base.setdefault(update.base, []).append(update)
    queue: list[tuple[int, int, int, list[PublishedUpdate]]] = []
    settled: set[int] = set()
    number = 0

    def reach(cost: int, version: int, path: list[PublishedUpdate]) -> None:
        nonlocal number
        number += 1
        heapq.heappush(queue, (cost, number, version, path))

    if held is not None:
        reach(0, held, [])
    for keyframe in by_base.get(None, ()):
        reach(KEYFRAME_COST, keyframe.version, [keyframe])
    while queue:
        cost, _, version, path = heapq.heappop(queue)
        if version == wanted:
            return path
        if version in settled:
            continue
        settled.add(version)
        for update in by_base.get(version, ()):
            reach(cost + 1, update.version, [*path, update])
    return None


def needed_from(updates: Collection[PublishedUpdate], wanted: Collection[int]) -> set[int]:
    """Versions of which some object lies on a newcomer's path to one of `wanted`."""
    needed: set[int] = set()
    for version in wanted:
        needed.update(update.version for update in shortest_path(updates, None, version) or ())
    return needed
