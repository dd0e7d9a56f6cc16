"""Makes the trainer of one rank, in the process that is to compute for it."""

import torch

from elastic.config import Config
from elastic.worker.trainer.ranks import ALONE, Ranks
from elastic.worker.trainer.sources import sources_of
from elastic.worker.trainer.transformers.model import CausalModel, Reference
from elastic.worker.trainer.transformers.settings import TransformersSettings
from elastic.worker.trainer.transformers.trainer import TransformersTrainer, computed_in


def trainer_on(
    config: Config, settings: TransformersSettings, device: torch.device, ranks: Ranks = ALONE
) -> TransformersTrainer:
    """Raises `CheckpointError` for a policy that does not load, and `ValueError` for settings that it does not take."""
    torch.set_num_threads(config.trainer.threads)
    rollout = config.rollout
    model = model_on(config, settings, device) if ranks.size == 1 else _sharded(config, settings, device, ranks)
    return TransformersTrainer(
        config.trainer,
        settings,
        model,
        rollout.groups,
        rollout.temperature,
        config.run.steps,
        ranks,
        _reference(config, settings, model, ranks),
        sources_of(config),
    )


def model_on(config: Config, settings: TransformersSettings, device: torch.device) -> CausalModel:
    """The base policy, whole. Raises as `trainer_on` does."""
    given = config.model.checkpoint, device, settings.attention, settings.activation_checkpointing
    if settings.lora is None:
        return CausalModel(*given)
    from elastic.worker.trainer.transformers.lora import AdaptedModel

    return AdaptedModel(*given, settings.lora, config.run.seed)


def _reference(config: Config, settings: TransformersSettings, model: CausalModel, ranks: Ranks) -> Reference | None:
    """The policy that `model` is compared with, if it is, sharded as that is; the base of adapters is there already."""
    directory = config.reference
    if directory is None:
        return None
    if settings.lora is not None and directory.resolve() == config.model.checkpoint.resolve():
        from elastic.worker.trainer.transformers.lora import AdaptedModel, Unadapted

        assert isinstance(model, AdaptedModel), "adapters are trained"
        return Unadapted(model)
    dtype = computed_in(settings, model.device)
    if ranks.size > 1:
        from elastic.worker.trainer.transformers.sharded import ShardedModel

        given = directory, model.device, settings.attention, False, dtype, ranks
        return ranks.in_turns(lambda: ShardedModel(*given))
    reference = CausalModel(directory, model.device, settings.attention, activation_checkpointing=False)
    reference.model.requires_grad_(False)
    reference.compute_in(dtype)
    return reference


def _sharded(config: Config, settings: TransformersSettings, device: torch.device, ranks: Ranks) -> CausalModel:
    settings.check_ranks(ranks.size)
    given = config.model.checkpoint, device, settings.attention, settings.activation_checkpointing
    there = computed_in(settings, device), ranks
    if (lora := settings.lora) is not None:
        from elastic.worker.trainer.transformers.sharded_lora import ShardedAdapters

        return ranks.in_turns(lambda: ShardedAdapters(*given, lora, config.run.seed, *there))
    from elastic.worker.trainer.transformers.sharded import ShardedModel

    return ranks.in_turns(lambda: ShardedModel(*given, *there))
