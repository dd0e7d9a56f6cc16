"""Policy losses as pure functions over packed tokens, the same for every kind of trainer.

`LOSSES` has them by their names in `[trainer] loss`. Each takes whole sequences, one after the other, and returns a
loss for each token; how these are averaged is `loss_agg_mode`, and no matter of a loss. Keys have verl's names.

- `grpo`: PPO's clip, asymmetric: DAPO (arXiv 2503.14476), §3.1; `clip_ratio_low`, `clip_ratio_high`. PPO's dual clip
  for negative advantages: Ye et al. (arXiv 1912.09729), §4.2; `clip_ratio_c`. Truncated importance sampling for old
  tokens: V-trace (arXiv 1802.01561), §4.1; `rollout_is_threshold`.
- `gspo`: the same of one ratio a sequence, the geometric mean of its tokens': GSPO (arXiv 2507.18071), §4.
- `cispo`: every token teaches, with a clipped weight: MiniMax-M1 (arXiv 2506.13585), §3.1.
- `distillation`: `grpo` of another advantage, the log-ratio of a reference to the policy, token by token: the gradient
  of the reverse KL on what the policy samples: GKD (arXiv 2306.13649), §3.

No token's weight in the gradient exceeds the largest of 1 + `clip_ratio_high`, `clip_ratio_c` and the cap of old
tokens, whatever its log-probabilities are.

Shapes: N tokens that the policy sampled, S sequences.
"""

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from elastic.config import LossConfig
from elastic.system.named_code import CodeUnusable, load
from elastic.system.plain_values import told

LOG_RATIO_MAX = 20.0
"""Log-ratios are clamped to ± this, as in verl: their exponential stays finite in float32."""

MOST_VERSIONS_APART = 1
"""Tokens more versions older than the trainer's have a truncated weight."""

KL_MAX = 10.0
"""A token's estimate of a KL is at most this, as in verl, and gives no gradient there."""


class LossTokens(NamedTuple):
    """What a loss is computed from. All tensors are [N], of whole sequences, one after the other."""

    logprobs: Tensor
    """As the policy has them now, with their gradient."""
    proximal: Tensor
    """Those that ratios are to: recorded where the tokens were sampled, or of the weights at the step's beginning."""
    advantages: Tensor
    ages: Tensor
    """How many versions older than the trainer's the weights were that sampled the token."""
    sequences: Tensor
    """A number for each sequence, the same for its tokens, and rising."""


class Clip(NamedTuple):
    """The trust region; `elastic.config.LossConfig` describes its keys."""

    low: float
    high: float
    dual: float
    cap: float
    """Largest weight of tokens more than `MOST_VERSIONS_APART` versions old."""


class TokenLosses(NamedTuple):
    """All tensors are [N]; all but `loss` are detached."""

    loss: Tensor
    ratio: Tensor
    """Current over proximal probability, of the token or its sequence, within the clamp."""
    clipped: Tensor
    """Bool: a clip is what counts, so the token gives no gradient, or with `cispo` the clip's."""
    truncated: Tensor
    """Bool: the weight is the cap of old tokens instead of the ratio."""


Loss: TypeAlias = Callable[[LossTokens, Clip], TokenLosses]


def grpo(tokens: LossTokens, clip: Clip) -> TokenLosses:
    """PPO's pessimistic surrogate.

    PPO's clip takes the gradient from tokens that have moved far enough in the direction of their advantage. It leaves
    the ratio of tokens with a negative advantage unbounded above, and one such token could drown all others. So the
    weight of old tokens, whose ratios are spread the widest, is capped: they go on teaching, with that weight. And
    where the objective of a token with a negative advantage would fall below `clip.dual` times that advantage, dual
    clip takes its gradient as well: it is almost sure to be an outlier.
    """
    return _surrogate(tokens, torch.exp(_log_ratio(tokens)), clip)


def gspo(tokens: LossTokens, clip: Clip) -> TokenLosses:
    """`grpo` of one ratio a sequence, the exponential of its tokens' mean log-ratio, which the clips look at.

    Ratios are that much nearer to 1, and so should the clips be.
    """
    return _surrogate(tokens, torch.exp(sequence_means(_log_ratio(tokens), tokens.sequences)), clip)


def cispo(tokens: LossTokens, clip: Clip) -> TokenLosses:
    """REINFORCE with importance weights that are clipped on both sides. No clip takes a token's gradient."""
    ratio = torch.exp(_log_ratio(tokens))
    truncated = _is_old(tokens) & (ratio > clip.cap)
    within = ratio.clamp(1 - clip.low, 1 + clip.high)
    weight = torch.where(truncated, within.clamp(max=clip.cap), within)
    return TokenLosses(-weight * tokens.advantages * tokens.logprobs, ratio, within != ratio, truncated)


LOSSES: Mapping[str, Loss] = {"grpo": grpo, "gspo": gspo, "cispo": cispo, "distillation": grpo}


def own_loss(name: str, settings: LossConfig) -> Loss:
    """Load and try code of one's own: a function of `LossTokens` and a `LossConfig` that returns a loss for each token.

    Raises `ValueError` for what cannot be loaded or called, and for what it returns.
    """
    try:
        function = load(name)
    except CodeUnusable as error:
        raise ValueError(f"trainer.loss: {error}") from error

    def loss(tokens: LossTokens, clip: Clip) -> TokenLosses:
        none = torch.zeros_like(tokens.ages, dtype=torch.bool)
        if not len(tokens.logprobs):  # All are masked. A largest one of none, or a mean, is an error, or no number.
            return TokenLosses(tokens.logprobs, tokens.logprobs.detach(), none, none)
        try:
            # Of copies: what it does to them in place is no matter of weights, masks and figures.
            found = function(LossTokens(*(tensor.clone() for tensor in tokens)), settings)
        except (torch.OutOfMemoryError, MemoryError):
            raise
        except (Exception, SystemExit) as error:
            raise ValueError(f"trainer.loss: {name} raised {told(error)}") from error
        shape = tuple(tokens.logprobs.shape)
        if not isinstance(found, Tensor) or tuple(found.shape) != shape:
            what = f"a tensor of shape {tuple(found.shape)}" if isinstance(found, Tensor) else repr(found)
            raise ValueError(f"trainer.loss: {name} returned {what}; allowed: a loss for each token, of shape {shape}")
        if tokens.logprobs.requires_grad and not found.requires_grad:
            raise ValueError(f"trainer.loss: {name} returned a loss without a gradient of `logprobs`")
        return TokenLosses(found, torch.exp(_log_ratio(tokens)), none, none)

    logprobs = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    plain = torch.tensor([-1.5, -1.5, -1.5])
    tokens = LossTokens(logprobs, plain, torch.ones(3), torch.zeros(3, dtype=torch.int64), torch.tensor([0, 0, 1]))
    tried = loss(tokens, Clip(0.2, 0.2, 3.0, math.inf)).loss
    if not bool(tried.isfinite().all()):
        raise ValueError(f"trainer.loss: {name} returned {tried.tolist()}; allowed: finite numbers")
    return loss


def _surrogate(tokens: LossTokens, ratio: Tensor, clip: Clip) -> TokenLosses:
    logprobs, advantages = tokens.logprobs, tokens.advantages
    # Worth `ratio`, with the gradient `ratio` · ∇log π also where the clamp holds.
    surrogate = ratio * torch.exp(logprobs - logprobs.detach())
    free = surrogate * advantages
    bounded = ratio.clamp(1 - clip.low, 1 + clip.high) * advantages
    outside = bounded < free
    truncated = _is_old(tokens) & (ratio > clip.cap)
    weight = torch.where(truncated, clip.cap / ratio, 1.0)
    objective = weight * torch.where(outside, bounded, free)
    floor = clip.dual * advantages
    outlier = (advantages < 0) & (objective < floor)
    clipped = (outside | outlier).detach()
    return TokenLosses(-torch.where(outlier, floor, objective), ratio, clipped, truncated & ~clipped)


def _is_old(tokens: LossTokens) -> Tensor:
    return tokens.ages > MOST_VERSIONS_APART


def _log_ratio(tokens: LossTokens) -> Tensor:
    return clamped(tokens.logprobs.detach() - tokens.proximal)


def clamped(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX)


def k3(log_ratio: Tensor) -> Tensor:
    """Schulman's low-variance estimate of the KL from p to q, of samples of p and `log_ratio` = log q − log p. It is 0
    or more for each token, [N]."""
    near = clamped(log_ratio)
    return (torch.exp(near) - near - 1).clamp(max=KL_MAX)


def over_sequences(of: Callable[[Tensor], Tensor], values: Tensor, sequences: Tensor) -> Tensor:
    """To each token what `of` makes of its sequence's values, [N]: one after the other, so the same bits every time."""
    _, place, counts = torch.unique_consecutive(sequences, return_inverse=True, return_counts=True)
    found = [of(one) for one in values.split(counts.tolist())]
    return torch.stack(found)[place] if found else values


def sequence_means(values: Tensor, sequences: Tensor) -> Tensor:
    return over_sequences(torch.mean, values, sequences)
