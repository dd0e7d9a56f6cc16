import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic.worker.trainer.grpo import (
    ClipSettings,
    PolicyLoss,
    clipped_policy_loss,
    group_advantages,
)

EPSILON = 1e-6
CLIP = ClipSettings(clip_ratio_low=0.2, clip_ratio_high=0.28, clip_ratio_c=3.0, rollout_is_threshold=2.0)
HEAVIEST = 3.0
"""What one token may weigh, with these settings."""

rewards = st.lists(st.floats(-10, 10), min_size=2, max_size=16)
wild_logprobs = st.one_of(st.floats(-1e3, 1e3), st.floats(-20.0, 0.0), st.sampled_from([0.0, -1e30, 1e30, -math.inf]))


def loss_of(
    logprobs: torch.Tensor, sampled: torch.Tensor, advantages: torch.Tensor, age: int = 0, clip: ClipSettings = CLIP
) -> PolicyLoss:
    return clipped_policy_loss(logprobs, sampled, advantages, torch.full(logprobs.shape, age), clip)


@given(rewards)
def test_advantages_have_no_mean_and_unit_deviation(values: list[float]):
    advantages = torch.tensor(group_advantages(values, EPSILON), dtype=torch.float64)
    assert len(advantages) == len(values)
    assert abs(advantages.mean()) < 1e-6
    deviation = torch.tensor(values, dtype=torch.float64).std().item()
    assert not advantages.any() or advantages.std().item() == pytest.approx(deviation / (deviation + EPSILON))


@given(rewards)
def test_advantages_rank_as_rewards_do(values: list[float]):
    advantages = group_advantages(values, EPSILON)
    order = sorted(range(len(values)), key=values.__getitem__)
    assert all(advantages[a] <= advantages[b] for a, b in itertools.pairwise(order))


@given(st.floats(-10, 10), st.floats(0, 1e-3), st.integers(2, 9))
def test_a_small_difference_is_no_large_advantage(value: float, difference: float, size: int):
    advantages = group_advantages([value] * (size - 1) + [value + difference], EPSILON)
    assert max(map(abs, advantages)) <= difference / EPSILON
    assert difference > 0.9 * EPSILON or not any(advantages)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped"),
    [
        (1.0, 2.0, -2.0, False),
        (1.2, 1.0, -1.2, False),
        (1.5, 1.0, -1.28, True),
        (0.5, 1.0, -0.5, False),
        (1.5, -1.0, 1.5, False),
        (2.9, -1.0, 2.9, False),
        (3.1, -1.0, 3.0, True),
        (3.1, -2.0, 6.0, True),
        (0.9, -1.0, 0.9, False),
        (0.5, -1.0, 0.8, True),
    ],
)
def test_the_clips_bound_what_can_be_gained_and_what_can_be_lost(
    ratio: float, advantage: float, loss: float, clipped: bool
):
    logprobs = torch.tensor([math.log(ratio) - 2.0], dtype=torch.float64, requires_grad=True)
    policy = loss_of(logprobs, torch.tensor([-2.0]), torch.tensor([advantage]))
    policy.loss.backward()
    assert policy.loss.item() == pytest.approx(loss)
    assert policy.ratio.item() == pytest.approx(ratio)
    assert policy.clipped.item() is clipped
    assert not policy.truncated.item()
    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx(0.0 if clipped else -ratio * advantage)


@pytest.mark.parametrize("log_ratio", [math.log(2.5), 2.0, 30.0, 1e3])
@pytest.mark.parametrize("age", [2, 5])
def test_a_truncated_weight_is_the_threshold_and_gives_its_gradient(log_ratio: float, age: int):
    logprobs = torch.tensor([0.0], dtype=torch.float64, requires_grad=True)
    policy = loss_of(logprobs, torch.tensor([-log_ratio]), torch.tensor([-1.0]), age)
    policy.loss.backward()
    assert policy.loss.item() == pytest.approx(2.0)
    assert (policy.truncated.item(), policy.clipped.item()) == (True, False)
    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx(2.0)


@given(st.floats(-5.0, 5.0), st.floats(-3, 3), st.integers(0, 4))
def test_truncation_changes_nothing_below_its_threshold_nor_what_is_clipped(
    log_ratio: float, advantage: float, age: int
):
    def gradient(threshold: float) -> float:
        logprobs = torch.tensor([log_ratio], dtype=torch.float64, requires_grad=True)
        clip = CLIP._replace(rollout_is_threshold=threshold, clip_ratio_c=1e9)
        loss_of(logprobs, torch.zeros(1), torch.tensor([advantage]), age, clip).loss.backward()
        assert logprobs.grad is not None
        return logprobs.grad.item()

    ratio = math.exp(log_ratio)
    if age > 1 and ratio > 2.0 and advantage < 0:
        assert gradient(2.0) == pytest.approx(-2.0 * advantage)
    else:
        assert gradient(2.0) == pytest.approx(gradient(1e9))


@given(st.lists(st.tuples(wild_logprobs, wild_logprobs, st.floats(-50, 50), st.integers(0, 4)), min_size=1))
def test_no_token_weighs_more_than_the_clips_let_it(tokens: list[tuple[float, float, float, int]]):
    now, sampled, advantages, ages = (torch.tensor(column) for column in zip(*tokens, strict=True))
    logprobs = now.clamp(-1e30, 1e30).requires_grad_()
    policy = clipped_policy_loss(logprobs, sampled, advantages, ages, CLIP)
    policy.loss.backward()
    assert policy.loss.isfinite()
    assert policy.ratio.isfinite().all()
    assert logprobs.grad is not None
    assert (logprobs.grad.abs() <= HEAVIEST * advantages.abs() * (1 + 1e-5)).all()
    assert not logprobs.grad[policy.clipped].any()
