"""A model whose parameters lie in shards on several ranks (FSDP2), each of which computes rows of its own.

A layer's weights are gathered while it is computed, in the type that is computed in; its gradient is summed over all
ranks in float32, and each keeps its share. What a rank holds of a parameter are some of its rows: as `torch.chunk`
cuts them.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from elastic.worker.trainer.distribution import TokenDistribution
from elastic.worker.trainer.packing import PackedRow
from elastic.worker.trainer.ranks import Ranks
from elastic.worker.trainer.transformers.model import Attention, CausalModel


class Sharded(CausalModel):
    """What sharding makes of a model that was loaded whole, in host memory."""

    def shard(self, device: torch.device, dtype: torch.dtype, ranks: Ranks) -> None:
        """Keep this rank's shards alone, on the device; rows are computed in `dtype` there from now on."""
        self.device = device
        trained = super().named_parameters()
        self._shapes = {name: tuple(one.shape) for name, one in trained.items()}
        self._root = _Root(self)
        _shard(self._root, self.model, init_device_mesh(device.type, (ranks.size,)), dtype)
        self._parameters = list(super().named_parameters().values())

    @property
    def sharded(self) -> bool:
        return True

    def named_parameters(self) -> dict[str, Tensor]:
        return {name: _local(parameter) for name, parameter in super().named_parameters().items()}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self._shapes

    def distribution(self, row: PackedRow, temperature: float | Tensor) -> TokenDistribution:
        return self._root(row, temperature)

    def gradients(self, loss: Tensor) -> list[Tensor | None]:
        """This rank's shards of the sum of all ranks' gradients."""
        loss.backward()
        found = [None if one.grad is None else _local(one.grad) for one in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        return found


class ShardedModel(Sharded):
    """Its parameters are this rank's shards, in float32. All ranks call the same methods in the same order."""

    def __init__(
        self,
        directory: Path,
        device: torch.device,
        wanted: Attention,
        activation_checkpointing: bool,
        dtype: torch.dtype,
        ranks: Ranks,
    ) -> None:
        """As `CausalModel`, looked at in host memory; it computes in `dtype`."""
        super().__init__(directory, torch.device("cpu"), wanted, activation_checkpointing)
        self.shard(device, dtype, ranks)


class _Root(nn.Module):
    """All that a row needs in one forward pass, the head's weights, too: FSDP gathers what its modules need."""

    def __init__(self, model: CausalModel) -> None:
        super().__init__()
        self.model = model.model
        self._compute = model.local_distribution

    def forward(self, row: PackedRow, temperature: float | Tensor) -> TokenDistribution:
        return self._compute(row, temperature)


def _shard(root: nn.Module, model: Any, mesh: DeviceMesh, dtype: torch.dtype) -> None:
    def policy(kept: torch.dtype | None) -> MixedPrecisionPolicy:
        return MixedPrecisionPolicy(kept, torch.float32, cast_forward_inputs=False)

    for module in _named(model, _kept_in_float32(model)) if dtype != torch.float32 else ():
        fully_shard(module, mesh=mesh, mp_policy=policy(None))
    for module in _layers(model):
        fully_shard(module, mesh=mesh, mp_policy=policy(dtype))
    # Nothing of it stays gathered that a later update would have made stale.
    fully_shard(root, mesh=mesh, mp_policy=policy(dtype), reshard_after_forward=True)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            # Gradients are sums, as in one rank, and whatever a row does not use has one of zero.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            module.set_reduce_scatter_unused_params(True)


def _layers(model: Any) -> list[nn.Module]:
    """The modules that transformers would not split, without those in others of them."""
    kinds = set(getattr(model, "_no_split_modules", None) or ())
    found: list[nn.Module] = []

    def look(module: nn.Module) -> None:
        for child in module.children():
            if type(child).__name__ in kinds:
                found.append(child)
            else:
                look(child)

    look(model)
    return found


def _kept_in_float32(model: Any) -> set[str]:
    return {*(model._keep_in_fp32_modules or ()), *(model._keep_in_fp32_modules_strict or ())}


def _named(model: nn.Module, names: set[str]) -> Iterable[nn.Module]:
    """Modules with parameters of their own that are called so, or are within one that is."""
    for name, module in model.named_modules():
        own: Sequence[nn.Parameter] = list(module.parameters(recurse=False))
        if own and names.intersection(name.split(".")):
            yield module


def _local(tensor: Any) -> Tensor:
    return tensor.detach().to_local()
