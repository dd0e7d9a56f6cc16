"""What turns of a kind of task cost: learned from those that have finished. Source: RollArt, mechanism 1."""

from dataclasses import dataclass

LEARNING_SHARE = 0.1
"""Of what is believed, that the next turn decides."""


@dataclass(slots=True)
class Demand:
    """Means over the turns of one tag: tokens prefilled (beyond cached prefixes) and decoded."""

    turns: int = 0
    prefill_tokens: float = 0.0
    decode_tokens: float = 0.0

    def note(self, prefill_tokens: int, decode_tokens: int) -> None:
        self.turns += 1
        share = max(LEARNING_SHARE, 1 / self.turns)
        self.prefill_tokens += share * (prefill_tokens - self.prefill_tokens)
        self.decode_tokens += share * (decode_tokens - self.decode_tokens)
