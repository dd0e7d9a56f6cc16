"""The shape of a world with a client outside, and its faults, drawn from its seed."""

from collections.abc import Sequence
from random import Random
from typing import ClassVar

from elastic.testing.faults.kinds import Fault, FaultKind, draw_fault
from elastic.testing.faults.shell.plan import WorldPlan

KINDS_OUTSIDE = (
    FaultKind.KILL_WORKER,
    FaultKind.KILL_TRAINER,
    FaultKind.KILL_ORCHESTRATOR,
    FaultKind.KILL_BOTH,
    FaultKind.KILL_FRONT,
    FaultKind.FREEZE,
    FaultKind.HOLD_UP,
    FaultKind.SUSPEND,
    FaultKind.CUT,
    FaultKind.STALL,
    FaultKind.REPEAT,
    FaultKind.WEATHER,
    FaultKind.PREEMPT,
    FaultKind.TAKE,
    FaultKind.HANG,
    FaultKind.SLOW,
    FaultKind.FAIL,
    FaultKind.TERMINATE,
    FaultKind.DECLINE,
    FaultKind.RELAY,
    FaultKind.TAMPER,
    FaultKind.CALENDAR,
    FaultKind.SLOW_DISK,
    FaultKind.POWER,
)
SPAN_S = 30.0


class OutsidePlan(WorldPlan, frozen=True, kw_only=True):
    """How many clients ask for turns at once, and how many directories are `offered`. With `lasting` each has a name of
    its own and is removed once it was answered; else they are written over each other. The journal forgets after
    `forget_mb`, and leases go back after `lull_s` without a request."""

    world: ClassVar[str] = "outside"
    askers: int
    offered: int
    lasting: bool
    forget_mb: float
    lull_s: float


def draw_outside(seed: int, only: Sequence[FaultKind] = ()) -> OutsidePlan:
    """Draw a plan by swarm testing, as `elastic.testing.faults.shell.plan.draw_plan` does."""
    rng = Random(f"{seed}/outside")
    among = 2 / 3 if only else rng.choice((1 / 8, 1 / 3, 2 / 3))
    kinds = [kind for kind in only or KINDS_OUTSIDE if rng.random() < among] or list(only)
    count = rng.choice((4, 8, 16) if only else (0, 4, 8, 16, 32, 48)) if kinds else 0
    span_s = rng.uniform(5, SPAN_S)
    faults = sorted((draw_fault(rng, rng.choice(kinds), span_s) for _ in range(count)), key=lambda fault: fault.at_s)
    calm = Fault(kind=FaultKind.WEATHER, at_s=span_s)
    return OutsidePlan(
        seed=seed,
        steps=10**9,
        groups=0,
        places=rng.randint(1, 4),
        staleness_bound=0,
        checkpoint_every=1,
        drift=rng.choice((0.0, 0.0, 1e-5, 1e-4)),
        durable_against="power",
        pending_mb=rng.choice((64.0, 64.0, 0.01)),
        far=rng.random() < 1 / 2,
        keyframe_every=rng.choice((2, 16)),
        merge_every=rng.choice((1, 2, 3)),
        askers=rng.choice((1, 2, 4)),
        offered=rng.randint(2, 8),
        lasting=rng.random() < 1 / 2,
        forget_mb=rng.choice((16.0, 0.02)),
        lull_s=rng.choice((600.0, 2.0)),
        faults=(*faults, calm),
        end_s=span_s,
        only=tuple(only),
    )
