"""Any decoder-only checkpoint that transformers loads, trained on one device, or in shards on several."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from elastic.config import Config, EngineConfig
from elastic.engine import resolve_engine
from elastic.engine.base import PROOF_TOKENS
from elastic.worker.trainer import trainer_engine
from elastic.worker.trainer.base import PolicyTrainer, StoredPolicy, TrainerKind
from elastic.worker.trainer.transformers.settings import TransformersSettings

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Transformers", "TransformersSettings"]


class Transformers(TrainerKind):
    """The entry point (`elastic.worker.trainer.base.TrainerKind`)."""

    Settings: ClassVar = TransformersSettings
    ranks: ClassVar = True

    @staticmethod
    def examine(config: Config, settings: TransformersSettings) -> StoredPolicy:
        from elastic.worker.trainer.transformers.examination import examine

        if config.trainer.gpus > 1:
            settings.check_ranks(config.trainer.gpus)
        return examine(config.model.checkpoint, settings)

    @staticmethod
    def seeding_engines(config: Config, settings: TransformersSettings) -> int:
        if settings.seeding == "auto":
            return 0
        engine = trainer_engine(config)
        _, own = resolve_engine(engine, "", ("trainer", "engine"))
        settings.check_seeding(config.trainer.gpus, engine, own)
        return config.trainer.gpus // own.ranks

    @staticmethod
    def unserved(config: Config, settings: TransformersSettings, engine: EngineConfig, own: Any) -> str:
        lora, policy = settings.lora, config.model.checkpoint
        base: Path | None = getattr(own, "base", None)
        if lora is None:
            return "" if base is None else f"base = '{base}': without trainer.transformers.lora no adapters are trained"
        if base is None or base.resolve() != policy.resolve():
            return (
                f"trainer.transformers.lora trains adapters, which alone travel; allowed: 'vllm' with base = '{policy}'"
            )
        if own.adapter_rank < lora.r:
            return f"adapters have rank trainer.transformers.lora.r = {lora.r}; allowed: an adapter_rank from that on"
        if engine.max_context_tokens <= PROOF_TOKENS:
            found = engine.max_context_tokens
            return (
                f"engine.max_context_tokens is {found}; with adapters allowed: above {PROOF_TOKENS}, for their proofs"
            )
        return ""

    @staticmethod
    def check_checkpoint(config: Config, settings: TransformersSettings, checkpoint: Path) -> None:
        """Reads its header: whether its bytes are as they were written is seen by the trainer, which reads them all."""
        from elastic.worker.trainer.transformers.examination import examine_checkpoint

        examine_checkpoint(config.model.checkpoint, checkpoint, settings)

    @staticmethod
    def create(config: Config, settings: TransformersSettings, device: str) -> PolicyTrainer:
        """Raises `CheckpointError` for a policy that does not load, and `ValueError` for settings that it does not
        take."""
        from elastic.engine.torch.runner import device_named

        if config.trainer.gpus > 1:
            from elastic.worker.trainer.transformers.ranked import ranked_trainer

            return ranked_trainer(config, settings, device_named(device))
        from elastic.worker.trainer.transformers.making import trainer_on

        return trainer_on(config, settings, device_named(device))

    @staticmethod
    def exported(config: Config, settings: TransformersSettings, checkpoint: Path) -> "Iterator[tuple[str, Tensor]]":
        import torch

        from elastic.worker.trainer.checkpoint import masters
        from elastic.worker.trainer.transformers.making import model_on

        model, found = model_on(config, settings, torch.device("cpu")), dict(masters(checkpoint))
        yield from model.merged(found).items()

    @staticmethod
    def exported_adapter(config: Config, settings: TransformersSettings, checkpoint: Path) -> "dict[str, Tensor]":
        if settings.lora is None:
            return {}
        from elastic.worker.trainer.checkpoint import masters

        return settings.lora.folded(dict(masters(checkpoint)))
