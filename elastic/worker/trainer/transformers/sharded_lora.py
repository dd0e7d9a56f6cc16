"""Adapters on several ranks: they are trained in shards, and so lies the base, which stays as it is."""

from pathlib import Path

import torch

from elastic.worker.trainer.ranks import Ranks
from elastic.worker.trainer.transformers.lora import AdaptedModel
from elastic.worker.trainer.transformers.model import Attention
from elastic.worker.trainer.transformers.settings import LoraSettings
from elastic.worker.trainer.transformers.sharded import Sharded


class ShardedAdapters(Sharded, AdaptedModel):
    """An `AdaptedModel` as `ShardedModel` is a `CausalModel`."""

    def __init__(
        self,
        directory: Path,
        device: torch.device,
        wanted: Attention,
        activation_checkpointing: bool,
        lora: LoraSettings,
        seed: int,
        dtype: torch.dtype,
        ranks: Ranks,
    ) -> None:
        AdaptedModel.__init__(self, directory, torch.device("cpu"), wanted, activation_checkpointing, lora, seed)
        self.shard(device, dtype, ranks)
