"""What a cluster asks of policies, and the read-only views that they decide on.

Policies are pure: no I/O, no clock, no memory of their own. The cluster calls them through these protocols and imports
none of them.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from elastic.cluster.groups import CycleModel, JobGroup
from elastic.cluster.types import GroupName, JobId, JobRequest, Nanoseconds, NodeId, PoolSpec


class PoolView(Protocol):
    """The cluster as a placement policy sees it."""

    @property
    def spec(self) -> PoolSpec: ...
    @property
    def groups(self) -> Mapping[GroupName, JobGroup]: ...
    @property
    def free_rollout(self) -> int:
        """Rollout nodes of no group."""
        ...

    @property
    def free_train(self) -> int: ...
    @property
    def arrivals(self) -> int:
        """How many placements have been asked for so far: what a policy draws by."""
        ...

    def request(self, job: JobId) -> JobRequest: ...
    def remaining_ns(self, job: JobId) -> Nanoseconds:
        """How long the job goes on, at the cycle that its group has now."""
        ...

    def limit_after_restart_ns(self, job: JobId) -> Nanoseconds:
        """The longest cycle that the job bears for the rest of its steps, if it is moved now."""
        ...

    def movable(self, job: JobId) -> bool:
        """It runs, and is not on its way elsewhere already."""
        ...


class PlacementChoice(msgspec.Struct, frozen=True, kw_only=True):
    """Where a job goes: `rollout` nodes of the group, and so many new ones; a group of its own where `group` is None.

    `marginal_nano_usd_per_hour` is what an hour of the cluster costs more, `cycle_ns` the group's planned cycle.
    """

    group: GroupName | None
    rollout: tuple[NodeId, ...] = ()
    new_rollout: int = 0
    new_train: int = 0
    marginal_nano_usd_per_hour: int = 0
    cycle_ns: Nanoseconds = 0

    @property
    def how(self) -> str:
        """As the papers count admissions: `packed`, `scaled` or `new`."""
        return "new" if self.group is None else "scaled" if self.new_rollout else "packed"


class PlacementRefusal(msgspec.Struct, frozen=True):
    """Why a job does not go into a group: what it would need there, and what is allowed."""

    group: GroupName
    reason: str
    needed: float
    allowed: float

    def __str__(self) -> str:
        return f"{self.group}: {self.reason}: {self.needed:.6g}; allowed: {self.allowed:.6g}"


class Relocation(msgspec.Struct, frozen=True):
    """A running job that is to move to another place, and why that pays."""

    job: JobId
    to: PlacementChoice
    reason: str


class PlacementPolicy(Protocol):
    @property
    def cycle(self) -> CycleModel:
        """How long the cycle of a group lasts under the rotation that goes with this placement."""
        ...

    def place(self, request: JobRequest, pool: PoolView) -> PlacementChoice | None:
        """Where the job goes; None while the pool has too few free nodes for it."""
        ...

    def refusals(self, request: JobRequest, pool: PoolView) -> Sequence[PlacementRefusal]:
        """For each group that the job cannot join, why not."""
        ...

    def relocations(self, pool: PoolView, changed: Sequence[GroupName]) -> Sequence[Relocation]:
        """Moves that pay, now that jobs have left or joined these groups."""
        ...


class SliceView(msgspec.Struct, frozen=True, kw_only=True):
    """A rollout phase under way. `waiting_ns` is the planned rollout of the job that is next on most of its nodes, 0
    where nobody waits; `left_ns` the rest of its planned time, of which there are `planned_ns` in all. `shortens_ns` is
    the most by which the group's cycle can become shorter where these nodes are free sooner: what else bounds it stays.
    """

    done: int
    of: int
    nodes: tuple[NodeId, ...]
    waiting_ns: Nanoseconds
    left_ns: Nanoseconds
    planned_ns: Nanoseconds
    shortens_ns: Nanoseconds


class TailPolicy(Protocol):
    def keeps(self, rollout: SliceView) -> tuple[NodeId, ...] | None:
        """The nodes that the phase's tail is to move to; None to leave it where it is."""
        ...


class DriftPolicy(Protocol):
    def strays(self, group: JobGroup, measured: Mapping[JobId, tuple[Nanoseconds, Nanoseconds]]) -> JobId | None:
        """The member to be placed anew, by the mean rollout and training time that was measured of each."""
        ...


class BillShare(msgspec.Struct, frozen=True, kw_only=True):
    """What a group charges for a stretch of time, in nano-dollars times nanoseconds per hour, so that sums are exact.

    `used` is what the job's slices and switches cost, `alone` what all of its nodes would have cost for it alone.
    """

    job: JobId
    used: int
    alone: int


class ChargingPolicy(Protocol):
    def bills(self, shares: Sequence[BillShare], cost: int) -> Mapping[JobId, int]:
        """What each member owes of the group's cost; what is left over is the pool's own."""
        ...


class ClusterPolicies(msgspec.Struct, frozen=True, kw_only=True):
    placement: PlacementPolicy
    tail: TailPolicy
    drift: DriftPolicy
    charging: ChargingPolicy
