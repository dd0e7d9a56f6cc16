"""How many groups to launch for a step."""

from collections.abc import Sequence

import msgspec

from elastic.core.policy import BatchView, StepRecord


class FixedBatch(msgspec.Struct, frozen=True):
    """Launches as many groups as are wanted, whatever their results (GRPO)."""

    @property
    def replaces_rejected(self) -> bool:
        return False

    def launches(self, batch: BatchView, history: Sequence[StepRecord]) -> int:
        return max(0, batch.wanted - batch.running - batch.finished - batch.rejected)


class DynamicSampling(msgspec.Struct, frozen=True):
    """Launches groups until enough are worth training on (DAPO), at most `most` times as many as are wanted.

    The number in flight should yield the missing groups, by the useful share of the previous step. Source: ROSE §6,
    DAPO (arXiv 2503.14476) §3.2.
    """

    most: float

    @property
    def replaces_rejected(self) -> bool:
        return True

    def launches(self, batch: BatchView, history: Sequence[StepRecord]) -> int:
        missing = max(0, batch.wanted - batch.finished)
        concurrent = round_up(missing / self._useful_share(history))
        bound = round_up(self.most * batch.wanted) - batch.launched
        return max(0, min(concurrent - batch.running, bound))

    def _useful_share(self, history: Sequence[StepRecord]) -> float:
        """Return the useful share of the last step's groups, bounded so that one step stays within the limit."""
        if not history:
            return 1.0
        of_use, rejected = history[-1].groups_of_use, history[-1].groups_rejected
        return max(1 / self.most, of_use / (of_use + rejected)) if of_use + rejected else 1.0


def round_up(value: float) -> int:
    """The next integer, where 3.0000000001 is 3."""
    return -int(-(value - 1e-9) // 1)
