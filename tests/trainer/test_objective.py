"""What a batch's tokens come to, by hand: means over tokens and sequences, what is masked, orders."""

import math
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.config import LossConfig
from elastic.protocol.wire import TrajectoryData
from elastic.testing.trajectories import PlainTrajectory
from elastic.worker.trainer.batches import Batch, collate
from elastic.worker.trainer.distribution import TokenDistribution
from elastic.worker.trainer.objective import BatchLoss, Objective, OtherLogprobs
from tests.seeds import examples

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


def loss_of(objective: Objective, batch: Batch, allowed: torch.Tensor | None = None) -> BatchLoss:
    now = TokenDistribution(batch.logprobs + MOVED, torch.zeros_like(batch.logprobs))
    return objective.of(batch, now, 0, allowed)


def value(found: BatchLoss) -> float:
    return 0.0 if found.loss is None else found.loss.item()


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
    assert value(found) / objective.share(5, 2) == pytest.approx(-math.exp(MOVED) * expected, rel=1e-5)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("loss", ["grpo", "gspo", "cispo"])
@settings(max_examples=examples(4, 10))
@given(lengths=st.lists(st.integers(1, 6), min_size=1, max_size=5), data=st.data())
def test_how_sequences_are_batched_changes_no_sum(mode: str, loss: str, lengths: list[int], data):
    objective = Objective(settings_of(mode, loss=loss))
    rows = [trajectory(number, length) for number, length in enumerate(lengths)]
    advantages = [(-1.0) ** number * (number + 1) for number in range(len(rows))]
    order = data.draw(st.permutations(range(len(rows))))
    cut = data.draw(st.integers(0, len(rows)))
    parts = [order[:cut], order[cut:]]
    found = sum(
        value(loss_of(objective, batch_of([rows[n] for n in part], [advantages[n] for n in part])))
        for part in parts
        if part
    )
    assert found == pytest.approx(value(loss_of(objective, batch_of(rows, advantages))), rel=1e-4, abs=1e-4)


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
    assert masked.masked.tolist() == (~allowed).tolist()
    if not allowed.any():
        assert masked.loss is None
        return
    without = Batch(
        *batch[:3],
        *(tensor[allowed] for tensor in (batch.logprobs, batch.versions, batch.advantages, batch.origins)),
        *(tensor[allowed] for tensor in (batch.temperatures, batch.sequences, batch.truncated)),
    )
    assert value(masked) == pytest.approx(value(loss_of(objective, without)), rel=1e-5, abs=1e-6)


def test_what_is_truncated_can_be_masked():
    rows = [trajectory(0, 2), trajectory(1, 3, truncated=True)]
    objective = Objective(settings_of("token-mean", mask_truncated=True))
    found = loss_of(objective, batch_of(rows, [1.0, 1.0]))
    assert found.masked.tolist() == [False] * 2 + [True] * 3
    assert value(found) == pytest.approx(-2 * math.exp(MOVED), rel=1e-5)
    assert loss_of(objective, batch_of(rows[1:], [1.0])).loss is None


CORRECTED = {"bypass_mode": False, "rollout_is": "token"}


def test_ratios_are_to_the_weights_at_the_steps_beginning_and_the_correction_to_what_sampled():
    batch = batch_of([trajectory(0, 3)], [1.0])
    first = batch.logprobs + torch.tensor([0.2, 1.0, -2.0])
    logprobs = (first + MOVED).requires_grad_()
    now = TokenDistribution(logprobs, torch.zeros(3))
    for threshold, weights in ((2.0, [math.exp(0.2), 2.0, math.exp(-2)]), ("0.5_5", [math.exp(0.2), math.exp(1), 0])):
        objective = Objective(settings_of("token-mean", **CORRECTED, rollout_is_threshold=threshold))
        found = objective.of(batch, now, 9, None, OtherLogprobs(first))
        assert found.loss is not None
        (gradient,) = torch.autograd.grad(found.loss, logprobs)
        torch.testing.assert_close(gradient, -math.exp(MOVED) * torch.tensor(weights, dtype=torch.float32))
        torch.testing.assert_close(found.tokens.ratio, torch.full((3,), math.exp(MOVED)))
        torch.testing.assert_close(found.log_ratio, torch.tensor([0.2, 1.0, -2.0]))
        assert found.masked.tolist() == [not weight for weight in weights]
        assert not found.tokens.truncated.any(), "the cap of old tokens is off"


def test_without_a_correction_the_same_weights_give_a_ratio_of_1_whatever_the_engine_says():
    batch = batch_of([trajectory(0, 3)], [1.0])
    now = TokenDistribution(batch.logprobs + torch.tensor([5.0, -5.0, 0.0]), torch.zeros(3))
    found = Objective(settings_of("token-mean", bypass_mode=False)).of(batch, now, 0, None)
    assert found.tokens.ratio.tolist() == [1.0] * 3
    assert value(found) == -3


def test_a_rejected_sequence_is_masked_and_counts_in_no_other_statistic():
    batch = batch_of([trajectory(0, 2), trajectory(1, 2)], [1.0, 1.0])
    now = TokenDistribution(batch.logprobs + torch.tensor([0.1, 0.1, 0.1, 9.0]), torch.zeros(4))
    keys = {"bypass_mode": False, "rollout_rs": "seq_sum_k1", "rollout_rs_threshold": 2.0, "loss": "gspo"}
    found = Objective(settings_of("token-mean", **keys)).of(batch, now, 0, None)
    assert found.masked.tolist() == [False, False, True, True]
    assert value(found) == -2
    found = Objective(settings_of("token-mean", **(keys | {"rollout_rs": "token_k1"}))).of(batch, now, 0, None)
    assert found.masked.tolist() == [False, False, False, True]


def test_the_kl_to_a_reference_and_the_entropy_are_in_each_tokens_loss():
    batch = batch_of([trajectory(0, 2)], [0.0])
    logprobs, entropy = batch.logprobs.clone().requires_grad_(), torch.tensor([0.5, 1.5], requires_grad=True)
    beside = OtherLogprobs(reference=batch.logprobs + torch.tensor([0.3, -0.3]))
    keys = {"kl_coefficient": 0.5, "entropy_coefficient": 0.25}
    found = Objective(settings_of("token-mean", **keys)).of(
        batch, TokenDistribution(logprobs, entropy), 0, None, beside
    )
    k3 = [math.exp(0.3) - 0.3 - 1, math.exp(-0.3) + 0.3 - 1]
    torch.testing.assert_close(found.kl, torch.tensor(k3))
    assert found.loss is not None
    assert value(found) == pytest.approx(0.5 * sum(k3) - 0.25 * 2.0, rel=1e-5)
    of_logprobs, of_entropy = torch.autograd.grad(found.loss, (logprobs, entropy))
    torch.testing.assert_close(of_logprobs, 0.5 * (1 - torch.tensor([0.3, -0.3]).exp()))
    assert of_entropy.tolist() == [-0.25] * 2


def test_distillation_follows_the_reference_token_by_token_whatever_the_rewards():
    batch = batch_of([trajectory(0, 3)], [5.0])
    logprobs = batch.logprobs.clone().requires_grad_()
    far = torch.tensor([0.5, -1.0, 0.0])
    objective = Objective(settings_of("token-mean", loss="distillation", reference="teacher"))
    found = objective.of(
        batch, TokenDistribution(logprobs, torch.zeros(3)), 0, None, OtherLogprobs(None, batch.logprobs + far)
    )
    assert found.loss is not None
    torch.testing.assert_close(torch.autograd.grad(found.loss, logprobs)[0], -far)


class TestCodeOfOnesOwn:
    def of(self, tmp_path: Path, body: str) -> Objective:
        file = tmp_path / f"loss_{abs(hash(body))}.py"
        file.write_text(f"def mine(tokens, settings):\n    return {body}\n")
        return Objective(settings_of("token-mean", loss=f"{file}:mine"))

    def test_is_a_loss_for_each_token(self, tmp_path: Path):
        objective = self.of(tmp_path, "-tokens.advantages * tokens.logprobs * settings.clip_ratio_c")
        batch = batch_of([trajectory(0, 2)], [2.0])
        found = loss_of(objective, batch)
        assert value(found) == pytest.approx(-6 * (batch.logprobs + MOVED).sum().item(), rel=1e-5)

    @pytest.mark.parametrize(
        ("body", "words"),
        [
            ("tokens.logprobs.sum()", r"returned a tensor of shape \(\); allowed: a loss for each token"),
            ("1.0", "returned 1.0; allowed"),
            ("tokens.advantages", "without a gradient"),
            ("tokens.nonesuch", "raised AttributeError"),
            ("tokens.logprobs * float('nan')", r"returned \[nan, nan, nan\]; allowed: finite numbers"),
        ],
    )
    def test_is_tried_before_anything_is_trained(self, tmp_path: Path, body: str, words: str):
        with pytest.raises(ValueError, match=r"trainer\.loss: .*" + words):
            self.of(tmp_path, body)

    def test_does_what_it_likes_to_its_tokens_and_is_not_asked_about_none(self, tmp_path: Path):
        body = "-tokens.advantages.mul_(2) * tokens.logprobs + 0 * tokens.sequences.zero_().max()"
        objective = self.of(tmp_path, f"{body} + 0 * tokens.proximal.fill_(9)")
        batch, plain = (
            batch_of([trajectory(0, 2)], [2.0]),
            self.of(tmp_path, "-2 * tokens.advantages * tokens.logprobs"),
        )
        found, expected = loss_of(objective, batch), loss_of(plain, batch)
        assert value(found) == value(expected)
        torch.testing.assert_close(found.tokens.ratio, expected.tokens.ratio)
        assert loss_of(objective, batch, torch.zeros_like(batch.truncated)).loss is None

    @pytest.mark.parametrize(
        ("body", "words"),
        [
            ("tokens.logprobs.detach()", "without a gradient"),
            ("tokens.logprobs.sum()", r"of shape \(\)"),
            ("exit(3)", "raised SystemExit: 3"),
        ],
    )
    def test_that_fails_later_is_named_too(self, tmp_path: Path, body: str, words: str):
        objective = self.of(tmp_path, f"{body} if len(tokens.logprobs) == 4 else tokens.logprobs")
        batch = batch_of([trajectory(0, 4)], [2.0])
        now = TokenDistribution(batch.logprobs.clone().requires_grad_(), torch.zeros(4))
        with pytest.raises(ValueError, match=r"trainer\.loss: .*" + words):
            objective.of(batch, now, 0, None)

    def test_that_is_not_there_is_named(self, tmp_path: Path):
        with pytest.raises(ValueError, match=r"trainer\.loss: no_such_module:mine"):
            Objective(settings_of("token-mean", loss="no_such_module:mine"))
