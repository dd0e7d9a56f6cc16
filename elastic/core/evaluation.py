"""An evaluation of the policy at one version: which tasks it has, when it is due, and what it comes to.

What it is measured on is the same each time: tasks are numbered from 0, and neither their seeds nor the sampling noise
depend on the version. Nothing of it is trained on.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from elastic.core.ids import evaluated_group_id, trajectory_id
from elastic.core.scores import Estimate, metrics
from elastic.core.types import Nanoseconds, PlannedEvaluation, StopRule, TrajectoryId


@dataclass(slots=True)
class EvaluatedTask:
    """The episodes of one task, with their rewards, the causes of their failures, or None before their ends. `place`
    is the task's number in its set."""

    group: str
    number: int
    environment: str
    place: int
    members: dict[TrajectoryId, float | str | None]


@dataclass(slots=True)
class Evaluation:
    """The evaluation that is under way. `next_step` begins once it is over; None where a step is under way beside it.

    `tasks` are those that have begun, the first ones of the plan's; `unended` episodes of all tasks have not come to an
    end.
    """

    version: int
    started_ns: Nanoseconds
    next_step: int | None
    tasks: dict[str, EvaluatedTask]
    unended: int
    timed_out: bool = False


class SetFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What the tasks of one set came to. Of its episodes so many `finished` with a reward, `failed`, or were `cut_off`
    as time was up. `rewards` has those of each task's episodes, None where there is none."""

    finished: int
    failed: int
    cut_off: int
    metrics: dict[str, Estimate]
    rewards: list[list[float | None]]


class EvaluationRecord(msgspec.Struct, frozen=True, kw_only=True):
    """An evaluation that is over: its `sets` by environment, and the metrics of all of their tasks together.

    `timed_out`: it has what it had by then.
    """

    version: int
    started_ns: Nanoseconds
    ended_ns: Nanoseconds
    timed_out: bool
    metrics: dict[str, Estimate]
    sets: dict[str, SetFigures]

    @property
    def duration_ns(self) -> Nanoseconds:
        return self.ended_ns - self.started_ns

    def value(self, metric: str) -> float | None:
        """The mean of a metric, or of `SET/METRIC`, by which versions are compared. None where it has no task, was not
        evaluated, or time was up: the episodes that had ended by then are the short ones, whatever the policy."""
        if self.timed_out:
            return None
        name, slash, of_set = metric.rpartition("/")
        one = self.sets.get(name)
        found = self.metrics if not slash else {} if one is None else one.metrics
        known = found.get(of_set)
        return None if known is None else known.mean


def metric_names(plan: PlannedEvaluation) -> list[str]:
    """Every metric that its evaluations have: of all tasks together, and of each set where there are several."""
    own = [f"avg@{plan.samples}", *(f"pass@{k}" for k in plan.passes)]
    several = [one.environment for one in plan.sets] if len(plan.sets) > 1 else []
    return [*own, *(f"{name}/{metric}" for name in several for metric in own)]


def is_due(plan: PlannedEvaluation, version: int, steps: int) -> bool:
    """Whether the policy is evaluated at this version, of a run that ends with version `steps`."""
    if version >= steps:
        return plan.at_end if steps else plan.at_start or plan.at_end
    if version == 0:
        return plan.at_start
    return plan.every > 0 and version % plan.every == 0


def planned(plan: PlannedEvaluation, version: int, next_step: int | None, now_ns: Nanoseconds) -> Evaluation:
    """The evaluation of a version, before any of its tasks begins."""
    return Evaluation(version, now_ns, next_step, {}, plan.episodes)


def under_way(plan: PlannedEvaluation, evaluation: Evaluation) -> int:
    """How many episodes have begun, and not come to an end."""
    return evaluation.unended - (plan.episodes - len(evaluation.tasks) * plan.samples)


def begin_next(plan: PlannedEvaluation, evaluation: Evaluation) -> EvaluatedTask | None:
    """Begin the task whose turn it is; None where all have begun."""
    number = place = len(evaluation.tasks)
    for one in plan.sets:
        if place < one.tasks:
            break
        place -= one.tasks
    else:
        return None
    group = evaluated_group_id(evaluation.version, number)
    members = dict[TrajectoryId, float | str | None].fromkeys(
        trajectory_id(evaluation.version, number, sample, evaluation=True) for sample in range(plan.samples)
    )
    task = evaluation.tasks[group] = EvaluatedTask(group, number, one.environment, place, members)
    return task


def recorded(plan: PlannedEvaluation, evaluation: Evaluation, now_ns: Nanoseconds) -> EvaluationRecord:
    """What the evaluation has come to, which is over now."""
    by_set = {
        one.environment: [task for task in evaluation.tasks.values() if task.environment == one.environment]
        for one in plan.sets
    }
    together = [_finished(task) for task in evaluation.tasks.values()]
    return EvaluationRecord(
        version=evaluation.version,
        started_ns=evaluation.started_ns,
        ended_ns=now_ns,
        timed_out=evaluation.timed_out,
        metrics=metrics(together, plan.samples, plan.passes),
        sets={one.environment: _figures(plan, one.tasks, by_set[one.environment]) for one in plan.sets},
    )


def _finished(task: EvaluatedTask) -> list[float]:
    return [outcome for outcome in task.members.values() if isinstance(outcome, float)]


def _figures(plan: PlannedEvaluation, of_set: int, tasks: Sequence[EvaluatedTask]) -> SetFigures:
    """What a set of so many tasks came to, of which these have begun."""
    outcomes = [outcome for task in tasks for outcome in task.members.values()]
    unbegun = of_set - len(tasks)
    rewards = [[one if isinstance(one, float) else None for one in task.members.values()] for task in tasks]
    return SetFigures(
        finished=sum(isinstance(outcome, float) for outcome in outcomes),
        failed=sum(isinstance(outcome, str) for outcome in outcomes),
        cut_off=outcomes.count(None) + unbegun * plan.samples,
        metrics=metrics([_finished(task) for task in tasks], plan.samples, plan.passes),
        rewards=[*rewards, *([None] * plan.samples for _ in range(unbegun))],
    )


# What follows from evaluations


def deciding_values(plan: PlannedEvaluation, record: EvaluationRecord) -> dict[str, float]:
    """What the metrics came to that decide which version is the best, or when the run ends; those without a task are
    left out."""
    deciding = [*([plan.keep_best] if plan.keep_best else []), *([plan.stop.metric] if plan.stop else [])]
    values = {metric: record.value(metric) for metric in deciding}
    return {metric: value for metric, value in values.items() if value is not None}


Values = Mapping[int, float | None]
"""By version, what a metric came to; None where it had no task."""


def best_version(values: Values) -> int | None:
    """The version with the highest value, the first of equals; None where none has any."""
    known = {version: value for version, value in values.items() if value is not None}
    return max(known, key=lambda version: (known[version], -version), default=None)


def why_stop(rule: StopRule, values: Values) -> str:
    """Why a run ends with the last of these evaluations; empty where it goes on."""
    if not values:
        return ""
    version, best = max(values), best_version(values)
    value = values[version]
    if rule.at_least is not None and value is not None and value >= rule.at_least:
        return f"{rule.metric} is {value:.4g} at version {version}, of which at least {rule.at_least:g} was wanted"
    since = [later for later in values if best is not None and later > best]
    if rule.no_better_for and len(since) >= rule.no_better_for:
        return f"{rule.metric} has not been above that of version {best} in {len(since)} evaluations"
    return ""
