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
    """Orchestrator and trainer."""
    STOP = "stop"
    """Somebody has the run stop, by a signal or a command, and resumes it."""
    COMMAND = "command"
    """Somebody caps a provider, or sets a budget that is enough."""
    FREEZE = "freeze"
    """A worker is not run for a while; its machine may be suspended, so that no time passes there."""
    HOLD_UP = "hold_up"
    """The orchestrator itself, so that its timers are late."""
    CUT = "cut"
    STALL = "stall"
    """Nothing passes a worker's connection for a while; then all of it does, late."""
    REPEAT = "repeat"
    """Frames of a worker's connection are delivered twice for a while."""
    WEATHER = "weather"
    FLOOD = "flood"
    """Strangers open connections, up to thousands at once."""
    DESCRIPTORS = "descriptors"
    """The orchestrator, or some workers, can open no connection and no file for a while."""
    PREEMPT = "preempt"
    TAKE = "take"
    """The cloud takes a lease without notice."""
    HANG = "hang"
    """An engine stands still, its heart goes on."""
    SLOW = "slow"
    FAIL = "fail"
    """A device fails while weights are put in force there next."""
    ROT = "rot"
    """A bit of the weights that a worker serves with changes by itself."""
    TERMINATE = "terminate"
    """Somebody has a worker's process leave, by a signal."""
    DECLINE = "decline"
    """A worker declines every turn for a while; it may announce credit all the same."""
    LIE = "lie"
    RELAY = "relay"
    """It answers late, with errors, in part, or not at all for a while."""
    TAMPER = "tamper"
    """What workers read of the relay is short or wrong for a while."""
    CALENDAR = "calendar"
    """The orchestrator's calendar leaps by hours."""
    SLOW_DISK = "slow_disk"
    FULL_DISK = "full_disk"
    PORT = "port"
    """The orchestrator is killed, and its port is somebody else's when it is back."""
    POWER = "power"
    """The orchestrator's machine loses power, and with it whatever its disk had not kept."""
    ENVIRONMENT = "environment"
    FUNCTIONS = "functions"
    KILL_COMMANDED = "kill_commanded"
    """Somebody commands the run, and its orchestrator is killed about when it answers."""


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """`target` picks whom it befalls, `chance` how bad it is."""

    kind: FaultKind
    at_s: float
    target: float = 0.0
    chance: float = 0.0
    duration_s: float = 1.0

    def weather(self) -> Weather:
        """How connections are from then on."""
        bad = self.chance
        return Weather(split=self.target / 2, slow=bad / 50, slow_s=2.5 * self.target, refused=bad / 4)


class WorldPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A run's shape, and the faults in order. After `end_s` nothing goes wrong any more.

    `drift` is how much faster than the world's a machine's clock goes at most. `lying_disk`: what the disk says to have
    kept is lost with its power all the same. `scored`: functions compute the rewards. So many `machines` join with
    tickets. `far`: workers may be on other machines.
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
    faults: tuple[Fault, ...] = ()
    end_s: float = 0.0
    only: tuple[FaultKind, ...] = ()
    """The kinds that it was drawn from, where that are not all."""

    def command(self) -> str:
        """What replays its world."""
        drawn = draw_plan(self.seed, self.only)
        parts = [f"python -m elastic.chaos {self.seed}"]
        if self.only:
            parts.append(f"--only {','.join(self.only)}")
        if self.faults != drawn.faults:
            parts.append(f"--faults {','.join(str(drawn.faults.index(fault)) for fault in self.faults) or 'none'}")
        return " ".join(parts)


SPAN_S = 30.0
LONG_SHARE = 1 / 50
"""Of the worlds: their turns take hours."""


def draw_plan(seed: int, only: Sequence[FaultKind] = ()) -> WorldPlan:
    """Swarm testing: each seed has some kinds of faults and lacks others, or has `only` some of these."""
    rng = Random(f"{seed}/plan")
    long = rng.random() < LONG_SHARE and not only
    among = 2 / 3 if only else rng.choice((1 / 8, 1 / 3, 2 / 3))
    drawn = Random(f"{seed}/kinds")
    kinds = [kind for kind in only or FaultKind if drawn.random() < among] or list(only)
    span_s = 3600.0 if long else rng.uniform(2, SPAN_S)
    count = rng.choice((2, 4, 8, 16) if only else (0, 4, 16, 32, 64, 96, 128, 160)) if kinds else 0
    faults = sorted((_draw(rng, rng.choice(kinds), span_s) for _ in range(count)), key=lambda fault: fault.at_s)
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
        faults=(*faults, calm),
        end_s=span_s,
        only=tuple(only),
    )
    if not long:
        return plan
    return msgspec.structs.replace(plan, steps=1, groups=1, places=1, max_tokens=90, token_s=45.0)


def _draw(rng: Random, kind: FaultKind, span_s: float) -> Fault:
    return Fault(
        kind=kind,
        at_s=rng.uniform(0, span_s),
        target=rng.random(),
        chance=rng.random(),
        duration_s=rng.choice((0.05, 0.5, 2.0, 8.0)) * rng.uniform(0.5, 1.5),
    )
