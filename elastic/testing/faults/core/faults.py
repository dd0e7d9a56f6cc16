"""What goes wrong in a world, drawn from its seed: single faults at their times, and rates of those that may
strike any message, request, load or turn."""

from collections.abc import Sequence
from enum import StrEnum
from random import Random

import msgspec

from elastic.core.types import NS_PER_S, Nanoseconds
from elastic.testing.faults.kinds import CRASHES, KINDS_OF_THE_CORE, Fault, FaultKind, draw_fault


class RunEnding(StrEnum):
    """How a run is to end."""

    COMPLETE = "complete"
    STOP = "stop"
    TRAINER_LOST = "trainer_lost"
    """The trainer's process dies, and every restart of it."""


class FaultRates(msgspec.Struct, frozen=True, kw_only=True):
    """The probability that one message, request, load or turn fails so. Late ones are overtaken by what follows."""

    frame_lost: float = 0.0
    frame_repeated: float = 0.0
    frame_late: float = 0.0
    order_lost: float = 0.0
    order_repeated: float = 0.0
    order_late: float = 0.0
    event_repeated: float = 0.0
    request_refused: float = 0.0
    request_ignored: float = 0.0
    release_ignored: float = 0.0
    load_failed: float = 0.0
    load_corrupted: float = 0.0
    boot_failed: float = 0.0
    environment_failed: float = 0.0
    reward_undefined: float = 0.0
    reward_refused: float = 0.0
    reward_late: float = 0.0
    reward_lost: float = 0.0


class FaultInjector:
    """Decides by chance which messages, requests, loads and turns fail; `struck` counts all faults so far."""

    def __init__(self) -> None:
        self.struck = 0

    def injects(self, rng: Random, rate: float) -> bool:
        """Whether a fault of this probability happens now."""
        struck = rng.random() < rate
        self.struck += struck
        return struck


class FaultPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The faults of a world, with those of the core itself. None begins after `end_ns`; then the run must reach its
    end."""

    end_ns: Nanoseconds
    faults: tuple[Fault, ...] = ()
    fault_rates: FaultRates = FaultRates()
    ending: RunEnding = RunEnding.COMPLETE
    ending_at_ns: Nanoseconds = 0

    @property
    def last_crash_ns(self) -> Nanoseconds:
        crashes = (fault.at_s for fault in self.faults if fault.kind in CRASHES)
        return round(max(crashes, default=0) * NS_PER_S)


NO_FAULTS = FaultPlan(end_ns=0)
FAULT_RATE_MAX = 0.15
MOST_FAULTS = 24
UNUSUAL_ENDING = 0.15
CRASHING = 0.3
MOST_CRASHES = 3


def draw_faults(rng: Random, end_ns: Nanoseconds) -> FaultPlan:
    """Each world draws rates of its own: about two thirds of them are 0, some others small."""

    def share() -> float:
        return rng.choice((0.0, 0.0, rng.uniform(0, FAULT_RATE_MAX)))

    def draw(kinds: Sequence[FaultKind], count: int) -> list[Fault]:
        return [draw_fault(rng, rng.choice(kinds), end_ns / NS_PER_S) for _ in range(count)]

    kinds = rng.sample(KINDS_OF_THE_CORE, k=rng.randint(1, len(KINDS_OF_THE_CORE)))
    faults = draw(kinds, rng.randint(0, MOST_FAULTS))
    fault_rates = FaultRates(**{name: share() for name in FaultRates.__struct_fields__})
    unusual = rng.random() < UNUSUAL_ENDING
    ending = rng.choice((RunEnding.STOP, RunEnding.TRAINER_LOST)) if unusual else RunEnding.COMPLETE
    ending_at_ns = rng.randrange(end_ns)
    faults += draw(CRASHES, rng.randint(1, MOST_CRASHES) if rng.random() < CRASHING else 0)
    return FaultPlan(
        end_ns=end_ns,
        faults=tuple(sorted(faults, key=lambda fault: fault.at_s)),
        fault_rates=fault_rates,
        ending=ending,
        ending_at_ns=ending_at_ns,
    )
