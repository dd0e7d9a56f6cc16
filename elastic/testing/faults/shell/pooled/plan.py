"""The shape of a world of jobs in a pool, and its faults, drawn from its seed."""

from collections.abc import Sequence
from random import Random
from typing import ClassVar

import msgspec

from elastic.testing.faults.kinds import KINDS_OF_POOLS, Fault, FaultKind, draw_fault
from elastic.testing.faults.shell.plan import WorldPlan

OF_RUNS = (
    FaultKind.KILL_ORCHESTRATOR,
    FaultKind.KILL_BOTH,
    FaultKind.HOLD_UP,
    FaultKind.FREEZE,
    FaultKind.CUT,
    FaultKind.STALL,
    FaultKind.REPEAT,
    FaultKind.WEATHER,
    FaultKind.HANG,
    FaultKind.SLOW,
    FaultKind.TERMINATE,
    FaultKind.RELAY,
    FaultKind.SLOW_DISK,
    FaultKind.ENVIRONMENT,
)
"""Kinds of one job."""
KINDS_POOLED = (*KINDS_OF_POOLS, *OF_RUNS)
SPAN_S = 40.0


class JobShape(msgspec.Struct, frozen=True, kw_only=True):
    """One job: its run, when it is submitted, how many rollout nodes it asks for, and its planned phases in seconds.

    Phases last as long as the models take, so that they may exceed the plan and are recalled then.
    """

    run: WorldPlan
    at_s: float
    nodes: int
    rollout_s: float
    train_s: float


class PooledPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A pool, its jobs and the faults in order. No fault begins after `end_s`."""

    world: ClassVar[str] = "pool"
    seed: int
    rollout_nodes: int
    jobs: tuple[JobShape, ...]
    notice_s: float
    silence_s: float
    park_s: float
    faults: tuple[Fault, ...] = ()
    end_s: float = 0.0
    only: tuple[FaultKind, ...] = ()


def draw_pooled(seed: int, only: Sequence[FaultKind] = ()) -> PooledPlan:
    """Draw a plan by swarm testing, as `elastic.testing.faults.shell.plan.draw_plan` does."""
    rng = Random(f"{seed}/pooled")
    among = 2 / 3 if only else rng.choice((1 / 8, 1 / 3, 2 / 3))
    kinds = [kind for kind in only or KINDS_POOLED if rng.random() < among] or list(only)
    count = rng.choice((16, 32, 48) if only else (0, 4, 8, 16, 32, 48)) if kinds else 0
    span_s = rng.uniform(5, SPAN_S)
    jobs = rng.choice((1, 2, 2))
    faults = sorted(
        (draw_fault(rng, rng.choice(kinds), span_s, jobs) for _ in range(count)), key=lambda fault: fault.at_s
    )
    calm = [Fault(kind=FaultKind.WEATHER, at_s=span_s, job=job) for job in range(jobs)]
    nodes = rng.randint(1, 2)
    return PooledPlan(
        seed=seed,
        rollout_nodes=nodes,
        jobs=tuple(_draw_job(rng, seed, number, nodes) for number in range(jobs)),
        notice_s=rng.choice((1.0, 3.0, 10.0)),
        silence_s=rng.choice((4.0, 10.0)),
        park_s=rng.choice((3.0, 10.0)),
        faults=(*faults, *calm),
        end_s=span_s,
        only=tuple(only),
    )


def _draw_job(rng: Random, seed: int, number: int, nodes: int) -> JobShape:
    run = WorldPlan(
        seed=2 * seed + number,
        steps=rng.randint(2, 6),
        groups=rng.choice((1, 2, 4)),
        places=0,
        staleness_bound=rng.choice((0, 0, 1)),
        checkpoint_every=rng.randint(1, 2),
        token_s=rng.choice((0.04, 0.15)),
        max_turns=rng.choice((2, 4)),
        scored=rng.random() < 1 / 4,
        keyframe_every=rng.choice((2, 16)),
        merge_every=rng.choice((1, 3)),
    )
    return JobShape(
        run=run,
        at_s=rng.uniform(0, 10),
        nodes=rng.randint(1, nodes),
        rollout_s=rng.uniform(0.3, 6),
        train_s=rng.uniform(0.3, 3),
    )
