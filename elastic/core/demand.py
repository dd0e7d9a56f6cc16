"""What turns of a kind of task cost: learned from those that have finished. Source: RollArt, mechanism 1."""

from collections import deque
from dataclasses import dataclass, field

LENGTHS_KEPT = 64
"""Enough to tell a common length from a rare one, few enough to follow a policy that learns."""
LEARNING_SHARE = 0.1
"""Weight of a new turn in the running estimates."""


@dataclass(slots=True)
class Demand:
    """Means over the turns of one tag: tokens prefilled (beyond cached prefixes) and decoded.

    `lengths` are the tokens decoded in the last ones.
    """

    turns: int = 0
    prefill_tokens: float = 0.0
    decode_tokens: float = 0.0
    lengths: deque[int] = field(default_factory=lambda: deque[int](maxlen=LENGTHS_KEPT))

    def note(self, prefill_tokens: int, decode_tokens: int) -> None:
        self.turns += 1
        self.lengths.append(decode_tokens)
        share = max(LEARNING_SHARE, 1 / self.turns)
        self.prefill_tokens += share * (prefill_tokens - self.prefill_tokens)
        self.decode_tokens += share * (decode_tokens - self.decode_tokens)
