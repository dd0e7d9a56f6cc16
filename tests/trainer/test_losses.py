import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic.worker.trainer.losses import LOSSES, Clip, LossTokens, TokenLosses, grpo

UNLIKE = ("grpo", "gspo", "cispo")
CLIP = Clip(low=0.2, high=0.28, dual=3.0, cap=2.0)
HEAVIEST = 3.0
"""What one token may weigh, with these settings."""

wild_logprobs = st.one_of(st.floats(-1e3, 1e3), st.floats(-20.0, 0.0), st.sampled_from([0.0, -1e30, 1e30, -math.inf]))


def tokens_of(
    logprobs: torch.Tensor, sampled: torch.Tensor, advantages: torch.Tensor, age: int | torch.Tensor = 0
) -> LossTokens:
    """All of one sequence."""
    ages = age if isinstance(age, torch.Tensor) else torch.full(logprobs.shape, age)
    return LossTokens(logprobs, sampled, advantages, ages, torch.zeros_like(ages))


def loss_of(
    logprobs: torch.Tensor, sampled: torch.Tensor, advantages: torch.Tensor, age: int = 0, clip: Clip = CLIP
) -> TokenLosses:
    return grpo(tokens_of(logprobs, sampled, advantages, age), clip)


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
    policy.loss.sum().backward()
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
    policy.loss.sum().backward()
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
        clip = CLIP._replace(cap=threshold, dual=1e9)
        loss_of(logprobs, torch.zeros(1), torch.tensor([advantage]), age, clip).loss.sum().backward()
        assert logprobs.grad is not None
        return logprobs.grad.item()

    ratio = math.exp(log_ratio)
    if age > 1 and ratio > 2.0 and advantage < 0:
        assert gradient(2.0) == pytest.approx(-2.0 * advantage)
    else:
        assert gradient(2.0) == pytest.approx(gradient(1e9))


@pytest.mark.parametrize("name", UNLIKE)
@given(tokens=st.lists(st.tuples(wild_logprobs, wild_logprobs, st.floats(-50, 50), st.integers(0, 4)), min_size=1))
def test_no_token_weighs_more_than_the_clips_let_it(name: str, tokens: list[tuple[float, float, float, int]]):
    now, sampled, advantages, ages = (torch.tensor(column) for column in zip(*tokens, strict=True))
    logprobs = now.clamp(-1e30, 1e30).requires_grad_()
    policy = LOSSES[name](tokens_of(logprobs, sampled, advantages, ages), CLIP)
    policy.loss.sum().backward()
    assert policy.loss.isfinite().all()
    assert policy.ratio.isfinite().all()
    assert logprobs.grad is not None
    assert (logprobs.grad.abs() <= HEAVIEST * advantages.abs() * (1 + 1e-5)).all()
    assert name == "cispo" or not logprobs.grad[policy.clipped].any()


def test_a_sequence_s_ratio_is_the_geometric_mean_of_its_tokens():
    """And a clip takes the gradient from all of its tokens, or from none."""
    log_ratios = torch.tensor([0.1, -0.05, 0.3, 0.9, 0.9])
    sequences = torch.tensor([0, 0, 0, 4, 4])
    logprobs = (log_ratios - 2.0).requires_grad_()
    tokens = LossTokens(logprobs, torch.full((5,), -2.0), torch.tensor([2.0] * 5), torch.zeros(5), sequences)
    found = LOSSES["gspo"](tokens, CLIP)
    found.loss.sum().backward()
    near, far = math.exp(0.35 / 3), math.exp(0.9)
    torch.testing.assert_close(found.ratio, torch.tensor([near] * 3 + [far] * 2))
    torch.testing.assert_close(found.loss.detach(), torch.tensor([-2 * near] * 3 + [-2 * 1.28] * 2))
    assert found.clipped.tolist() == [False] * 3 + [True] * 2
    torch.testing.assert_close(logprobs.grad, torch.tensor([-2 * near] * 3 + [0.0] * 2))


@pytest.mark.parametrize(
    ("ratio", "age", "weight", "clipped", "truncated"),
    [
        (1.1, 0, 1.1, False, False),
        (0.5, 0, 0.8, True, False),
        (5.0, 0, 1.28, True, False),
        (5.0, 2, 1.2, True, True),
    ],
)
@pytest.mark.parametrize("advantage", [1.5, -1.5])
def test_a_clipped_weight_leaves_the_gradient(
    ratio: float, age: int, weight: float, clipped: bool, truncated: bool, advantage: float
):
    logprobs = torch.tensor([math.log(ratio) - 2.0], requires_grad=True)
    tokens = tokens_of(logprobs, torch.tensor([-2.0]), torch.tensor([advantage]), age)
    found = LOSSES["cispo"](tokens, CLIP._replace(cap=1.2))
    found.loss.sum().backward()
    assert found.loss.item() == pytest.approx(-weight * advantage * (math.log(ratio) - 2.0), rel=1e-5)
    assert (found.clipped.item(), found.truncated.item()) == (clipped, truncated)
    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx(-weight * advantage, rel=1e-5)


sequences_of_tokens = st.lists(
    st.lists(st.tuples(st.floats(-6, 0), st.floats(-6, 0), st.floats(-3, 3)), min_size=1, max_size=5),
    min_size=1,
    max_size=4,
)


@pytest.mark.parametrize("name", UNLIKE)
@given(rows=sequences_of_tokens, data=st.data())
def test_the_order_of_sequences_changes_no_token_s_loss(name: str, rows: list[list[tuple[float, ...]]], data):
    order = data.draw(st.permutations(range(len(rows))))

    def losses(places: Sequence[int]) -> dict[int, torch.Tensor]:
        columns = zip(*(token for place in places for token in rows[place]), strict=True)
        logprobs, sampled, advantages = (torch.tensor(column) for column in columns)
        numbers = [number for number, place in enumerate(places) for _ in rows[place]]
        tokens = LossTokens(logprobs, sampled, advantages, torch.zeros_like(logprobs), torch.tensor(numbers))
        found = LOSSES[name](tokens, CLIP).loss.split([len(rows[place]) for place in places])
        return dict(zip(places, found, strict=True))

    one, other = losses(range(len(rows))), losses(order)
    assert all(torch.equal(one[place], other[place]) for place in one)
