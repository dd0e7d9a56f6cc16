"""What tokens were sampled from, computed by chunks of tokens: no matrix of all logits is ever there.

Logits of a chunk are computed, used and forgotten; the backward pass computes them again. So memory beside the hidden
states and the head's gradient is that of one chunk, however long the batch is, for one more multiplication by the head.

Shapes: N sampled tokens, D hidden, V vocabulary.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

CHUNK_ELEMENTS = 1 << 22
"""Logits of a chunk: 16 MiB in float32, which caches of processors still help with."""
CHUNK_TOKENS_MIN = 16
"""Fewer tokens would read the head's weights more often than they use them."""


class Head(NamedTuple):
    """The last layer: logits are `scale` · (hidden · weightᵀ + bias), squeezed into ± `softcap` where that is given."""

    weight: Tensor
    """[V, D]"""
    bias: Tensor | None = None
    """[V]"""
    softcap: float = 0.0
    scale: float = 1.0


class TokenDistribution(NamedTuple):
    logprobs: Tensor
    """[N], of the tokens that were sampled."""
    entropy: Tensor
    """[N], in nats."""


def token_distribution(
    hidden: Tensor, head: Head, token_ids: Tensor, temperature: float | Tensor, chunk_elements: int = CHUNK_ELEMENTS
) -> TokenDistribution:
    """The distribution that each token was sampled from, at one temperature or at [N, 1] of them, in float32.

    hidden: [N, D], the state that predicts the token; token_ids: [N].
    """
    chunk = max(CHUNK_TOKENS_MIN, chunk_elements // head.weight.shape[0])
    logprobs, entropy = _Distribution.apply(
        hidden, head.weight, head.bias, token_ids, temperature, head.softcap, head.scale, chunk
    )
    return TokenDistribution(logprobs, entropy)


def logits_distribution(logits: Tensor, token_ids: Tensor, temperature: float | Tensor) -> TokenDistribution:
    """The same from logits [N, V] that are there already, of heads that are no single layer."""
    log_softmax = torch.log_softmax(logits.float() / temperature, dim=-1)
    logprobs = log_softmax.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)
    return TokenDistribution(logprobs, -torch.linalg.vecdot(log_softmax.exp(), log_softmax))


class _Distribution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        token_ids: Tensor,
        temperature: float | Tensor,
        softcap: float,
        scale: float,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        logprobs = torch.empty(len(hidden), device=hidden.device)
        entropy, normalizers = torch.empty_like(logprobs), torch.empty_like(logprobs)
        head = Head(weight, bias, softcap, scale)
        for part in _parts(len(hidden), chunk):
            logits = _logits(hidden[part], head).div_(_at(temperature, part))
            normalizers[part] = torch.logsumexp(logits, -1)
            logits -= normalizers[part, None]
            logprobs[part] = logits.gather(-1, token_ids[part, None]).squeeze(-1)
            entropy[part] = -torch.linalg.vecdot(logits.exp(), logits)
        ctx.save_for_backward(hidden, weight, bias, token_ids, normalizers, entropy)
        ctx.shape = temperature, softcap, scale, chunk
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, token_ids, normalizers, entropy = ctx.saved_tensors
        of_logprobs, of_entropy = gradients
        if of_logprobs is None:
            of_logprobs = torch.zeros_like(normalizers)
        temperature, softcap, scale, chunk = ctx.shape
        of_hidden, of_weight, of_bias = ctx.needs_input_grad[:3]
        hidden_gradient = torch.empty_like(hidden) if of_hidden else None
        # Chunks are summed in float32, whatever the weights are.
        weight_gradient = torch.zeros_like(weight, dtype=torch.float32) if of_weight else None
        bias_gradient = torch.zeros_like(bias, dtype=torch.float32) if of_bias else None
        for part in _parts(len(hidden), chunk):
            plain = _plain_logits(hidden[part], weight, bias, scale)
            heat = _at(temperature, part)
            capped = torch.tanh(plain / softcap).mul_(softcap) if softcap else plain
            # From here on in the place of the logits: minus their probabilities, and then their gradient.
            slope = capped.div(heat) if softcap else capped.div_(heat)
            slope = slope.sub_(normalizers[part, None])
            uncertain = None
            if of_entropy is not None:
                uncertain = (slope + entropy[part, None]).mul_(slope.exp()).mul_(-of_entropy[part, None])
            slope = slope.exp_().neg_()
            slope.scatter_add_(-1, token_ids[part, None], torch.ones_like(normalizers[part, None]))
            slope.mul_(of_logprobs[part, None] * scale / heat)
            if uncertain is not None:
                slope.add_(uncertain.mul_(scale / heat))
            if softcap:
                slope.mul_(capped.div_(softcap).square_().neg_().add_(1.0))
            if bias_gradient is not None:
                bias_gradient += slope.sum(0)
            slope = slope.to(hidden.dtype)
            if hidden_gradient is not None:
                hidden_gradient[part] = slope @ weight
            if weight_gradient is not None:
                if weight.dtype == torch.float32:
                    weight_gradient.addmm_(slope.T, hidden[part])
                else:
                    weight_gradient += slope.T @ hidden[part]
        found = (
            hidden_gradient,
            None if weight_gradient is None else weight_gradient.to(weight.dtype),
            None if bias_gradient is None else bias_gradient.to(bias.dtype),
        )
        return (*found, *(None,) * 5)


def _logits(hidden: Tensor, head: Head) -> Tensor:
    logits = _plain_logits(hidden, head.weight, head.bias, head.scale)
    return torch.tanh(logits / head.softcap).mul_(head.softcap) if head.softcap else logits


def _plain_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """Float32 logits without a cap, which nobody else has."""
    logits = F.linear(hidden, weight, bias).float()
    return logits.mul_(scale) if scale != 1.0 else logits


def _parts(tokens: int, chunk: int) -> Iterator[slice]:
    for begin in range(0, tokens, chunk):
        yield slice(begin, min(begin + chunk, tokens))


def _at(temperature: float | Tensor, part: slice) -> float | Tensor:
    return temperature[part] if isinstance(temperature, Tensor) else temperature
