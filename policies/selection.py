"""Which finished groups are worth training on."""

from collections.abc import Sequence


class NonZeroVariance:
    """A group whose members all got the same reward has no advantage to learn from (GRPO)."""

    def drop_reason(self, rewards: Sequence[float]) -> str | None:
        return "zero_variance" if max(rewards) == min(rewards) else None
