"""Any decoder-only checkpoint that transformers loads, trained on one device."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from elastic.config import Config
from elastic.worker.trainer.base import StoredPolicy
from elastic.worker.trainer.transformers.settings import TransformersSettings

if TYPE_CHECKING:
    from torch import Tensor

    from elastic.worker.trainer.transformers.trainer import TransformersTrainer

__all__ = ["Transformers", "TransformersSettings"]


class Transformers:
    """The entry point (`elastic.worker.trainer.base.TrainerKind`)."""

    Settings: ClassVar = TransformersSettings

    @staticmethod
    def examine(config: Config, settings: TransformersSettings) -> StoredPolicy:
        from elastic.worker.trainer.transformers.examination import examine

        return examine(config.model.checkpoint)

    @staticmethod
    def check_checkpoint(config: Config, settings: TransformersSettings, checkpoint: Path) -> None:
        """Reads its header: whether its bytes are as they were written is seen by the trainer, which reads them all."""
        from elastic.worker.trainer.transformers.examination import examine_checkpoint

        examine_checkpoint(config.model.checkpoint, checkpoint)

    @staticmethod
    def create(config: Config, settings: TransformersSettings, device: str) -> "TransformersTrainer":
        """Raises `CheckpointError` for a policy that does not load, and `ValueError` for settings that it does not
        take."""
        import torch

        from elastic.engine.torch.runner import device_named
        from elastic.worker.trainer.transformers.model import CausalModel
        from elastic.worker.trainer.transformers.trainer import TransformersTrainer

        torch.set_num_threads(config.trainer.threads)
        where = device_named(device)
        model = CausalModel(config.model.checkpoint, where, settings.attention, settings.activation_checkpointing)
        rollout = config.rollout
        return TransformersTrainer(
            config.trainer, settings, model, rollout.groups, rollout.temperature, config.run.steps
        )

    @staticmethod
    def exported(config: Config, settings: TransformersSettings, checkpoint: Path) -> "Iterator[tuple[str, Tensor]]":
        import torch

        from elastic.worker.trainer.checkpoint import masters
        from elastic.worker.trainer.transformers.model import CausalModel

        model = CausalModel(config.model.checkpoint, torch.device("cpu"), "auto", activation_checkpointing=False)
        yield from model.as_stored(dict(masters(checkpoint))).items()
