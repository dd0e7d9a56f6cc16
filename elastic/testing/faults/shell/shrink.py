"""Finds a small set of faults that still makes a world fail: delta debugging (Zeller, Hildebrandt 2002)."""

import contextlib
import itertools
import time
from collections.abc import Sequence

import msgspec

from elastic.testing.faults.kinds import Fault
from elastic.testing.faults.outcome import WorldFailed
from elastic.testing.faults.shell.simulate import Plan, simulate

SHRINK_S = 300.0


def shrunk(plan: Plan, limit_s: float = SHRINK_S) -> tuple[Plan, WorldFailed]:
    """Return the plan with the fewest faults found within `limit_s`, or before an interrupt, and its failure. Any
    failure counts.

    Raises `ValueError` if no fault set fails.
    """
    until_s = time.monotonic() + limit_s
    found = _failure(plan)
    if found is None:
        raise ValueError(f"the world of seed {plan.seed} does not fail")
    parts = 2
    with contextlib.suppress(KeyboardInterrupt):
        while (faults := plan.faults) and time.monotonic() < until_s:
            for kept in _without_a_part(faults, min(parts, len(faults))):
                if time.monotonic() >= until_s:
                    break
                smaller = msgspec.structs.replace(plan, faults=kept)
                if (failure := _failure(smaller)) is not None:
                    plan, found, parts = smaller, failure, max(2, parts - 1)
                    break
            else:
                if parts >= len(faults):
                    break
                parts = min(len(faults), 2 * parts)
    return plan, found


def _without_a_part(faults: Sequence[Fault], parts: int) -> list[tuple[Fault, ...]]:
    bounds = [len(faults) * number // parts for number in range(parts + 1)]
    return [(*faults[:begin], *faults[end:]) for begin, end in itertools.pairwise(bounds)]


def _failure(plan: Plan) -> WorldFailed | None:
    try:
        simulate(plan)
    except WorldFailed as failure:
        return failure
    return None
