"""What became of groups: ages of trained tokens, and lengths of dropped groups beside those of trained ones.

Dropping slow groups prefers short ones; the two lengths show by how much (invariant 4).
"""

from collections.abc import Sequence

import msgspec
import numpy as np

from elastic.report.history import History
from elastic.runtime.journal import GroupRow

TRAINED = "trained"


class Fate(msgspec.Struct, frozen=True, kw_only=True):
    """Groups that were trained, or dropped for one reason, and the policy tokens of their trajectories."""

    fate: str
    groups: int
    trajectories: int
    tokens: int
    tokens_mean: float | None
    tokens_p50: float | None
    tokens_p95: float | None


class Batches(msgspec.Struct, frozen=True, kw_only=True):
    """`trained_tokens_by_age`: policy tokens by how many versions older than the trainer they were."""

    fates: list[Fate]
    trained_tokens: int
    trained_tokens_by_age: dict[int, int]


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
    )


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
