"""What happens to a cluster. Every event is immutable, journaled, and enough to replay the cluster."""

from typing import TypeAlias, dataclass_transform

import msgspec

from elastic.core.cluster.state import JobRecord
from elastic.core.cluster.types import (
    BeyondQuota,
    JobId,
    JobRequest,
    KindName,
    Nanoseconds,
    NodeId,
    PhaseKind,
    PhasePlan,
)


@dataclass_transform(frozen_default=True, field_specifiers=(msgspec.field,))
class _ClusterEvent(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    pass


class TimePassed(_ClusterEvent):
    """Time has reached the cluster's wake-up; nothing else happened."""


class PoolSuspended(_ClusterEvent):
    """The pool's machine was suspended for so long, and nobody could be heard."""

    for_ns: Nanoseconds


class NodeJoined(_ClusterEvent):
    node: NodeId
    kind: KindName


class NodeLost(_ClusterEvent):
    """The node and every resident on it are gone."""

    node: NodeId


class NodeDrained(_ClusterEvent):
    """The node is to be let go: its jobs stop at their step's end and are placed anew, and no other gets it."""

    node: NodeId


class JobSubmitted(_ClusterEvent):
    """A job has come. With `quota` it is queued, and considered for a place once `QuotaChanged` lets it."""

    request: JobRequest
    quota: BeyondQuota | None = None


class QuotaChanged(_ClusterEvent):
    """A queued job is within its quota now, or beyond it for another reason."""

    job: JobId
    quota: BeyondQuota | None


class JobProfiled(_ClusterEvent):
    """One timed step of the job itself."""

    job: JobId
    plan: PhasePlan


class JobStarted(_ClusterEvent):
    """The job's residents are up on the nodes of its placement. `placement` is the number in the command."""

    job: JobId
    placement: int


class JobProgressed(_ClusterEvent):
    """`steps_done` steps are done in all. The durations are those of the job's latest phases, if it reports them."""

    job: JobId
    steps_done: int
    rollout_ns: Nanoseconds | None = None
    train_ns: Nanoseconds | None = None


class JobFinished(_ClusterEvent):
    job: JobId


class JobFailed(_ClusterEvent):
    """`placement` is the number of the start that failed; the failure of an older start is ignored. None for no
    start."""

    job: JobId
    cause: str
    placement: int | None = None


class CancelRequested(_ClusterEvent):
    job: JobId


class ResubmitRequested(_ClusterEvent):
    """A failed job arrives anew and goes on from its last checkpoint.

    `forgotten` is its record if the cluster has forgotten the job, without what it owes. `billed` is that, in digits:
    msgpack takes no number of that length. `quota` as in `JobSubmitted`.
    """

    job: JobId
    forgotten: JobRecord | None = None
    billed: str = "0"
    quota: BeyondQuota | None = None

    @classmethod
    def of_forgotten(cls, record: JobRecord, quota: BeyondQuota | None = None) -> "ResubmitRequested":
        forgotten, billed = msgspec.structs.replace(record, billed=0), str(record.billed)
        return cls(job=record.request.id, forgotten=forgotten, billed=billed, quota=quota)


class JobsForgotten(_ClusterEvent):
    """These jobs are over and kept elsewhere: they leave the cluster's state."""

    jobs: tuple[JobId, ...]


class JobStopped(_ClusterEvent):
    """A job that was told to stop has freed everything at a step's end. Its checkpoint has `steps_done` steps."""

    job: JobId
    steps_done: int


class PhaseAsked(_ClusterEvent):
    """The job can begin this phase now. `placement` is the number of the job's start, if known.

    With `both` the job needs the nodes of both pools at once, and takes a time slice of training whatever `phase` says.
    """

    job: JobId
    phase: PhaseKind
    placement: int | None = None
    both: bool = False


class PermitYielded(_ClusterEvent):
    """The phase has parked its state and left its nodes. `finished`: the phase needs no further slice.

    `switch_ns` is the part of the slice that starting an engine, resuming and parking took; `cold_ns` that of starting.
    """

    job: JobId
    permit: int
    finished: bool
    switch_ns: Nanoseconds = 0
    cold_ns: Nanoseconds = 0


class RolloutProgressed(_ClusterEvent):
    """`done` of the phase's responses are done."""

    job: JobId
    permit: int
    done: int
    of: int


class TailMoved(_ClusterEvent):
    """The phase's last responses run on the nodes that `MoveTail` named. The other nodes are free."""

    job: JobId
    permit: int


class ResidentLost(_ClusterEvent):
    """A job's process on a node is gone. Its work goes on elsewhere, or in a new process."""

    job: JobId
    node: NodeId
    cause: str


class ResidencyMeasured(_ClusterEvent):
    job: JobId
    node: NodeId
    host_bytes: int


ClusterEvent: TypeAlias = (
    TimePassed
    | PoolSuspended
    | NodeJoined
    | NodeLost
    | NodeDrained
    | JobSubmitted
    | QuotaChanged
    | JobProfiled
    | JobStarted
    | JobProgressed
    | JobFinished
    | JobFailed
    | CancelRequested
    | ResubmitRequested
    | JobsForgotten
    | JobStopped
    | PhaseAsked
    | PermitYielded
    | RolloutProgressed
    | TailMoved
    | ResidentLost
    | ResidencyMeasured
)
