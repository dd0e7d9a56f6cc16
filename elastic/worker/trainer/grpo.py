"""Group relative policy optimisation as pure functions: advantages, the clipped loss.

What the pieces are, where they come from, and their keys in `[trainer]`, which are verl's:

- advantages relative to the group, with ε beside the standard deviation: DeepSeekMath (arXiv 2402.03300), §4.1;
  `advantage_epsilon`;
- PPO's clip, asymmetric, and the mean over tokens: DAPO (arXiv 2503.14476), §3.1 and §3.3; `clip_ratio_low`,
  `clip_ratio_high`;
- PPO's dual clip for negative advantages: Ye et al. (arXiv 1912.09729), §4.2; `clip_ratio_c`;
- truncated importance sampling for old tokens: V-trace (arXiv 1802.01561), §4.1; `rollout_is_threshold`.

There is no KL term. No token's weight in the gradient exceeds the largest of 1 + `clip_ratio_high`, `clip_ratio_c` and
`rollout_is_threshold`, whatever its log-probabilities are.

Shape: N trained tokens.
"""

import statistics
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

LOG_RATIO_MAX = 20.0
"""Log-ratios are clamped to ± this, as in verl: their exponential stays finite in float32."""

MOST_VERSIONS_APART = 1
"""Tokens more versions older than the trainer's have a truncated weight."""


def group_advantages(rewards: Sequence[float], epsilon: float) -> list[float]:
    """Rewards relative to their group, over its standard deviation plus `epsilon`.

    All zero where rewards differ by no more than `epsilon`: that is rounding, and no signal.
    Raises `OverflowError` where rewards lie too far apart for floats.
    """
    if max(rewards) - min(rewards) <= epsilon:
        return [0.0] * len(rewards)
    mean, deviation = statistics.fmean(rewards), statistics.stdev(rewards)
    return [(reward - mean) / (deviation + epsilon) for reward in rewards]


class ClipSettings(NamedTuple):
    """The trust region; `elastic.config.TrainerConfig` describes its keys."""

    clip_ratio_low: float
    clip_ratio_high: float
    clip_ratio_c: float
    rollout_is_threshold: float


class PolicyLoss(NamedTuple):
    """`loss` is a sum over tokens, to be divided by the token count of the whole mini-batch."""

    loss: Tensor
    """Scalar."""
    ratio: Tensor
    """[N], detached: current over sampled probability, within the clamp."""
    clipped: Tensor
    """[N], bool: a clip is what counts, so the token gives no gradient."""
    truncated: Tensor
    """[N], bool: the weight is the threshold instead of the ratio."""


def clipped_policy_loss(
    logprobs: Tensor, sampled_logprobs: Tensor, advantages: Tensor, ages: Tensor, settings: ClipSettings
) -> PolicyLoss:
    """PPO's pessimistic surrogate over tokens; all of shape [N].

    `sampled_logprobs` were recorded where the tokens were sampled, whatever the engine and weights version; `ages` says
    how many versions older than the trainer's those weights were.

    PPO's clip takes the gradient from tokens that have moved far enough in the direction of their advantage. It leaves
    the ratio of tokens with a negative advantage unbounded above, and one such token could drown all others. So the
    weight of old tokens, whose ratios are spread the widest, is capped at `rollout_is_threshold`: they go on teaching,
    with that weight. And where the objective of a token with a negative advantage would fall below `clip_ratio_c`
    times that advantage, dual clip takes its gradient as well: it is almost sure to be an outlier.
    """
    ratio = torch.exp((logprobs.detach() - sampled_logprobs).clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX))
    # Worth `ratio`, with the gradient `ratio` · ∇log π also where the clamp holds.
    surrogate = ratio * torch.exp(logprobs - logprobs.detach())
    free = surrogate * advantages
    bounded = ratio.clamp(1 - settings.clip_ratio_low, 1 + settings.clip_ratio_high) * advantages
    outside = bounded < free
    truncated = (ages > MOST_VERSIONS_APART) & (ratio > settings.rollout_is_threshold)
    weight = torch.where(truncated, settings.rollout_is_threshold / ratio, 1.0)
    objective = weight * torch.where(outside, bounded, free)
    floor = settings.clip_ratio_c * advantages
    outlier = (advantages < 0) & (objective < floor)
    clipped = (outside | outlier).detach()
    return PolicyLoss(-torch.where(outlier, floor, objective).sum(), ratio, clipped, truncated & ~clipped)
