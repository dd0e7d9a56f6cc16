"""What happens to a cluster. Every event is immutable, journaled, and enough to replay the cluster."""

from typing import TypeAlias

import msgspec

from elastic.cluster.types import JobId, JobRequest, Nanoseconds, NodeId, PhaseKind, PhasePlan


class _ClusterEvent(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    pass


class TimePassed(_ClusterEvent, frozen=True):
    """Time has reached the cluster's wake-up; nothing else happened."""


class NodeJoined(_ClusterEvent, frozen=True):
    node: NodeId
    phase: PhaseKind


class NodeLost(_ClusterEvent, frozen=True):
    """The node and every resident on it are gone."""

    node: NodeId


class JobSubmitted(_ClusterEvent, frozen=True):
    request: JobRequest


class JobProfiled(_ClusterEvent, frozen=True):
    """One timed step of the job itself."""

    job: JobId
    plan: PhasePlan


class JobStarted(_ClusterEvent, frozen=True):
    """The job's residents are up where it was placed. `placement` is the number that the command carried."""

    job: JobId
    placement: int


class JobProgressed(_ClusterEvent, frozen=True):
    """So many of its steps are done in all; how long its phases have lately taken, where the job says so."""

    job: JobId
    steps_done: int
    rollout_ns: Nanoseconds | None = None
    train_ns: Nanoseconds | None = None


class JobFinished(_ClusterEvent, frozen=True):
    job: JobId


class JobFailed(_ClusterEvent, frozen=True):
    """`placement` is the number of the start that failed: an older one's failure is no news. None for none."""

    job: JobId
    cause: str
    placement: int | None = None


class CancelRequested(_ClusterEvent, frozen=True):
    job: JobId


class ResubmitRequested(_ClusterEvent, frozen=True):
    """A job that failed goes on from its last checkpoint, as a new arrival."""

    job: JobId


class JobStopped(_ClusterEvent, frozen=True):
    """The job that was told to stop has given everything back at a step's end; its checkpoint has `steps_done`."""

    job: JobId
    steps_done: int


class PhaseAsked(_ClusterEvent, frozen=True):
    """The job could begin this phase now. `placement` is the number of its start, where that is known.

    With `both` it needs the nodes of both pools at once, and takes a turn of training, whatever `phase` says.
    """

    job: JobId
    phase: PhaseKind
    placement: int | None = None
    both: bool = False


class PermitYielded(_ClusterEvent, frozen=True):
    """The phase has parked and left its nodes. `finished`: it need not go on in a further slice.

    `switch_ns` is how much of the slice resuming and parking took.
    """

    job: JobId
    permit: int
    finished: bool
    switch_ns: Nanoseconds = 0


class RolloutProgressed(_ClusterEvent, frozen=True):
    """So many of the phase's responses are done."""

    job: JobId
    permit: int
    done: int
    of: int


class TailMoved(_ClusterEvent, frozen=True):
    """The phase's last responses go on where they were told to; the other nodes are free."""

    job: JobId
    permit: int


class ResidentLost(_ClusterEvent, frozen=True):
    """A job's process on a node is gone; what it computed there goes on elsewhere or in a new one."""

    job: JobId
    node: NodeId
    cause: str


class ResidencyMeasured(_ClusterEvent, frozen=True):
    job: JobId
    node: NodeId
    host_bytes: int


ClusterEvent: TypeAlias = (
    TimePassed
    | NodeJoined
    | NodeLost
    | JobSubmitted
    | JobProfiled
    | JobStarted
    | JobProgressed
    | JobFinished
    | JobFailed
    | CancelRequested
    | ResubmitRequested
    | JobStopped
    | PhaseAsked
    | PermitYielded
    | RolloutProgressed
    | TailMoved
    | ResidentLost
    | ResidencyMeasured
)
