"""What a batch's tokens come to, by hand: means over tokens and sequences, what is masked, orders."""

import math
import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic.config import LossConfig
from elastic.protocol.wire import TrajectoryData
from elastic.testing.trajectories import PlainTrajectory
from elastic.worker.trainer.batches import Batch, collate
from elastic.worker.trainer.distribution import TokenDistribution
from elastic.worker.trainer.objective import BatchLoss, Objective

MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
MOVED = 0.1
"""How far the policy's log-probabilities are from those that were sampled with, in nats."""


def trajectory(number: int, tokens: int, *, truncated: bool = False) -> TrajectoryData:
    rng = random.Random(number)
    logprobs = [-1.0, *(rng.uniform(-4.0, -1.0) for _ in range(tokens))]
    made = PlainTrajectory(str(number), [1] * (tokens + 1), [0] + [1] * tokens, logprobs, [0] * (tokens + 1)).packed()
    made.sampled.truncated = truncated
    return made


def settings_of(mode: str, **keys: object) -> LossConfig:
    factor = {"loss_scale_factor": 8.0} if mode == "seq-mean-token-sum-norm" else {}
    return LossConfig.model_validate({"loss_agg_mode": mode, **factor, **keys})


def batch_of(rows: Sequence[TrajectoryData], advantages: Sequence[float]) -> Batch:
    return collate(list(zip(rows, advantages, strict=True)), {})


def loss_of(objective: Objective, batch: Batch, allowed: torch.Tensor | None = None) -> BatchLoss | None:
    now = TokenDistribution(batch.logprobs + MOVED, torch.zeros_like(batch.logprobs))
    return objective.of(batch, now, 0, allowed)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", (2 * 1.0 + 3 * -2.0) / 5),
        ("seq-mean-token-sum", (2 * 1.0 + 3 * -2.0) / 2),
        ("seq-mean-token-mean", (1.0 - 2.0) / 2),
        ("seq-mean-token-sum-norm", (2 * 1.0 + 3 * -2.0) / 2 / 8),
    ],
)
def test_modes_are_means_over_tokens_or_sequences(mode: str, expected: float):
    objective = Objective(settings_of(mode))
    found = loss_of(objective, batch_of([trajectory(0, 2), trajectory(1, 3)], [1.0, -2.0]))
    assert found is not None
    assert found.loss.item() / objective.share(5, 2) == pytest.approx(-math.exp(MOVED) * expected, rel=1e-5)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("loss", ["grpo", "gspo", "cispo"])
@given(lengths=st.lists(st.integers(1, 6), min_size=1, max_size=5), data=st.data())
def test_how_sequences_are_batched_changes_no_sum(mode: str, loss: str, lengths: list[int], data):
    objective = Objective(settings_of(mode, loss=loss))
    rows = [trajectory(number, length) for number, length in enumerate(lengths)]
    advantages = [(-1.0) ** number * (number + 1) for number in range(len(rows))]
    order = data.draw(st.permutations(range(len(rows))))
    cut = data.draw(st.integers(0, len(rows)))
    parts = [order[:cut], order[cut:]]
    found = sum(
        one.loss.item()
        for part in parts
        if part and (one := loss_of(objective, batch_of([rows[n] for n in part], [advantages[n] for n in part])))
    )
    together = loss_of(objective, batch_of(rows, advantages))
    assert together is not None
    assert found == pytest.approx(together.loss.item(), rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("mode", ["seq-mean-token-sum", "seq-mean-token-sum-norm"])
@pytest.mark.parametrize("loss", ["grpo", "gspo", "cispo"])
@given(lengths=st.lists(st.integers(2, 6), min_size=1, max_size=3), data=st.data())
def test_a_masked_token_is_as_if_it_were_not_there(mode: str, loss: str, lengths: list[int], data):
    """In modes whose denominator does not count tokens."""
    objective = Objective(settings_of(mode, loss=loss))
    rows = [trajectory(number, length) for number, length in enumerate(lengths)]
    batch = batch_of(rows, [1.0] * len(rows))
    allowed = torch.tensor(data.draw(st.lists(st.booleans(), min_size=sum(lengths), max_size=sum(lengths))))
    masked = loss_of(objective, batch, allowed)
    if not allowed.any():
        assert masked is None
        return
    without = Batch(
        *batch[:3],
        *(tensor[allowed] for tensor in (batch.logprobs, batch.versions, batch.advantages, batch.origins)),
        *(tensor[allowed] for tensor in (batch.temperatures, batch.sequences, batch.truncated)),
    )
    expected = loss_of(objective, without)
    assert masked is not None
    assert expected is not None
    assert masked.loss.item() == pytest.approx(expected.loss.item(), rel=1e-5, abs=1e-6)


def test_what_is_truncated_can_be_masked():
    rows = [trajectory(0, 2), trajectory(1, 3, truncated=True)]
    batch = batch_of(rows, [1.0, 1.0])
    found = loss_of(Objective(settings_of("token-mean", mask_truncated=True)), batch)
    assert found is not None
    assert found.kept.tolist() == [True] * 2 + [False] * 3
    assert found.loss.item() == pytest.approx(-2 * math.exp(MOVED), rel=1e-5)
    assert loss_of(Objective(settings_of("token-mean", mask_truncated=True)), batch_of(rows[1:], [1.0])) is None
