"""How long an iteration takes on a modelled device, and each of its parts, so that its time can be shared out."""

from bisect import bisect_left
from collections.abc import Mapping
from typing import NamedTuple

from elastic.config import PacingConfig


class IterationLoad(NamedTuple):
    """Tokens that one iteration computes. A decoding sequence feeds one; recompute is prefill paid for again."""

    decode: int
    prefill: int
    recompute: int


class Costs(NamedTuple):
    """The cost of each part of an iteration, in seconds where they are known; only proportions count where not."""

    decode: float
    prefill: float
    recompute: float


def costs(load: IterationLoad, pacing: PacingConfig) -> Costs:
    return Costs(
        decode=decode_step_s(load.decode, pacing.decode_step_s),
        prefill=load.prefill / pacing.prefill_tokens_per_s,
        recompute=load.recompute / pacing.prefill_tokens_per_s,
    )


def decode_step_s(batch: int, profile: Mapping[int, float]) -> float:
    """Time of one decode iteration: linear between profiled batch sizes and beyond the last two, flat before
    the first."""
    if batch == 0:
        return 0.0
    sizes = sorted(profile)
    if batch <= sizes[0] or len(sizes) == 1:
        return profile[sizes[0]]
    upper = min(bisect_left(sizes, batch), len(sizes) - 1)
    low, high = sizes[upper - 1], sizes[upper]
    slope = (profile[high] - profile[low]) / (high - low)
    return max(0.0, profile[low] + slope * (batch - low))
