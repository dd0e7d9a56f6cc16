"""The shape of a run's world, and its faults, drawn from its seed: first the kinds that exist at all, then each."""

from collections.abc import Sequence
from random import Random
from typing import ClassVar

import msgspec

from elastic.testing.faults.kinds import KINDS_OF_RUNS, LASTING, OF_HOSTS, OF_RANKS, Fault, FaultKind, draw_fault

LASTING_SHARE = 1 / 4
"""Share of worlds of all kinds of faults with such a Byzantine worker."""

BUSY_S, LONG_BUSY_S = 2.0, 8.0
LONG_BUSY_SHARE = 1 / 8
"""Share of worlds whose load changes so seldom that idle workers hear nothing but heartbeats for longer than they bear
silence."""


class WorldPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of a run, and its faults in order. No fault begins after `end_s`.

    `drift` is the most by which a machine's clock runs faster than the world's. With `lying_disk` the disk loses synced
    data with its power. With `scored` functions compute the rewards, and each is tried again `reward_retries` times.
    `machines` machines join with tickets. With `far` workers may be on other machines. With `life_s` the cloud's leases
    expire after that. With `agents` these drive its trajectories, which end after `deadline_s`, or `idle_s` without a
    call. With `proves` workers prove which version they serve. The trainer has so many `ranks`; with more than one its
    device does not generate. The environment is in `hosts` env workers, or with none on the run's own loop. On so
    many tasks as `evaluates` says each version is evaluated. The orchestrator's core is full and idle in turn, for
    `busy_s` each: workers hear of each change.
    """

    world: ClassVar[str] = "run"
    seed: int
    steps: int
    groups: int
    places: int
    staleness_bound: int
    checkpoint_every: int
    max_batch: int = 8
    max_pending: int = 4
    max_tokens: int = 24
    token_s: float = 0.04
    drift: float = 0.0
    durable_against: str = "process"
    lying_disk: bool = False
    pending_mb: float = 64.0
    scored: bool = False
    reward_retries: int = 8
    refill_most: int = 2
    staleness_drop: str = "group"
    machines: int = 0
    far: bool = False
    max_turns: int = 4
    keyframe_every: int = 16
    merge_every: int = 4
    life_s: float | None = None
    agents: bool = False
    deadline_s: float = 60.0
    idle_s: float = 8.0
    proves: bool = False
    ranks: int = 1
    hosts: int = 0
    evaluates: int = 0
    busy_s: float = BUSY_S
    faults: tuple[Fault, ...] = ()
    end_s: float = 0.0
    only: tuple[FaultKind, ...] = ()
    """The kinds from which the faults were drawn; empty for all kinds."""


SELDOM = (FaultKind.STILLBORN, FaultKind.SUSPEND, FaultKind.KILL_FRONT, *OF_RANKS, *OF_HOSTS, *LASTING)
OFTEN = tuple(kind for kind in KINDS_OF_RUNS if kind not in SELDOM)
STILLBORN_SHARE = 1 / 8
"""Share of worlds with workers that cannot start, besides their other faults."""
SUSPENDED_SHARE = 1 / 8
"""Share of worlds of all kinds of faults whose machine is suspended, too. Leases expire in those."""
AGENTS_SHARE = 1 / 12
"""Share of worlds of all kinds of faults whose trajectories agents drive. Fronts are killed in those, too."""
RANKS_SHARE = 1 / 8
"""Share of worlds of all kinds of faults whose trainer has several ranks. These die and hang, too.

The trainer's device does not generate there, so somebody else has to: no lease expires, and nobody lies on and on."""
HOSTS_SHARE = 1 / 8
"""Share of worlds of all kinds of faults whose environment is in env workers. These die and hang, too."""
LONG_IDLE_SHARE = 1 / 8
"""Share of those in which a trajectory is idle for longer than a turn goes on without a client."""
PROVING_SHARE = 1 / 3
LIFE_S = 4.0, 20.0
SPAN_S = 30.0
LONG_SHARE = 1 / 50
"""Share of worlds whose turns take hours."""


def draw_plan(seed: int, only: Sequence[FaultKind] = ()) -> WorldPlan:
    """Draw a plan by swarm testing: each seed has some kinds of faults and lacks others. `only` restricts the kinds."""
    rng = Random(f"{seed}/plan")
    long = rng.random() < LONG_SHARE and not only
    among = 2 / 3 if only else rng.choice((1 / 8, 1 / 3, 2 / 3))
    drawn = Random(f"{seed}/kinds")
    kinds = [kind for kind in only or OFTEN if drawn.random() < among] or list(only)
    span_s = 3600.0 if long else rng.uniform(2, SPAN_S)
    count = rng.choice((2, 4, 8, 16) if only else (0, 4, 16, 32, 64, 96, 128, 160)) if kinds else 0
    faults = [draw_fault(rng, rng.choice(kinds), span_s) for _ in range(count)]
    ranked = Random(f"{seed}/ranks")
    ranks = ranked.choice((2, 3))
    if not only and not long and ranked.random() < RANKS_SHARE:
        faults += [draw_fault(ranked, ranked.choice(OF_RANKS), span_s) for _ in range(ranked.choice((2, 4, 8)))]
    elif not set(OF_RANKS).intersection(only):
        ranks = 1
    starts, lasting = Random(f"{seed}/starts"), Random(f"{seed}/lasting")
    if not only and not long and starts.random() < STILLBORN_SHARE:
        faults += [draw_fault(starts, FaultKind.STILLBORN, span_s) for _ in range(2)]
    if not only and not long and ranks == 1 and lasting.random() < LASTING_SHARE:
        faults.append(draw_fault(lasting, lasting.choice(LASTING), span_s))
    suspensions = Random(f"{seed}/suspensions")
    if not only and not long and suspensions.random() < SUSPENDED_SHARE:
        faults += [draw_fault(suspensions, FaultKind.SUSPEND, span_s) for _ in range(2)]
    expires = ranks == 1 and any(fault.kind is FaultKind.SUSPEND for fault in faults)
    life_s = suspensions.uniform(*LIFE_S) if expires else None
    driven = Random(f"{seed}/agents")
    agents = FaultKind.KILL_FRONT in only or (not only and not long and driven.random() < AGENTS_SHARE)
    if agents and not only:
        faults += [draw_fault(driven, FaultKind.KILL_FRONT, span_s) for _ in range(driven.choice((2, 8, 16)))]
    hosted = Random(f"{seed}/hosts")
    hosts = hosted.choice((1, 2, 3)) if set(OF_HOSTS).intersection(only) else 0
    if not only and not long and not agents and hosted.random() < HOSTS_SHARE:
        hosts = hosted.choice((1, 2, 3))
        faults += [draw_fault(hosted, hosted.choice(OF_HOSTS), span_s) for _ in range(hosted.choice((2, 8, 16)))]
    faults.sort(key=lambda fault: fault.at_s)
    calm = Fault(kind=FaultKind.WEATHER, at_s=span_s)
    one_slot = rng.random() < 1 / 10
    grouped = Random(f"{seed}/groups")
    plan = WorldPlan(
        seed=seed,
        steps=rng.randint(2, 8),
        groups=rng.choice((1, 2, 4, 8)),
        places=rng.randint(0, 4),
        staleness_bound=rng.choice((0, 0, 1, 2)),
        checkpoint_every=rng.randint(1, 3),
        max_batch=1 if one_slot else 8,
        max_pending=0 if one_slot else 4,
        drift=rng.choice((0.0, 0.0, 1e-5, 1e-4)),
        durable_against=rng.choice(("process", "power")),
        lying_disk=rng.random() < 1 / 8,
        pending_mb=rng.choice((64.0, 64.0, 0.01)),
        scored=rng.random() < 1 / 3,
        reward_retries=grouped.choice((8, 8, 1)),
        refill_most=grouped.randint(1, 2),
        staleness_drop=grouped.choice(("group", "token")),
        keyframe_every=rng.choice((2, 16)),
        merge_every=rng.choice((1, 2, 3)),
        machines=rng.choice((0, 0, 2)),
        far=rng.random() < 1 / 2,
        max_turns=rng.choice((2, 4)),
        life_s=life_s,
        agents=agents,
        deadline_s=driven.choice((15.0, 15.0, 45.0)),
        idle_s=40.0 if driven.random() < LONG_IDLE_SHARE else 4.0,
        proves=Random(f"{seed}/proofs").random() < PROVING_SHARE,
        ranks=ranks,
        hosts=0 if agents else hosts,
        busy_s=LONG_BUSY_S if Random(f"{seed}/load").random() < LONG_BUSY_SHARE else BUSY_S,
        faults=(*faults, calm),
        end_s=span_s,
        only=tuple(only),
    )
    if ranks > 1:
        plan = msgspec.structs.replace(plan, places=max(1, plan.places))
    if not long:
        return plan
    return msgspec.structs.replace(plan, steps=1, groups=1, places=1, max_tokens=90, token_s=45.0)
