"""Brings running jobs together so that nodes can be given back, at the price of restarts.

A move pays if the nodes that are given back, for as long as they would have been needed, cost more than the moved jobs'
own nodes while they restart and the longer lives of the receiving groups. A job moves only if its remaining steps make
up for the restart within its SLO.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Protocol

from elastic.core.cluster.groups import CycleModel, JobGroup, PlannedMember, planned
from elastic.core.cluster.policy import PlacementChoice, PoolView, Relocation
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

LOOKED_AT = 24
"""Groups examined after one change. The next change causes another look."""
TAKERS = 64
"""Groups considered for a moved job: those that live longest."""


class GrowingView(Protocol):
    """The data on which a way into a group depends."""

    @property
    def spec(self) -> PoolSpec: ...
    def free(self, kind: KindName) -> int: ...
    def kind(self, node: NodeId) -> NodeKind: ...
    def steps_left(self, job: JobId) -> int: ...


class Newcomer:
    """A job on its way into a group. Its plan there depends only on the group's training nodes: how many, and which."""

    __slots__ = ("_planned", "limit_ns", "request", "rollout_nodes")

    def __init__(self, request: JobRequest, limit_ns: Nanoseconds | None = None) -> None:
        self.request = request
        self.limit_ns = request.cycle_limit_ns if limit_ns is None else limit_ns
        self.rollout_nodes = request.rollout_nodes
        self._planned: dict[tuple[int, KindName], tuple[PlannedMember, Nanoseconds]] = {}

    def planned(self, train_nodes: int, train: NodeKind) -> tuple[PlannedMember, Nanoseconds]:
        """Return the member without its nodes, and the length of its own step with switching."""
        found = self._planned.get(key := (train_nodes, train.name))
        if found is None:
            member = planned(self.request, train_nodes, train, (), self.limit_ns)
            found = self._planned[key] = member, member.alone_ns
        return found


class WaysInto(Protocol):
    """The rules for joining groups."""

    @property
    def cycle(self) -> CycleModel: ...
    def ways_into(self, group: JobGroup, newcomer: Newcomer, pool: GrowingView) -> Iterator[PlacementChoice]: ...


def brought_together(rules: WaysInto, pool: PoolView, changed: Sequence[GroupName]) -> list[Relocation]:
    """Return the moves that save most: all members of one group, or of one of its rollout nodes, into other groups,
    so that these nodes can be given back."""
    best_saved, best = 0, list[Relocation]()
    takers = _takers(pool)
    for name in _worth_a_look(pool, changed):
        group = pool.groups[name]
        for members, nano_usd_per_hour in _what_may_be_given_back(group, pool):
            found = _moved(rules, pool, group, members, nano_usd_per_hour, takers)
            if found is not None and found[0] > best_saved:
                best_saved, best = found
    return best


def _what_may_be_given_back(group: JobGroup, pool: PoolView) -> Iterator[tuple[list[PlannedMember], int]]:
    """Yield the members that would have to leave, and the price of the nodes that would become free."""
    members = list(group.members.values())
    yield members, group.price(pool.kind)
    for node in group.rollout:
        pinned = [member for member in members if node in member.nodes]
        if len(pinned) < len(members) and all(len(member.nodes) == 1 for member in pinned):
            yield pinned, pool.kind(node).nano_usd_per_hour


def _worth_a_look(pool: PoolView, changed: Sequence[GroupName]) -> list[GroupName]:
    """Return groups that may dissolve: changed groups first, then the smallest others."""
    there = [name for name in changed if name in pool.groups][:LOOKED_AT]
    others = [group for name, group in pool.groups.items() if name not in set(there)]
    others.sort(key=lambda group: (len(group.members), group.train_ns))
    return [*there, *(group.name for group in others[: LOOKED_AT - len(there)])]


def _takers(pool: PoolView) -> list[tuple[JobGroup, Nanoseconds]]:
    """Return groups with their remaining lives, the longest first."""
    found = [
        (group, max(pool.remaining_ns(job) for job in group.members)) for group in pool.groups.values() if group.members
    ]
    found.sort(key=lambda each: -each[1])
    return found[:TAKERS]


def _moved(
    rules: WaysInto,
    pool: PoolView,
    group: JobGroup,
    members: Sequence[PlannedMember],
    nano_usd_per_hour: int,
    takers: Sequence[tuple[JobGroup, Nanoseconds]],
) -> tuple[int, list[Relocation]] | None:
    """Return the saving of moving these members out of the group, in nano-dollars times nanoseconds per hour, and
    the moves; None if they cannot move."""
    if not members or not all(pool.movable(member.job) for member in members):
        return None
    saved = nano_usd_per_hour * max(pool.remaining_ns(member.job) for member in members)
    moves: list[Relocation] = []
    after = GroupsAfter(pool, group.name, takers)
    for member in sorted(members, key=lambda member: -member.rollout_ns):
        newcomer = Newcomer(pool.request(member.job), pool.limit_after_restart_ns(member.job))
        best = after.cheapest(rules, newcomer, pool.remaining_ns(member.job))
        if best is None or best[0] >= saved:
            return None
        saved -= best[0]
        after.join(newcomer, best[1], rules.cycle)
        moves.append(Relocation(member.job, best[1]))
    return saved, moves


class GroupsAfter:
    """The groups as they would be after some moves."""

    def __init__(
        self, pool: PoolView, without: GroupName | None, takers: Sequence[tuple[JobGroup, Nanoseconds]]
    ) -> None:
        self.spec, self._pool = pool.spec, pool
        self._new: dict[NodeId, KindName] = {}
        self._groups = {group.name: (group, lives_ns) for group, lives_ns in takers if group.name != without}

    def free(self, kind: KindName) -> int:
        return self._pool.free(kind) - Counter(self._new.values())[kind]

    def kind(self, node: NodeId) -> NodeKind:
        return self.spec.kinds[self._new[node]] if node in self._new else self._pool.kind(node)

    def steps_left(self, job: JobId) -> int:
        return self._pool.steps_left(job)

    def cheapest(
        self, rules: WaysInto, newcomer: Newcomer, remaining_ns: Nanoseconds
    ) -> tuple[int, PlacementChoice] | None:
        """Return the place where the job costs least until it ends: new nodes, a longer life of the group, and the
        job's own nodes while it restarts."""
        request = newcomer.request
        restart = self.spec.price_alone(request) * request.moving_ns
        ends_ns = remaining_ns + request.moving_ns
        best: tuple[int, PlacementChoice] | None = None
        for group, lives_ns in self._groups.values():
            longer = group.price(self.kind) * max(0, ends_ns - lives_ns)
            if best is not None and longer + restart >= best[0]:
                continue
            for choice in rules.ways_into(group, newcomer, self):
                cost = restart + longer + choice.marginal_nano_usd_per_hour * max(ends_ns, lives_ns)
                if best is None or cost < best[0]:
                    best = cost, choice
        return best

    def into(self, name: GroupName, rules: WaysInto, newcomer: Newcomer, *, new_rollout: int) -> PlacementChoice | None:
        """Return the way into this group with the fewest new rollout nodes, at most `new_rollout`."""
        ways = (way for way in rules.ways_into(self._groups[name][0], newcomer, self) if way.new_rollout <= new_rollout)
        return min(ways, key=lambda way: way.new_rollout, default=None)

    def join(self, newcomer: Newcomer, choice: PlacementChoice, cycle: CycleModel) -> None:
        """Put the job into its place. New nodes have no name yet, so no other job may be placed there."""
        assert choice.group is not None
        group, lives_ns = self._groups[choice.group]
        new: tuple[NodeId, ...] = tuple(f"{newcomer.request.id}-new-{i}" for i in range(choice.new_rollout))
        trains = len(group.train), self.kind(group.train[0])
        member, _ = newcomer.planned(*trains)
        grown = JobGroup(
            name=group.name,
            train=group.train,
            rollout=(*group.rollout, *new),
            members=group.members
            | {member.job: planned(newcomer.request, *trains, (*choice.rollout, *new), newcomer.limit_ns)},
        )
        grown.follow(cycle)
        self._new.update(zip(new, choice.new, strict=True))
        for node in self._new.keys() & grown.rollout:
            grown.rollout_bytes[node] = self.kind(node).memory_bytes + 1
        self._groups[group.name] = grown, lives_ns
