"""The sizes and speeds of a small simulated world, and the limits that its core works with."""

from collections.abc import Mapping
from random import Random
from typing import Any

import msgspec

from elastic.core.types import (
    NS_PER_S,
    EvaluationSet,
    Limits,
    Nanoseconds,
    Plan,
    PlannedEvaluation,
    StalenessDrop,
    WeightMode,
    WorkerRole,
)

MS = NS_PER_S // 1000

SMALL_LIMITS = Limits(
    heartbeat_timeout_ns=3 * NS_PER_S,
    stall_timeout_ns=4 * NS_PER_S,
    turn_stall_timeout_ns=5 * NS_PER_S,
    handover_timeout_ns=1 * NS_PER_S,
    drain_timeout_ns=3 * NS_PER_S,
    acquire_timeout_ns=4 * NS_PER_S,
    boot_timeout_ns=5 * NS_PER_S,
    load_timeout_ns=4 * NS_PER_S,
    resume_timeout_ns=2 * NS_PER_S,
    release_timeout_ns=2 * NS_PER_S,
    queue_timeout_ns=60 * NS_PER_S,
    train_timeout_ns=40 * NS_PER_S,
    catch_up_timeout_ns=90 * NS_PER_S,
    reseed_delay_ns=250 * MS,
    retry_base_ns=500 * MS,
    retry_max_ns=4 * NS_PER_S,
    score_timeout_ns=2 * NS_PER_S,
    score_retry_ns=200 * MS,
    scorings_max=2,
    max_engine_errors=3,
    max_pending=2,
)


class SimulatedProviderSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Leases live for `life_ns` where it is given, with `overlap` replacements to be had besides `leases`.

    A notice comes `notice_ns` before a lease is taken. Requests of its hosts' own come in bursts, `serving_gap_ns`
    apart on average; None if its hosts serve nobody. Where a request is a turn on a shared pool it is mostly granted
    within `grant_within_ns`; a trainer `by_permit` computes in its turns only.
    """

    name: str
    role: WorkerRole = WorkerRole.ELASTIC
    leases: int = 2
    overlap: int = 0
    workers_per_lease: int = 1
    gpus_per_worker: int = 1
    usd_per_gpu_hour: float = 2.0
    boot_ns: Nanoseconds = 800 * MS
    life_ns: Nanoseconds | None = None
    notice_ns: Nanoseconds = 1500 * MS
    serving_gap_ns: Nanoseconds | None = None
    grant_within_ns: Nanoseconds = 0
    by_permit: bool = False


class WorldSettings(msgspec.Struct, frozen=True, kw_only=True):
    plan: Plan
    limits: Limits = SMALL_LIMITS
    providers: tuple[SimulatedProviderSettings, ...] = ()
    seeding_ns: Nanoseconds = 1 * NS_PER_S
    adaptive_seeding: bool = False
    marginal_provisioning: bool = False
    balancing: bool = False
    max_batch: int = 100
    hardware: bool = False
    weight_mode: WeightMode = WeightMode.FINISH
    dynamic_most: float = 0.0
    """How many times the groups that are wanted dynamic sampling may launch; 0 does without it."""
    heartbeat_ns: Nanoseconds = 500 * MS
    iteration_ns: Nanoseconds = 250 * MS
    tokens_per_iteration: int = 2
    capacity_turns: int = 3
    load_ns: Nanoseconds = 300 * MS
    train_ns: Nanoseconds = 400 * MS
    think_ns: Nanoseconds = 500 * MS
    rewards_on_functions: bool = False
    reward_ns: Nanoseconds = 300 * MS
    max_turns: int = 3
    max_new_tokens: int = 24
    checkpoint_every_steps: int = 1
    holding: bool = False
    """Whether leases are held only while there are rollouts to do."""
    foreseen: bool = True
    """Whether they are asked for again shortly before that."""
    permit_within_ns: Nanoseconds = 0
    """How long the trainer may wait for its device, where it shares that with other jobs; 0 where it does not."""
    commit_ns: Nanoseconds = 500 * MS
    """How often the journal is made durable."""
    fault_span_ns: Nanoseconds = 15 * NS_PER_S
    liveness_ns: Nanoseconds = 1500 * NS_PER_S
    """How long after the last fault the run may take to its end."""
    policies: Mapping[str, Any] = {}
    """In place of ours, by the fields of `elastic.core.policy.Policies`."""


SPOT_WORKERS = 4
"""Most spot workers of a small world, which has eight workers in all."""
MOST_TURNS = 64
"""Most turns in a small world's plan, without groups that are dropped and launched again."""


def draw_settings(rng: Random) -> WorldSettings:
    """A small world: a few workers, a few short trajectories, every size at random."""
    per_lease = rng.choice((1, 1, 2))
    leases = rng.randint(1, 3) if per_lease == 1 else 1
    spot = SimulatedProviderSettings(
        name="spot",
        leases=leases,
        overlap=rng.randint(0, min(2, SPOT_WORKERS // per_lease - leases)),
        workers_per_lease=per_lease,
        life_ns=rng.choice((None, rng.randint(3, 20) * NS_PER_S)),
        notice_ns=rng.choice((0, 500 * MS, 1500 * MS, 4 * NS_PER_S, 12 * NS_PER_S)),
    )
    serving = SimulatedProviderSettings(
        name="serving",
        leases=rng.randint(1, 2),
        boot_ns=200 * MS,
        usd_per_gpu_hour=1.25,
        gpus_per_worker=2,
        serving_gap_ns=rng.choice((None, 2 * NS_PER_S, 6 * NS_PER_S)),
    )
    reserved = SimulatedProviderSettings(name="reserved", role=WorkerRole.DEDICATED, leases=1)
    providers = tuple(provider for provider in (spot, serving, reserved) if rng.random() < 0.7)
    plan = Plan(
        steps=rng.randint(1, 4),
        groups=(groups := rng.randint(1, 4)),
        group_size=rng.randint(2, 3),
        staleness_bound=rng.choice((0, 0, 1, 1, 2, 3)),
        minibatches=rng.randint(1, groups),
    )
    return _draw_weather(rng, plan, providers, max(1, min(4, MOST_TURNS // (plan.steps * groups * plan.group_size))))


def draw_sharing(rng: Random, settings: WorldSettings) -> WorldSettings:
    """Draw which leases are held for rollouts only or shared with other jobs; none in most worlds."""
    providers = [
        msgspec.structs.replace(
            provider,
            grant_within_ns=rng.randint(2, 12) * NS_PER_S,
            life_ns=rng.randint(3, 12) * NS_PER_S,
            notice_ns=rng.choice((500 * MS, 1500 * MS)),
        )
        if provider.role is WorkerRole.ELASTIC and rng.random() < 1 / 4
        else provider
        for provider in settings.providers
    ]
    return msgspec.structs.replace(
        settings,
        providers=tuple(providers),
        holding=rng.random() < 1 / 3,
        foreseen=rng.random() < 1 / 2,
        permit_within_ns=rng.choice((0, 0, rng.randint(2, 10) * NS_PER_S)),
    )


def draw_groups(rng: Random, settings: WorldSettings) -> WorldSettings:
    """Draw how often members that infrastructure has failed are replaced, and what is dropped of groups that are
    overtaken."""
    refill_most, drop = rng.choice((0, 1, 2)), rng.choice(list(StalenessDrop))
    plan = msgspec.structs.replace(settings.plan, refill_most=refill_most, staleness_drop=drop)
    return msgspec.structs.replace(settings, plan=plan)


def draw_evaluation(rng: Random, settings: WorldSettings) -> WorldSettings:
    """Draw when the policy is evaluated, on what, and whether beside steps. It may be out of time."""
    samples = rng.randint(1, 3)
    evaluation = PlannedEvaluation(
        sets=(EvaluationSet(environment="held", tasks=rng.randint(1, 3)), EvaluationSet(environment="other", tasks=1)),
        samples=samples,
        timeout_ns=rng.choice((3, 30, 200)) * NS_PER_S,
        every=rng.randint(0, 2),
        at_start=rng.random() < 2 / 3,
        at_end=rng.random() < 2 / 3,
        passes=(1, samples),
        overlap=rng.random() < 1 / 2,
        keep_best=rng.choice(("", f"avg@{samples}")),
    )
    if rng.random() < 1 / 4:  # More than are under way at once.
        held, other = evaluation.sets
        held = msgspec.structs.replace(held, tasks=6 * held.tasks)
        evaluation = msgspec.structs.replace(evaluation, sets=(held, other))
    return msgspec.structs.replace(settings, plan=msgspec.structs.replace(settings.plan, evaluation=evaluation))


def draw_large_settings(rng: Random) -> WorldSettings:
    """Tens of workers and hundreds of turns, with whatever else a small world may have."""
    life_ns = rng.choice((None, rng.randint(5, 20) * NS_PER_S))
    spot = SimulatedProviderSettings(
        name="spot", leases=rng.randint(6, 12), workers_per_lease=2, life_ns=life_ns, overlap=2
    )
    serving = SimulatedProviderSettings(
        name="serving", leases=rng.randint(4, 8), boot_ns=200 * MS, usd_per_gpu_hour=1.25, serving_gap_ns=4 * NS_PER_S
    )
    plan = Plan(
        steps=2,
        groups=(groups := rng.randint(6, 10)),
        group_size=rng.randint(4, 8),
        staleness_bound=rng.choice((0, 1)),
        minibatches=rng.randint(1, groups),
    )
    return _draw_weather(rng, plan, (spot, serving), most_turns=4)


def _draw_weather(
    rng: Random, plan: Plan, providers: tuple[SimulatedProviderSettings, ...], most_turns: int
) -> WorldSettings:
    return WorldSettings(
        plan=plan,
        providers=providers,
        seeding_ns=rng.choice((0, 500 * MS, 2 * NS_PER_S)),
        train_ns=rng.choice((400 * MS, 400 * MS, 3 * NS_PER_S)),
        adaptive_seeding=rng.random() < 2 / 3,
        marginal_provisioning=rng.random() < 2 / 3,
        balancing=rng.random() < 2 / 3,
        max_batch=rng.choice((1, 2, 100)),
        hardware=rng.random() < 1 / 3,
        capacity_turns=rng.randint(1, 4),
        max_turns=rng.randint(1, most_turns),
        max_new_tokens=rng.choice((6, 16, 40)),
        tokens_per_iteration=rng.randint(1, 3),
        fault_span_ns=rng.randint(4, 20) * NS_PER_S,
        rewards_on_functions=rng.random() < 0.5,
        weight_mode=rng.choice(list(WeightMode)),
        dynamic_most=rng.choice((0.0, 0.0, 2.0, 5.0)),
        checkpoint_every_steps=rng.randint(1, 3),
    )
