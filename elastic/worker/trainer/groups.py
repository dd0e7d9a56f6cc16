"""A step's groups, whatever computes their gradients: mini-batches, means, workers that disagree, figures.

A step's groups are split into `updates_per_step` mini-batches by their index, which is their launch order. A group of
a later mini-batch is held until the earlier ones have stepped, since it is trained on their weights.

A mini-batch's gradient is a mean over all its groups, of the policy's tokens or sequences (`objective.py`). Groups
without signal give no gradient and count in that mean, as in verl and TRL: the fewer groups have signal, the smaller
the step. With dynamic sampling others take their place, and they count nowhere (DAPO).

Tokens of workers that do not generate with the weights which they name are left out (`agreement.py`).

No data ends a run. A group from which no usable gradient comes is left out whole, and its cause is kept in `unusable`.
"""

import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import NamedTuple

import torch
from torch import Tensor

from elastic.config import TrainerConfig
from elastic.core.ids import provider_of
from elastic.core.types import LogprobCheck
from elastic.protocol.wire import TrainGroupFrame, TrajectoryData
from elastic.worker.trainer.agreement import StepAgreement
from elastic.worker.trainer.batches import (
    Batch,
    UnusableGroup,
    advantages_of,
    by_member,
    check_group,
    policy_tokens,
    without_overtaken,
)
from elastic.worker.trainer.distribution import TokenDistribution
from elastic.worker.trainer.first_weights import FirstWeights
from elastic.worker.trainer.losses import k3
from elastic.worker.trainer.objective import BatchLoss, Objective, OtherLogprobs
from elastic.worker.trainer.schedules import learning_rate
from elastic.worker.trainer.sources import SourceOf

UNKNOWN = "unknown"
"""The source of tokens of which nobody says who sampled them."""


class SkippedGroup(NamedTuple):
    """A group that is not trained on."""

    tokens: int
    trajectories: Sequence[TrajectoryData]


class SourceFigures:
    """Sums over the tokens of a group that come from one source."""

    def __init__(self) -> None:
        self.sums: dict[str, float] = {"tokens": 0.0, "log_ratio": 0.0, "kl": 0.0, "masked": 0.0, "clipped": 0.0}
        self.log_ratio_max = 0.0


class GroupFigures:
    """Sums over a group's tokens that give a gradient, and by source over all that were looked at for one."""

    def __init__(self, rewards: list[float]) -> None:
        self.rewards = rewards
        self.ratio_max = 0.0
        self.left_out = 0
        """Tokens of workers that disagree."""
        self.sums = defaultdict[str, float](float)
        self.sources = defaultdict[str, SourceFigures](SourceFigures)

    def note(self, found: BatchLoss, origins: Tensor, sources: Sequence[str]) -> None:
        """`origins`, [N], are places in `sources`, or -1."""
        self._note_sources(found, origins, sources)
        if found.loss is None:
            return
        tokens = found.tokens
        self.ratio_max = max(self.ratio_max, tokens.ratio.max().item())
        sums = {
            "tokens": len(tokens.ratio),
            "loss": found.loss.item(),
            "entropy": found.entropy.sum().item(),
            "kl": found.kl.sum().item(),
            "ratio": tokens.ratio.sum().item(),
            "clipped": tokens.clipped.sum().item(),
            "truncated": tokens.truncated.sum().item(),
            "age": found.ages.sum().item(),
        }
        for name, value in sums.items():
            self.sums[name] += value

    def _note_sources(self, found: BatchLoss, origins: Tensor, sources: Sequence[str]) -> None:
        apart = found.log_ratio.abs()
        columns = (torch.ones_like(apart), apart, k3(found.log_ratio), found.masked, found.clipped)
        rows = torch.stack([column.double() for column in columns], 1)
        names = {-1: UNKNOWN, **dict(enumerate(sources))}
        for place in origins.unique().tolist():
            own, source = origins == place, self.sources[names[place]]
            *sums, most = torch.cat((rows[own].sum(0), apart[own].max().double()[None])).tolist()
            source.log_ratio_max = max(source.log_ratio_max, most)
            for name, value in zip(source.sums, sums, strict=True):
                source.sums[name] += value


class GroupTrainer(ABC):
    """Takes a step's orders. A kind says what becomes of a group with signal, and how an update is made.

    `version` counts steps and names the weights; `updates` counts optimiser updates; `metrics` are of the last step,
    also where that was before the checkpoint that was loaded. After any error other than
    `ValueError` the step cannot be finished: load a checkpoint.
    """

    def __init__(
        self,
        settings: TrainerConfig,
        vocabulary: int,
        groups: int,
        temperature: float,
        steps: int | None = None,
        *,
        in_order_of_launch: bool = False,
        source_of: SourceOf = provider_of,
    ) -> None:
        """Tokens are below `vocabulary`; a step has so many `groups`, and the run `steps`, if that is known.

        `in_order_of_launch` holds a group until those before it in its mini-batch are here; `source_of` says under what
        a worker's figures are told.
        """
        if settings.updates_per_step > groups:
            raise ValueError(f"updates_per_step: at most one a group, {groups} (found {settings.updates_per_step})")
        self._settings = settings
        self._vocabulary = vocabulary
        self._groups = groups
        self._temperature = temperature
        self._in_order_of_launch = in_order_of_launch
        self._last_update = None if steps is None else steps * settings.updates_per_step
        self._objective = Objective(settings)
        self._source_of = source_of
        self._first_weights = FirstWeights()
        self._rate = 0.0
        self.version = 0
        self.updates = 0
        self.metrics: dict[str, float] = {}
        self._unusable: dict[str, str] = {}
        self._checks: list[LogprobCheck] = []
        self._begin_step()

    @abstractmethod
    def _learn(self, group: TrainGroupFrame, advantages: Sequence[float], figures: GroupFigures) -> None:
        """Take a group with signal, each of its trajectories with its advantage; note figures as they are computed.

        Where it raises `UnusableGroup`, nothing of the group has been added to the gradient.
        """

    @abstractmethod
    def _compare(self, trajectories: Sequence[TrajectoryData]) -> None:
        """Compare log-probabilities of a group that gives no gradient, as far as that tells something new."""

    @abstractmethod
    def _settle(self) -> None:
        """All groups of the mini-batch are here: compute what was put off."""

    @abstractmethod
    def _has_gradient(self) -> bool:
        """Whether any token of the mini-batch has given one."""

    @abstractmethod
    def _keep_first_weights(self) -> None:
        """Have `self._first_weights` keep the weights."""

    @abstractmethod
    def _make_update(self, share: float) -> float:
        """Update the weights by the mini-batch's gradient over its `share` (`Objective.share`), at `self._rate`, and
        forget the gradient; returns its norm before it is clipped."""

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
        self._note(index, SkippedGroup(tokens, trajectories))

    def proof(self) -> list[float]:
        """Nothing is to be proven: whole models are verified as tensors."""
        return []

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

    def _begin_step(self) -> None:
        self._seen: set[int] = set()
        self._held: dict[int, TrainGroupFrame | SkippedGroup] = {}
        self._agreement = StepAgreement(self.version, self._settings.mismatch_max)
        self._minibatch = 0
        self._outstanding = self._members(0)
        self._shares: dict[int, float] = {}
        """By group, what counts in the mean of the mini-batch that is under way."""
        self._share_of_step = 0.0
        self._figures: dict[int, GroupFigures] = {}
        self._gradient_norms: list[float] = []
        self._first_weights.forget()

    def _members(self, minibatch: int) -> set[int]:
        updates = self._settings.updates_per_step
        return {index for index in range(self._groups) if index * updates // self._groups == minibatch}

    def _note(self, index: int, group: TrainGroupFrame | SkippedGroup) -> None:
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
            for index in self._ready():
                group = self._held.pop(index)
                if isinstance(group, SkippedGroup):
                    self._shares[index] = self._objective.share(group.tokens, len(group.trajectories))
                    self._compare(group.trajectories)
                else:
                    self._train(group)
                self._outstanding.remove(index)
            if self._outstanding:
                return
            self._settle()
            self._agreement.updates()
            self._step_optimizer()
            self._minibatch += 1
            self._outstanding = self._members(self._minibatch)

    def _ready(self) -> list[int]:
        """The groups of the mini-batch whose turn it is."""
        if not self._in_order_of_launch:
            return sorted(self._outstanding & self._held.keys())
        return list(takewhile(self._held.__contains__, sorted(self._outstanding)))

    def _train(self, group: TrainGroupFrame) -> None:
        try:
            check_group(group, self._vocabulary)
            self._accumulate(group)
        except UnusableGroup as error:
            self._leave_out(group, str(error))

    def _leave_out(self, group: TrainGroupFrame, why: str) -> None:
        """No gradient comes from this group, and it counts nowhere."""
        self._unusable[group.group] = why
        self._figures.pop(group.index, None)
        self._shares.pop(group.index, None)

    def _accumulate(self, group: TrainGroupFrame) -> None:
        """Take the group's gradient. Raises `UnusableGroup`."""
        rewards = list(by_member(group.trajectories).values())
        group, advantages = without_overtaken(group, advantages_of(group.trajectories, self._settings))
        figures = self._figures[group.index] = GroupFigures(rewards)
        self._shares[group.index] = self._objective.share(policy_tokens(group), len(group.trajectories))
        if any(advantages) or self._settings.learns_from_equal_rewards:
            self._learn(group, advantages, figures)
        else:
            self._compare(group.trajectories)

    @property
    def _asks_first_weights(self) -> bool:
        """Whether log-probabilities of the weights at the step's beginning are wanted, which are others by now."""
        return not self._settings.bypass_mode and bool(self._gradient_norms)

    def _loss(
        self,
        batch: Batch,
        now: TokenDistribution,
        beside: OtherLogprobs,
        allowed: Tensor | None,
        figures: GroupFigures,
        workers: Sequence[str],
    ) -> Tensor | None:
        """The loss of a batch of one group, a sum over the tokens that are `allowed` (None: all), whose figures are
        noted; None where none of them gives a gradient. All is on one device; `workers` are those of its origins."""
        if allowed is not None:
            figures.left_out += int((~allowed).sum())
        found = self._objective.of(batch, now, self.version, allowed, beside)
        figures.note(found, batch.origins, [self._source_of(worker) for worker in workers])
        return found.loss

    def _step_optimizer(self) -> None:
        share = math.fsum(self._shares.values())
        self._shares.clear()
        self._share_of_step += share
        if not self._has_gradient():
            return
        if (
            not (self._settings.bypass_mode or self._gradient_norms)
            and self._minibatch + 1 < self._settings.updates_per_step
        ):
            self._keep_first_weights()
        self._rate = learning_rate(self._settings, self.updates, self._last_update)
        self._gradient_norms.append(self._make_update(share))
        self.updates += 1

    def _metrics(self) -> dict[str, float]:
        groups = [self._figures[index] for index in sorted(self._figures)]
        rewards = [reward for group in groups for reward in group.rewards]

        def total(name: str) -> float:
            return math.fsum(group.sums[name] for group in groups)

        def per_token(name: str) -> float:
            return total(name) / max(1, tokens)

        tokens = total("tokens")
        return {
            "loss": total("loss") / (self._share_of_step or 1.0),
            "gradient_norm": math.fsum(self._gradient_norms) / max(1, len(self._gradient_norms)),
            "ratio_mean": per_token("ratio") if tokens else 1.0,
            "ratio_max": max((group.ratio_max for group in groups), default=0.0) if tokens else 1.0,
            "clip_fraction": per_token("clipped"),
            "truncated_fraction": per_token("truncated"),
            "staleness_mean": per_token("age"),
            "entropy": per_token("entropy"),
            "tokens": tokens,
            "tokens_left_out": float(sum(group.left_out for group in groups)),
            "mismatch_mean": self._agreement.mean,
            "groups": float(len(groups)),
            "groups_with_signal": float(sum(group.sums["tokens"] > 0 for group in groups)),
            "groups_unusable": float(len(self._unusable)),
            "reward_mean": math.fsum(reward / max(1, len(rewards)) for reward in rewards),
            "learning_rate": self._rate if self._gradient_norms else 0.0,
            "updates": float(len(self._gradient_norms)),
            **({"kl": per_token("kl")} if self._settings.has_reference else {}),
            **_mismatch(groups),
        }

    def _check_between_steps(self, action: str) -> None:
        if self._seen:
            raise ValueError(f"{action}: a step is under way ({len(self._seen)} of {self._groups} groups are here)")


def _mismatch(groups: Sequence[GroupFigures]) -> dict[str, float]:
    """How far engines' log-probabilities were from the trainer's, and what came of it, in all and by source."""
    names = sorted({name for group in groups for name in group.sources})
    own = {name: [group.sources[name] for group in groups if name in group.sources] for name in names}
    metrics = _mismatch_of([one for found in own.values() for one in found], "")
    for name, found in own.items():
        metrics |= _mismatch_of(found, f"/{name}")
    return metrics


def _mismatch_of(figures: Sequence[SourceFigures], suffix: str) -> dict[str, float]:
    def total(name: str) -> float:
        return math.fsum(one.sums[name] for one in figures)

    tokens = total("tokens")
    shown = {
        "tokens_seen": tokens,
        "log_ratio_mean": total("log_ratio") / max(1.0, tokens),
        "log_ratio_max": max((one.log_ratio_max for one in figures), default=0.0),
        "mismatch_kl": total("kl") / max(1.0, tokens),
        "masked_fraction": total("masked") / max(1.0, tokens),
    }
    if suffix:
        shown["clip_fraction"] = total("clipped") / max(1.0, tokens)
    return {f"{name}{suffix}": value for name, value in shown.items()}
