"""The reserved trainer as a library: groups in, weights out, the same whatever the order of arrival.

A step's groups are split into `updates_per_step` mini-batches by their index, which is their launch order. A
group's gradient is computed when it arrives, from its own trajectories alone, and summed exactly; a group of a
later mini-batch is held until the earlier ones have stepped, since it is trained on their weights.

A mini-batch's gradient is the mean over the policy's tokens in all its groups. Groups without signal give no gradient
and count in that mean, as in verl and TRL: the fewer groups have signal, the smaller the step. With dynamic sampling
others take their place, and they count nowhere (DAPO).

Tokens of workers that do not generate with the weights which they name are left out (`agreement.py`).

No data ends a run. A group from which no usable gradient comes is left out whole, and its cause is kept in `unusable`.
"""

import math
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from elastic.config import TrainerConfig
from elastic.core.types import LogprobCheck
from elastic.engine.model.qwen3 import Qwen3
from elastic.protocol.wire import TrainGroupFrame, TrajectoryData, finite
from elastic.system.parking import Switch
from elastic.system.parking.tensors import ParkedTensors, held_bytes
from elastic.worker.trainer import checkpoint
from elastic.worker.trainer.accumulator import GradientAccumulator, GradientOverflow
from elastic.worker.trainer.adamw import AdamW
from elastic.worker.trainer.agreement import StepAgreement
from elastic.worker.trainer.batches import (
    Batch,
    UnusableGroup,
    advantages_of,
    by_member,
    check_group,
    check_trajectories,
    micro_batches,
    policy_tokens,
    workers_of,
)
from elastic.worker.trainer.grpo import (
    ClipSettings,
    TokenDistribution,
    clipped_policy_loss,
    sampled_distribution,
)


class _Skipped(NamedTuple):
    """A group that is not trained on."""

    tokens: int
    trajectories: Sequence[TrajectoryData]


class GRPOTrainer:
    """Trains `model` in place; its float32 parameters are the masters.

    `version` counts steps and names the weights; `updates` counts optimiser updates; `metrics` are of the last step,
    also where that was before the checkpoint that was loaded. After any error other than
    `ValueError` the step cannot be finished: load a checkpoint.
    """

    def __init__(self, settings: TrainerConfig, model: Qwen3, groups: int, temperature: float) -> None:
        if settings.updates_per_step > groups:
            raise ValueError(f"updates_per_step: at most one a group, {groups} (found {settings.updates_per_step})")
        self._settings = settings
        self.model = model.float().train()
        self._groups = groups
        self._temperature = temperature
        self._clip = ClipSettings(
            settings.clip_ratio_low, settings.clip_ratio_high, settings.clip_ratio_c, settings.rollout_is_threshold
        )
        self._names = [name for name, _ in model.named_parameters()]
        self._parameters = list(model.parameters())
        self._device = self._parameters[0].device
        self.accumulator = GradientAccumulator(self._parameters)
        """Sums up the gradients of the minibatch that is under way."""
        self.optimizer = AdamW(self._parameters, settings.betas, settings.adam_epsilon, settings.weight_decay)
        self._parked = ParkedTensors()
        self._rate = 0.0
        self.version = 0
        self.updates = 0
        self.metrics: dict[str, float] = {}
        self._unusable: dict[str, str] = {}
        self._checks: list[LogprobCheck] = []
        self._begin_step()

    def train_group(self, group: TrainGroupFrame) -> None:
        """Accumulate the group's gradient, now or when its mini-batch's turn comes.

        Raises `ValueError`, and changes nothing, for a group that is unknown or already here.
        """
        self._note(group.index, group)
        self._advance()

    def skip_group(self, index: int, tokens: int = 0, trajectories: Sequence[TrajectoryData] = ()) -> None:
        """The step does without this group; raises `ValueError` for one that is unknown or already here.

        `tokens` of the policy count in its mini-batch's mean all the same. It is noted and no more: rollouts may have
        the device. What waited for it is done with the next group, and then the log-probabilities of its
        `trajectories` are compared.
        """
        self._note(index, _Skipped(tokens, trajectories))

    def take_checks(self) -> list[LogprobCheck]:
        """How workers' log-probabilities compare with the trainer's, in what was looked at since the last call."""
        checks, self._checks = [*self._checks, *self._agreement.take()], []
        return checks

    @property
    def unusable(self) -> Mapping[str, str]:
        """Groups of this step from which no usable gradient came, and why; of the last step once it is finished."""
        return self._unusable

    def update(self) -> dict[str, float]:
        """Finish the step under a new version; returns its metrics.

        Raises `ValueError` while groups are missing. A mini-batch without a gradient makes no update.
        """
        missing = sorted(set(range(self._groups)) - self._seen)
        if missing:
            raise ValueError(f"update: groups neither trained nor skipped: {', '.join(map(str, missing))}")
        self._advance()
        self.metrics = self._metrics()
        self._checks += self._agreement.take()
        self.version += 1
        self._begin_step()
        return self.metrics

    def bf16_tensors(self) -> dict[str, Tensor]:
        """What rollouts use: a rounded copy of each parameter, where that is, under its Hugging Face name."""
        return {
            name: parameter.detach().to(torch.bfloat16, copy=True).contiguous()
            for name, parameter in zip(self._names, self._parameters, strict=True)
        }

    def save(self, path: Path) -> None:
        """Write masters, optimiser state and counters to the file `path`, all or nothing; between steps only."""
        self._check_between_steps("save")
        counters = checkpoint.Counters(version=self.version, updates=self.updates, metrics=finite(self.metrics))
        checkpoint.write(path, self._state(), counters)

    def load(self, path: Path) -> None:
        """Go on from a checkpoint. Raises `CheckpointError`, and changes nothing, if it does not fit the model."""
        self._check_between_steps("load")
        self.resume()
        state = self._state()
        tensors, counters = checkpoint.read(path, {name: tensor.shape for name, tensor in state.items()})
        for name, tensor in state.items():
            tensor.copy_(tensors[name])
        self.optimizer.begin_at(counters.updates)
        self.version, self.updates, self.metrics = counters.version, counters.updates, counters.metrics
        self._begin_step()

    def park(self) -> Switch:
        """Take masters, moments and the gradients of the step under way off the device; `save` may still be called."""
        begun_s = time.monotonic()
        moments = (*self.optimizer.exp_avg, *self.optimizer.exp_avg_sq)
        sums = self.accumulator.sums
        if self.accumulator.is_zero:
            size_bytes = self._parked.park((*self._parameters, *moments), zeros=sums)
        else:
            size_bytes = self._parked.park((*self._parameters, *moments, *sums))
        return Switch(time.monotonic() - begun_s, size_bytes, held_bytes(self._device))

    def resume(self) -> Switch:
        """Bring them back, bit for bit."""
        begun_s = time.monotonic()
        size_bytes = self._parked.resume()
        return Switch(time.monotonic() - begun_s, size_bytes)

    def _begin_step(self) -> None:
        self._seen: set[int] = set()
        self._held: dict[int, TrainGroupFrame | _Skipped] = {}
        self._agreement = StepAgreement(self.version, self._settings.mismatch_max)
        self._minibatch = 0
        self._outstanding = self._members(0)
        self._minibatch_tokens = 0
        self._minibatch_has_gradient = False
        self._tokens_of_mean = 0
        self._statistics: dict[int, _GroupStatistics] = {}
        self._gradient_norms: list[float] = []
        self._tokens_left_out = 0

    def _members(self, minibatch: int) -> set[int]:
        updates = self._settings.updates_per_step
        return {index for index in range(self._groups) if index * updates // self._groups == minibatch}

    def _note(self, index: int, group: TrainGroupFrame | _Skipped) -> None:
        if not 0 <= index < self._groups:
            raise ValueError(f"group {index}: a step has groups 0 to {self._groups - 1}")
        if index in self._seen:
            raise ValueError(f"group {index}: already trained or skipped in this step")
        if not self._seen:
            self._unusable = {}
        self._seen.add(index)
        self._held[index] = group

    def _advance(self) -> None:
        """Train what is held of the current mini-batch, and step as often as one is complete."""
        while self._minibatch < self._settings.updates_per_step:
            for index in sorted(self._outstanding & self._held.keys()):
                group = self._held.pop(index)
                if isinstance(group, _Skipped):
                    self._minibatch_tokens += group.tokens
                    self._compare(group.trajectories)
                else:
                    self._train(group)
                self._outstanding.remove(index)
            if self._outstanding:
                return
            self._agreement.updates()
            self._step_optimizer()
            self._minibatch += 1
            self._outstanding = self._members(self._minibatch)

    def _train(self, group: TrainGroupFrame) -> None:
        try:
            check_group(group, self.model.config.vocab_size)
            self._accumulate(group)
        except (UnusableGroup, GradientOverflow) as error:
            self._unusable[group.group] = str(error)

    def _accumulate(self, group: TrainGroupFrame) -> None:
        """All of the group's gradient or, where that raises `UnusableGroup` or `GradientOverflow`, nothing of it."""
        statistics = _GroupStatistics(list(by_member(group.trajectories).values()))
        advantages = advantages_of(group.trajectories, self._settings.advantage_epsilon)
        if any(advantages):
            if gradient := self._gradient(group, advantages, statistics):
                self.accumulator.add(gradient)
                self._minibatch_has_gradient = True
        else:
            self._compare(group.trajectories)
        self._statistics[group.index] = statistics
        self._minibatch_tokens += policy_tokens(group)

    def _gradient(
        self, group: TrainGroupFrame, advantages: Sequence[float], statistics: "_GroupStatistics"
    ) -> Sequence[Tensor]:
        """The gradient of the group's loss, a sum over its tokens; empty where none of them may be trained on."""
        total: Sequence[Tensor] = ()
        workers = workers_of(group.trajectories)
        for batch in micro_batches(group.trajectories, advantages, self._settings.micro_batch_tokens):
            part = self._batch_gradient(batch.to(self._device), workers, group.bounds, statistics)
            if total and part:
                total = [have.add_(more) for have, more in zip(total, part, strict=True)]
            else:
                total = total or part
        return total

    def _batch_gradient(
        self, batch: Batch, workers: Sequence[str], bounds: Mapping[str, float | None], statistics: "_GroupStatistics"
    ) -> Sequence[Tensor]:
        logits = self.model(batch.token_ids, batch.lengths)
        now = self._distribution(logits, batch)
        logprobs, sampled, advantages, entropy = now.logprobs, batch.logprobs, batch.advantages, now.entropy
        ages = self.version - batch.versions
        keep = self._agreement.compare(batch, now.logprobs, workers, bounds)
        if keep is not None:
            self._tokens_left_out += int((~keep).sum())
            if not keep.any():
                return ()
            logprobs, sampled, advantages = logprobs[keep], sampled[keep], advantages[keep]
            ages, entropy = ages[keep], entropy[keep]
        policy = clipped_policy_loss(logprobs, sampled, advantages, ages, self._clip)
        gradient = torch.autograd.grad(policy.loss, self._parameters)
        statistics.ratio_max = max(statistics.ratio_max, policy.ratio.max().item())
        sums = {
            "tokens": len(logprobs),
            "loss": policy.loss.item(),
            "entropy": entropy.sum().item(),
            "ratio": policy.ratio.sum().item(),
            "clipped": policy.clipped.sum().item(),
            "truncated": policy.truncated.sum().item(),
            "age": ages.sum().item(),
        }
        for name, value in sums.items():
            statistics.sums[name] += value
        return gradient

    def _distribution(self, logits: Tensor, batch: Batch) -> TokenDistribution:
        """What the batch's tokens were sampled from, as the model has it now."""
        temperature: float | Tensor = self._temperature
        if batch.temperatures.any():
            own = batch.temperatures
            temperature = torch.where(own > 0, own, self._temperature).unsqueeze(-1)
        return sampled_distribution(logits, batch.token_ids, batch.trained, temperature)

    @torch.no_grad()
    def _compare(self, group: Sequence[TrajectoryData]) -> None:
        """Compare log-probabilities of a group that gives no gradient, as far as that tells something new."""
        trajectories = self._agreement.wanting(group)
        try:
            check_trajectories(trajectories, self.model.config.vocab_size)
        except UnusableGroup:
            return
        workers = workers_of(trajectories)
        for batch in micro_batches(trajectories, [0.0] * len(trajectories), self._settings.micro_batch_tokens):
            there = batch.to(self._device)
            logits = self.model(there.token_ids, there.lengths)
            now = self._distribution(logits, there)
            self._agreement.compare(there, now.logprobs, workers, {})

    def _step_optimizer(self) -> None:
        tokens, self._minibatch_tokens = self._minibatch_tokens, 0
        self._tokens_of_mean += tokens
        if not self._minibatch_has_gradient:
            return
        self._minibatch_has_gradient = False
        gradients = self.accumulator.take(tokens)
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(gradient) for gradient in gradients]))
        self._gradient_norms.append(norm.item())
        scale = min(1.0, self._settings.gradient_clip / max(norm.item(), 1e-12))
        self._rate = self._learning_rate()
        self.optimizer.step([gradient * scale for gradient in gradients], self._rate)
        self.updates += 1

    def _learning_rate(self) -> float:
        """Of the next update: linear in the first `warmup_updates`, then constant."""
        return self._settings.learning_rate * min(1.0, (self.updates + 1) / max(1, self._settings.warmup_updates))

    def _metrics(self) -> dict[str, float]:
        groups = [self._statistics[index] for index in sorted(self._statistics)]
        rewards = [reward for group in groups for reward in group.rewards]

        def total(name: str) -> float:
            return math.fsum(group.sums[name] for group in groups)

        def per_token(name: str) -> float:
            return total(name) / max(1, tokens)

        tokens = total("tokens")
        return {
            "loss": total("loss") / max(1, self._tokens_of_mean),
            "gradient_norm": math.fsum(self._gradient_norms) / max(1, len(self._gradient_norms)),
            "ratio_mean": per_token("ratio") if tokens else 1.0,
            "ratio_max": max((group.ratio_max for group in groups), default=0.0) if tokens else 1.0,
            "clip_fraction": per_token("clipped"),
            "truncated_fraction": per_token("truncated"),
            "staleness_mean": per_token("age"),
            "entropy": per_token("entropy"),
            "tokens": tokens,
            "tokens_left_out": float(self._tokens_left_out),
            "mismatch_mean": self._agreement.mean,
            "groups": float(len(groups)),
            "groups_with_signal": float(sum(group.sums["tokens"] > 0 for group in groups)),
            "groups_unusable": float(len(self._unusable)),
            "reward_mean": math.fsum(reward / max(1, len(rewards)) for reward in rewards),
            "learning_rate": self._rate if self._gradient_norms else 0.0,
            "updates": float(len(self._gradient_norms)),
        }

    def _state(self) -> dict[str, Tensor]:
        """All that learning goes on from, as it stands in the checkpoint."""
        kinds = {
            "master": self._parameters,
            "exp_avg": self.optimizer.exp_avg,
            "exp_avg_sq": self.optimizer.exp_avg_sq,
        }
        return {
            f"{kind}.{name}": self._parked.content(tensor.detach())
            for kind, tensors in kinds.items()
            for name, tensor in zip(self._names, tensors, strict=True)
        }

    def _check_between_steps(self, action: str) -> None:
        if self._seen:
            raise ValueError(f"{action}: a step is under way ({len(self._seen)} of {self._groups} groups are here)")


class _GroupStatistics:
    """Sums over a group's tokens that give a gradient."""

    def __init__(self, rewards: list[float]) -> None:
        self.rewards = rewards
        self.ratio_max = 0.0
        self.sums = defaultdict[str, float](float)
