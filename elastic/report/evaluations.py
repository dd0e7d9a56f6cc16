"""What evaluations came to: version by version, in all and by environment, and which was the best."""

from collections.abc import Mapping
from typing import Any

import msgspec

from elastic.core.evaluation import best_version
from elastic.core.scores import Estimate
from elastic.core.types import NS_PER_S
from elastic.report import units
from elastic.report.history import History
from elastic.runtime.journal import SIMULATED, EvaluationRow


class EvaluatedSet(msgspec.Struct, frozen=True, kw_only=True):
    """One environment's part of an evaluation, of so many `tasks`. Of their episodes so many `finished` with a reward,
    `failed`, or were `cut_off` as time was up."""

    tasks: int
    finished: int
    failed: int
    cut_off: int
    metrics: dict[str, Estimate]


class EvaluatedVersion(msgspec.Struct, frozen=True, kw_only=True):
    """The evaluation of a version, which ended at `at_s`: the metrics of all tasks, and each environment's. One that
    `timed_out` has what it had by then."""

    version: int
    at_s: float
    duration_s: float
    timed_out: bool
    metrics: dict[str, Estimate]
    environments: dict[str, EvaluatedSet]


class Evaluations(msgspec.Struct, frozen=True, kw_only=True):
    """All of a run's, in the order of their versions. `metric` is the one by which the `best` version was looked for:
    `evaluation.keep_best`, else that by which the run was to stop, else the mean reward of all tasks. `ends` is why the
    run ended before its last step by what they came to; empty where it did not."""

    metric: str = ""
    best: int | None = None
    ends: str = ""
    versions: list[EvaluatedVersion] = []

    def of(self, version: int) -> Estimate | None:
        """What the metric came to at a version that was evaluated."""
        found = next(one for one in self.versions if one.version == version)
        name, slash, metric = self.metric.rpartition("/")
        known = found.metrics if not slash else found.environments[name].metrics if name in found.environments else {}
        return known.get(metric)


def evaluations_of(history: History) -> Evaluations:
    """Return a run's evaluations. The last one of a version counts, if a later process evaluated it again. A
    simulation's rewards are drawn, and come to no metric."""
    rows = {row.version: row for row in history.rows(EvaluationRow)}
    if not rows:
        return Evaluations()
    meta = history.segments[-1].meta()
    if SIMULATED in meta:
        return Evaluations(versions=[_version(rows[version], learns=False) for version in sorted(rows)])
    config = msgspec.json.decode(meta.get("config", "{}"))
    metric = _metric(config.get("evaluation") or {}, rows[max(rows)])
    return Evaluations(
        metric=metric,
        best=best_version({version: row.record.value(metric) for version, row in rows.items()}),
        ends=rows[max(rows)].ends,
        versions=[_version(rows[version]) for version in sorted(rows)],
    )


def _metric(section: Mapping[str, Any], row: EvaluationRow) -> str:
    stop = section.get("stop_when") or {}
    return section.get("keep_best") or stop.get("metric") or next(iter(row.record.metrics), "")


def _version(row: EvaluationRow, *, learns: bool = True) -> EvaluatedVersion:
    record = row.record
    return EvaluatedVersion(
        version=row.version,
        at_s=row.t_ns / NS_PER_S,
        duration_s=record.duration_ns / NS_PER_S,
        timed_out=record.timed_out,
        metrics=record.metrics if learns else {},
        environments={
            name: EvaluatedSet(
                tasks=len(one.rewards),
                finished=one.finished,
                failed=one.failed,
                cut_off=one.cut_off,
                metrics=one.metrics if learns else {},
            )
            for name, one in record.sets.items()
        },
    )


def estimate_words(found: Estimate | None) -> str:
    """A mean with its standard error: 0.481 ± 0.020."""
    if found is None:
        return units.NONE
    return units.reward(found.mean) + (f" ± {units.reward(found.error)}" if found.error is not None else "")


def evaluation_words(evaluations: Evaluations) -> str:
    """The last evaluation and the best one in a line; empty where there is none."""
    if not evaluations.versions:
        return ""
    last = evaluations.versions[-1]
    told = ", ".join(f"{name} {estimate_words(found)}" for name, found in last.metrics.items())
    told = told or f"{sum(one.finished for one in last.environments.values())} episodes finished"
    words = f"evaluation of version {last.version}: {told}{' (timed out)' if last.timed_out else ''}"
    if (best := evaluations.best) is not None:
        words += f"; best by {evaluations.metric}: version {best}, {estimate_words(evaluations.of(best))}"
    return words
