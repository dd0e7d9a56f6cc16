"""The settings of `[trainer.transformers]`."""

from typing import Literal

from pydantic import Field

from elastic.worker.trainer.base import TrainerSettings


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
