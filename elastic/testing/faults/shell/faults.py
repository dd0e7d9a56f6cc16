"""The faults of a world, drawn from its seed: first the kinds that exist at all, then the time and target of each."""

from collections.abc import Sequence
from enum import StrEnum
from random import Random

import msgspec

from elastic.testing.faults.shell.network import Weather


class FaultKind(StrEnum):
    KILL_WORKER = "kill_worker"
    KILL_TRAINER = "kill_trainer"
    KILL_ORCHESTRATOR = "kill_orchestrator"
    KILL_BOTH = "kill_both"
    """Orchestrator and trainer are killed together."""
    STOP = "stop"
    """A user stops the run, by a signal or a command, and resumes it."""
    COMMAND = "command"
    """A user caps a provider, or sets a sufficient budget."""
    FREEZE = "freeze"
    """A worker does not run for a while. Its machine may be suspended, so that no time passes there."""
    HOLD_UP = "hold_up"
    """The orchestrator does not run for a while, so that its timers are late."""
    SUSPEND = "suspend"
    """The orchestrator's machine is suspended for a while, with the workers that are on it. Leases go on."""
    CUT = "cut"
    STALL = "stall"
    """No byte passes a worker's connection for a while; then all of them arrive late."""
    REPEAT = "repeat"
    """Frames of a worker's connection are delivered twice for a while."""
    WEATHER = "weather"
    FLOOD = "flood"
    """Strangers open connections, up to thousands at once."""
    DESCRIPTORS = "descriptors"
    """The orchestrator, or some workers, can open no connection and no file for a while."""
    PREEMPT = "preempt"
    TAKE = "take"
    """The cloud ends a lease without notice."""
    HANG = "hang"
    """An engine stands still while its worker sends heartbeats."""
    SLOW = "slow"
    FAIL = "fail"
    """A device fails when weights are next put in force on it."""
    ROT = "rot"
    """A bit of the weights that a worker serves with changes by itself."""
    TERMINATE = "terminate"
    """A user ends a worker's process by a signal."""
    DECLINE = "decline"
    """A worker declines every turn for a while, although it may announce credit."""
    LIE = "lie"
    RELAY = "relay"
    """The relay answers late, with errors, in part, or not at all for a while."""
    TAMPER = "tamper"
    """Workers read blobs from the relay that are short or wrong, for a while."""
    CALENDAR = "calendar"
    """The orchestrator's calendar jumps by hours."""
    SLOW_DISK = "slow_disk"
    FULL_DISK = "full_disk"
    PORT = "port"
    """The orchestrator is killed, and another program has its port when it is back."""
    POWER = "power"
    """The orchestrator's machine loses power, and everything that its disk had not synced."""
    ENVIRONMENT = "environment"
    FUNCTIONS = "functions"
    KILL_COMMANDED = "kill_commanded"
    """A user commands the run, and the orchestrator is killed about when it answers."""
    HOLD = "hold"
    """From now on a worker says that all its turns wait, and brings nothing."""
    TRICKLE = "trickle"
    """From now on a worker brings each token just before that would be late."""
    BADSTART = "badstart"
    """From now on a worker's tokens begin elsewhere than they should."""
    SPAM = "spam"
    """From now on a worker sends valid frames as fast as it can."""
    FLAP = "flap"
    """From now on a worker loses its connection as soon as it has one."""
    IMPOSTOR = "impostor"
    """An engine generates with other weights than those that it has put in force: the former ones, zeros, or noise."""
    STILLBORN = "stillborn"
    """Someone of the cloud, or the trainer, is replaced, and for a while all end before their first word, all alike."""

    KILL_POOL = "kill_pool"
    KILL_KEEPER = "kill_keeper"
    KILL_RESIDENT = "kill_resident"
    """A resident or trainer is killed, in a slice or parked."""
    HOLD_POOL = "hold_pool"
    """The pool's process does not run for a while, so that its timers are late."""
    HOLD_KEEPER = "hold_keeper"
    HOLD_RESIDENT = "hold_resident"
    """A resident or trainer does not run for a while, so that it does not park in time."""
    CUT_POOL = "cut_pool"
    """A keeper's or an orchestrator's connection to the pool's process breaks."""
    STALL_POOL = "stall_pool"
    """No byte passes the connections of the pool's process for a while; then all of them arrive late."""
    REPEAT_POOL = "repeat_pool"
    """Messages to and from the pool's process are delivered twice for a while."""


KINDS_OF_POOLS = (
    FaultKind.KILL_POOL,
    FaultKind.KILL_KEEPER,
    FaultKind.KILL_RESIDENT,
    FaultKind.HOLD_POOL,
    FaultKind.HOLD_KEEPER,
    FaultKind.HOLD_RESIDENT,
    FaultKind.CUT_POOL,
    FaultKind.STALL_POOL,
    FaultKind.REPEAT_POOL,
)
"""What befalls a pool's own processes, and not a run's."""
KINDS_OF_RUNS = tuple(kind for kind in FaultKind if kind not in KINDS_OF_POOLS)
LASTING = (FaultKind.HOLD, FaultKind.TRICKLE, FaultKind.BADSTART, FaultKind.SPAM, FaultKind.FLAP)
"""Lies that a worker tells for as long as it lives, in frames of which each is valid."""
LASTING_SHARE = 1 / 4
"""Share of worlds of all kinds of faults with such a liar."""


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """`target` picks the victim, `chance` the severity; in a pool `job` is the number of the job that a run's kind of
    fault befalls."""

    kind: FaultKind
    at_s: float
    job: int = 0
    target: float = 0.0
    chance: float = 0.0
    duration_s: float = 1.0

    def weather(self) -> Weather:
        """Return the state of connections from this fault on."""
        bad = self.chance
        return Weather(split=self.target / 2, slow=bad / 50, slow_s=2.5 * self.target, refused=bad / 4)


class WorldPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of a run, and its faults in order. No fault begins after `end_s`.

    `drift` is the most by which a machine's clock runs faster than the world's. With `lying_disk` the disk loses synced
    data with its power. With `scored` functions compute the rewards. `machines` machines join with tickets. With `far`
    workers may be on other machines. With `life_s` the cloud's leases expire after that.
    """

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
    machines: int = 0
    far: bool = False
    max_turns: int = 4
    keyframe_every: int = 16
    merge_every: int = 4
    life_s: float | None = None
    faults: tuple[Fault, ...] = ()
    end_s: float = 0.0
    only: tuple[FaultKind, ...] = ()
    """The kinds from which the faults were drawn; empty for all kinds."""


def options_of(only: Sequence[FaultKind], faults: Sequence[Fault], drawn: Sequence[Fault]) -> str:
    """Return the options of `elastic simulate --faults` besides world and seed that give these faults."""
    told = f" --only {','.join(only)}" if only else ""
    if faults != drawn:
        told += f" --keep {','.join(str(drawn.index(fault)) for fault in faults) or 'none'}"
    return told


SELDOM = (FaultKind.STILLBORN, FaultKind.SUSPEND, *LASTING)
OFTEN = tuple(kind for kind in KINDS_OF_RUNS if kind not in SELDOM)
STILLBORN_SHARE = 1 / 8
"""Share of worlds with workers that cannot start, besides their other faults."""
SUSPENDED_SHARE = 1 / 8
"""Share of worlds of all kinds of faults whose machine is suspended, too. Leases expire in those."""
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
    starts, lasting = Random(f"{seed}/starts"), Random(f"{seed}/lasting")
    if not only and not long and starts.random() < STILLBORN_SHARE:
        faults += [draw_fault(starts, FaultKind.STILLBORN, span_s) for _ in range(2)]
    if not only and not long and lasting.random() < LASTING_SHARE:
        faults.append(draw_fault(lasting, lasting.choice(LASTING), span_s))
    suspensions = Random(f"{seed}/suspensions")
    if not only and not long and suspensions.random() < SUSPENDED_SHARE:
        faults += [draw_fault(suspensions, FaultKind.SUSPEND, span_s) for _ in range(2)]
    life_s = suspensions.uniform(*LIFE_S) if any(fault.kind is FaultKind.SUSPEND for fault in faults) else None
    faults.sort(key=lambda fault: fault.at_s)
    calm = Fault(kind=FaultKind.WEATHER, at_s=span_s)
    one_slot = rng.random() < 1 / 10
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
        keyframe_every=rng.choice((2, 16)),
        merge_every=rng.choice((1, 2, 3)),
        machines=rng.choice((0, 0, 2)),
        far=rng.random() < 1 / 2,
        max_turns=rng.choice((2, 4)),
        life_s=life_s,
        faults=(*faults, calm),
        end_s=span_s,
        only=tuple(only),
    )
    if not long:
        return plan
    return msgspec.structs.replace(plan, steps=1, groups=1, places=1, max_tokens=90, token_s=45.0)


def draw_fault(rng: Random, kind: FaultKind, span_s: float, jobs: int = 0) -> Fault:
    """Draw a fault of this kind, in a pool of one of so many jobs."""
    return Fault(
        kind=kind,
        at_s=rng.uniform(0, span_s),
        job=rng.randrange(jobs) if jobs else 0,
        target=rng.random(),
        chance=rng.random(),
        duration_s=rng.choice((0.05, 0.5, 2.0, 8.0)) * rng.uniform(0.5, 1.5),
    )
