"""Tensors by name, and the same as one flat array of bf16 patterns."""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from elastic.weights.manifest import DTYPE_BYTES, TensorEntry

_DTYPE_NAMES = {torch.bfloat16: "bfloat16"}

Bits = npt.NDArray[np.uint16]


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
    total = sum(tensor.numel() for tensor in tensors.values())
    bits = np.empty(total, np.uint16)
    target = torch.from_numpy(bits.view(np.int16))
    at = 0
    for tensor in tensors.values():
        target[at : at + tensor.numel()].copy_(tensor.detach().contiguous().view(-1).view(torch.int16))
        at += tensor.numel()
    return bits


def views(entries: Sequence[TensorEntry], bits: Bits) -> dict[str, Tensor]:
    """The tensors that lie in `bits`, which live as long as one of them does."""
    flat = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
    begins = ((entry, entry.offset // 2) for entry in entries)
    return {entry.name: flat[begin : begin + entry.size_bytes // 2].view(entry.shape) for entry, begin in begins}
