"""Tensors by name, and the same as one flat array of 16-bit patterns."""

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from elastic.weights.codecs.base import Bits
from elastic.weights.records import DTYPE_BYTES, TensorEntry
from elastic.weights.sharding import Box, Shape, Shard

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
assert DTYPES.keys() == DTYPE_BYTES.keys()
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def entries_of(tensors: Mapping[str, Tensor]) -> tuple[TensorEntry, ...]:
    """How `tensors` lie one after the other. Raises `ValueError` for one that is neither bfloat16 nor float32."""
    for name, tensor in tensors.items():
        if tensor.dtype not in _NAMES:
            raise ValueError(f"tensor {name}: dtype {tensor.dtype}; allowed: {', '.join(DTYPE_BYTES)}")
    return _entries((name, tuple(tensor.shape), (), _NAMES[tensor.dtype]) for name, tensor in tensors.items())


def entries_of_boxes(boxes: Iterable[Box], float32: Collection[str] = ()) -> tuple[TensorEntry, ...]:
    """How cells lie one after the other, of tensors that are `float32`, or else bfloat16."""
    return _entries(
        (box.tensor, box.shape, box.begin, "float32" if box.tensor in float32 else "bfloat16") for box in boxes
    )


def _entries(parts: Iterable[tuple[str, Shape, Shape, str]]) -> tuple[TensorEntry, ...]:
    """Entries of tensors or cells, each with its name, its shape, where it begins in its tensor, and its type."""
    entries: list[TensorEntry] = []
    offset = 0
    for name, shape, begin, dtype in parts:
        entries.append(TensorEntry(name=name, shape=shape, dtype=dtype, offset=offset, begin=begin))
        offset += entries[-1].size_bytes
    return tuple(entries)


def count_patterns(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors) // 2


def flatten(tensors: Mapping[str, Tensor]) -> Bits:
    """A copy of all patterns, tensor after tensor, row-major."""
    bits = np.empty(count_patterns(tensors.values()), np.uint16)
    deque(filling(bits, tensors.values()), maxlen=0)
    return bits


def filling(bits: Bits, tensors: Iterable[Tensor]) -> Iterator[int]:
    """Copies one tensor's patterns after the other into `bits`; says each time how far that has come."""
    at = 0
    for tensor in tensors:
        flat = tensor.detach().contiguous().view(-1).view(torch.int16)
        target = bits[at : at + flat.numel()].view(np.int16)
        if flat.device.type == "cpu":
            # A plain copy of memory, which PyTorch's own between tensors is not.
            np.copyto(target, flat.numpy())
        else:
            torch.from_numpy(target).copy_(flat)
        at += flat.numel()
        yield at


class _Place(NamedTuple):
    """Where a box lies: in which of a rank's tensors, from which row on, and that tensor's shape as a stack of rows."""

    name: str
    row: int
    box: Box
    shape: Shape


def _places(shard: Shard) -> dict[str, list[_Place]]:
    """By the model's tensor."""
    places: dict[str, list[_Place]] = {}
    for name, local in shard.items():
        for row, box in local.rows():
            places.setdefault(box.tensor, []).append(_Place(name, row, box, local.stacked_shape))
    return places


def box_of(entry: TensorEntry) -> Box:
    begin = entry.begin or (0,) * len(entry.shape)
    return Box(entry.name, begin, tuple(b + size for b, size in zip(begin, entry.shape, strict=True)))


def cut(boxes: Iterable[Box], shard: Shard, tensors: Mapping[str, Tensor]) -> Iterator[Tensor]:
    """Each of `boxes`, from the `tensors` of the rank that has `shard`. Raises `ValueError` if it does not hold one."""
    for name, local in shard.items():
        if tuple(tensors[name].shape) != local.shape:
            raise ValueError(f"tensor {name}: shape {tuple(tensors[name].shape)}; its placement says {local.shape}")
    places = _places(shard)
    for box in boxes:
        found = next((place for place in places.get(box.tensor, ()) if place.box.contains(box)), None)
        if found is None:
            raise ValueError(f"tensor {box.tensor}: elements {box.begin} to {box.end} are not in this shard")
        yield tensors[found.name].view(found.shape)[_within(box, found.box, found.row)]


def assemble(entries: Sequence[TensorEntry], bits: Bits, shard: Shard) -> dict[str, Tensor]:
    """The tensors of the rank that hosts `shard`, out of cells that lie in `bits` one after the other; padding is zero.

    A tensor that is made of parts of both types is float32.
    """
    cells: dict[str, list[tuple[Box, Tensor]]] = {}
    at = 0
    for entry in entries:
        cells.setdefault(entry.name, []).append((box_of(entry), _lying_at(at, entry, bits)))
        at += entry.patterns
    tensors: dict[str, Tensor] = {}
    for name, local in shard.items():
        exact = any(one.dtype is torch.float32 for box in local.boxes for _, one in cells.get(box.tensor, ()))
        tensors[name] = torch.zeros(local.shape, dtype=torch.float32 if exact else torch.bfloat16)
        for row, mine in local.rows():
            for box, content in cells.get(mine.tensor, ()):
                if (both := box.overlap(mine)) is not None:
                    tensors[name].view(local.stacked_shape)[_within(both, mine, row)] = content[_within(both, box, 0)]
    return tensors


def _within(box: Box, outer: Box, row: int) -> tuple[slice, ...]:
    """Where `box` lies in `outer`, when that begins at `row`."""
    begins = [b - origin for b, origin in zip(box.begin, outer.begin, strict=True)]
    if begins:
        begins[0] += row
    return tuple(slice(b, b + size) for b, size in zip(begins, box.shape, strict=True))


def by_tensor(
    entries: Sequence[TensorEntry], place: npt.NDArray[np.int64], value: Bits, shard: Shard | None = None
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Turns places of the flat array and their new patterns into (tensor, places in it, values), all bfloat16.

    `entries` lie in that array one after the other. With a `shard` the tensors are the shard's. Places are in any order
    within a tensor; those of one tensor come before those of the next.
    """
    ends = np.cumsum([entry.patterns for entry in entries])
    mine = None if shard is None else _places(shard)
    first, begin = 0, 0
    for entry, last, end in zip(entries, np.searchsorted(place, ends).tolist(), ends.tolist(), strict=True):
        if last > first:
            index, values = place[first:last] - begin, value[first:last]
            for name, inside, where in _located(entry, index, mine):
                new = torch.from_numpy(values[inside].view(np.int16)).view(torch.bfloat16)
                yield name, torch.from_numpy(where), new
        first, begin = last, end


def _located(
    entry: TensorEntry, index: npt.NDArray[np.int64], mine: Mapping[str, Sequence[_Place]] | None
) -> Iterator[tuple[str, slice | npt.NDArray[np.bool_], npt.NDArray[np.int64]]]:
    """Yields every tensor that has elements of a cell, with the positions in `index` that it has and their places in
    it.
    """
    if mine is None:
        yield entry.name, slice(None), index
        return
    cell = box_of(entry)
    for name, row, box, shape in mine.get(entry.name, ()):
        if (both := box.overlap(cell)) is None:
            continue
        at = np.unravel_index(index, cell.shape) if cell.shape else ()
        at = [part + begin for part, begin in zip(at, cell.begin, strict=True)]
        inside = np.ones(len(index), bool)
        for part, begin, end in zip(at, both.begin, both.end, strict=True):
            inside &= (begin <= part) & (part < end)
        at = [part[inside] - begin for part, begin in zip(at, box.begin, strict=True)]
        if at:
            at[0] += row
        where = np.ravel_multi_index(at, shape) if at else np.full(int(inside.sum()), row)
        yield name, inside, where.astype(np.int64)


def views(entries: Sequence[TensorEntry], bits: Bits) -> dict[str, Tensor]:
    """The tensors that lie in `bits`, which live as long as one of them does."""
    return {entry.name: _lying_at(entry.offset // 2, entry, bits) for entry in entries}


def _lying_at(begin: int, entry: TensorEntry, bits: Bits) -> Tensor:
    """The tensor, or cell, that begins at pattern `begin`."""
    patterns = torch.from_numpy(bits[begin : begin + entry.patterns].view(np.int16))
    dtype = DTYPES[entry.dtype]
    if not entry.patterns:
        return torch.empty(entry.shape, dtype=dtype)  # Nothing cannot be read as something wider.
    if begin * 2 % dtype.itemsize:
        patterns = patterns.clone()  # A float32 at an odd pattern cannot be read where it is.
    return patterns.view(dtype).view(entry.shape)
