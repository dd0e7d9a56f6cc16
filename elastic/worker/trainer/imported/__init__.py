"""The kind of a run whose weights somebody else trains: each version is a directory that was offered to it."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from elastic.config import Config, ConfigError, EngineConfig, GivenPath
from elastic.worker.trainer.base import StoredPolicy, TrainerKind, TrainerSettings

if TYPE_CHECKING:
    from torch import Tensor

    from elastic.worker.trainer.imported.trainer import ImportedTrainer

__all__ = ["Imported", "ImportedSettings"]


class ImportedSettings(TrainerSettings):
    roots: tuple[GivenPath, ...] = Field(
        (), description="directories below which offered weights are; nothing else is read"
    )


class Imported(TrainerKind):
    """The entry point (`elastic.worker.trainer.base.TrainerKind`)."""

    Settings: ClassVar = ImportedSettings
    generates: ClassVar = False
    in_directories: ClassVar = True

    @staticmethod
    def unserved(config: Config, settings: TrainerSettings, engine: EngineConfig, own: Any) -> str:
        if (base := getattr(own, "base", None)) is None:
            return ""
        return f"base = '{base}': trainer.kind = 'imported' takes whole models; allowed: no base"

    @staticmethod
    def examine(config: Config, settings: TrainerSettings) -> StoredPolicy:
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
        from elastic.worker.trainer.imported.trainer import ImportedTrainer

        return ImportedTrainer(config.model.checkpoint, settings.roots)

    @staticmethod
    def exported(config: Config, settings: ImportedSettings, checkpoint: Path) -> "Iterator[tuple[str, Tensor]]":
        made = Imported.create(config, settings, "cpu")
        made.load(checkpoint)
        yield from made.tensors().items()
