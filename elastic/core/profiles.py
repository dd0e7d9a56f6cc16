"""How fast workers of a kind decode at which batch size, captured from what they report. Source: RLBoost §4.2.1."""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field

from elastic.core.types import NS_PER_S, Nanoseconds

KEPT_SHARE = 0.8
"""Weight of earlier observations at a new one. Weights, contexts and a device's speed change."""


@dataclass(slots=True)
class DecodeSample:
    """Decoding at one batch size: tokens, the time they took, and their contexts' mean length weighted by them."""

    tokens: float = 0.0
    decode_ns: float = 0.0
    context_tokens: float = 0.0

    @property
    def tokens_per_ns(self) -> float:
        return self.tokens / self.decode_ns


@dataclass(slots=True)
class BatchProfile:
    """Samples by batch size, of one kind of worker, and the tokens that it has prefilled in `prefill_ns`."""

    samples: dict[int, DecodeSample] = field(default_factory=dict[int, DecodeSample])
    prefill_tokens: float = 0.0
    prefill_ns: float = 0.0

    @property
    def prefill_tokens_per_s(self) -> float:
        """0 where it is not known."""
        return self.prefill_tokens / self.prefill_ns * NS_PER_S if self.prefill_ns else 0.0

    def turn_tokens_per_s(self, batch: int) -> float:
        """Return the decode speed of each turn in a batch of about this size; 0 if unknown."""
        if not self.samples:
            return 0.0
        near = min(self.samples, key=lambda seen: abs(seen - batch))
        return self.samples[near].tokens_per_ns / near * NS_PER_S

    def note_prefill(self, tokens: int, prefill_ns: Nanoseconds) -> None:
        self.prefill_tokens = self.prefill_tokens * KEPT_SHARE + tokens
        self.prefill_ns = self.prefill_ns * KEPT_SHARE + prefill_ns

    def note(self, batch: int, tokens: int, decode_ns: Nanoseconds, context_tokens: float) -> None:
        sample = self.samples.setdefault(batch, DecodeSample())
        kept = sample.tokens * KEPT_SHARE
        sample.context_tokens = (kept * sample.context_tokens + tokens * context_tokens) / (kept + tokens)
        sample.tokens = kept + tokens
        sample.decode_ns = sample.decode_ns * KEPT_SHARE + decode_ns


def decode_step_s(batch: int, measured_s: Mapping[int, float]) -> float:
    """Time of one decode iteration: linear between measured batch sizes and beyond the last two, flat before the
    first."""
    if batch == 0:
        return 0.0
    sizes = sorted(measured_s)
    if batch <= sizes[0] or len(sizes) == 1:
        return measured_s[sizes[0]]
    upper = min(bisect_left(sizes, batch), len(sizes) - 1)
    low, high = sizes[upper - 1], sizes[upper]
    slope = (measured_s[high] - measured_s[low]) / (high - low)
    return max(0.0, measured_s[low] + slope * (batch - low))
