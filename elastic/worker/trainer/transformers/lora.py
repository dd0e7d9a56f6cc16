"""Low-rank adapters by peft: the base stays as it is, and what is trained, published and kept are adapters alone.

An adapter is a pair of matrices A [r, in] and B [out, r] beside a linear layer's weights, to which it adds
scale · B · A. Their names are those of peft's files, and in versions the scale stands in B, so that it is 1 for code
that serves them.
"""

# pyright: reportMissingImports=false

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from elastic.engine.base import proof_text
from elastic.worker.trainer.distribution import TokenDistribution
from elastic.worker.trainer.packing import PackedRow
from elastic.worker.trainer.transformers.model import Attention, CausalModel, row_of_sequences
from elastic.worker.trainer.transformers.settings import LoraSettings

ADAPTER = "default"
"""peft's name for a model's only adapter. Its files leave it out."""
PREFIX = "base_model.model."
"""Before the names of the model's own modules in peft's files."""


class AdaptedModel(CausalModel):
    """A model whose parameters are those of its adapters. They begin as no change, drawn from `seed`."""

    def __init__(
        self,
        directory: Path,
        device: torch.device,
        wanted: Attention,
        activation_checkpointing: bool,
        lora: LoraSettings,
        seed: int,
    ) -> None:
        """Raises as `CausalModel` does, and `ValueError` for modules that the model does not have."""
        super().__init__(directory, device, wanted, activation_checkpointing)
        self._lora = lora
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            adapt(self.model, lora)

    def named_parameters(self) -> dict[str, Tensor]:
        return dict(adapters(self.model))

    def as_stored(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The adapter as it travels, under the names of peft's files, with a scale of 1."""
        return self._lora.folded(tensors)

    def published_buffers(self) -> dict[str, Tensor]:
        """None: those of the base are not the adapter's."""
        return {}

    @torch.no_grad()
    def merged(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The base with the adapter `tensors` (as they are trained) added to it, under the names of its files."""
        found = {name.replace(".base_layer.", "."): one.detach() for name, one in self.model.named_parameters()}
        found = {name: one for name, one in found.items() if ".lora_" not in name}
        for name, module in self.model.named_modules():
            if isinstance(module, LoraLayer):
                a, b = (tensors[f"{PREFIX}{name}.lora_{part}.weight"] for part in "AB")
                found[f"{name}.weight"] = found[f"{name}.weight"] + self._lora.scale * (b @ a)
        return super().merged(found)

    @torch.no_grad()
    def proof(self) -> list[float]:
        """The log-probabilities that the adapted model gives to the fixed text, but for its first token."""
        row = row_of_sequences([torch.tensor(proof_text(self.vocab_size))])
        return self.distribution(row, 1.0).logprobs.float().tolist()


class Unadapted:
    """The base of an adapted model, as a reference that takes no memory of its own."""

    def __init__(self, adapted: AdaptedModel) -> None:
        self._adapted = adapted
        self._layers = [module for module in adapted.model.modules() if isinstance(module, LoraLayer)]

    def named_parameters(self) -> dict[str, Tensor]:
        return {}

    def distribution(self, row: PackedRow, temperature: float | Tensor) -> TokenDistribution:
        for layer in self._layers:
            layer.enable_adapters(False)
        try:
            return self._adapted.distribution(row, temperature)
        finally:
            for layer in self._layers:
                layer.enable_adapters(True)


def adapt(model: Any, lora: LoraSettings, *, empty: bool = False) -> None:
    """Put adapters into the model; they alone are trained. `empty` ones have no values, as a model without any."""
    config = LoraConfig(r=lora.r, lora_alpha=lora.lora_alpha, target_modules=lora.target_modules)
    inject_adapter_in_model(config, model, ADAPTER, low_cpu_mem_usage=empty)


def adapters(model: Any) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters of a model's adapters by the names of peft's files."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            yield f"{PREFIX}{name.replace(f'.{ADAPTER}.', '.')}", parameter
