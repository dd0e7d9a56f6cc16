"""How long the trainer's device generates at the start of a step. Source: RLBoost §4.1, Algorithm 1."""

import math

import msgspec

from elastic.core.policy import SeedingPlan, StepRecord
from elastic.core.types import NS_PER_S, Nanoseconds


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
    `rate` (η). The window of a step in which as many workers helped all the time is remembered under their number, and
    taken up again whenever so many are there. The first step may have as many workers as the trainer's device is
    divided into while it seeds (`reserved_engines`, N_resv); the later ones as many as would make rollouts as short as
    training.

    Three differences from the paper: the window has an upper end; it starts from what was used of it (rollouts that
    end within it say nothing about the rest); and a step without any remote worker teaches nothing.
    """

    initial_ns: Nanoseconds
    rate: float = 4.0
    longest_ns: Nanoseconds = 300 * NS_PER_S
    remembers: bool = True
    bounds_workers: bool = True
    reserved_engines: int = 1

    def first(self) -> SeedingPlan:
        bound = self.reserved_engines if self.bounds_workers else None
        return SeedingPlan(window_ns=self.initial_ns, worker_bound=bound)

    def following(self, plan: SeedingPlan, record: StepRecord) -> SeedingPlan:
        if record.workers_mean == 0:
            return self._recalled(plan, record)
        window_ns = self._adjusted_ns(plan.window_ns, record)
        steady = record.workers_mean == record.workers_end
        tuned = SeedingPlan(
            window_ns=window_ns,
            worker_bound=worker_bound(window_ns, self.reserved_engines, record) if self.bounds_workers else None,
            memory={**plan.memory, record.workers_end: window_ns} if steady and self.remembers else plan.memory,
        )
        return self._recalled(tuned, record)

    def _adjusted_ns(self, window_ns: Nanoseconds, record: StepRecord) -> Nanoseconds:
        used_ns = min(window_ns, record.seeding_ns)
        change_ns = (record.train_wait_ns - record.remote_wait_ns) / self.rate
        return min(self.longest_ns, max(0, round(used_ns + change_ns)))

    def _recalled(self, plan: SeedingPlan, record: StepRecord) -> SeedingPlan:
        return msgspec.structs.replace(plan, window_ns=plan.memory.get(record.workers_end, plan.window_ns))


def worker_bound(window_ns: Nanoseconds, reserved_engines: int, record: StepRecord) -> int | None:
    """N_prem: as many workers as would roll out no longer than the trainer trains, without any seeding."""
    if record.train_ns <= 0:
        return None
    rollout_ns = record.rollout_ns * record.workers_mean + window_ns * reserved_engines
    return max(1, math.ceil(rollout_ns / record.train_ns))
