"""Tensors by name, and the same as one flat array of bf16 patterns."""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from elastic.weights.codecs.base import Bits
from elastic.weights.manifest import DTYPE_BYTES, TensorEntry
from elastic.weights.sharding import Box, Shape, Shard

_DTYPE_NAMES = {torch.bfloat16: "bfloat16"}


def entries_of(tensors: Mapping[str, Tensor]) -> tuple[TensorEntry, ...]:
    """How `tensors` lie one after the other. Raises `ValueError` for one that is not bfloat16."""
    entries: list[TensorEntry] = []
    offset = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in _DTYPE_NAMES:
            raise ValueError(f"tensor {name}: dtype {tensor.dtype}; allowed: {', '.join(DTYPE_BYTES)}")
        entry = TensorEntry(name=name, shape=tuple(tensor.shape), dtype=_DTYPE_NAMES[tensor.dtype], offset=offset)
        entries.append(entry)
        offset += entry.size_bytes
    return tuple(entries)


def flatten(tensors: Mapping[str, Tensor]) -> Bits:
    """A copy of all patterns, tensor after tensor, row-major."""
    bits = np.empty(sum(tensor.numel() for tensor in tensors.values()), np.uint16)
    deque(filling(bits, tensors.values()), maxlen=0)
    return bits


def filling(bits: Bits, tensors: Iterable[Tensor]) -> Iterator[int]:
    """Copies one tensor's patterns after the other into `bits`; says each time how far that has come."""
    at = 0
    for tensor in tensors:
        flat = tensor.detach().contiguous().view(-1).view(torch.int16)
        target = bits[at : at + tensor.numel()].view(np.int16)
        if flat.device.type == "cpu":
            # A plain copy of memory, which PyTorch's own between tensors is not.
            np.copyto(target, flat.numpy())
        else:
            torch.from_numpy(target).copy_(flat)
        at += tensor.numel()
        yield at


def entries_of_boxes(boxes: Iterable[Box]) -> tuple[TensorEntry, ...]:
    """How cells of bfloat16 tensors lie one after the other."""
    entries: list[TensorEntry] = []
    offset = 0
    for box in boxes:
        entries.append(TensorEntry(name=box.tensor, shape=box.shape, dtype="bfloat16", offset=offset, begin=box.begin))
        offset += entries[-1].size_bytes
    return tuple(entries)


def box_of(entry: TensorEntry) -> Box:
    begin = entry.begin or (0,) * len(entry.shape)
    return Box(entry.name, begin, tuple(b + size for b, size in zip(begin, entry.shape, strict=True)))


def whole_shapes(cells: Iterable[TensorEntry]) -> dict[str, Shape]:
    """The shapes of the tensors of which these are the cells."""
    shapes: dict[str, Shape] = {}
    for box in map(box_of, cells):
        shapes[box.tensor] = tuple(map(max, shapes.get(box.tensor, box.end), box.end))
    return shapes


def cut(boxes: Iterable[Box], shard: Shard, tensors: Mapping[str, Tensor]) -> Iterator[Tensor]:
    """Each of `boxes`, out of the `tensors` of who has `shard`. Raises `ValueError` for one that it does not hold."""
    places: dict[str, list[tuple[str, int, Box]]] = {}
    for name, local in shard.items():
        if tuple(tensors[name].shape) != local.shape:
            raise ValueError(f"tensor {name}: shape {tuple(tensors[name].shape)}; its placement says {local.shape}")
        for row, mine in local.rows():
            places.setdefault(mine.tensor, []).append((name, row, mine))
    for box in boxes:
        found = next(((name, row, mine) for name, row, mine in places.get(box.tensor, ()) if mine.contains(box)), None)
        if found is None:
            raise ValueError(f"tensor {box.tensor}: elements {box.begin} to {box.end} are not in this shard")
        name, row, mine = found
        yield tensors[name][_within(box, mine, row)]


def assemble(entries: Sequence[TensorEntry], bits: Bits, shard: Shard) -> dict[str, Tensor]:
    """The tensors of who hosts `shard`, out of cells that lie in `bits` one after the other; padding is zero."""
    flat = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
    cells: dict[str, list[tuple[Box, Tensor]]] = {}
    at = 0
    for entry in entries:
        size = entry.size_bytes // 2
        cells.setdefault(entry.name, []).append((box_of(entry), flat[at : at + size].view(entry.shape)))
        at += size
    tensors = {name: torch.zeros(local.shape, dtype=torch.bfloat16) for name, local in shard.items()}
    for name, local in shard.items():
        for row, mine in local.rows():
            for box, content in cells.get(mine.tensor, ()):
                if (both := box.overlap(mine)) is not None:
                    tensors[name][_within(both, mine, row)] = content[_within(both, box, 0)]
    return tensors


def _within(box: Box, outer: Box, row: int) -> tuple[slice, ...]:
    """Where `box` lies in `outer`, when that begins at `row`."""
    begins = [b - origin for b, origin in zip(box.begin, outer.begin, strict=True)]
    if begins:
        begins[0] += row
    return tuple(slice(b, b + size) for b, size in zip(begins, box.shape, strict=True))


def by_tensor(
    entries: Sequence[TensorEntry], place: npt.NDArray[np.int64], value: Bits
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """New patterns at places of the flat array as (tensor, places in it, bfloat16 values).

    Places are in any order within a tensor; those of one tensor come before those of the next.
    """
    ends = np.cumsum([entry.size_bytes // 2 for entry in entries])
    first = 0
    for entry, last in zip(entries, np.searchsorted(place, ends).tolist(), strict=True):
        if last > first:
            index = torch.from_numpy(place[first:last] - entry.offset // 2)
            yield entry.name, index, torch.from_numpy(value[first:last].view(np.int16)).view(torch.bfloat16)
        first = last


def views(entries: Sequence[TensorEntry], bits: Bits) -> dict[str, Tensor]:
    """The tensors that lie in `bits`, which live as long as one of them does."""
    flat = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
    begins = ((entry, entry.offset // 2) for entry in entries)
    return {entry.name: flat[begin : begin + entry.size_bytes // 2].view(entry.shape) for entry, begin in begins}
