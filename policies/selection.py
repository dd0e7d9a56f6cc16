"""Which finished groups are worth training on."""

from collections.abc import Sequence

import msgspec


class NonZeroVariance(msgspec.Struct, frozen=True):
    """A group whose members all got the same reward has no advantage to learn from (GRPO).

    Rewards are the same where they differ by no more than `epsilon`, the ε of the advantages.
    """

    epsilon: float = 1e-6

    def drop_reason(self, rewards: Sequence[float]) -> str | None:
        return "zero_variance" if max(rewards) - min(rewards) <= self.epsilon else None


class EveryGroup(msgspec.Struct, frozen=True):
    """Every group is worth training on: rewards are not all that it is trained by."""

    def drop_reason(self, rewards: Sequence[float]) -> str | None:
        return None
