"""What goes wrong in a world: drawn from its seed, which faults there are at all first, then when and how."""

from collections.abc import Sequence
from enum import StrEnum
from random import Random

import msgspec

from elastic.chaos.network import Weather


class FaultKind(StrEnum):
    KILL_WORKER = "kill_worker"
    KILL_TRAINER = "kill_trainer"
    KILL_ORCHESTRATOR = "kill_orchestrator"
    KILL_BOTH = "kill_both"
    FREEZE = "freeze"
    HOLD_UP = "hold_up"
    """The orchestrator itself, so that its timers are late."""
    CUT = "cut"
    PREEMPT = "preempt"
    WEATHER = "weather"


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    kind: FaultKind
    at_s: float
    target: float = 0.0
    chance: float = 0.0
    duration_s: float = 1.0

    def weather(self, now: Weather) -> Weather:
        """How connections are from then on."""
        bad = self.chance
        return Weather(split=self.target / 2, slow=bad / 50, slow_s=2.5 * self.target, refused=bad / 4)


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A run's shape, and the faults in order. After `end_s` nothing goes wrong any more."""

    seed: int
    steps: int
    groups: int
    places: int
    staleness_bound: int
    checkpoint_every: int
    faults: tuple[Fault, ...] = ()
    end_s: float = 0.0


SPAN_S = 30.0


def draw_plan(seed: int) -> Plan:
    """Swarm testing: each seed has some kinds of faults and lacks others."""
    rng = Random(f"{seed}/plan")
    kinds = [kind for kind in FaultKind if rng.random() < 1 / 2]
    span_s = rng.uniform(2, SPAN_S)
    count = rng.choice((0, 1, 2, 4, 8, 16, 32)) if kinds else 0
    faults = sorted((_draw(rng, rng.choice(kinds), span_s) for _ in range(count)), key=lambda fault: fault.at_s)
    calm = Fault(kind=FaultKind.WEATHER, at_s=span_s)
    return Plan(
        seed=seed,
        steps=rng.randint(2, 8),
        groups=rng.choice((1, 2, 4, 8)),
        places=rng.randint(0, 4),
        staleness_bound=rng.choice((0, 0, 1, 2)),
        checkpoint_every=rng.randint(1, 3),
        faults=(*faults, calm),
        end_s=span_s,
    )


def _draw(rng: Random, kind: FaultKind, span_s: float) -> Fault:
    return Fault(
        kind=kind,
        at_s=rng.uniform(0, span_s),
        target=rng.random(),
        chance=rng.random(),
        duration_s=rng.choice((0.05, 0.5, 2.0, 8.0)) * rng.uniform(0.5, 1.5),
    )


def fewer(plan: Plan, kept: Sequence[int]) -> Plan:
    """The plan with these of its faults only."""
    return msgspec.structs.replace(plan, faults=tuple(plan.faults[number] for number in kept))
