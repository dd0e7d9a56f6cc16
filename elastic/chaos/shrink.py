"""How few of a plan's faults make its world fail: delta debugging (Zeller, Hildebrandt 2002)."""

import itertools
from collections.abc import Sequence

import msgspec

from elastic.chaos.faults import Fault, WorldPlan
from elastic.chaos.simulate import WorldFailed, simulate

TRIES_MAX = 400


def shrunk(plan: WorldPlan) -> WorldFailed:
    """The failure with the fewest faults that was found; any will do. Raises `ValueError` where there is none."""
    found = _failure(plan)
    if found is None:
        raise ValueError(f"the world of seed {plan.seed} does not fail")
    parts, tries = 2, 0
    while (faults := found.plan.faults) and tries < TRIES_MAX:
        for kept in _without_a_part(faults, min(parts, len(faults))):
            tries += 1
            if (smaller := _failure(msgspec.structs.replace(plan, faults=kept))) is not None:
                found, parts = smaller, max(2, parts - 1)
                break
        else:
            if parts >= len(faults):
                break
            parts = min(len(faults), 2 * parts)
    return found


def _without_a_part(faults: Sequence[Fault], parts: int) -> list[tuple[Fault, ...]]:
    bounds = [len(faults) * number // parts for number in range(parts + 1)]
    return [(*faults[:begin], *faults[end:]) for begin, end in itertools.pairwise(bounds)]


def _failure(plan: WorldPlan) -> WorldFailed | None:
    try:
        simulate(plan.seed, plan)
    except WorldFailed as failure:
        return failure
    return None
