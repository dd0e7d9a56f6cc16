"""The core's vocabulary: identifiers, states and the small value types that events and commands carry.

Tokens are opaque here: the core knows (attempt, start, count), never ids. Times are integer nanoseconds on
the clock of whichever shell drives the core; the core itself never reads one.
"""

from enum import StrEnum
from typing import TypeAlias

import msgspec

Nanoseconds: TypeAlias = int
LeaseId: TypeAlias = str
WorkerId: TypeAlias = str
TrajectoryId: TypeAlias = str
TurnId: TypeAlias = str

NS_PER_S = 1_000_000_000


class Account(StrEnum):
    """Where a GPU-nanosecond can go; each is in exactly one of these (DESIGN §4, "A GPU-second")."""

    BOOTING = "booting"
    LOADING = "loading"
    APPLYING = "applying"
    IDLE = "idle"
    ASLEEP = "asleep"
    PREFILL = "prefill"
    DECODE = "decode"
    RECOMPUTE = "recompute"
    TRAINING = "training"
    SERVING = "serving"
    DRAINING = "draining"
    LOST = "lost"
    UNATTRIBUTED = "unattributed"


OVERHEAD_ACCOUNTS = frozenset(
    {
        Account.BOOTING,
        Account.LOADING,
        Account.APPLYING,
        Account.RECOMPUTE,
        Account.LOST,
        Account.UNATTRIBUTED,
    }
)
"""What counts as allocation overhead: time paid for that a fixed, never-failing device would not have spent."""


class LeaseState(StrEnum):
    REQUESTED = "requested"
    GRANTED = "granted"
    RELEASING = "releasing"
    ENDED = "ended"
    REFUSED = "refused"


class WorkerState(StrEnum):
    BOOTING = "booting"
    LOADING = "loading"
    READY = "ready"
    ASLEEP = "asleep"
    DRAINING = "draining"
    DETACHED = "detached"
    GONE = "gone"


class TurnState(StrEnum):
    QUEUED = "queued"
    RUNNING = "running"
    MOVING = "moving"
    FINISHED = "finished"
    CANCELLED = "cancelled"
    FAILED = "failed"


class GroupState(StrEnum):
    RUNNING = "running"
    READY = "ready"
    TRAINING = "training"
    TRAINED = "trained"
    DROPPED = "dropped"


class WorkerRole(StrEnum):
    """TRAINER is the trainer's own device, which generates only inside a seeding window."""

    TRAINER = "trainer"
    DEDICATED = "dedicated"
    ELASTIC = "elastic"


class FinishReason(StrEnum):
    """Why a chunk is a turn's last: the first two end the turn, the others give it back to be routed again."""

    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"
    STALLED = "stalled"
    ERROR = "error"


class WeightMode(StrEnum):
    """What happens to running turns when new weights are applied (DESIGN §4, "A weights version")."""

    FINISH = "finish"
    RECOMPUTE = "recompute"
    KEEP = "keep"


class EndCause(StrEnum):
    """Why a lease ended."""

    RELEASED = "released"
    PREEMPTED = "preempted"
    EXPIRED = "expired"
    FENCED = "fenced"
    LOST = "lost"
    BOOT_TIMEOUT = "boot_timeout"


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """What a provider can give right now. `available` counts leases; `expected_life_s` is None when unknown."""

    provider: str
    role: WorkerRole
    available: int
    usd_per_gpu_hour: float
    gpus_per_worker: int = 1
    workers_per_lease: int = 1
    boot_s: float = 0.0
    expected_life_s: float | None = None


class Progress(msgspec.Struct, frozen=True, array_like=True):
    """One chunk of a turn as the core sees it: `count` tokens from position `start` of the turn's output."""

    turn: TurnId
    attempt: int
    start: int
    count: int
    finish: FinishReason | None = None
    detail: str = ""


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker's engine declares once, when it joins."""

    engine: str
    replayable_sampling: bool
    max_context_tokens: int
    device: str
    tflops: float | None = None
    memory_gb_per_s: float | None = None
