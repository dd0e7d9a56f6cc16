"""The rows that environments' episodes are about: where they are, and who says in which order they come."""

from collections.abc import Mapping
from pathlib import Path

from elastic.compose.named_policies import named_policy
from elastic.config import CHAT, Config, ConfigError, ConfigProblem, DataConfig, EnvironmentConfig
from elastic.core.policy import CurriculumPolicy
from elastic.core.rows import Curriculum
from elastic.environments.hub_rows import HUB, HubSource
from elastic.environments.rows import BadData, DataSource, read_rows
from policies.curriculum import CURRICULA, OrderedPasses

DECISION = "curriculum"
"""The decision of the policies that order a pass over the data."""


def episode_seed(config: Config, environment: str) -> int:
    """What an environment draws its tasks from: the run's seed, or, where it is evaluated alone, another one."""
    trained = any(one.name == environment for one in config.trained)
    return config.run.seed if trained else config.run.seed ^ 1


def data_source(environment: EnvironmentConfig, seed: int) -> DataSource | None:
    """The rows that an environment's episodes are about, if they are about any."""
    data = environment.data
    if data is None:
        return None
    named = data.source
    return DataSource(
        source=named if isinstance(named, Path) else HubSource(named.removeprefix(HUB), data.subset, data.split),
        prompt=data.prompt,
        answer=data.answer,
        order=data.order,
        seed=seed,
        columns=data.columns,
        texts=environment.kind == CHAT,
        counted=0 if data.order in CURRICULA or data.rows is None else data.rows,
    )


def counted(config: Config, where: str) -> Config:
    """The configuration with the numbers of rows that curricula have to know. Raises `ConfigError` for data that cannot
    be read, and for a curriculum that is not installed or cannot be loaded."""
    return config.with_mixture([_counted(config, number, where) for number in range(len(config.mixture))])


def _counted(config: Config, number: int, where: str) -> EnvironmentConfig:
    environment, section = config.mixture[number], (*config.environment_section(number), "data")
    data, source = environment.data, data_source(environment, config.run.seed)
    if data is None or source is None or data.order in CURRICULA:
        return environment
    _curriculum(data, where, *section)
    if data.rows is not None:
        return environment
    if isinstance(source.source, HubSource):
        problem = f"is missing, which its order has to know: env workers alone read {source.source}; allowed: rows = N"
        raise ConfigError(ConfigProblem(problem, (*section, "rows"), where))
    try:
        rows = len(read_rows(source).rows)
    except BadData as error:
        raise ConfigError(ConfigProblem(str(error), section, where)) from error
    return environment.model_copy(update={"data": data.model_copy(update={"rows": rows})})


def curricula(config: Config, where: str) -> Mapping[str, Curriculum]:
    """Return the curriculum of each environment, by its name, whose rows do not follow from its groups' places. Raises
    `ConfigError`."""
    return {
        one.name: OrderedPasses(
            one.data.rows,
            config.run.seed,
            _curriculum(one.data, where, *config.environment_section(number), "data").order,
        )
        for number, one in enumerate(config.mixture)
        if one.data is not None and one.data.rows is not None and one.data.order not in CURRICULA
    }


def _curriculum(data: DataConfig, where: str, *section: str) -> CurriculumPolicy:
    return named_policy(
        DECISION,
        data.order,
        data.order_settings,
        where=where,
        key=(*section, "order"),
        settings_key=(*section, "order_settings"),
        others=CURRICULA,
    )
