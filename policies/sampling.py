"""How many groups to launch for a step."""

from collections.abc import Sequence

import msgspec

from elastic.core.policy import BatchView, StepRecord


class FixedBatch(msgspec.Struct, frozen=True):
    """As many as are wanted, whatever they come to (GRPO)."""

    @property
    def replaces_rejected(self) -> bool:
        return False

    def launches(self, batch: BatchView, history: Sequence[StepRecord]) -> int:
        return max(0, batch.wanted - batch.running - batch.finished - batch.rejected)


class DynamicSampling(msgspec.Struct, frozen=True):
    """Until as many as are wanted are worth training on (DAPO), at most `most` times as many.

    So many run at once as should bring what is missing, by the share of the previous step's groups that were of
    use. Source: ROSE §6, DAPO (arXiv 2503.14476) §3.2.
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
        """Of the last step's finished groups; never so small that one step would ask for more than the bound."""
        if not history:
            return 1.0
        of_use, rejected = history[-1].groups_of_use, history[-1].groups_rejected
        return max(1 / self.most, of_use / (of_use + rejected)) if of_use + rejected else 1.0


def round_up(value: float) -> int:
    """The next integer, where 3.0000000001 is 3."""
    return -int(-(value - 1e-9) // 1)
