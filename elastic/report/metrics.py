"""What environments measure besides rewards."""

from collections.abc import Iterable
from statistics import fmean

from elastic.runtime.journal import TrajectoryRow


def mean_metrics(trajectories: Iterable[TrajectoryRow]) -> dict[str, float]:
    """The mean of each metric over those of the scored trajectories that have it, by name."""
    values: dict[str, list[float]] = {}
    for row in trajectories:
        if row.reward is not None and not row.cause:
            for name, value in row.metrics_by_name.items():
                values.setdefault(name, []).append(value)
    return {name: fmean(found) for name, found in sorted(values.items())}
