"""Shares a provider that has fewer GPUs than its runs could use: computes a cap for each run. Pure.

- GPUs are shared by the projects' weights, max-min: no project gets more before the project with the least per weight
  has all that it can use. A project's quota bounds its runs together.
- No GPU that fits somewhere stays unused.
- Each run gets a lease within the period. If there are more runs than leases, a run whose turn is over gives its lease
  to the run that has waited longest. Turns are as long as that allows, and shorter for projects of less weight.
- Shares change only for a cause: a run comes or goes, limits change, a turn ends.
- A cap is lowered at once, and raised only by GPUs that other runs have given back. Together the runs never hold more
  than there is.

Source: max-min fairness by progressive filling (Bertsekas and Gallager, Data Networks, 6.5.2), in whole leases.
"""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

TURN_SHARE = 0.8
"""Length of a turn as a share of the period, if one hand-over is enough. The rest is for draining."""
URGENT_SHARE = 0.9
"""Share of the period after which a waiting run comes first, whichever run holds the GPUs."""
LEAST_TURN_SHARE = 0.25
"""Shortest turn as a share of the longest. In a shorter turn a lease would boot and do nothing."""


@dataclass(frozen=True, kw_only=True)
class LeaseClaim:
    """One run's claim to one provider: `gpus` in leases of `unit` each.

    `share` is its share so far, `told` the cap that its process may know, `held` what it holds. Since `since_us` it
    waits, or has what it may hold.
    """

    key: str
    project: str
    gpus: int
    unit: int
    share: int
    since_us: int
    told: int = 0
    held: int = 0

    @property
    def served(self) -> bool:
        """Whether the run has a share and knows it, and other runs have given those GPUs back."""
        return self.share > 0 and self.told > 0

    def since_us_after(self, share: int, told: int, now_us: int) -> int:
        """Since when it waits, or has what it may hold, with this share and cap."""
        return self.since_us if self.served == (share > 0 and told > 0) else now_us

    @property
    def reserved(self) -> int:
        """GPUs that it holds, or may ask for at any moment."""
        return max(self.told, self.held)


@dataclass(frozen=True, kw_only=True)
class SharedProvider:
    """One provider's `gpus`, if limited, and each project's quota and weight."""

    gpus: int | None
    quotas: Mapping[str, int]
    weights: Mapping[str, float]

    def weight(self, project: str) -> float:
        return self.weights.get(project, 1.0)


class _Room:
    """The GPUs that are left in all, and of each project's quota."""

    def __init__(self, provider: SharedProvider) -> None:
        self._gpus = provider.gpus
        self._quotas = dict(provider.quotas)

    def left(self, project: str) -> int | None:
        """GPUs; None for any number."""
        bounds = [gpus for gpus in (self._gpus, self._quotas.get(project)) if gpus is not None]
        return min(bounds, default=None)

    def fits(self, project: str, gpus: int) -> bool:
        left = self.left(project)
        return left is None or left >= gpus

    def take(self, project: str, gpus: int) -> None:
        if self._gpus is not None:
            self._gpus -= gpus
        if project in self._quotas:
            self._quotas[project] -= gpus


def shares(claims: Sequence[LeaseClaim], provider: SharedProvider, now_us: int, period_us: int) -> dict[str, int]:
    """Each claim's share in GPUs, by its key: a multiple of its lease's."""
    room, given = _Room(provider), dict.fromkeys((claim.key for claim in claims), 0)
    usable = [claim for claim in claims if claim.unit <= claim.gpus and room.fits(claim.project, claim.unit)]
    first: list[LeaseClaim] = []
    for claim in _in_turn(usable, provider, now_us, period_us):
        if room.fits(claim.project, claim.unit):
            room.take(claim.project, claim.unit)
            given[claim.key] = claim.unit
            first.append(claim)
    _fill(first, provider, room, given)
    return given


def _in_turn(claims: Sequence[LeaseClaim], provider: SharedProvider, now_us: int, period_us: int) -> list[LeaseClaim]:
    """The order in which claims get a first lease."""
    heaviest = max((provider.weight(claim.project) for claim in claims), default=1.0)
    rounds = _rounds(claims, provider)

    def place(claim: LeaseClaim) -> tuple[int, int, str]:
        passed_us = now_us - claim.since_us
        if not claim.served:
            if passed_us >= URGENT_SHARE * period_us:
                return (0, claim.since_us, claim.key)
            return (1 if claim.share else 2, claim.since_us, claim.key)
        part = max(LEAST_TURN_SHARE, provider.weight(claim.project) / heaviest)
        turn_us = TURN_SHARE * period_us * part / max(1, rounds)
        # Of those in their turn the newest keeps its lease longest; of those who had theirs, too.
        return (1 if passed_us < turn_us else 3, -claim.since_us, claim.key)

    return sorted(claims, key=place)


def _rounds(claims: Sequence[LeaseClaim], provider: SharedProvider) -> int:
    """How many turns the last in the queue waits for: of all, or of the project whose quota lets the fewest in."""
    groups: list[tuple[Sequence[LeaseClaim], int | None]] = [(claims, provider.gpus)]
    for project in {claim.project for claim in claims}:
        its = [claim for claim in claims if claim.project == project]
        groups.append((its, provider.quotas.get(project)))
    return max(_turns(group, gpus) for group, gpus in groups)


def _turns(claims: Sequence[LeaseClaim], gpus: int | None) -> int:
    if gpus is None or not claims:
        return 0
    at_once = max(1, gpus // max(claim.unit for claim in claims))
    waiting = max(0, len(claims) - at_once)
    return -(-waiting // at_once)


def _fill(claims: Sequence[LeaseClaim], provider: SharedProvider, room: _Room, given: dict[str, int]) -> None:
    """Give what is left, lease by lease, to the project with the least per weight, and there to the run with least."""
    totals: dict[str, int] = {}
    queues: dict[str, list[tuple[int, bool, str, LeaseClaim]]] = {}
    for claim in claims:
        totals[claim.project] = totals.get(claim.project, 0) + given[claim.key]
        _queue(queues.setdefault(claim.project, []), claim, given)
    poorest = [(total / provider.weight(project), project) for project, total in totals.items()]
    heapq.heapify(poorest)
    while poorest:
        _, project = heapq.heappop(poorest)
        queue = queues[project]
        claim = heapq.heappop(queue)[-1]
        # What does not fit now never will: there is only ever less.
        if given[claim.key] + claim.unit <= claim.gpus and room.fits(project, claim.unit):
            room.take(project, claim.unit)
            given[claim.key] += claim.unit
            totals[project] += claim.unit
            _queue(queue, claim, given)
        if queue:
            heapq.heappush(poorest, (totals[project] / provider.weight(project), project))


def _queue(queue: list[tuple[int, bool, str, LeaseClaim]], claim: LeaseClaim, given: Mapping[str, int]) -> None:
    """Order claims. Of two runs with equal shares, the run that has had more keeps its share."""
    has = given[claim.key]
    heapq.heappush(queue, (has, claim.share <= has, claim.key, claim))


def caps(claims: Sequence[LeaseClaim], provider: SharedProvider, shares: Mapping[str, int]) -> dict[str, int]:
    """Return the cap for each claim's process: its share, as far as other runs have given back their GPUs."""
    room = _Room(provider)
    for claim in claims:
        room.take(claim.project, claim.reserved)
    told: dict[str, int] = {}
    # Who has nothing comes first, and of those who has waited longest.
    for claim in sorted(claims, key=lambda claim: (claim.told > 0, claim.since_us, claim.key)):
        share, left = shares[claim.key], room.left(claim.project)
        # What it holds beyond its cap is reserved for it already, and on its way back.
        more = max(0, share - claim.reserved)
        granted = more if left is None else max(0, min(more, left)) // claim.unit * claim.unit
        room.take(claim.project, granted)
        told[claim.key] = min(share, claim.reserved + granted)
    return told
