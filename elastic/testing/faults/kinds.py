"""The vocabulary of faults of all worlds: its kind, its target, its time, how long it lasts and how bad it is."""

from enum import StrEnum
from random import Random

import msgspec


class FaultKind(StrEnum):
    KILL_WORKER = "kill_worker"
    KILL_TRAINER = "kill_trainer"
    KILL_RANK = "kill_rank"
    """A further rank of the trainer is killed, which ends them all a moment later."""
    HANG_RANK = "hang_rank"
    """A rank of the trainer stands still for a while or for ever, while the process sends heartbeats."""
    DRAIN_NODE = "drain_node"
    """A user lets a pool's node go, whose jobs go on elsewhere."""
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
    """Unauthenticated peers open connections, up to thousands at once."""
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
    KILL_FRONT = "kill_front"
    """A front is gone with all its streams. Its clients come again through another one."""
    KILL_ENVIRONMENT = "kill_environment"
    """An env worker is killed, with all episodes that it plays."""
    HANG_ENVIRONMENT = "hang_environment"
    """An env worker does not run for a while or for ever, so that it says nothing."""

    KILL_POOL = "kill_pool"
    KILL_NODE_AGENT = "kill_node_agent"
    KILL_RESIDENT = "kill_resident"
    """A resident or trainer is killed, in a slice or parked."""
    HOLD_POOL = "hold_pool"
    """The pool's process does not run for a while, so that its timers are late."""
    HOLD_NODE_AGENT = "hold_node_agent"
    HOLD_RESIDENT = "hold_resident"
    """A resident or trainer does not run for a while, so that it does not park in time."""
    CUT_POOL = "cut_pool"
    """A node agent's or an orchestrator's connection to the pool's process breaks."""
    STALL_POOL = "stall_pool"
    """No byte passes the connections of the pool's process for a while; then all of them arrive late."""
    REPEAT_POOL = "repeat_pool"
    """Messages to and from the pool's process are delivered twice for a while."""

    BLACKOUT = "blackout"
    """Every elastic provider takes everything at once and has nothing for a while."""
    SILENT_PROVIDER = "silent_provider"
    """A provider hears nothing for a while, and what it says arrives late."""
    LOSE_JOURNAL = "lose_journal"
    """The orchestrator is killed, and its journal lost: the trainer's checkpoint is all that is left."""

    MEMORY = "memory"
    """A resident holds more memory than was declared."""
    CANCEL = "cancel"
    """A user cancels a job."""
    UNEXPECTED = "unexpected"
    """Code fails at one job, in a way that nobody expects."""


KINDS_OF_POOLS = (
    FaultKind.KILL_POOL,
    FaultKind.KILL_NODE_AGENT,
    FaultKind.KILL_RESIDENT,
    FaultKind.HOLD_POOL,
    FaultKind.HOLD_NODE_AGENT,
    FaultKind.HOLD_RESIDENT,
    FaultKind.CUT_POOL,
    FaultKind.STALL_POOL,
    FaultKind.REPEAT_POOL,
)
"""Faults of a pool's own processes, and not of a run's."""
KINDS_OF_THE_CORE = (
    FaultKind.KILL_WORKER,
    FaultKind.TAKE,
    FaultKind.PREEMPT,
    FaultKind.FREEZE,
    FaultKind.HANG,
    FaultKind.SLOW,
    FaultKind.CUT,
    FaultKind.STALL,
    FaultKind.DECLINE,
    FaultKind.LIE,
    FaultKind.KILL_TRAINER,
    FaultKind.FUNCTIONS,
    FaultKind.BLACKOUT,
    FaultKind.SILENT_PROVIDER,
)
"""Faults of what surrounds a core among models."""
CRASHES = (FaultKind.KILL_ORCHESTRATOR, FaultKind.KILL_BOTH, FaultKind.LOSE_JOURNAL)
"""Faults of the core itself there."""
KINDS_OF_RUNS = tuple(FaultKind)[: tuple(FaultKind).index(FaultKind.KILL_POOL)]
"""Faults of a run of the production shell."""
OF_RANKS = (FaultKind.KILL_RANK, FaultKind.HANG_RANK)
"""Faults of trainers of several ranks alone."""
OF_HOSTS = (FaultKind.KILL_ENVIRONMENT, FaultKind.HANG_ENVIRONMENT)
"""Faults of runs alone whose environment is in env workers."""
LASTING = (FaultKind.HOLD, FaultKind.TRICKLE, FaultKind.BADSTART, FaultKind.SPAM, FaultKind.FLAP)
"""Lies that a worker tells for as long as it lives, in frames of which each is valid."""


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """`target` picks the victim, `chance` the severity; in a pool `job` is the number of the job that a run's kind of
    fault befalls."""

    kind: FaultKind
    at_s: float
    job: int = 0
    target: float = 0.0
    chance: float = 0.0
    duration_s: float = 1.0


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
