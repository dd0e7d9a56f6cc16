"""The kind of a run whose weights somebody else trains: each version is a directory that was offered to it."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from elastic.config import Config, ConfigError, EngineConfig, GivenPath
from elastic.engine import resolve_engine
from elastic.worker.trainer.base import StoredPolicy, TrainerKind, TrainerSettings

if TYPE_CHECKING:
    from torch import Tensor

    from elastic.worker.trainer.imported.trainer import ImportedTrainer

__all__ = ["Imported", "ImportedSettings"]


class ImportedSettings(TrainerSettings):
    roots: tuple[GivenPath, ...] = Field(
        (), description="directories below which offered weights are; nothing else is read"
    )
    adapters: bool = Field(False, description="adapters to model.checkpoint are offered, else whole models")


class Imported(TrainerKind):
    """The entry point (`elastic.worker.trainer.base.TrainerKind`)."""

    Settings: ClassVar = ImportedSettings
    generates: ClassVar = False
    in_directories: ClassVar = True

    @staticmethod
    def unserved(config: Config, settings: ImportedSettings, engine: EngineConfig, own: Any) -> str:
        base, policy = getattr(own, "base", None), config.model.checkpoint
        if not settings.adapters:
            return "" if base is None else f"base = '{base}': without trainer.imported.adapters none are taken"
        if base is None or base.resolve() != policy.resolve():
            return f"trainer.imported.adapters takes adapters alone; allowed: 'vllm' with base = '{policy}'"
        return ""

    @staticmethod
    def examine(config: Config, settings: ImportedSettings) -> StoredPolicy:
        from elastic.engine.model.stored import CheckpointError
        from elastic.worker.trainer.imported.offered import examined

        try:
            return examined(config.model.checkpoint)
        except CheckpointError as error:
            raise ConfigError(f"model.checkpoint: {error}") from error

    @staticmethod
    def check_checkpoint(config: Config, settings: ImportedSettings, checkpoint: Path) -> None:
        """Reads all of it."""
        Imported.create(config, settings, "cpu").load(checkpoint)

    @staticmethod
    def create(config: Config, settings: ImportedSettings, device: str) -> "ImportedTrainer":
        """Raises `CheckpointError` for a base policy that cannot be read."""
        from elastic.worker.trainer.imported.forms import Adapters, WholeModels
        from elastic.worker.trainer.imported.trainer import ImportedTrainer

        base = config.model.checkpoint
        form = Adapters(base, _rank_max(config)) if settings.adapters else WholeModels(base)
        return ImportedTrainer(form, settings.roots)

    @staticmethod
    def exported(config: Config, settings: ImportedSettings, checkpoint: Path) -> "Iterator[tuple[str, Tensor]]":
        from elastic.worker.trainer.imported.forms import Adapters

        tensors = _loaded(config, settings, checkpoint)
        if settings.adapters:
            yield from Adapters(config.model.checkpoint, _rank_max(config)).merged(tensors)
        else:
            yield from tensors.items()

    @staticmethod
    def exported_adapter(config: Config, settings: ImportedSettings, checkpoint: Path) -> "dict[str, Tensor]":
        return _loaded(config, settings, checkpoint) if settings.adapters else {}


def _loaded(config: Config, settings: ImportedSettings, checkpoint: Path) -> "dict[str, Tensor]":
    """Raises `CheckpointError`."""
    made = Imported.create(config, settings, "cpu")
    made.load(checkpoint)
    return made.tensors()


def _rank_max(config: Config) -> int:
    """The largest rank of an adapter that engines take."""
    _, own = resolve_engine(config.engine, "the engine's settings")
    return getattr(own, "adapter_rank", 0)
