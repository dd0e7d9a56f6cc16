"""Losses and gradients are those of TRL's `GRPOTrainer.compute_loss`, of the pinned version, on the same batch."""

import os
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from elastic.config import LossConfig
from elastic.protocol.wire import TrajectoryData
from elastic.testing.trajectories import PlainTrajectory
from elastic.worker.trainer.batches import Batch, advantages_of, collate
from elastic.worker.trainer.objective import Objective, OtherLogprobs
from tests.trainer.hugging_face import VOCABULARY, write_model

pytestmark = [pytest.mark.trl, pytest.mark.filterwarnings("ignore")]
"""What TRL's own calls are warned of is its own matter."""

PROMPT = 3
LENGTHS = (4, 9, 2, 6)
REWARDS = (1.0, 0.0, 0.0, 0.5)
LONGEST = max(LENGTHS)
PLAIN: Mapping[str, Any] = {"epsilon": 0.2, "epsilon_high": 0.28, "delta": 3.0, "loss_type": "dapo"}
CORRECTED: Mapping[str, Any] = {"bypass_mode": False, "rollout_is": "token"}


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("policy"), "qwen3")


def trajectories() -> list[TrajectoryData]:
    rng = random.Random(0)
    made: list[TrajectoryData] = []
    for number, (length, reward) in enumerate(zip(LENGTHS, REWARDS, strict=True)):
        ids = [rng.randrange(VOCABULARY) for _ in range(PROMPT + length)]
        marks = [0] * PROMPT + [1] * length
        made.append(PlainTrajectory(str(number), ids, marks, [-1.0] * len(ids), [0] * len(ids), reward).packed())
    return made


class OneBatch:
    """A batch with log-probabilities around the policy's own: of what sampled it, of the step's beginning, and of a
    reference."""

    def __init__(self, directory: Path, settings: LossConfig) -> None:
        from elastic.worker.trainer.packing import row_of
        from elastic.worker.trainer.transformers.model import CausalModel

        self.settings = settings
        self.model = CausalModel(directory, torch.device("cpu"), "auto", activation_checkpointing=False)
        rows = trajectories()
        batch = collate(list(zip(rows, advantages_of(rows, settings), strict=True)), {})
        self.now = self.model.distribution(row_of([batch]), 1.0)
        generator = torch.Generator().manual_seed(1)
        self.sampled, self.first, self.reference = (
            self.now.logprobs.detach() + width * torch.randn(len(self.now.logprobs), generator=generator)
            for width in (0.5, 0.4, 0.3)
        )
        if settings.bypass_mode:
            self.sampled = self.first
        self.batch: Batch = batch._replace(logprobs=self.sampled)

    def ours(self) -> tuple[float, dict[str, Tensor]]:
        objective = Objective(self.settings)
        found = objective.of(self.batch, self.now, 0, None, OtherLogprobs(self.first, self.reference))
        assert found.loss is not None
        loss = found.loss / objective.share(sum(LENGTHS), len(LENGTHS))
        named = self.model.named_parameters()
        return loss.item(), dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True))

    def padded(self, values: Tensor) -> Tensor:
        """[B, T]"""
        return torch.nn.utils.rnn.pad_sequence(list(values.split(LENGTHS)), batch_first=True)

    def theirs(self, directory: Path, work: Path, keys: Mapping[str, Any]) -> tuple[float, dict[str, Tensor]]:
        trainer = trainer_of(directory, work, keys)
        mask = self.padded(torch.ones(sum(LENGTHS)))
        ids = self.batch.token_ids
        inputs = {
            "prompt_ids": ids[:, :PROMPT],
            "prompt_mask": torch.ones_like(ids[:, :PROMPT]),
            "completion_ids": ids[:, PROMPT:],
            "completion_mask": mask.long(),
            "old_per_token_logps": self.padded(self.first),
            "ref_per_token_logps": self.padded(self.reference),
            "advantages": self.padded(self.batch.advantages)[:, 0],
            "num_items_in_batch": torch.tensor(float(sum(LENGTHS))),
        }
        if self.settings.rollout_is is not None:
            trainer.use_vllm = trainer.vllm_importance_sampling_correction = True
            inputs["importance_sampling_ratio"] = self.importance_ratio(mask)
        loss = trainer.compute_loss(trainer.model, inputs)
        loss.backward()
        return loss.item(), {name: one.grad for name, one in trainer.model.named_parameters() if one.grad is not None}

    def importance_ratio(self, mask: Tensor) -> Tensor:
        """As TRL computes it where it generates, in its modes `*_truncate` and `*_mask`."""
        apart = self.padded(self.first - self.sampled) * mask
        if self.settings.rollout_is == "sequence":
            apart = apart.sum(-1, keepdim=True)
        ratio, threshold = apart.exp(), self.settings.rollout_is_threshold
        if isinstance(threshold, float):
            return ratio.clamp(max=threshold)
        low, high = map(float, threshold.split("_"))
        return ratio.masked_fill((ratio < low) | (ratio > high), 0.0)


def trainer_of(directory: Path, work: Path, keys: Mapping[str, Any]) -> Any:
    os.environ["HF_HUB_OFFLINE"] = "1"
    from datasets import Dataset  # pyright: ignore[reportMissingImports]
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
    from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

    words = Tokenizer(WordLevel({"<pad>": 0, "<end>": 1, "a": 2}, unk_token="<pad>"))
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<end>"),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        train_dataset=Dataset.from_dict({"prompt": ["a", "a"]}),
        args=GRPOConfig(
            output_dir=str(work),
            per_device_train_batch_size=len(LENGTHS),
            num_generations=len(LENGTHS),
            steps_per_generation=1,
            max_completion_length=LONGEST,
            gradient_checkpointing=False,
            report_to=[],
            use_cpu=True,
            bf16=False,
            disable_tqdm=True,
            **{**PLAIN, **keys},
        ),
    )
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    return trainer


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({}, {}),
        ({"loss_agg_mode": "seq-mean-token-mean"}, {"loss_type": "grpo"}),
        (
            {"loss_agg_mode": "seq-mean-token-sum-norm", "loss_scale_factor": LONGEST},
            {"loss_type": "dr_grpo"},
        ),
        (
            {"loss": "gspo", "loss_agg_mode": "seq-mean-token-mean", "clip_ratio_low": 0.05, "clip_ratio_high": 0.06},
            {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.05, "epsilon_high": 0.06},
        ),
        ({"loss": "cispo", "clip_ratio_low": 1.0}, {"loss_type": "cispo", "epsilon_high": 1.28}),
        ({"kl_coefficient": 0.3}, {"beta": 0.3, "use_bias_correction_kl": False}),
        ({"entropy_coefficient": 0.2}, {"entropy_coef": 0.2}),
        ({**CORRECTED, "rollout_is_threshold": 1.5}, {}),
        ({**CORRECTED, "rollout_is_threshold": "0.7_1.4"}, {}),
        ({**CORRECTED, "rollout_is": "sequence", "rollout_is_threshold": "0.2_3"}, {}),
    ],
    ids=str,
)  # fmt: skip
def test_losses_and_gradients_are_trls(
    stored: Path, tmp_path: Path, ours: dict[str, Any], theirs: dict[str, Any]
) -> None:
    one = OneBatch(stored, LossConfig.model_validate(ours))
    (loss, gradients), (their_loss, expected) = one.ours(), one.theirs(stored, tmp_path, theirs)
    assert loss == pytest.approx(their_loss, rel=1e-4, abs=1e-5)
    assert expected.keys() <= gradients.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name], gradient, atol=1e-5, rtol=1e-3, msg=name)
    assert max(gradient.abs().max().item() for gradient in expected.values()) > 1e-3
