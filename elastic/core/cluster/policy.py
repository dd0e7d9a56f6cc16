"""What a cluster asks of policies, and the read-only views on which they decide.

Policies are pure: no I/O, no clock, no memory of their own. The cluster calls them through these protocols and imports
no policy.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from elastic.core.cluster.groups import CycleModel, JobGroup
from elastic.core.cluster.types import (
    GroupName,
    JobId,
    JobRequest,
    KindName,
    Nanoseconds,
    NodeId,
    NodeKind,
    PoolSpec,
)


class PoolView(Protocol):
    """The cluster as a placement policy sees it."""

    @property
    def spec(self) -> PoolSpec: ...
    @property
    def groups(self) -> Mapping[GroupName, JobGroup]: ...
    @property
    def arrivals(self) -> int:
        """The number of placements asked for so far. Policies that draw at random use it as their seed."""
        ...

    def free(self, kind: KindName) -> int:
        """Return the number of nodes of this kind that are in no group."""
        ...

    def kind(self, node: NodeId) -> NodeKind: ...
    def request(self, job: JobId) -> JobRequest: ...
    def remaining_ns(self, job: JobId) -> Nanoseconds:
        """Return how long the job will still run at its group's present cycle."""
        ...

    def steps_left(self, job: JobId) -> int:
        """Return how many steps the job still has to do, at least one."""
        ...

    def limit_after_restart_ns(self, job: JobId) -> Nanoseconds:
        """Return the longest cycle that the job accepts for its remaining steps if it moves now."""
        ...

    def movable(self, job: JobId) -> bool:
        """Return whether the job runs and is not already moving."""
        ...


class PlacementChoice(msgspec.Struct, frozen=True, kw_only=True):
    """A place for a job: `rollout` nodes of a group and new ones of these kinds, which may differ; a new group if
    `group` is None, with training nodes of one kind.

    `marginal_nano_usd_per_hour` is the increase of the cluster's price, `cycle_ns` the group's planned cycle.
    """

    group: GroupName | None
    rollout: tuple[NodeId, ...] = ()
    new: tuple[KindName, ...] = ()
    train: tuple[KindName, ...] = ()
    marginal_nano_usd_per_hour: int = 0
    cycle_ns: Nanoseconds = 0

    @property
    def new_rollout(self) -> int:
        return len(self.new)

    @property
    def new_train(self) -> int:
        return len(self.train)

    @property
    def how(self) -> str:
        """The kind of admission in the papers' words: `packed`, `scaled` or `new`."""
        return "new" if self.group is None else "scaled" if self.new_rollout else "packed"


class PlacementRefusal(msgspec.Struct, frozen=True):
    """Why a job cannot join a group: what the job would need there, and what is allowed."""

    group: GroupName
    reason: str
    needed: float
    allowed: float

    def __str__(self) -> str:
        return f"{self.group}: {self.reason}: {self.needed:.6g}; allowed: {self.allowed:.6g}"


class Relocation(msgspec.Struct, frozen=True):
    """A move of a running job to another place."""

    job: JobId
    to: PlacementChoice


class PlacementPolicy(Protocol):
    @property
    def cycle(self) -> CycleModel:
        """Returns the cycle of a group under the rotation that goes with this placement."""
        ...

    def place(self, request: JobRequest, pool: PoolView) -> PlacementChoice | None:
        """Returns a place for the job; None while the pool has too few free nodes for it."""
        ...

    def refusals(self, request: JobRequest, pool: PoolView) -> Sequence[PlacementRefusal]:
        """Returns the reason for each group that the job cannot join."""
        ...

    def relocations(self, pool: PoolView, changed: Sequence[GroupName]) -> Sequence[Relocation]:
        """Returns moves that pay, after jobs have left or joined the groups in `changed`."""
        ...


class SliceView(msgspec.Struct, frozen=True, kw_only=True):
    """A rollout phase under way.

    `waiting_ns` is the planned rollout of the next job, 0 if no job waits: it rolls out on `waiting_nodes` nodes, and
    waits for those of the phase's that are `wanted`. `left_ns` is the rest of the phase's planned time `planned_ns`.
    `shortens_ns` is the most by which the group's cycle can shrink if these nodes are freed sooner.
    """

    done: int
    of: int
    nodes: tuple[NodeId, ...]
    wanted: tuple[NodeId, ...]
    waiting_nodes: int
    waiting_ns: Nanoseconds
    left_ns: Nanoseconds
    planned_ns: Nanoseconds
    shortens_ns: Nanoseconds


class TailPolicy(Protocol):
    def keeps(self, rollout: SliceView) -> tuple[NodeId, ...] | None:
        """Returns the nodes that the phase's tail moves to; None to leave the tail where it is."""
        ...


class DriftPolicy(Protocol):
    def strays(self, group: JobGroup, measured: Mapping[JobId, tuple[Nanoseconds, Nanoseconds]]) -> JobId | None:
        """Returns the member to place anew, judged by the mean rollout and training times measured of each member."""
        ...


class BillShare(msgspec.Struct, frozen=True, kw_only=True):
    """One member's part in a stretch of a group's time, in nano-dollars times nanoseconds per hour; all sums are exact.

    `used` is the cost of the member's slices and switches, `alone` the cost of all of its nodes if it ran alone.
    """

    job: JobId
    used: int
    alone: int


class ChargingPolicy(Protocol):
    def bills(self, shares: Sequence[BillShare], cost: int) -> Mapping[JobId, int]:
        """Returns what each member owes of the group's cost. The pool pays the rest."""
        ...


class ClusterPolicies(msgspec.Struct, frozen=True, kw_only=True):
    placement: PlacementPolicy
    tail: TailPolicy
    drift: DriftPolicy
    charging: ChargingPolicy
