"""Kinds of trainers behind one contract (`base`). A kind's own imports (torch) happen only when it is created."""

from elastic.config import Config, EngineConfig, TrainerConfig, resolve_kind
from elastic.worker.trainer.base import PolicyTrainer, TrainerKind, TrainerSettings


def create_trainer(config: Config) -> PolicyTrainer:
    """The trainer that `trainer.kind` names, with the run's base policy, on the device of the trainer's engine.

    Raises `ConfigError` for a kind that is not installed and settings that are not its own, else what its `create`
    raises.
    """
    kind, settings = resolve_trainer(config.trainer, "the run's configuration")
    return kind.create(config, settings, trainer_device(config))


def trainer_engine(config: Config) -> EngineConfig:
    """The settings of the engine that seeds on the trainer's device."""
    return EngineConfig.model_validate(config.engine.overlaid(config.trainer.engine))


def trainer_device(config: Config) -> str:
    """The name of the device that the trainer shares with the engine that seeds there."""
    return trainer_engine(config).device


def seeding_engines(config: Config) -> int:
    """How many engines the trainer makes way for (`TrainerKind.seeding_engines`). Raises `ConfigError`."""
    kind, settings = resolve_trainer(config.trainer, "the run's configuration")
    return kind.seeding_engines(config, settings)


def generates(config: Config) -> bool:
    """Whether anything generates on the trainer's device while it does not train. Raises `ConfigError`."""
    kind, settings = resolve_trainer(config.trainer, "the run's configuration")
    return kind.seeding_engines(config, settings) > 0 or (kind.generates and config.trainer.gpus == 1)


def resolve_trainer(trainer: TrainerConfig, where: str) -> tuple[type[TrainerKind], TrainerSettings]:
    """What a trainer is made by, and its own settings; the sections of all other kinds are looked at as well.

    Kinds come from the entry-point group "elastic.trainers"; each names a `TrainerKind`.
    Raises `ConfigError` for a kind or a section that is not installed or cannot be loaded, and for settings that are
    not its own.
    """
    return resolve_kind(trainer, "trainer", TrainerKind, where, ("trainer",))
