"""A group of jobs that share nodes, as planned: which phase runs on which node, and the resulting cycle.

All figures that a placement reads are updated with the group's members, so that looking at a group costs a few
comparisons.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

import msgspec

from elastic.core.cluster.cycle import CycleMember
from elastic.core.cluster.types import (
    GroupName,
    JobId,
    JobRequest,
    Nanoseconds,
    NodeId,
    NodeKind,
    PhaseKind,
    price_of,
)

CycleModel: TypeAlias = Callable[[Sequence[CycleMember]], Nanoseconds]


class PlannedMember(msgspec.Struct, kw_only=True):
    """A job's plan within its group; phases include switching. `limit_ns` is the longest cycle that the job accepts."""

    job: JobId
    rollout_ns: Nanoseconds
    train_ns: Nanoseconds
    sync_ns: Nanoseconds
    solo_ns: Nanoseconds
    limit_ns: Nanoseconds
    nodes: tuple[NodeId, ...]
    rollout_bytes: int
    train_bytes: int

    @property
    def alone_ns(self) -> Nanoseconds:
        return self.rollout_ns + self.train_ns + self.sync_ns


def planned(
    request: JobRequest,
    train_nodes: int,
    train: NodeKind,
    nodes: tuple[NodeId, ...] = (),
    limit_ns: Nanoseconds | None = None,
) -> PlannedMember:
    """Plan the job in a group with `train_nodes` training nodes of a kind, on these rollout nodes."""
    plan = request.plan
    assert plan is not None
    return PlannedMember(
        job=request.id,
        rollout_ns=plan.rollout_ns + plan.switching_ns(PhaseKind.ROLLOUT),
        train_ns=request.train_ns(train_nodes, train) + plan.switching_ns(PhaseKind.TRAIN),
        sync_ns=plan.sync_ns,
        solo_ns=plan.solo_ns,
        limit_ns=request.cycle_limit_ns if limit_ns is None else limit_ns,
        nodes=nodes,
        rollout_bytes=request.rollout_bytes,
        train_bytes=request.train_bytes_on(train_nodes, train),
    )


class JobGroup(msgspec.Struct, kw_only=True):
    """`members` come in the order of the cycle. The fields from `cycle_ns` on follow from those before."""

    name: GroupName
    train: tuple[NodeId, ...]
    rollout: tuple[NodeId, ...]
    members: dict[JobId, PlannedMember] = {}
    cycle_ns: Nanoseconds = 0
    limit_ns: Nanoseconds = 0
    longest_ns: Nanoseconds = 0
    train_ns: Nanoseconds = 0
    train_bytes: int = 0
    rollout_ns: dict[NodeId, Nanoseconds] = {}
    rollout_bytes: dict[NodeId, int] = {}
    single: bool = True
    """Every member has one rollout node and no synchronisation: the cycle is then the largest of a few sums."""

    def follow(self, cycle: CycleModel) -> None:
        """Update everything that depends on the members."""
        members = list(self.members.values())
        self.cycle_ns = cycle(members) if members else 0
        self.limit_ns = min((member.limit_ns for member in members), default=0)
        self.longest_ns = max((member.alone_ns for member in members), default=0)
        self.train_ns = sum(member.train_ns for member in members)
        self.train_bytes = sum(member.train_bytes for member in members)
        self.rollout_ns = dict.fromkeys(self.rollout, 0)
        self.rollout_bytes = dict.fromkeys(self.rollout, 0)
        for member in members:
            for node in member.nodes:
                self.rollout_ns[node] += member.rollout_ns
                self.rollout_bytes[node] += member.rollout_bytes
        self.single = all(len(member.nodes) == 1 and not member.sync_ns for member in members)

    def rollout_load_ns(self, nodes: Iterable[NodeId]) -> Nanoseconds:
        """Return the work of the busiest of these rollout nodes in a cycle."""
        return max((self.rollout_ns.get(node, 0) for node in nodes), default=0)

    @property
    def load_ns(self) -> Nanoseconds:
        """The work of the busiest node in a cycle."""
        return max(self.train_ns, max(self.rollout_ns.values(), default=0))

    @property
    def saturated(self) -> bool:
        """Whether the busiest node has no idle time in the longest member's step (Weave §4.2)."""
        return self.load_ns >= self.longest_ns

    def price(self, kind: Callable[[NodeId], NodeKind]) -> int:
        """Return the price of an hour of all of the group's nodes, whose kinds `kind` tells, in nano-dollars."""
        return price_of(map(kind, (*self.rollout, *self.train)))
