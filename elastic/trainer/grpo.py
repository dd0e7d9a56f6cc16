"""Group relative policy optimisation as pure functions: advantages, the clipped loss, log-probabilities.

Source: DeepSeekMath (arXiv 2402.03300), §4.1, with DAPO's (arXiv 2503.14476) asymmetric clip and token mean,
§3.1 and §3.3, and without a KL term. Shapes: B trajectories, T positions, N trained tokens, V vocabulary.
"""

import statistics
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


def group_advantages(rewards: Sequence[float]) -> list[float]:
    """Rewards relative to their group, in its standard deviations; all zero where the rewards are equal."""
    if min(rewards) == max(rewards):
        return [0.0] * len(rewards)
    mean, deviation = statistics.fmean(rewards), statistics.stdev(rewards)
    return [(reward - mean) / deviation for reward in rewards]


MOST_VERSIONS_APART = 1
"""Up to here recorded log-probabilities are taken as they are; the ratios of older tokens are truncated."""


class PolicyLoss(NamedTuple):
    """`loss` is a sum over tokens, to be divided by the token count of the whole mini-batch."""

    loss: Tensor
    """Scalar."""
    ratio: Tensor
    """[N], detached: current over sampled probability, truncated where it is."""
    clipped: Tensor
    """[N], bool: the clip is what counts, so the token gives no gradient."""


def clipped_policy_loss(
    logprobs: Tensor, sampled_logprobs: Tensor, advantages: Tensor, clip_low: float, clip_high: float, ratio_max: Tensor
) -> PolicyLoss:
    """PPO's pessimistic surrogate over tokens; all of shape [N].

    `sampled_logprobs` were recorded where the tokens were sampled, whatever the engine and weights version. Where a
    ratio exceeds its `ratio_max` it is truncated to it and gives no gradient: the surrogate leaves the ratio of
    tokens with a negative advantage unbounded above, and the older the tokens, the likelier are ratios that would
    drown all others (truncated importance sampling, as V-trace, arXiv 1802.01561).
    """
    ratio = torch.minimum(torch.exp(logprobs - sampled_logprobs), ratio_max)
    free = ratio * advantages
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    clipped = (bounded < free) | (ratio >= ratio_max)
    return PolicyLoss(-torch.minimum(free, bounded).sum(), ratio.detach(), clipped.detach())


def ratio_bounds(ages: Tensor, stale_ratio_max: float) -> Tensor:
    """[N]: no bound for tokens at most one version older than the trainer's, `stale_ratio_max` for all others."""
    bounds = torch.full(ages.shape, torch.inf, device=ages.device)
    return bounds.masked_fill(ages > MOST_VERSIONS_APART, stale_ratio_max)


class TokenDistribution(NamedTuple):
    logprobs: Tensor
    """[N], of the tokens that were sampled."""
    entropy: Tensor
    """[N], detached, in nats."""


def sampled_distribution(logits: Tensor, token_ids: Tensor, trained: Tensor, temperature: float) -> TokenDistribution:
    """What was sampled from, at the N trained tokens in row-major order.

    logits: [B, T, V]; token_ids: [B, T]; trained: [B, T], bool, false at position 0. Logits at t - 1 predict
    token t. Computed in float32.
    """
    log_softmax = torch.log_softmax(logits[:, :-1][trained[:, 1:]].float() / temperature, dim=-1)
    logprobs = log_softmax.gather(-1, token_ids[trained].unsqueeze(-1)).squeeze(-1)
    with torch.no_grad():
        entropy = -(log_softmax.exp() * log_softmax).sum(-1)
    return TokenDistribution(logprobs, entropy)
