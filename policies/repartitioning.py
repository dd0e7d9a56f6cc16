"""Finds the cheapest groups for the members of a few neighbouring groups, with the cost of moving there.

Single moves end where only an exchange helps: a small group could dissolve if one member of another group moved first.
Here every set of neighbours that may be a group is priced, moves included, and the cheapest division of all of them
into such sets is found exactly, by their subsets.

For groups with one rollout node per member, without synchronisation, and with equally many training nodes, of pools
with one kind of node for each phase.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from elastic.core.cluster.cycle import cycle_ns
from elastic.core.cluster.groups import JobGroup, PlannedMember
from elastic.core.cluster.policy import PoolView, Relocation
from elastic.core.cluster.types import NS_PER_HOUR, GroupName, JobRequest, Nanoseconds, NodeId
from policies.regrouping import GroupsAfter, Newcomer, WaysInto

NEIGHBOURS = 11
"""Jobs whose groups are formed anew together. Time grows exponentially with their number."""
HORIZON_NS: Nanoseconds = 3 * NS_PER_HOUR
"""How far ahead costs count. By then other jobs have come and left, and groups are formed anew."""
NEVER = 1 << 120


def formed_anew(rules: WaysInto, pool: PoolView, changed: Sequence[GroupName]) -> list[Relocation]:
    """Return the moves to cheaper groups that are possible now. The others follow once the jobs in their way have
    left."""
    alike = len(pool.spec.rollout) == len(pool.spec.train) == 1
    groups = _neighbours(pool, changed) if alike and rules.cycle is cycle_ns else []
    return _Neighbourhood(pool, groups).moves(rules) if len(groups) > 1 else []


def _neighbours(pool: PoolView, changed: Sequence[GroupName]) -> list[JobGroup]:
    """Return the changed groups and the smallest others, with few members together."""
    names = set(changed)
    near = sorted(pool.groups.values(), key=lambda group: (group.name not in names, len(group.members), group.train_ns))
    found, jobs = list[JobGroup](), 0
    for group in near:
        alike = group.single and (not found or len(group.train) == len(found[0].train))
        if alike and jobs + len(group.members) <= NEIGHBOURS:
            found.append(group)
            jobs += len(group.members)
            if jobs == NEIGHBOURS:
                break
    return found


class _Neighbour(NamedTuple):
    """A member of one of the groups. `left_ns` is how long it runs on, within the horizon.

    `move_cost` is never zero, so that among equal divisions the one with the fewest moves wins and moves come to an
    end.
    """

    member: PlannedMember
    request: JobRequest
    home: int
    movable: bool
    left_ns: Nanoseconds
    moved_limit_ns: Nanoseconds
    move_cost: int


class _Block(NamedTuple):
    """The cost of a set of jobs as one of the groups, in nano-dollars times nanoseconds per hour, and the jobs that
    move there, each with its rollout node (None for a new node)."""

    cost: int
    group: int
    newcomers: tuple[tuple[int, NodeId | None], ...]


class _Neighbourhood:
    """Sets of jobs are numbers: bit i stands for the job at place i."""

    def __init__(self, pool: PoolView, groups: Sequence[JobGroup]) -> None:
        self._pool, self._groups = pool, groups
        (self._rollout,), (train,) = pool.spec.rollout, pool.spec.train
        self._train_price = train.nano_usd_per_hour * len(groups[0].train)
        self._train_memory = train.memory_bytes
        self._jobs = [
            self._neighbour(home, member) for home, group in enumerate(groups) for member in group.members.values()
        ]

    def _neighbour(self, home: int, member: PlannedMember) -> _Neighbour:
        pool, request = self._pool, self._pool.request(member.job)
        movable = pool.movable(member.job)
        return _Neighbour(
            member=member,
            request=request,
            home=home,
            movable=movable,
            left_ns=min(HORIZON_NS, pool.remaining_ns(member.job)),
            moved_limit_ns=pool.limit_after_restart_ns(member.job) if movable else 0,
            move_cost=pool.spec.price_alone(request) * max(1, request.moving_ns),
        )

    def moves(self, rules: WaysInto) -> list[Relocation]:
        homes = [0] * len(self._groups)
        for i, job in enumerate(self._jobs):
            homes[job.home] |= 1 << i
        stay = [self._block(mask, home) for home, mask in enumerate(homes)]
        if None in stay:
            return []
        cost = sum(block.cost for block in stay if block is not None)
        blocks = dict(self._blocks())
        plan = self._settled(self._cheapest(blocks), blocks)
        if plan is None or sum(block.cost for block in plan) >= cost:
            return []
        return self._at_once(rules, plan)

    def _blocks(self) -> Iterator[tuple[int, list[_Block]]]:
        """Return every set that may be a group, with its cost as each group of its members, the cheapest first."""
        jobs, memory = self._jobs, self._train_memory
        limits_ns = [max(job.member.limit_ns, job.moved_limit_ns) for job in jobs]
        open_sets: list[tuple[int, int, int, int, int, int]] = [(0, 0, 0, 0, NEVER, 0)]
        while open_sets:
            mask, first, train_ns, longest_ns, limit_ns, train_bytes = open_sets.pop()
            for i in range(first, len(jobs)):
                member = jobs[i].member
                trains_ns, bound_ns = train_ns + member.train_ns, min(limit_ns, limits_ns[i])
                lasts_ns, holds = max(longest_ns, member.alone_ns), train_bytes + member.train_bytes
                if max(trains_ns, lasts_ns) <= bound_ns and holds <= memory:
                    larger = mask | 1 << i
                    groups = {job.home for j, job in enumerate(jobs) if larger >> j & 1}
                    ways = sorted(way for group in groups if (way := self._block(larger, group)) is not None)
                    if ways:
                        yield larger, ways
                    open_sets.append((larger, i + 1, trains_ns, lasts_ns, bound_ns, holds))

    def _block(self, mask: int, group: int) -> _Block | None:
        """Return the set as this group: its own members keep their nodes, every other job takes the fullest
        sufficient node."""
        inside = [(i, job) for i, job in enumerate(self._jobs) if mask >> i & 1]
        if any(job.home != group and not job.movable for _, job in inside):
            return None
        bound_ns = min(job.member.limit_ns if job.home == group else job.moved_limit_ns for _, job in inside)
        longest_ns = max(job.member.alone_ns for _, job in inside)
        if max(longest_ns, sum(job.member.train_ns for _, job in inside)) > bound_ns:
            return None
        nodes: dict[NodeId, list[int]] = {}
        moving = [(i, job) for i, job in inside if job.home != group]
        for _, job in inside:
            if job.home == group:
                _put(job, nodes.setdefault(job.member.nodes[0], [0, 0, 0]))
        moving.sort(key=lambda each: -each[1].member.rollout_ns)
        cost, newcomers = 0, list[tuple[int, NodeId | None]]()
        for i, job in moving:
            most_ns = bound_ns - job.member.rollout_ns
            most_bytes = self._rollout.memory_bytes - job.member.rollout_bytes
            room = [node for node, used in nodes.items() if used[0] <= most_ns and used[1] <= most_bytes]
            node = max(room, key=lambda node: nodes[node][0], default=None)
            _put(job, nodes.setdefault(f"for {job.request.id}" if node is None else node, [0, 0, 0]))
            cost += job.move_cost
            newcomers.append((i, node))
        cost += self._train_price * max(job.left_ns for _, job in inside)
        cost += self._rollout.nano_usd_per_hour * sum(used[2] for used in nodes.values())
        return _Block(cost, group, tuple(newcomers))

    def _cheapest(self, blocks: dict[int, list[_Block]]) -> list[int]:
        """Return the division of all jobs into sets of least cost, if each set could be its best group."""
        by_first: list[list[tuple[int, int]]] = [[] for _ in self._jobs]
        for mask, ways in blocks.items():
            by_first[_first(mask)].append((mask, ways[0].cost))
        best: dict[int, tuple[int, int]] = {0: (0, 0)}

        def least(left: int) -> int:
            if left in best:
                return best[left][0]
            cost, chosen = NEVER, 0
            for mask, own in by_first[_first(left)]:
                if mask & left == mask and own < cost and own + least(left ^ mask) < cost:
                    cost, chosen = own + least(left ^ mask), mask
            best[left] = cost, chosen
            return cost

        left = (1 << len(self._jobs)) - 1
        least(left)
        found: list[int] = []
        while left and best[left][1]:
            found.append(best[left][1])
            left ^= found[-1]
        return found

    def _settled(self, chosen: Sequence[int], blocks: dict[int, list[_Block]]) -> list[_Block] | None:
        """Assign each set a group of its own. The set that loses most by another group chooses first."""

        def loses(mask: int) -> int:
            ways = blocks[mask]
            return NEVER if len(ways) == 1 else ways[1].cost - ways[0].cost

        plan: list[_Block] = []
        for mask in sorted(chosen, key=loses, reverse=True):
            taken = {block.group for block in plan}
            way = next((way for way in blocks[mask] if way.group not in taken), None)
            if way is None:
                return None
            plan.append(way)
        return plan

    def _at_once(self, rules: WaysInto, plan: Sequence[_Block]) -> list[Relocation]:
        """Return the moves for which there is room before any other job has left."""
        after = GroupsAfter(self._pool, None, [(group, 0) for group in self._groups])
        moves: list[Relocation] = []
        for block in plan:
            name = self._groups[block.group].name
            for i, node in block.newcomers:
                job = self._jobs[i]
                newcomer = Newcomer(job.request, job.moved_limit_ns)
                choice = after.into(name, rules, newcomer, new_rollout=int(node is None))
                if choice is not None:
                    after.join(newcomer, choice, rules.cycle)
                    moves.append(Relocation(job.request.id, choice))
        return moves


def _put(job: _Neighbour, used: list[int]) -> None:
    """Add the job's time, memory and life to those of its rollout node."""
    used[0] += job.member.rollout_ns
    used[1] += job.member.rollout_bytes
    used[2] = max(used[2], job.left_ns)


def _first(mask: int) -> int:
    return (mask & -mask).bit_length() - 1
