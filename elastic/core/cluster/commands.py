"""The commands of a cluster. The shell carries them out in order and reports the results as events."""

from typing import TypeAlias, dataclass_transform

import msgspec

from elastic.core.cluster.types import JobId, NodeId, Permit, Seat


@dataclass_transform(frozen_default=True, field_specifiers=(msgspec.field,))
class _ClusterCommand(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    pass


class ProfileJob(_ClusterCommand):
    """Time one step of the job; answered by `JobProfiled` or `JobFailed`."""

    job: JobId


class StartJob(_ClusterCommand):
    """Start the job's residents on these nodes, from its checkpoint if it has one; answered by `JobStarted`."""

    job: JobId
    seat: Seat
    train: tuple[NodeId, ...]
    placement: int
    restart: bool


class StopJob(_ClusterCommand):
    """Stop the job at its step's end and keep its checkpoint; answered by `JobStopped`."""

    job: JobId


class EndJob(_ClusterCommand):
    """End every process of the job now. The cluster ignores the job's messages from here on."""

    job: JobId


class RejectJob(_ClusterCommand):
    job: JobId
    reason: str


class PermitCommand(_ClusterCommand):
    """A command on a permit as it stands from now on."""

    permit: Permit

    @property
    def job(self) -> JobId:
        return self.permit.job


class GrantPermit(PermitCommand, frozen=True):
    """The slice begins, or gets further nodes. With `both` the nodes are those of rollouts and of training."""


class RecallPermit(PermitCommand, frozen=True):
    """Ask the phase to park its state and to yield. After the notice its residents are killed."""


class MoveTail(PermitCommand, frozen=True):
    """Move the phase's last responses to the permit's `tail_nodes` and free the others; answered by `TailMoved`."""


class KillResident(_ClusterCommand):
    """End the job's process on this node at once."""

    job: JobId
    node: NodeId
    reason: str


class StartResident(_ClusterCommand):
    """Start the job's process on this node anew. It has no device before its job's time slice."""

    job: JobId
    node: NodeId


class ReleaseNode(_ClusterCommand):
    """Let a drained node go: the cluster has not got it any more."""

    node: NodeId


ClusterCommand: TypeAlias = (
    ProfileJob
    | StartJob
    | StopJob
    | EndJob
    | RejectJob
    | GrantPermit
    | RecallPermit
    | MoveTail
    | KillResident
    | StartResident
    | ReleaseNode
)
