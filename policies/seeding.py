"""How long the trainer's device generates at the start of a step. Source: RLBoost §4.1, Algorithm 1."""

import math
from collections.abc import Mapping

import msgspec

from elastic.core.policy import SeedingPlan, StepRecord
from elastic.core.types import NS_PER_S, Nanoseconds

KEYS_PER_DOUBLING = 4
"""Capacities within a fifth of each other share a memory: a co-serving worker's credit is never quite still."""


class FixedWindow(msgspec.Struct, frozen=True):
    """The same window in every step, and no opinion on how many workers are worth having."""

    duration_ns: Nanoseconds

    def first(self) -> SeedingPlan:
        return SeedingPlan(window_ns=self.duration_ns)

    def following(self, plan: SeedingPlan, record: StepRecord) -> SeedingPlan:
        return plan


class AdaptiveWindow(msgspec.Struct, frozen=True):
    """The window that leaves trainer and remote workers idle for equally long.

    After each step it grows by the trainer's idle time and shrinks by that of the remote workers, divided by
    `rate` (η). The window found under an unchanged capacity is remembered, and taken up again whenever that
    capacity returns. Where the paper counts instances the memory counts credits, since providers mix.

    Two differences from the paper: the window starts from what was used of it (rollouts that end within it say
    nothing about the rest), and a step without any remote worker teaches nothing.
    """

    initial_ns: Nanoseconds
    rate: float = 4.0
    longest_ns: Nanoseconds = 60 * NS_PER_S
    remembers: bool = True
    bounds_workers: bool = True

    def first(self) -> SeedingPlan:
        return SeedingPlan(window_ns=self.initial_ns)

    def following(self, plan: SeedingPlan, record: StepRecord) -> SeedingPlan:
        if record.credits_mean == 0:
            return self._recalled(plan, record)
        window_ns = self._adjusted_ns(plan.window_ns, record)
        tuned = SeedingPlan(
            window_ns=window_ns,
            worker_bound=worker_bound(window_ns, record) if self.bounds_workers else None,
            memory=_memorised(plan.memory, window_ns, record) if self.remembers else {},
        )
        return self._recalled(tuned, record)

    def _adjusted_ns(self, window_ns: Nanoseconds, record: StepRecord) -> Nanoseconds:
        used_ns = min(window_ns, record.seeding_ns)
        change_ns = (record.train_wait_ns - record.remote_wait_ns) / self.rate
        return min(self.longest_ns, max(0, round(used_ns + change_ns)))

    def _recalled(self, plan: SeedingPlan, record: StepRecord) -> SeedingPlan:
        window_ns = plan.memory.get(capacity_key(record.credits_end), plan.window_ns)
        return msgspec.structs.replace(plan, window_ns=window_ns)


def worker_bound(window_ns: Nanoseconds, record: StepRecord) -> int | None:
    """N_prem: as many workers as would roll out no longer than the trainer trains, without any seeding."""
    if record.train_ns <= 0:
        return None
    rollout_ns = record.rollout_ns * record.workers_mean + window_ns
    return max(1, math.ceil(rollout_ns / record.train_ns))


def capacity_key(credits: float) -> int:
    """What capacity a window is remembered under; 0 for next to none."""
    return 0 if credits < 1 else 1 + round(KEYS_PER_DOUBLING * math.log2(credits))


def _memorised(memory: Mapping[int, Nanoseconds], window_ns: Nanoseconds, record: StepRecord) -> dict[int, Nanoseconds]:
    """With the window under the step's capacity, unless that changed during the step."""
    key = capacity_key(record.credits_end)
    steady = key == capacity_key(record.credits_mean)
    return {**memory, key: window_ns} if steady else dict(memory)
