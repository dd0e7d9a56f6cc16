"""The settings of `[trainer.transformers]`."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, model_validator

from elastic.config import ConfigError, EngineConfig
from elastic.engine.base import EngineSettings
from elastic.worker.trainer.base import TrainerSettings

if TYPE_CHECKING:
    from torch import Tensor

_FIXED: dict[str, Any] = {
    "lora_dropout": 0,
    "bias": "none",
    "use_dora": False,
    "use_rslora": False,
    "modules_to_save": None,
}
"""Keys of peft's whose other values cannot travel as an adapter of one rank and one scale."""
_NOT_ADAPTED = ("lm_head", "embed_tokens")
"""What versions hold no adapters for: the head's weights are read as they are, and the embedding is not multiplied."""


class LoraSettings(TrainerSettings):
    """Low-rank adapters, under peft's names."""

    r: int = Field(16, ge=1, le=256, description="rank of each adapter")
    lora_alpha: int = Field(
        16,
        ge=1,
        description="scales the adapter by lora_alpha / r, a power of two, which bfloat16 holds exactly",
    )
    target_modules: list[str] | Literal["all-linear"] = Field(
        ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        description="ends of the names of the linear layers that are adapted; all-linear: all but the head",
    )

    @property
    def scale(self) -> float:
        return self.lora_alpha / self.r

    def folded(self, tensors: "Mapping[str, Tensor]") -> "dict[str, Tensor]":
        """An adapter with its scale in its B matrices, so every engine applies the scale once."""
        return {name: one * self.scale if name.endswith(".lora_B.weight") else one for name, one in tensors.items()}

    @model_validator(mode="before")
    @classmethod
    def _is_of_pefts_kinds(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        for key, allowed in _FIXED.items():
            if given.get(key, allowed) not in (allowed, [] if allowed is None else allowed):
                raise ValueError(
                    f"{key}: found {given[key]!r}; allowed: {allowed!r}, since engines take adapters of plain products"
                )
        return {key: value for key, value in given.items() if key not in _FIXED}

    @model_validator(mode="after")
    def _travels_exactly(self) -> "LoraSettings":
        if math.frexp(self.scale)[0] != 0.5:
            raise ValueError(
                f"lora_alpha: found {self.lora_alpha} with r = {self.r}, a scale of {self.scale:.4g}; allowed: r times "
                f"a power of two, such as {self.r} or {2 * self.r}, which bfloat16 holds exactly"
            )
        if odd := sorted({*_NOT_ADAPTED}.intersection(self.target_modules)):
            raise ValueError(f"target_modules: found {odd[0]!r}; allowed: linear layers other than the head")
        return self


class TransformersSettings(TrainerSettings):
    dtype: Literal["auto", "bfloat16", "float32"] = Field(
        "auto",
        description="what is computed in; masters, moments and sums of gradients are float32. auto: bfloat16 on a GPU, "
        "float32 on a CPU",
    )
    attention: Literal["auto", "sdpa", "eager", "flash_attention_2"] = Field(
        "auto", description="how attention is computed; auto: sdpa, or eager where a model has no sdpa"
    )
    activation_checkpointing: bool = Field(
        True, description="compute a layer's activations again in the backward pass instead of keeping them"
    )
    offload: Literal["none", "optimizer", "all"] = Field(
        "none",
        description="optimizer: masters and moments are in host memory, and updates are made there; all: the weights "
        "and sums, too, between a step and the next one's first group",
    )
    order: Literal["launch", "arrival"] = Field(
        "launch",
        description="in which a mini-batch's groups are computed. launch: whichever come early wait, and the weights "
        "do not depend on that; arrival: as they come, so that sums round as that chances to be",
    )
    seeding: Literal["auto", "vllm"] = Field(
        "auto",
        description="what generates on the trainer's GPUs while it does not train. auto: on one GPU the trainer's "
        "engine, beside the trainer, on several nothing; vllm: engines of tensor_parallel GPUs each, to which the "
        "trainer leaves all of them, with offload = 'all'",
    )
    lora: LoraSettings | None = Field(
        None, description="train low-rank adapters to the base policy, which alone travel and are kept"
    )

    def check_seeding(self, gpus: int, engine: EngineConfig, own: EngineSettings) -> None:
        """Raises `ConfigError` where engines with these settings, their `own` among them, cannot seed on so many
        GPUs."""
        if engine.kind != "vllm":
            raise ConfigError(
                f"trainer.transformers.seeding: found 'vllm', but the trainer's engine is {engine.kind!r}; allowed: "
                "with engine.kind = 'vllm', or trainer.engine.kind"
            )
        if self.offload != "all":
            raise ConfigError(
                f"trainer.transformers.offload: found {self.offload!r} with seeding = 'vllm', for which the trainer "
                "leaves its devices; allowed: 'all'"
            )
        if gpus % own.ranks:
            raise ConfigError(
                f"trainer.gpus: found {gpus} with trainer.transformers.seeding = 'vllm', whose engines take "
                f"{own.ranks} each (engine.vllm.tensor_parallel); allowed: multiples of that"
            )
        if engine.device != "cpu" and not getattr(own, "sleep_level", 0):
            raise ConfigError(
                "trainer.engine.vllm.sleep_level: found 0 with trainer.transformers.seeding = 'vllm': asleep, its "
                "weights would stay where the trainer computes; allowed: 1, 2, or any with trainer.engine.device = "
                "'cpu'"
            )

    def check_ranks(self, gpus: int) -> None:
        """Raises `ConfigError` for what a trainer of so many GPUs, several ones, does not do."""
        if self.attention == "flash_attention_2":
            raise ConfigError(
                f"trainer.transformers.attention: found {self.attention!r} with trainer.gpus = {gpus}, where models "
                "are looked at on a CPU first, which does not have it; allowed: 'auto', 'sdpa', 'eager'"
            )
