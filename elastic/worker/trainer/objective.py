"""What a run's trainer minimises, by its keys: the loss of a batch's tokens, masked and weighted.

A token that is masked gives no gradient. It counts in the mean all the same, as a group without signal does, so that
what is left does not weigh more for it.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from elastic.config import LossConfig
from elastic.worker.trainer.batches import Batch
from elastic.worker.trainer.distribution import TokenDistribution
from elastic.worker.trainer.losses import LOSSES, Clip, LossTokens, TokenLosses


class BatchLoss(NamedTuple):
    """M of a batch's N tokens give a gradient."""

    loss: Tensor
    """Scalar, a sum, to be divided by the `share`s of the mini-batch's groups."""
    kept: Tensor
    """[N], bool: the M tokens."""
    tokens: TokenLosses
    """Of shape [M]."""
    entropy: Tensor
    """[M]"""
    ages: Tensor
    """[M]"""


class Objective:
    """A loss with all that is around it. Pure: the same tokens come to the same."""

    def __init__(self, settings: LossConfig) -> None:
        self._settings = settings
        self._loss = LOSSES[settings.loss]
        self._clip = Clip(
            settings.clip_ratio_low, settings.clip_ratio_high, settings.clip_ratio_c, settings.rollout_is_threshold
        )

    def share(self, tokens: int, sequences: int) -> float:
        """What so many sampled tokens, in so many sequences, count in the mean of their mini-batch."""
        if self._settings.loss_agg_mode == "token-mean":
            return float(tokens)
        return sequences * (self._settings.loss_scale_factor or 1.0)

    def of(self, batch: Batch, now: TokenDistribution, version: int, allowed: Tensor | None) -> BatchLoss | None:
        """The loss of a batch of whole sequences, by a trainer at `version`; None where every token is masked.

        `allowed`, [N], says which tokens may be trained on (None: all).
        """
        settings = self._settings
        kept = torch.ones_like(batch.truncated) if allowed is None else allowed
        if settings.mask_truncated:
            kept = kept & ~batch.truncated
        if not kept.any():
            return None
        weights = self._weights(batch)[kept]
        tokens = LossTokens(
            now.logprobs[kept],
            batch.logprobs[kept],
            batch.advantages[kept],
            (version - batch.versions)[kept],
            batch.sequences[kept],
        )
        found = self._loss(tokens, self._clip)
        return BatchLoss((weights * found.loss).sum(), kept, found, now.entropy[kept].detach(), tokens.ages)

    def _weights(self, batch: Batch) -> Tensor:
        """[N]: how each token counts in its sequence."""
        if self._settings.loss_agg_mode != "seq-mean-token-mean":
            return torch.ones_like(batch.advantages)
        lengths = torch.bincount(batch.sequences)
        return (1.0 / lengths)[batch.sequences]
