"""Tensors that leave their device and come back: bit for bit, with their views, as often as one likes."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from elastic.system.parking.tensors import ParkedTensors

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.float64, torch.uint8)
PAGES = 3 * 4096


def filled(dtype: torch.dtype, size: int, seed: int) -> Tensor:
    bits = torch.randint(0, 256, (size * dtype.itemsize,), dtype=torch.uint8, generator=torch.manual_seed(seed))
    return bits.view(dtype)


def bits_of(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def spoil(tensor: Tensor) -> None:
    """Others use the arena."""
    tensor.detach().view(-1).view(torch.uint8).fill_(0xA5)


kinds = st.tuples(st.sampled_from(DTYPES), st.sampled_from((0, 1, 7, 4096, 5000, PAGES)))


@given(st.lists(kinds, max_size=5), st.lists(kinds, max_size=3), st.integers(1, 3))
def test_they_come_back_bit_for_bit_whatever_became_of_the_arena(
    kept: list[tuple[torch.dtype, int]], zero: list[tuple[torch.dtype, int]], times: int
) -> None:
    tensors = [filled(dtype, size, seed) for seed, (dtype, size) in enumerate(kept)]
    zeros = [torch.zeros(size, dtype=dtype) for dtype, size in zero]
    parked = ParkedTensors()
    for _ in range(times):
        before = [bits_of(tensor) for tensor in tensors]
        copied = parked.park(tensors, zeros)
        assert parked.parked
        assert copied == sum(map(len, before))
        for tensor in (*tensors, *zeros):
            spoil(tensor)
        assert [bits_of(parked.content(tensor)) for tensor in tensors] == before
        assert not any(parked.content(tensor).any() for tensor in zeros)
        assert parked.park(tensors, zeros) == 0, "they are parked already"
        assert parked.resume() == copied
        assert not parked.parked
        assert [bits_of(tensor) for tensor in tensors] == before
        assert not any(tensor.any() for tensor in zeros)
        assert parked.resume() == 0
        for tensor in tensors:
            tensor.view(-1)[:1].fill_(1)


def test_a_view_stays_a_view_and_a_parameter_itself() -> None:
    whole = torch.nn.Parameter(filled(torch.float32, PAGES, 0).nan_to_num())
    view = whole.detach().view(3, -1)[1:, 5:]
    expected, place = view.clone(), whole.data_ptr()
    parked = ParkedTensors()
    assert parked.park([whole, view]) == whole.nbytes, "they share one storage"
    assert torch.equal(parked.content(view), expected)
    parked.resume()
    assert whole.requires_grad
    assert torch.equal(view, expected)
    view.zero_()
    assert whole.data_ptr() == place
    assert not whole.detach().view(3, -1)[1:, 5:].any()


@pytest.mark.parametrize("grow", [lambda n: n + 1, lambda n: 2 * n, lambda n: 1])
def test_what_is_parked_may_change_from_time_to_time(grow: Callable[[int], int]) -> None:
    parked, size = ParkedTensors(), 5000
    for _ in range(3):
        tensors = [filled(torch.float32, size, 1), filled(torch.int64, 7, 2)]
        before = [bits_of(tensor) for tensor in tensors]
        parked.park(tensors)
        for tensor in tensors:
            spoil(tensor)
        parked.resume()
        assert [bits_of(tensor) for tensor in tensors] == before
        size = grow(size)
