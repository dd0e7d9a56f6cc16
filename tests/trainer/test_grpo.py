import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic.trainer.grpo import clipped_policy_loss, group_advantages, ratio_bounds, sampled_distribution

UNBOUNDED = torch.tensor(math.inf)
rewards = st.lists(st.floats(-10, 10), min_size=2, max_size=16)


@given(rewards)
def test_advantages_have_no_mean_and_unit_deviation(values: list[float]):
    advantages = torch.tensor(group_advantages(values), dtype=torch.float64)
    assert len(advantages) == len(values)
    assert abs(advantages.mean()) < 1e-6
    assert not advantages.any() or abs(advantages.std() - 1) < 1e-6


@given(rewards)
def test_advantages_rank_as_rewards_do(values: list[float]):
    advantages = group_advantages(values)
    order = sorted(range(len(values)), key=values.__getitem__)
    assert all(advantages[a] <= advantages[b] for a, b in itertools.pairwise(order))


@given(st.floats(-1e6, 1e6), st.integers(1, 9))
def test_equal_rewards_say_nothing(value: float, size: int):
    assert group_advantages([value] * size) == [0.0] * size


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped"),
    [
        (1.0, 2.0, -2.0, False),
        (1.2, 1.0, -1.2, False),
        (1.5, 1.0, -1.28, True),
        (0.5, 1.0, -0.5, False),
        (1.5, -1.0, 1.5, False),
        (0.9, -1.0, 0.9, False),
        (0.5, -1.0, 0.8, True),
    ],
)
def test_the_clip_bounds_what_can_be_gained_and_nothing_else(
    ratio: float, advantage: float, loss: float, clipped: bool
):
    logprobs = torch.tensor([math.log(ratio) - 2.0], dtype=torch.float64, requires_grad=True)
    policy = clipped_policy_loss(logprobs, torch.tensor([-2.0]), torch.tensor([advantage]), 0.2, 0.28, UNBOUNDED)
    policy.loss.backward()
    assert policy.loss.item() == pytest.approx(loss)
    assert policy.ratio.item() == pytest.approx(ratio)
    assert policy.clipped.item() is clipped
    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx(0.0 if clipped else -ratio * advantage)


def test_only_tokens_more_than_one_version_old_are_truncated():
    assert ratio_bounds(torch.tensor([0, 1, 2, 5]), 2.0).tolist() == [math.inf, math.inf, 2.0, 2.0]


@pytest.mark.parametrize(("age", "loss", "gradient"), [(1, 5.0, 5.0), (2, 2.0, 0.0)])
def test_a_truncated_ratio_bounds_the_loss_and_gives_no_gradient(age: int, loss: float, gradient: float):
    logprobs = torch.tensor([math.log(5.0) - 9.0], dtype=torch.float64, requires_grad=True)
    bounds = ratio_bounds(torch.tensor([age]), 2.0)
    policy = clipped_policy_loss(logprobs, torch.tensor([-9.0]), torch.tensor([-1.0]), 0.2, 0.28, bounds)
    policy.loss.backward()
    assert policy.loss.item() == pytest.approx(loss)
    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx(gradient)


def test_the_gradient_on_policy_is_that_of_reinforce():
    logprobs = torch.randn(50, dtype=torch.float64, requires_grad=True)
    advantages = torch.randn(50, dtype=torch.float64)
    clipped_policy_loss(logprobs, logprobs.detach(), advantages, 0.2, 0.28, UNBOUNDED).loss.backward()
    assert logprobs.grad is not None
    torch.testing.assert_close(logprobs.grad, -advantages)


@given(st.integers(0, 2**31), st.floats(0.2, 3.0))
def test_the_distribution_is_the_one_that_was_sampled_from(seed: int, temperature: float):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(3, 7, 5, generator=generator)
    token_ids = torch.randint(5, (3, 7), generator=generator)
    trained = torch.rand(3, 7, generator=generator) < 0.5
    trained[:, 0] = False
    now = sampled_distribution(logits, token_ids, trained, temperature)
    at = [(b, t) for b in range(3) for t in range(7) if trained[b, t]]
    for i, (b, t) in enumerate(at):
        reference = torch.distributions.Categorical(logits=logits[b, t - 1] / temperature)
        torch.testing.assert_close(now.logprobs[i], reference.log_prob(token_ids[b, t]))
        torch.testing.assert_close(now.entropy[i], reference.entropy())
    assert len(now.logprobs) == len(at)
