"""What became of groups: ages of trained tokens, and lengths of dropped groups beside those of trained ones.

Dropping slow groups prefers short ones; the two lengths show by how much (invariant 4). They *part* where trajectories
that were dropped for what has nothing to do with their rewards were longer than those that were trained on, by a share
that matters (`PARTS_BY`), and by more than chance explains (`PARTS_ERRORS` standard errors of the difference of means,
of groups, whose members are alike in length). Only longer ones count: a trajectory that was dropped may not have come
to its end, so that a short length tells nothing.
"""

import math
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from elastic.report.history import History
from elastic.runtime.journal import GroupRow

TRAINED = "trained"
IN_VAIN = ("stale", "infrastructure")
"""Reasons for dropping a group that are neither its rewards' nor its place in the order's."""
PARTS_BY = 0.2
PARTS_ERRORS = 3.0
"""The standard errors by which about one in a thousand parts differs in runs without a preference."""
PARTS_AT_LEAST = 8
"""Groups of either kind below which nothing is said."""


class Fate(msgspec.Struct, frozen=True, kw_only=True):
    """Groups that were trained, or dropped for one reason, and the policy tokens of their trajectories."""

    fate: str
    groups: int
    trajectories: int
    tokens: int
    tokens_mean: float | None
    tokens_p50: float | None
    tokens_p95: float | None


class StepLengths(msgspec.Struct, frozen=True, kw_only=True):
    """Mean policy tokens of a step's trajectories that were trained on, and of those that were dropped in vain."""

    step: int
    trained: float | None
    dropped: float | None


class Parted(msgspec.Struct, frozen=True, kw_only=True):
    """Mean lengths that part, over the whole run."""

    trained: float
    dropped: float


class Batches(msgspec.Struct, frozen=True, kw_only=True):
    """`trained_tokens_by_age`: policy tokens by how many versions older than the trainer they were. `masked_tokens` of
    trained groups were left out since they were older than the bound."""

    fates: list[Fate]
    trained_tokens: int
    trained_tokens_by_age: dict[int, int]
    masked_tokens: int
    lengths: list[StepLengths]
    parted: Parted | None
    """Set where lengths part."""


def batches_of(history: History) -> Batches:
    """Returns the trained groups' figures first, then those of dropped groups by reason, the most frequent first."""
    by_fate: dict[str, list[GroupRow]] = {}
    for row in history.rows(GroupRow):
        by_fate.setdefault(row.dropped.partition(":")[0] or TRAINED, []).append(row)
    fates = [_fate(name, rows) for name, rows in by_fate.items()]
    ages: dict[int, int] = {}
    for row in by_fate.get(TRAINED, []):
        for age, tokens in row.tokens_by_age.items():
            ages[age] = ages.get(age, 0) + tokens
    return Batches(
        fates=sorted(fates, key=lambda fate: (fate.fate != TRAINED, -fate.groups, fate.fate)),
        trained_tokens=sum(ages.values()),
        trained_tokens_by_age=dict(sorted(ages.items())),
        masked_tokens=sum(row.masked_tokens for row in by_fate.get(TRAINED, [])),
        lengths=_by_step(history.rows(GroupRow)),
        parted=parted(
            _means(by_fate.get(TRAINED, [])), _means(row for reason in IN_VAIN for row in by_fate.get(reason, []))
        ),
    )


def _means(rows: Iterable[GroupRow]) -> list[float]:
    return [sum(row.lengths) / len(row.lengths) for row in rows if row.lengths]


def parted(trained: Sequence[float], dropped: Sequence[float]) -> Parted | None:
    """The mean lengths, where they part: of groups' mean lengths."""
    if min(len(trained), len(dropped)) < PARTS_AT_LEAST:
        return None
    means = float(np.mean(trained)), float(np.mean(dropped))
    error = math.sqrt(sum(float(np.var(of, ddof=1)) / len(of) for of in (trained, dropped)))
    longer = means[1] - means[0]
    if longer <= PARTS_BY * means[0] or longer <= PARTS_ERRORS * error:
        return None
    return Parted(trained=means[0], dropped=means[1])


def _by_step(rows: Iterable[GroupRow]) -> list[StepLengths]:
    """Return the lengths of the steps in which groups were dropped in vain, or trained on; none if no group was
    dropped so."""
    trained: dict[int, list[int]] = {}
    dropped: dict[int, list[int]] = {}
    for row in rows:
        reason = row.dropped.partition(":")[0]
        if not reason or reason in IN_VAIN:
            (dropped if reason else trained).setdefault(row.step, []).extend(row.lengths)
    steps = sorted(trained.keys() | dropped.keys()) if dropped else []
    return [
        StepLengths(step=step, trained=_mean(trained.get(step)), dropped=_mean(dropped.get(step))) for step in steps
    ]


def _mean(lengths: Sequence[int] | None) -> float | None:
    return sum(lengths) / len(lengths) if lengths else None


def _fate(name: str, rows: Sequence[GroupRow]) -> Fate:
    lengths = [length for row in rows for length in row.lengths]
    p50, p95 = (float(q) for q in np.percentile(lengths, (50, 95))) if lengths else (None, None)
    return Fate(
        fate=name.replace("_", " "),
        groups=len(rows),
        trajectories=len(lengths),
        tokens=sum(lengths),
        tokens_mean=sum(lengths) / len(lengths) if lengths else None,
        tokens_p50=p50,
        tokens_p95=p95,
    )
