"""How two models share the KV memory of a serving device. Source: ROSE §4.1, "Preemptive memory sharing policy".

Memory is counted in pages of one pool. At the start of a step rollouts get a budget: what serving did not use
recently, less a headroom H. When serving grows beyond its recent use and a high watermark within H, the
device is under *pressure*: the budget is cut by a factor at once, more than is needed, and stays frozen until
the next step, so that a burst costs one reclamation and not many. Pure: a budget is a value, and each
observation gives the next.
"""

from collections.abc import Sequence
from math import ceil

import msgspec

from elastic.core.device_sharing import Budget
from elastic.core.types import NS_PER_S, Nanoseconds


class PreemptiveMemory(msgspec.Struct, frozen=True, kw_only=True):
    """ROSE's policy: a headroom that is serving's at any time, one emergency cut, then a freeze."""

    headroom_share: float = 0.2
    """H as a share of all pages."""
    watermark_share: float = 0.5
    """The share of H whose consumption by serving is pressure."""
    cut_factor: float = 2.0
    recent_quantile: float = 0.9
    """Which of the recent samples of serving's use counts as what it needs; 1 is their peak."""
    lease_ns: Nanoseconds = 10 * NS_PER_S

    def __post_init__(self) -> None:
        if not 0 <= self.headroom_share < 1:
            raise ValueError(f"headroom_share: must be in [0, 1) (found {self.headroom_share})")
        if not 0 <= self.watermark_share <= 1:
            raise ValueError(f"watermark_share: must be in [0, 1] (found {self.watermark_share})")
        if self.cut_factor <= 1:
            raise ValueError(f"cut_factor: must be above 1 (found {self.cut_factor})")
        if not 0 <= self.recent_quantile <= 1:
            raise ValueError(f"recent_quantile: must be in [0, 1] (found {self.recent_quantile})")
        if self.lease_ns < 0:
            raise ValueError(f"lease_ns: must not be negative (found {self.lease_ns})")

    def begin_step(self, total_pages: int, recent_pages: Sequence[int]) -> Budget:
        expected = sorted(recent_pages)[ceil(self.recent_quantile * (len(recent_pages) - 1))] if recent_pages else 0
        headroom = self._headroom(total_pages)
        return Budget(
            pages=max(0, total_pages - headroom - expected),
            serving_pages=total_pages,
            reserve_pages=headroom,
            expected_pages=expected,
        )

    def observe(self, budget: Budget, total_pages: int, serving_pages: int, needed_pages: int) -> Budget:
        watermark = max(0, total_pages - budget.pages - self._headroom(total_pages) * (1 - self.watermark_share))
        if not budget.pages or not (needed_pages or serving_pages > watermark):
            return budget
        cut = int(budget.pages / self.cut_factor)
        # One cut is meant to be enough; where serving needs still more, it gets that too.
        enough = max(0, total_pages - serving_pages - needed_pages)
        return msgspec.structs.replace(budget, pages=min(cut, enough), pressure=True, cuts=budget.cuts + 1)

    def _headroom(self, total_pages: int) -> int:
        return ceil(total_pages * self.headroom_share)


class FineGrainedMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Takes back exactly what serving lacks, each time it does, and lets rollouts grow again at once."""

    lease_ns: Nanoseconds = 10 * NS_PER_S

    def begin_step(self, total_pages: int, recent_pages: Sequence[int]) -> Budget:
        return Budget(pages=total_pages, serving_pages=total_pages)

    def observe(self, budget: Budget, total_pages: int, serving_pages: int, needed_pages: int) -> Budget:
        pages = max(0, total_pages - serving_pages - needed_pages)
        return msgspec.structs.replace(
            budget, pages=pages, pressure=needed_pages > 0, cuts=budget.cuts + (needed_pages > 0)
        )


class StaticPartition(msgspec.Struct, frozen=True, kw_only=True):
    """Each model has its share and nothing ever moves."""

    rollout_share: float = 0.5
    lease_ns: Nanoseconds = 10 * NS_PER_S

    def begin_step(self, total_pages: int, recent_pages: Sequence[int]) -> Budget:
        pages = int(total_pages * self.rollout_share)
        return Budget(pages=pages, serving_pages=total_pages - pages)

    def observe(self, budget: Budget, total_pages: int, serving_pages: int, needed_pages: int) -> Budget:
        return budget
