"""What each rank has of the policy as it is published: under the names and in the shapes of the files.

Of a tensor that is in the files as it is here, each rank has the rows that it holds. What transformers fuses as it
loads (such as a layer's experts) is undone on one rank, layer by layer in turns, which then has all of it. Buffers,
which every rank holds, each has.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from elastic.weights.placements import Placement, declared
from elastic.weights.sharding import Shape, Shard, whole
from elastic.worker.trainer.layers import layer_of
from elastic.worker.trainer.ranks import Ranks
from elastic.worker.trainer.transformers.model import CausalModel


class _Fused(NamedTuple):
    """Tensors that are undone together, by their names here, and what they come to."""

    names: Sequence[str]
    shapes: Mapping[str, Shape]


class PublishedShards:
    """The published shards of one model on ranks that all do the same at the same time. A lone rank has everything."""

    def __init__(self, model: CausalModel, ranks: Ranks) -> None:
        self._model, self._ranks = model, ranks
        self._held = model.shapes()
        """The parameters, of which each rank has rows."""
        buffers = {name: tuple(buffer.shape) for name, buffer in model.published_buffers().items()}
        here = {name: torch.empty(shape, device="meta") for name, shape in (*buffers.items(), *self._held.items())}
        there = model.as_stored(here)
        names = {id(tensor): name for name, tensor in here.items()}
        self._same = {names[id(tensor)]: name for name, tensor in there.items() if id(tensor) in names}
        """Names in the files by those here, of what nothing is done to."""
        fused = {name: tensor for name, tensor in here.items() if name not in self._same}
        known = {*self._same.values()}
        shapes = {name: tuple(tensor.shape) for name, tensor in there.items()}
        self._fused = _by_layer(model, fused, {name: shape for name, shape in shapes.items() if name not in known})
        self._shapes = {name: shapes[name] for name in self._same.values()}
        self.float32 = model.float32 & shapes.keys()
        """Those that are published in float32; all others are rounded to bfloat16."""

    def shards(self) -> list[Shard]:
        """What each rank has."""
        return [self._shard(rank) for rank in range(self._ranks.size)]

    def own(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return copies of what this rank has, of its parameters as they are here. All ranks call this."""
        given = self._model.published_buffers() | dict(tensors)
        found = {
            stored: given[name].to(self._type(stored), copy=True).contiguous() for name, stored in self._same.items()
        }
        for number, fused in enumerate(self._fused):
            owner = number % self._ranks.size
            exact = any(name in self.float32 for name in fused.shapes)
            whole = {name: self._whole(name, given[name], owner, exact=exact) for name in fused.names}
            if self._ranks.rank == owner:
                undone = self._model.as_stored({name: tensor for name, tensor in whole.items() if tensor is not None})
                found |= {stored: tensor.to(self._type(stored)).contiguous() for stored, tensor in undone.items()}
        return found

    def _whole(self, name: str, mine: Tensor, owner: int, *, exact: bool) -> Tensor | None:
        # Rounded first where all of it is: that takes half the memory.
        rounded = mine.to(torch.float32 if exact else torch.bfloat16, copy=True)
        if name not in self._held:
            return rounded
        shape = self._held[name]
        return self._ranks.collect(
            rounded, [len(share) for share in self._ranks.shares(shape[0] if shape else 1)], owner
        )

    def _shard(self, rank: int) -> Shard:
        mesh, at = (self._ranks.size,), (rank,)
        split = {
            name: (0,) if here in self._held and self._shapes[name] else (None,) for here, name in self._same.items()
        }
        rows = declared(self._shapes, {name: Placement(mesh, at, dimensions) for name, dimensions in split.items()})
        mine = [fused.shapes for fused in self._fused[rank :: self._ranks.size]]
        return {**rows, **whole({name: shape for shapes in mine for name, shape in shapes.items()})}

    def _type(self, stored: str) -> torch.dtype:
        return torch.float32 if stored in self.float32 else torch.bfloat16


def _by_layer(model: CausalModel, fused: Mapping[str, Tensor], expected: Mapping[str, Shape]) -> list[_Fused]:
    """What is undone, a layer at a time if it can be, else all at once."""
    layers: dict[str, dict[str, Tensor]] = {}
    for name, tensor in fused.items():
        layers.setdefault(layer_of(name), {})[name] = tensor
    found = [_Fused(list(layer), _shapes_of(model.as_stored(layer))) for layer in layers.values()]
    if {name: shape for layer in found for name, shape in layer.shapes.items()} == expected:
        return found
    return [_Fused(list(fused), expected)]


def _shapes_of(tensors: Mapping[str, Tensor]) -> dict[str, Shape]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}
