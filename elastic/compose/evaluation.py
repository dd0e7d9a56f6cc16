"""How a run's policy is evaluated: on which tasks, of which none may be one that is trained on."""

import json
from collections.abc import Sequence
from typing import Any

from msgspec import UNSET, UnsetType

from elastic.compose.data import data_source
from elastic.config import Config, ConfigError, ConfigProblem, EnvironmentConfig, EvaluationConfig, SplitConfig
from elastic.core.types import NS_PER_S, EvaluationSet, PlannedEvaluation, StopRule
from elastic.environments.hub_rows import HubSource
from elastic.environments.rows import BadData, DataSource, Rows, read_rows

MOST_EPISODES = 1_000_000
"""Of an evaluation: each of their rewards is kept until its end."""


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
    return split.model_copy(update={"tasks": len(_rows(source, (*section, "data"), where).rows)})


def _read_elsewhere(environment: EnvironmentConfig, source: DataSource) -> bool:
    """Whether the rows may be readable to another interpreter alone."""
    return isinstance(source.source, HubSource) and bool(environment.python or environment.container)


def _rows(source: DataSource, section: Sequence[str], where: str) -> Rows:
    try:
        return read_rows(source)
    except BadData as error:
        raise ConfigError(ConfigProblem(str(error), tuple(section), where)) from error


def check_evaluation(config: Config, where: str) -> None:
    """Raises `ConfigError` where a split has more tasks than rows, or rows that are trained on, which it tells the
    number of."""
    sources = [data_source(one, config.run.seed) for one in config.mixture]
    splits = () if config.evaluation is None else config.evaluation.splits
    evaluated = [
        (split, source, ("evaluation", "splits", str(place), "data"))
        for place, (split, source) in enumerate(zip(splits, sources[len(config.trained) :], strict=True))
        if source is not None and not _read_elsewhere(split, source)
    ]
    if not evaluated:
        return
    trained = {
        environment.name: set(_prompts(source, (*config.environment_section(number), "data"), where))
        for number, (environment, source) in enumerate(zip(config.trained, sources, strict=False))
        if source is not None and not _read_elsewhere(environment, source)
    }
    for split, source, section in evaluated:
        prompts = _prompts(source, section, where)
        if split.tasks is not None and split.tasks > (rows := len(prompts)):
            problem = f"found {split.tasks}, but {source.source} has {rows} rows; allowed: up to {rows}"
            raise ConfigError(ConfigProblem(problem, (*section[:-1], "tasks"), where))
        tasks = prompts[: split.tasks]
        for name, known in trained.items():
            if shared := sum(task in known for task in tasks):
                problem = (
                    f"{shared} of the {len(tasks)} tasks of {split.name!r} have prompts that are trained on, by "
                    f"{name!r}; allowed: others"
                )
                raise ConfigError(ConfigProblem(problem, section, where))


def _prompts(source: DataSource, section: Sequence[str], where: str) -> list[str]:
    rows = _rows(source, section, where)
    return [_plain(rows.prompt(row)) for row in rows.rows]


def _plain(prompt: Any) -> str:
    return json.dumps(prompt, sort_keys=True, default=str)
