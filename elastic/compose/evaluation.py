"""How a run's policy is evaluated: on which tasks, of which none may be one that is trained on."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import UNSET, UnsetType

from elastic.compose.data import data_source
from elastic.config import Config, ConfigError, ConfigProblem, EvaluationConfig, SplitConfig
from elastic.core.types import NS_PER_S, EvaluationSet, PlannedEvaluation, StopRule
from elastic.environments.hub_rows import HubSource
from elastic.environments.rows import (
    BadData,
    DataSource,
    Rows,
    check_held_out,
    check_tasks,
    prompts_of,
    read_rows,
)

if TYPE_CHECKING:
    from elastic.environments.env_worker import HeldOutRows

MOST_EPISODES = 1_000_000
"""The most episodes of an evaluation, which keeps each reward until its end."""


def planned_evaluation(config: Config) -> PlannedEvaluation | UnsetType:
    """When the run's policy is evaluated, and on what; unset where it is not."""
    own = config.evaluation
    if own is None:
        return UNSET
    splits = {split.name: split.tasks for split in own.splits}
    stop = own.stop_when
    return PlannedEvaluation(
        sets=tuple(EvaluationSet(environment=name, tasks=splits.get(name) or own.tasks) for name in config.evaluated),
        samples=own.samples,
        timeout_ns=round(own.timeout_s * NS_PER_S),
        every=own.every,
        at_start=own.at_start,
        at_end=own.at_end,
        passes=own.passes,
        overlap=own.overlap,
        keep_best=own.keep_best,
        stop=None
        if stop is None
        else StopRule(metric=stop.metric, at_least=stop.at_least, no_better_for=stop.no_better_for or 0),
    )


def with_tasks(config: Config, where: str) -> Config:
    """The configuration with the number of tasks of each split. Raises `ConfigError` for rows that cannot be read, and
    for more episodes than `MOST_EPISODES`."""
    own = config.evaluation
    if own is None:
        return config
    splits = [_with_tasks(config, own, number, where) for number in range(len(own.splits))]
    tasks = sum(split.tasks or own.tasks for split in splits) + own.tasks * (len(config.evaluated) - len(splits))
    if tasks * own.samples > MOST_EPISODES:
        problem = (
            f"{tasks:,} tasks of {own.samples:,} samples are {tasks * own.samples:,} episodes; allowed: up to "
            f"{MOST_EPISODES:,}"
        )
        raise ConfigError(ConfigProblem(problem, ("evaluation",), where))
    return config.model_copy(update={"evaluation": own.model_copy(update={"splits": tuple(splits)})})


def _with_tasks(config: Config, own: EvaluationConfig, number: int, where: str) -> SplitConfig:
    split, section = own.splits[number], ("evaluation", "splits", str(number))
    source = data_source(split, config.run.seed)
    if source is None or split.tasks is not None:  # What is known need not be read again, nor be there any more.
        return split.model_copy(update={"tasks": split.tasks or own.tasks})
    if isinstance(source.source, HubSource):
        problem = f"is missing: env workers alone read {source.source}; allowed: tasks = N, of its first rows"
        raise ConfigError(ConfigProblem(problem, (*section, "tasks"), where))
    return split.model_copy(update={"tasks": len(_rows(source, (*section, "data"), where).rows)})


def _rows(source: DataSource, section: Sequence[str], where: str) -> Rows:
    try:
        return read_rows(source)
    except BadData as error:
        raise ConfigError(ConfigProblem(str(error), tuple(section), where)) from error


def check_evaluation(config: Config, where: str) -> None:
    """Raises `ConfigError` where a split has more tasks than rows, or rows that are trained on, which it tells the
    number of. Rows of the hub are read by env workers alone, which look at that themselves: see `held_out`."""
    files = {name: source for name, source in _sources(config).items() if isinstance(source.source, Path)}
    splits = () if config.evaluation is None else config.evaluation.splits
    evaluated = [(place, split, files[split.name]) for place, split in enumerate(splits) if split.name in files]
    if not evaluated:
        return
    trained = {
        one.name: set(prompts_of(_rows(files[one.name], (*config.environment_section(number), "data"), where)))
        for number, one in enumerate(config.trained)
        if one.name in files
    }
    for place, split, source in evaluated:
        section = ("evaluation", "splits", str(place))
        rows = _rows(source, (*section, "data"), where)
        key = "tasks"
        try:
            check_tasks(rows, split.tasks or 0)
            key = "data"
            check_held_out(split.name, prompts_of(rows)[: split.tasks], trained)
        except BadData as error:
            raise ConfigError(ConfigProblem(str(error), (*section, key), where)) from error


def held_out(config: Config, environment: str) -> "HeldOutRows | None":
    """What an env worker is to look at before it plays tasks of a split: what `check_evaluation` could not."""
    from elastic.environments.env_worker import HeldOutRows

    sources = _sources(config)
    splits = {} if config.evaluation is None else {split.name: split for split in config.evaluation.splits}
    if environment not in splits or environment not in sources:
        return None
    of_hub = isinstance(sources[environment].source, HubSource)
    trained = {one.name: sources[one.name] for one in config.trained if one.name in sources}
    unseen = {name: one for name, one in trained.items() if of_hub or isinstance(one.source, HubSource)}
    return HeldOutRows(name=environment, tasks=splits[environment].tasks, trained=unseen)


def _sources(config: Config) -> dict[str, DataSource]:
    """The rows of environments, by their names, of those that are about rows."""
    found = {one.name: data_source(one, config.run.seed) for one in config.mixture}
    return {name: source for name, source in found.items() if source is not None}
