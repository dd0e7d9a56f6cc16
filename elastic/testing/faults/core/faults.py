"""What goes wrong in a world, drawn from its seed: single faults at their times, and rates of those that may
strike any message, request, load or turn."""

from enum import StrEnum
from random import Random
from typing import Protocol

import msgspec

from elastic.core.types import NS_PER_S, Nanoseconds, TurnId
from elastic.simulation.loop import EventLoop
from elastic.testing.faults.core.settings import WorldSettings


class SimulatedFaultKind(StrEnum):
    KILL = "kill"
    """The process dies and its connection is reset."""
    VANISH = "vanish"
    """The machine disappears without any event."""
    PREEMPT = "preempt"
    """The provider takes the lease, without notice."""
    NOTICE = "notice"
    """The provider takes the lease, with notice."""
    FREEZE = "freeze"
    """The worker is silent for a while, then says everything that it would have said."""
    HANG = "hang"
    """The engine stands still, the heart goes on."""
    SLOW = "slow"
    DISCONNECT = "disconnect"
    """The connection breaks; the worker dials again."""
    CUT_UP = "cut_up"
    """No message from the worker arrives for a while; all of them arrive late."""
    CUT_DOWN = "cut_down"
    PRESSURE = "pressure"
    """The host's own work takes the device: running turns are given up, and arriving turns are declined. Some hosts
    announce meanwhile that they have no credit, others do not."""
    BLACKOUT = "blackout"
    """Every elastic provider takes everything at once and has nothing for a while."""
    SILENT_PROVIDER = "silent_provider"
    """A provider is cut off for a while: it hears nothing, and its events arrive late."""
    REWARDS_DOWN = "rewards_down"
    """Every function that scores is unavailable for a while."""
    TRAINER_KILLED = "trainer_killed"
    """The trainer's process dies, with or without a report by its provider; at most as often as a run survives."""
    LIE = "lie"
    """The worker lies. One of its lies is refused, and the worker is barred."""


class RunEnding(StrEnum):
    """How a run is to end."""

    COMPLETE = "complete"
    STOP = "stop"
    TRAINER_LOST = "trainer_lost"
    """The trainer's process dies, and every restart of it."""


class SimulatedFault(msgspec.Struct, frozen=True):
    """`target` picks one of the workers that are there, by its share of their number."""

    at_ns: Nanoseconds
    kind: SimulatedFaultKind
    duration_ns: Nanoseconds
    target: float


class Crash(msgspec.Struct, frozen=True):
    """The orchestrator dies at `at_ns`; `down_ns` later a new process goes on from its journal.

    With the journal lost, all that is left is the trainer's checkpoint. The trainer's process may die with it.
    """

    at_ns: Nanoseconds
    down_ns: Nanoseconds
    journal_lost: bool = False
    trainer_dies: bool = False


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


class SimulatedSurroundings(Protocol):
    """The part of a world that every model uses: its clock, its random numbers and its faults."""

    seed: int
    settings: WorldSettings
    loop: EventLoop
    rng: Random
    injector: FaultInjector

    @property
    def fault_rates(self) -> FaultRates: ...

    def rewards_down(self) -> bool:
        """Whether no function can be had just now."""
        ...

    def turn_length(self, turn: TurnId) -> int:
        """How many tokens the turn has, wherever it is generated."""
        ...


class FaultPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The faults of a world. None begins after `end_ns`; then the run must reach its end."""

    end_ns: Nanoseconds
    faults: tuple[SimulatedFault, ...]
    fault_rates: FaultRates
    ending: RunEnding = RunEnding.COMPLETE
    ending_at_ns: Nanoseconds = 0
    crashes: tuple[Crash, ...] = ()

    @property
    def last_crash_ns(self) -> Nanoseconds:
        return max((crash.at_ns for crash in self.crashes), default=0)


NO_FAULTS = FaultPlan(end_ns=0, faults=(), fault_rates=FaultRates())
FAULT_RATE_MAX = 0.15
MOST_FAULTS = 24
LONGEST_FAULT_NS = 8 * NS_PER_S
UNUSUAL_ENDING = 0.15
CRASHING = 0.3
MOST_CRASHES = 3
JOURNAL_LOST = 1 / 3
TRAINER_DIES = 1 / 3
LONGEST_DOWN_NS = 5 * NS_PER_S


def draw_faults(rng: Random, end_ns: Nanoseconds) -> FaultPlan:
    """Each world draws rates of its own: about two thirds of them are 0, some others small."""

    def share() -> float:
        return rng.choice((0.0, 0.0, rng.uniform(0, FAULT_RATE_MAX)))

    kinds = rng.sample(list(SimulatedFaultKind), k=rng.randint(1, len(SimulatedFaultKind)))
    faults = [
        SimulatedFault(rng.randrange(end_ns), rng.choice(kinds), rng.randrange(1, LONGEST_FAULT_NS), rng.random())
        for _ in range(rng.randint(0, MOST_FAULTS))
    ]
    fault_rates = FaultRates(**{name: share() for name in FaultRates.__struct_fields__})
    unusual = rng.random() < UNUSUAL_ENDING
    ending = rng.choice((RunEnding.STOP, RunEnding.TRAINER_LOST)) if unusual else RunEnding.COMPLETE
    return FaultPlan(
        end_ns=end_ns,
        faults=tuple(sorted(faults, key=lambda fault: fault.at_ns)),
        fault_rates=fault_rates,
        ending=ending,
        ending_at_ns=rng.randrange(end_ns),
        crashes=_draw_crashes(rng, end_ns),
    )


def _draw_crashes(rng: Random, end_ns: Nanoseconds) -> tuple[Crash, ...]:
    count = rng.randint(1, MOST_CRASHES) if rng.random() < CRASHING else 0
    times_ns = sorted(rng.randrange(end_ns) for _ in range(count))
    return tuple(
        Crash(
            at_ns,
            rng.randrange(1, LONGEST_DOWN_NS),
            journal_lost=rng.random() < JOURNAL_LOST,
            trainer_dies=rng.random() < TRAINER_DIES,
        )
        for at_ns in times_ns
    )
