"""Attention of rows that several sequences share, each of which sees itself alone.

It takes the place of a model's own attention through transformers' `AttentionInterface`, and needs no mask of a whole
row: sequences are computed one after the other, windows and what softmaxes share by blocks of queries. So memory grows
with the longest sequence, not with the row's square.

Shapes: a row of T positions, H heads of which every so many share keys and values, E elements of a head.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface

SDPA, EAGER = "elastic_by_sequence", "elastic_by_sequence_eager"
"""The names that models know them by."""
BLOCK_QUERIES = 256
"""Queries that are computed at once where scores must be looked at."""


def sdpa(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **given: Any
) -> tuple[Tensor, None]:
    """By torch's kernels. query: [1, H, T, E]; returns [1, T, H, E]. `given` as models give it, and `sequences`."""
    return _by_sequence(module, query, key, value, given, fused=True)


def eager(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **given: Any
) -> tuple[Tensor, None]:
    """From scores that are computed here, as models without kernels of their own need it: capped, or with sinks."""
    return _by_sequence(module, query, key, value, given, fused=False)


def register() -> None:
    """Make both known to transformers. No masks are registered: models that ask for one get none."""
    AttentionInterface.register(SDPA, sdpa)
    AttentionInterface.register(EAGER, eager)


def _by_sequence(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, given: dict[str, Any], *, fused: bool
) -> tuple[Tensor, None]:
    window = given.get("sliding_window")
    if window is None and getattr(module, "layer_type", "") == "sliding_attention":
        window = getattr(module.config, "sliding_window", None)
    softcap, sinks, scale = given.get("softcap"), given.get("s_aux"), given.get("scaling")
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    fused = fused and not softcap and sinks is None
    outputs: list[Tensor] = []
    for span in _spans(given.get("sequences"), query.shape[2]):
        q, k, v = query[:, :, span], key[:, :, span], value[:, :, span]
        if fused and (not window or q.shape[2] <= window):
            outputs.append(_fused(q, k, v, scale))
        else:
            outputs += _blocks(q, k, v, scale, window, softcap, sinks, fused=fused)
    return torch.cat(outputs, 2).transpose(1, 2).contiguous(), None


def _spans(sequences: Sequence[int] | None, length: int) -> Iterator[slice]:
    ends = list(accumulate(sequences or (length,)))
    for begin, end in zip([0, *ends], ends, strict=False):
        yield slice(begin, end)


def _fused(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None = None) -> Tensor:
    grouped = q.shape[1] != k.shape[1]
    causal = mask is None
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=scale, enable_gqa=grouped)


def _blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    *,
    fused: bool,
) -> Iterator[Tensor]:
    """Yield the outputs of one sequence, block after block of its queries."""
    length = q.shape[2]
    for begin in range(0, length, BLOCK_QUERIES):
        end = min(begin + BLOCK_QUERIES, length)
        first = max(0, begin - window + 1) if window else 0
        mine, theirs = q[:, :, begin:end], slice(first, end)
        distance = torch.arange(begin, end, device=q.device)[:, None] - torch.arange(first, end, device=q.device)
        seen = (distance >= 0) & (distance < window) if window else distance >= 0
        if fused:
            yield _fused(mine, k[:, :, theirs], v[:, :, theirs], scale, seen)
        else:
            yield _scored(mine, k[:, :, theirs], v[:, :, theirs], scale, seen, softcap, sinks)


def _scored(
    q: Tensor, k: Tensor, v: Tensor, scale: float, seen: Tensor, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    shared = q.shape[1] // k.shape[1]
    k, v = (tensor.repeat_interleave(shared, 1) if shared > 1 else tensor for tensor in (k, v))
    scores = (q @ k.transpose(2, 3)) * scale
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~seen, torch.finfo(scores.dtype).min)
    if sinks is None:
        return torch.softmax(scores, -1, dtype=torch.float32).to(q.dtype) @ v
    # A sink takes its share of a softmax and gives nothing.
    drains = sinks.to(scores.dtype).reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    shares = torch.softmax(torch.cat((scores, drains), -1), -1, dtype=torch.float32)
    return shares[..., :-1].to(q.dtype) @ v
