"""Compare and compact where the weights are: of a step on a GPU only what changed crosses to the host.

Plain torch operations (a comparison of patterns, `nonzero`, a gather), the same on every device. Each of them reads
or writes the weights once, at the speed of the device's memory, so there is no kernel of our own.
"""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from elastic.weights.tensors import Bits

COMPARE_ELEMENTS = 1 << 26
"""At once: what is compared takes a byte an element beside the weights, and eight for each that changed."""


def on_device(tensors: Iterable[Tensor]) -> bool:
    """Whether all of them are on a GPU."""
    return all(tensor.is_cuda for tensor in tensors)


class Mirror:
    """The last version's patterns beside the weights, on the device that trains them: two bytes an element."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._last = [_patterns(tensor).clone() for tensor in tensors]

    def filling(self, bits: Bits, last: Bits, tensors: Iterable[Tensor]) -> Iterator[int]:
        """Make `bits` the patterns of `tensors`, where `last` are those before; says each time how far that has come.

        From its first step until it is exhausted the mirror is of no version.
        """
        at = 0
        for mirrored, tensor in zip(self._last, tensors, strict=True):
            new = _patterns(tensor)
            np.copyto(bits[at : at + new.numel()], last[at : at + new.numel()])
            for index, values in compact(mirrored, new):
                bits[at + index.numpy()] = values.numpy().view(np.uint16)
            mirrored.copy_(new)
            at += new.numel()
            yield at


def compact(old: Tensor, new: Tensor, at_once: int = COMPARE_ELEMENTS) -> Iterator[tuple[Tensor, Tensor]]:
    """Where flat `new` differs from `old` and what is there, on the host: int64 and int16.

    So many elements are compared `at_once`, and each piece is yielded.
    """
    for begin in range(0, new.numel(), at_once):
        before, after = (patterns[begin : begin + at_once] for patterns in (old, new))
        index = (before != after).nonzero().view(-1)
        yield (index + begin).cpu(), after[index].cpu()


def _patterns(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.int16)
