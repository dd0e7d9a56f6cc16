"""Gumbel-max sampling whose noise is a pure function of (noise seed, position, token id).

Where a token is generated, beside what and after how many interruptions does not enter. Source: docs/design.md, "A
turn"; the counter-based generator is SplitMix64's finaliser (Steele et al., OOPSLA 2014) over a Weyl sequence.
"""

import sys
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from elastic.core.types import SamplingParameters

_UINT64 = 1 << 64
_GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


class Truncation(NamedTuple):
    """Truncation of each row's distribution: the `top_k` likeliest tokens [S] int64, and of those as few as have
    `top_p` of the probability [S] float32.
    """

    top_k: Tensor
    top_p: Tensor

    @classmethod
    def of(cls, wanted: Sequence[SamplingParameters], device: torch.device) -> "Truncation | None":
        """None where no row is truncated."""
        if all(s.top_k == 0 and s.top_p == 1 for s in wanted):
            return None
        return cls(
            torch.tensor([s.top_k or sys.maxsize for s in wanted], device=device),
            torch.tensor([s.top_p for s in wanted], dtype=torch.float32, device=device),
        )

    def masked(self, logits: Tensor) -> Tensor:
        ordered, tokens = torch.sort(logits, dim=-1, descending=True, stable=True)
        ranks = torch.arange(logits.shape[1], device=logits.device)
        ordered = ordered.masked_fill(ranks >= self.top_k[:, None], -torch.inf)
        before = ordered.softmax(-1).cumsum(-1).roll(1, -1)
        ordered = ordered.masked_fill((ranks > 0) & (before >= self.top_p[:, None]), -torch.inf)
        return torch.empty_like(logits).scatter_(-1, tokens, ordered)


def sample(
    logits: Tensor, temperatures: Tensor, noise_seeds: Tensor, positions: Tensor, truncation: Truncation | None = None
) -> tuple[Tensor, Tensor]:
    """One token a row, and its log-probability under the distribution it was drawn from.

    logits: [S, V] float32; temperatures: [S] float32; noise_seeds, positions: [S] int64. A temperature of zero
    takes the likeliest token, and its log-probability is that at temperature one. Returns ([S] int64, [S]).
    """
    greedy = (temperatures == 0)[:, None]
    scaled = logits / temperatures[:, None].masked_fill(greedy, 1.0)
    if truncation is not None:
        scaled = torch.where(greedy, scaled, truncation.masked(scaled))
    noise = gumbel_noise(noise_seeds, positions, logits.shape[1])
    token_ids = torch.add(scaled, noise.masked_fill_(greedy, 0.0)).argmax(-1)
    logprobs = scaled.log_softmax(-1).gather(1, token_ids[:, None]).squeeze(1)
    return token_ids, logprobs


def gumbel_noise(noise_seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel noise [S, V] in float64 for `noise_seeds` and `positions`, [S] int64 each."""
    rows = _mix(noise_seeds + (positions + 1) * _signed(_GOLDEN))
    tokens = torch.arange(1, vocab_size + 1, device=rows.device) * _signed(_GOLDEN)
    bits = _mix(rows[:, None] + tokens)
    # 52 bits and a half: strictly between zero and one, and exact in float64.
    uniform = (_shift_right(bits, 12).double() + 0.5) * 2.0**-52
    return uniform.log_().neg_().log_().neg_()


def signed_seed(noise_seed: int) -> int:
    """The 64 bits of a seed as torch's int64 holds them."""
    return _signed(noise_seed % _UINT64)


def _mix(x: Tensor) -> Tensor:
    """SplitMix64's finaliser; int64 arithmetic wraps as uint64's does."""
    x = (x ^ _shift_right(x, 30)) * _signed(_MULTIPLIERS[0])
    x = (x ^ _shift_right(x, 27)) * _signed(_MULTIPLIERS[1])
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return value - _UINT64 if value >= _UINT64 // 2 else value
