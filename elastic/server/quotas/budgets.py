"""A project's budgets, allotted to its runs in slices. Pure.

- A run may spend what it was allotted, and its core sees to that. What all runs of a project were allotted, less what
  those that have ended did not use, never exceeds the project's budget, nor within a day what it may spend in a day.
- A run gets its next slice while half of one is left. Where there is none any more, it stops by itself in time, and
  waits.
- A limit that is lowered takes back what was allotted and is neither spent nor committed, of the last runs first. What
  a run's process may not have heard of yet counts until it has.
- What is allotted today counts today, until the day ends; then what is not used of it counts for the next day.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from elastic.core.ledger import NANO_USD_PER_USD

NEXT_SHARE = 0.5
"""Share of a slice below which the next slice is given, long before the run would have to stop."""
WARNED_SHARE = 0.8
LEAST_SLICE_NANO_USD = NANO_USD_PER_USD // 100
US_PER_DAY = 24 * 3600 * 1_000_000
MARKS, MARK_US = 60, 60_000_000
"""The forecast's rate is that of the last hour: a mark a minute."""


@dataclass(frozen=True, kw_only=True)
class SpendingLimits:
    """What a project may spend; None for any amount."""

    budget_nano_usd: int | None = None
    day_nano_usd: int | None = None

    def __bool__(self) -> bool:
        return self != SpendingLimits()


@dataclass(frozen=True, kw_only=True)
class RunAccount:
    """One run: what it was allotted, or what it cost once it has ended, and what it had cost as the day began.

    `committed_nano_usd` is what it costs if it is stopped now, `known_nano_usd` what its process may believe it may
    cost, `own_nano_usd` its own budget, if it has one. One that goes on is `alive`; one about to begin `begins`.
    """

    run: str
    allotted_nano_usd: int
    day_base_nano_usd: int = 0
    committed_nano_usd: int = 0
    known_nano_usd: int = 0
    own_nano_usd: int | None = None
    slice_nano_usd: int = 0
    alive: bool = False
    begins: bool = False

    @property
    def slice(self) -> int:
        return max(LEAST_SLICE_NANO_USD, self.slice_nano_usd)

    @property
    def may_nano_usd(self) -> int:
        """The most that the run can spend, as far as its process knows."""
        return max(self.allotted_nano_usd, self.known_nano_usd)

    @property
    def today_nano_usd(self) -> int:
        return max(0, self.may_nano_usd - self.day_base_nano_usd)


@dataclass(frozen=True, kw_only=True)
class ProjectAccount:
    """A project's account: its runs, and what those cost that have been deleted."""

    runs: Sequence[RunAccount]
    gone_nano_usd: int = 0
    gone_today_nano_usd: int = 0

    @property
    def total_nano_usd(self) -> int:
        """Spent, or allotted to be spent."""
        return self.gone_nano_usd + sum(run.may_nano_usd for run in self.runs)

    @property
    def today_nano_usd(self) -> int:
        return self.gone_today_nano_usd + sum(run.today_nano_usd for run in self.runs)

    def left_nano_usd(self, limits: SpendingLimits) -> int:
        """What can still be allotted; negative if a limit was lowered below earlier allotments."""
        lefts: list[int] = []
        if limits.budget_nano_usd is not None:
            lefts.append(limits.budget_nano_usd - self.total_nano_usd)
        if limits.day_nano_usd is not None:
            lefts.append(limits.day_nano_usd - self.today_nano_usd)
        return min(lefts)


def slices(account: ProjectAccount, limits: SpendingLimits) -> dict[str, int]:
    """The slices that are given now, in nano-dollars by run; who would have to stop first comes first.

    A run that begins gets a whole slice, or all that its own budget leaves, or waits.
    """
    left, given = account.left_nano_usd(limits), dict[str, int]()
    alive = sorted((run for run in account.runs if run.alive), key=lambda run: (_free(run), run.run))
    for run in alive:
        if _free(run) <= NEXT_SHARE * run.slice and (usd := min(_wanted(run), left)) > 0:
            given[run.run], left = usd, left - usd
    for run in account.runs:
        if run.begins and not run.alive and 0 < _wanted(run) <= left:
            given[run.run] = _wanted(run)
            left -= given[run.run]
    return given


def taken_back(account: ProjectAccount, limits: SpendingLimits) -> dict[str, int]:
    """Return reductions of runs' allotments, in nano-dollars by run, after their project's limit was lowered: unused
    parts of the last runs first, and before these of runs without a process."""
    coming = sum(max(0, run.may_nano_usd - max(run.allotted_nano_usd, run.committed_nano_usd)) for run in account.runs)
    over, taken = -(account.left_nano_usd(limits) + coming), dict[str, int]()
    last_first = account.runs[::-1]
    for run in sorted(last_first, key=lambda run: run.alive):
        if over > 0 and (usd := min(_free(run), over)) > 0:
            taken[run.run], over = usd, over - usd
    return taken


def _free(run: RunAccount) -> int:
    """Return what was allotted and is neither spent nor committed."""
    return run.allotted_nano_usd - run.committed_nano_usd


def _wanted(run: RunAccount) -> int:
    if run.own_nano_usd is None:
        return run.slice
    return max(0, min(run.slice, run.own_nano_usd - run.allotted_nano_usd))


def returned(run: RunAccount, cost_nano_usd: int) -> RunAccount:
    """The account of a run that has ended: what it did not use is the project's again."""
    return RunAccount(run=run.run, allotted_nano_usd=cost_nano_usd, day_base_nano_usd=run.day_base_nano_usd)


def day_of(at_us: int) -> int:
    return at_us // US_PER_DAY


def marked(marks: Sequence[Sequence[int]], at_us: int, spent_nano_usd: int) -> list[list[int]] | None:
    """The marks with one for now; None while the last one is not a minute old."""
    if marks and at_us - marks[-1][0] < MARK_US:
        return None
    return [*([*one] for one in marks[-(MARKS - 1) :]), [at_us, spent_nano_usd]]


def usd_per_hour(marks: Sequence[Sequence[int]], at_us: int, spent_nano_usd: int) -> float:
    """Return the recent spending per hour. A pause of the server counts as one step."""
    if not marks or at_us <= marks[0][0]:
        return 0.0
    usd = max(0, spent_nano_usd - marks[0][1]) / NANO_USD_PER_USD
    return usd / ((at_us - marks[0][0]) / 3_600_000_000)


def ends_in_s(limit_usd: float | None, spent_usd: float, rate_usd_per_hour: float) -> float | None:
    """When a budget ends at this rate; None for never."""
    if limit_usd is None or rate_usd_per_hour <= 0:
        return None
    return max(0.0, limit_usd - spent_usd) / rate_usd_per_hour * 3600
