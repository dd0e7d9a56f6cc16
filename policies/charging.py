"""How the cost of a group's time is divided among its jobs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from elastic.core.cluster.policy import BillShare
from elastic.core.cluster.types import JobId


@dataclass(frozen=True, slots=True)
class IdleAsAlone:
    """Each member pays for its slices, and for a part of the idle time in proportion to the idle time that it would pay
    alone.

    - No member owes more than the same time alone would cost. A group that costs more than its members would apart (it
      grew, and members left) leaves the rest to the pool.
    - Otherwise the bills sum to the group's cost exactly: shares are whole numbers, the largest remainders rounded up.
    """

    def bills(self, shares: Sequence[BillShare], cost: int) -> Mapping[JobId, int]:
        used = {share.job: min(share.used, share.alone) for share in shares}
        spare = {share.job: share.alone - used[share.job] for share in shares}
        idle, most = cost - sum(used.values()), sum(spare.values())
        if idle <= 0:
            return _divided(used, cost)
        part = _divided(spare, min(idle, most))
        return {job: used[job] + part[job] for job in used}


def _divided(weights: Mapping[JobId, int], amount: int) -> dict[JobId, int]:
    """The amount in whole parts proportional to the weights; no part is larger than its weight if the amount is no
    larger than their sum."""
    total = sum(weights.values())
    if total == 0:
        return dict.fromkeys(weights, 0)
    parts = {job: amount * weight // total for job, weight in weights.items()}
    rest = amount - sum(parts.values())
    for job in sorted(weights, key=lambda job: (-(amount * weights[job] % total), job))[:rest]:
        parts[job] += 1
    return parts
