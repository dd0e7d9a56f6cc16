"""Corrections for engines whose log-probabilities are not the trainer's, as pure functions over packed tokens.

Engines compute in other types and other orders than the trainer, so the policy that sampled is not quite the one that
is trained, with the same weights. `log_ratio` is the difference of their log-probabilities, of the trainer's weights at
the step's beginning and of the engine's as recorded. Names and meanings are verl's.

- `rollout_is`: tokens weigh exp(log_ratio), truncated at a threshold (TIS) or, outside of two bounds, nothing (IcePop).
- `rollout_rs`: tokens or sequences whose divergence is beyond a bound are rejected.

Shapes: N tokens, of whole sequences, one after the other; `sequences` as in `LossTokens`.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from elastic.config import low_high
from elastic.worker.trainer.losses import clamped, over_sequences

_LEVELS = {"seq_sum": torch.sum, "seq_mean": torch.mean, "seq_max": torch.amax}


class WeightBounds(NamedTuple):
    """Bounds of an importance weight; `low` is None where weights are truncated at `high` instead of masked outside."""

    low: float | None
    high: float

    @classmethod
    def of(cls, threshold: float | str) -> "WeightBounds":
        """As `[trainer] rollout_is_threshold` has it."""
        return cls(*low_high(threshold)) if isinstance(threshold, str) else cls(None, threshold)


def importance_weights(log_ratio: Tensor, sequences: Tensor, level: str, bounds: WeightBounds) -> Tensor:
    """What each token's loss is multiplied by, [N]; the level is "token", or "sequence", of the product over each."""
    weights = torch.exp(clamped(over_sequences(torch.sum, log_ratio, sequences) if level == "sequence" else log_ratio))
    if bounds.low is None:
        return weights.clamp(max=bounds.high)
    return torch.where((weights < bounds.low) | (weights > bounds.high), 0.0, weights)


def rejected(log_ratio: Tensor, sequences: Tensor, statistic: str, threshold: float | str) -> Tensor:
    """Which tokens a statistic such as `seq_mean_k3` rejects, [N], bool.

    Of k1 = −log_ratio the exponential is bounded on both sides, by `threshold` = "low_high", or a number and one over
    it; k2 = log_ratio² / 2 and k3 = exp(log_ratio) − log_ratio − 1 are at most that number. What is no number is not
    rejected: its group is found unusable.
    """
    level, _, name = statistic.rpartition("_")
    near = clamped(log_ratio)
    each = {"k1": -near, "k2": near.square() / 2, "k3": torch.exp(near) - near - 1}[name]
    if level != "token":
        each = over_sequences(_LEVELS[level], each, sequences)
    if name != "k1":
        return each > float(threshold)
    low, high = low_high(threshold) if isinstance(threshold, str) else (1 / threshold, threshold)
    bounds = torch.tensor([low, high], dtype=each.dtype, device=each.device).log()
    return (each < bounds[0]) | (each > bounds[1])
