"""The part of each tensor that a tensor-parallel rank of vLLM needs, and whole tensors for vLLM's loaders out of it.

vLLM's loaders take whole tensors and copy their rank's part. So they are given tensors of the whole shape in which only
that part is written; memory that nobody touches takes no room. What the part is follows from the shapes of the rank's
own parameters (`elastic.weights.placements`). A tensor of which that cannot be told is pulled whole. Whether all was
told rightly shows in the first load: everything else is no number then, and must not be found in the model.
"""

# pyright: reportMissingImports=false

from collections.abc import Iterator, Mapping
from typing import Any

import structlog
import torch
from torch import Tensor

from elastic.weights.placements import inferred
from elastic.weights.sharding import Box, LocalTensor, Shape, Shard, whole_box

log = structlog.get_logger(__name__)

STACK_OF_EXPERTS = ".routed_experts."
"""vLLM's module within that of a mixture's experts; files have none."""


class RankParts:
    """The parts of tensors that one rank holds, whose parameters have these shapes as they are loaded."""

    def __init__(self, local: Mapping[str, Shape], rank: int, ranks: int) -> None:
        self._local = local
        self._rank, self._ranks = rank, ranks
        self.shapes: Mapping[str, Shape] = {}
        """The shapes of the model's whole tensors."""
        self._boxes: dict[str, Box] = {}
        self.proven = False
        """Whether a model was found to have nothing beyond these parts."""

    def shard(self, shapes: Mapping[str, Shape]) -> Shard:
        """What the rank pulls of a model's tensors, under the same names."""
        boxes, reasons = dict[str, list[Box]](), list[str]()
        for name, shape in self._local.items():
            try:
                own = inferred(shapes, {name: shape}, self._rank, self._ranks)[name]
            except ValueError as error:
                reasons.append(str(error))
                continue
            for box in own.boxes:
                boxes.setdefault(box.tensor, []).append(box)
        if unexplained := [name for name in shapes if name not in boxes]:
            why = reasons[0] if reasons else "no parameter of the rank's is made of it"
            log.warning("tensors are pulled whole", count=len(unexplained), first=unexplained[0], reason=why)
        self.shapes = shapes
        self._boxes = {
            name: _around(boxes[name]) if name in boxes else whole_box(name, shape) for name, shape in shapes.items()
        }
        return {name: LocalTensor(box.shape, (box,)) for name, box in self._boxes.items()}

    def spread(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield tensors of the whole shape out of those of `shard`; what is not the rank's is no number until that is
        `proven`."""
        for name, part in tensors.items():
            box, shape = self._boxes[name], self.shapes[name]
            if box.shape == shape:
                yield name, part
                continue
            whole = torch.empty(shape, dtype=part.dtype)
            if not self.proven:
                whole.fill_(torch.nan)
            whole[tuple(slice(begin, end) for begin, end in zip(box.begin, box.end, strict=True))] = part
            yield name, whole


def parts_of(model: Any) -> RankParts | None:
    """None where vLLM has one rank."""
    from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    if (ranks := get_tensor_model_parallel_world_size()) == 1:
        return None
    local = {
        f"{module}.{name}".removeprefix(".").replace(STACK_OF_EXPERTS, "."): tuple(parameter.shape)
        for module, layer in model.named_modules()
        for name, parameter in get_layerwise_info(layer).restore_metadata[0].items()
    }
    return RankParts(local, get_tensor_model_parallel_rank(), ranks)


def without_value(model: Any) -> str | None:
    """The first of a model's parameters, as far as one can look at these, in which some element is no number."""
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and bool(parameter.isnan().any()):
            return name
    return None


def _around(boxes: list[Box]) -> Box:
    """The smallest box around all of these, which are of one tensor."""
    begin = tuple(map(min, *(box.begin for box in boxes), boxes[0].begin))
    end = tuple(map(max, *(box.end for box in boxes), boxes[0].end))
    return Box(boxes[0].tensor, begin, end)
