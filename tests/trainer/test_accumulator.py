import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic.worker.trainer.embedded.accumulator import MAGNITUDE_MAX, GradientAccumulator, GradientOverflow

gradients = st.lists(st.floats(-1000, 1000, width=32), min_size=3, max_size=3).map(torch.tensor)


@given(st.lists(gradients, min_size=1, max_size=12), st.randoms(use_true_random=False), st.integers(1, 10_000))
def test_the_sum_is_the_same_in_every_order_and_close_to_the_true_one(
    parts: list[torch.Tensor], rng: random.Random, divisor: int
):
    def mean(order: list[torch.Tensor]) -> torch.Tensor:
        accumulator = GradientAccumulator([parts[0]])
        for part in order:
            accumulator.add([part])
        return accumulator.take(divisor)[0]

    shuffled = rng.sample(parts, len(parts))
    assert torch.equal(mean(parts), mean(shuffled))
    exact = torch.stack(parts).double().sum(0) / divisor
    torch.testing.assert_close(mean(parts).double(), exact, rtol=1e-6, atol=1e-9)


def test_taking_starts_again_from_zero():
    accumulator = GradientAccumulator([torch.zeros(2, 2), torch.zeros(())])
    accumulator.add([torch.ones(2, 2), torch.tensor(3.0)])
    first, second = accumulator.take(2)
    assert torch.equal(first, torch.full((2, 2), 0.5))
    assert second.item() == 1.5
    assert not any(mean.any() for mean in accumulator.take(1))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 2 * MAGNITUDE_MAX])
def test_what_cannot_be_summed_exactly_is_refused_and_adds_nothing(bad: float):
    accumulator = GradientAccumulator([torch.zeros(2), torch.zeros(1)])
    with pytest.raises(GradientOverflow, match="gradient 1"):
        accumulator.add([torch.ones(2), torch.tensor([bad])])
    assert not any(mean.any() for mean in accumulator.take(1))
