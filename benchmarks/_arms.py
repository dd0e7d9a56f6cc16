"""Ways of doing the same thing (arms), measured in turn, and what repeated measurements of each say."""

import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from statistics import mean, median, stdev
from typing import TypeVar

from benchmarks._common import Figures

T = TypeVar("T")


async def in_turn(arms: Iterable[str], runs: int, measure: Callable[[str, int], Awaitable[T]]) -> dict[str, list[T]]:
    """Each arm once with every run's number, which is its seed; whatever else the machine does meets all alike."""
    found: dict[str, list[T]] = {arm: [] for arm in arms}
    for run in range(runs):
        for arm, values in found.items():
            values.append(await measure(arm, run))
    return found


def deviation(values: Sequence[float]) -> float | None:
    return stdev(values) if len(values) > 1 else None


def standard_error(values: Sequence[float]) -> float:
    """Of the mean; 0 of a single value, which says nothing about it."""
    return (deviation(values) or 0.0) / math.sqrt(len(values))


def descends(found: Mapping[str, Sequence[float]]) -> bool:
    """Whether no arm's mean is above that of the one before, but for one standard error."""
    return all(
        mean(later) <= mean(earlier) + math.hypot(standard_error(earlier), standard_error(later))
        for earlier, later in pairwise(found.values())
    )


def in_order(what: str, found: Mapping[str, Sequence[float]], arms: Iterable[str], runs: int) -> Figures:
    """The means of what was found of all arms, and whether they descend."""
    return {
        what: {arm: mean(found[arm]) if arm in found else None for arm in arms},
        "standard_error": {arm: standard_error(v) for arm, v in found.items()} if runs > 1 else None,
        "ordering_holds": descends(found),
        "runs": runs,
    }


def by_name(found: Mapping[str, Sequence[Sequence[float]]], names: Sequence[str]) -> Figures:
    """Of arms whose runs have a value of each name: the means, and the first name's deviation, by arm."""
    runs = len(next(iter(found.values())))
    figures: Figures = {
        name: {arm: mean(row[column] for row in rows) for arm, rows in found.items()}
        for column, name in enumerate(names)
    }
    spread = {arm: deviation([row[0] for row in rows]) for arm, rows in found.items()}
    return {**figures, f"{names[0]}_spread": spread, "runs": runs}


def median_range(values: Iterable[float | None]) -> dict[str, float] | None:
    """Of those values that there are."""
    found = [value for value in values if value is not None]
    return {"median": median(found), "min": min(found), "max": max(found)} if found else None
