"""What a run's trainer minimises, by its keys: the loss of a batch's tokens, corrected, masked and weighted.

The loss of a token is that of the policy, times its importance weight, plus the KL to a reference, less the entropy.
A token that is masked gives no gradient. It counts in the mean all the same, as a group without signal does, so that
what is left does not weigh more for it.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from elastic.config import DISTILLATION, LossConfig
from elastic.worker.trainer.batches import Batch
from elastic.worker.trainer.corrections import WeightBounds, importance_weights, rejected
from elastic.worker.trainer.distribution import TokenDistribution
from elastic.worker.trainer.losses import LOSSES, Clip, LossTokens, TokenLosses, clamped, k3, own_loss


class OtherLogprobs(NamedTuple):
    """Log-probabilities of a batch's tokens by other weights than the present ones, [N] each, without a gradient."""

    first: Tensor | None = None
    """The log-probabilities by the weights at the step's beginning; None where those are the present ones, or
    unused."""
    reference: Tensor | None = None
    """The log-probabilities by the reference, where there is one."""


class BatchLoss(NamedTuple):
    """The loss of a batch's N tokens, of which M may give a gradient; all but `loss` is detached."""

    loss: Tensor | None
    """Scalar, a sum, to be divided by the `share`s of the mini-batch's groups; None where M is 0."""
    tokens: TokenLosses
    """The losses of the M tokens, of shape [M]."""
    entropy: Tensor
    """[M]"""
    ages: Tensor
    """[M]"""
    kl: Tensor
    """[M], to the reference; zeros without one."""
    log_ratio: Tensor
    """[N], of the trainer's probability to the engine's, within the clamp."""
    masked: Tensor
    """[N], bool: gives no gradient, whatever its ratio is."""
    clipped: Tensor
    """[N], bool, as of `tokens`."""


class Objective:
    """A loss with all that is around it. Pure: the same tokens come to the same."""

    def __init__(self, settings: LossConfig) -> None:
        """Loads code of one's own. Raises `ValueError` where that cannot be used."""
        self._settings = settings
        self._loss = LOSSES.get(settings.loss) or own_loss(settings.loss, settings)
        threshold = settings.rollout_is_threshold
        self._importance = None if settings.rollout_is is None else (settings.rollout_is, WeightBounds.of(threshold))
        cap = float(threshold) if settings.rollout_is is None else math.inf
        self._clip = Clip(settings.clip_ratio_low, settings.clip_ratio_high, settings.clip_ratio_c, cap)

    def share(self, tokens: int, sequences: int) -> float:
        """What so many sampled tokens, in so many sequences, count in the mean of their mini-batch."""
        if self._settings.loss_agg_mode == "token-mean":
            return float(tokens)
        return sequences * (self._settings.loss_scale_factor or 1.0)

    def of(
        self,
        batch: Batch,
        now: TokenDistribution,
        version: int,
        allowed: Tensor | None,
        beside: OtherLogprobs | None = None,
    ) -> BatchLoss:
        """The loss of a batch of whole sequences, by a trainer at `version`.

        `allowed`, [N], says which tokens may be trained on (None: all).
        """
        settings, beside = self._settings, beside or OtherLogprobs()
        first = now.logprobs.detach() if beside.first is None else beside.first
        log_ratio = clamped(first - batch.logprobs)
        kept = self._kept(batch, log_ratio, allowed)
        proximal = batch.logprobs if settings.bypass_mode else first
        logprobs, sequences = now.logprobs[kept], batch.sequences[kept]
        advantages = batch.advantages[kept]
        if settings.loss == DISTILLATION:
            assert beside.reference is not None, "a distillation has a reference"
            advantages = clamped(beside.reference - proximal)[kept]
        ages = (version - batch.versions)[kept]
        found = self._loss(LossTokens(logprobs, proximal[kept], advantages, ages, sequences), self._clip)
        losses, kl, outside = found.loss, torch.zeros_like(advantages), torch.zeros_like(found.clipped)
        if self._importance is not None:
            weights = importance_weights(log_ratio[kept], sequences, *self._importance)
            losses, outside = weights * losses, weights == 0
        if settings.kl_coefficient > 0:
            assert beside.reference is not None, "who looks at the KL has a reference"
            to_reference = k3(beside.reference[kept] - logprobs)
            losses, kl = losses + settings.kl_coefficient * to_reference, to_reference.detach()
        if settings.entropy_coefficient > 0:
            losses = losses - settings.entropy_coefficient * now.entropy[kept]
        masked, clipped = ~kept, torch.zeros_like(kept)
        masked[kept], clipped[kept] = outside, found.clipped
        loss = (self._weights(batch)[kept] * losses).sum() if len(losses) else None
        return BatchLoss(loss, found, now.entropy[kept].detach(), ages, kl, log_ratio, masked, clipped)

    def _kept(self, batch: Batch, log_ratio: Tensor, allowed: Tensor | None) -> Tensor:
        """[N], bool: which tokens may give a gradient. Statistics over sequences are of these."""
        settings = self._settings
        kept = torch.ones_like(batch.truncated) if allowed is None else allowed.clone()
        if settings.mask_truncated:
            kept &= ~batch.truncated
        if settings.rollout_rs is not None:
            assert settings.rollout_rs_threshold is not None, "they belong together"
            of, sequences = log_ratio[kept], batch.sequences[kept]
            kept[kept.clone()] = ~rejected(of, sequences, settings.rollout_rs, settings.rollout_rs_threshold)
        return kept

    def _weights(self, batch: Batch) -> Tensor:
        """[N]: how each token counts in its sequence."""
        if self._settings.loss_agg_mode != "seq-mean-token-mean":
            return torch.ones_like(batch.advantages)
        lengths = torch.bincount(batch.sequences)
        return (1.0 / lengths)[batch.sequences]
