"""The embedded trainer: small Qwen3 policies in float32, with sums that are exact whatever the order of arrival."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from elastic.config import Config, ConfigError, EngineConfig
from elastic.worker.trainer.base import StoredPolicy, TrainerKind, TrainerSettings

if TYPE_CHECKING:
    from torch import Tensor

    from elastic.worker.trainer.embedded.trainer import GRPOTrainer

__all__ = ["Embedded"]


class Embedded(TrainerKind):
    """The entry point (`elastic.worker.trainer.base.TrainerKind`). It has no settings beside those of `[trainer]`."""

    Settings: ClassVar = TrainerSettings

    @staticmethod
    def unserved(config: Config, settings: TrainerSettings, engine: EngineConfig, own: Any) -> str:
        if (base := getattr(own, "base", None)) is None:
            return ""
        return (
            f"base = '{base}': trainer.kind = 'embedded' trains no adapters; allowed: trainer.kind = 'transformers' "
            "with trainer.transformers.lora, or no base"
        )

    @staticmethod
    def examine(config: Config, settings: TrainerSettings) -> StoredPolicy:
        from elastic.engine.model.stored import CheckpointError, check_stored, count_float32, stored_tensors

        try:
            shape, parameters = check_stored(config.model.checkpoint)
            stored = stored_tensors(config.model.checkpoint)
        except CheckpointError as error:
            other = "; trainer.kind = 'transformers' trains other models" if "model_type" in str(error) else ""
            raise ConfigError(f"model.checkpoint: {error}{other}") from error
        return StoredPolicy(shape.vocab_size, parameters, count_float32(stored))

    @staticmethod
    def check_checkpoint(config: Config, settings: TrainerSettings, checkpoint: Path) -> None:
        """Reads it whole, into a trainer."""
        Embedded.create(config, settings, "cpu").load(checkpoint)

    @staticmethod
    def create(config: Config, settings: TrainerSettings, device: str) -> "GRPOTrainer":
        """Raises `CheckpointError` for a policy that is not a supported Qwen3 model, or cannot be read."""
        import torch

        from elastic.engine.model.checkpoint import load_model
        from elastic.engine.model.stored import float32_names, stored_tensors
        from elastic.engine.torch.runner import device_named
        from elastic.worker.trainer.embedded.trainer import GRPOTrainer
        from elastic.worker.trainer.sources import sources_of

        torch.set_num_threads(config.trainer.threads)
        model = load_model(config.model.checkpoint, device_named(device))
        rollout, float32 = config.rollout, float32_names(stored_tensors(config.model.checkpoint))
        reference = None if config.reference is None else load_model(config.reference, device_named(device))
        return GRPOTrainer(
            config.trainer,
            model,
            rollout.groups,
            rollout.temperature,
            config.run.steps,
            float32,
            reference,
            sources_of(config),
        )

    @staticmethod
    def exported(config: Config, settings: TrainerSettings, checkpoint: Path) -> "Iterator[tuple[str, Tensor]]":
        from elastic.worker.trainer.checkpoint import masters

        yield from masters(checkpoint)
