"""How long a group's cycle lasts: every member has one rollout and one training phase in it, in a fixed order.

A phase begins as soon as its job may and all its nodes are free of those before it in the order. Starts are maxima and
sums of earlier ends, so a phase that ends early makes nobody late. The cycle's length is the largest ratio of length to
laps over the closed paths of that schedule.

Source: RollMux and Weave §4.3. T_cycle and T_load there are the bounds that `shortest_cycle_ns` takes; with rollouts on
several nodes, or time between phases that holds no node, they are no more than bounds.
"""

from collections.abc import Hashable, Sequence
from typing import Protocol


class CycleMember(Protocol):
    """A job in a group's cycle, in the order of the cycle; phases include switching."""

    @property
    def rollout_ns(self) -> int: ...
    @property
    def train_ns(self) -> int: ...
    @property
    def sync_ns(self) -> int: ...
    @property
    def nodes(self) -> Sequence[Hashable]:
        """Its rollout nodes. All members share all of the group's training nodes."""
        ...


def longest_step_ns(members: Sequence[CycleMember]) -> int:
    """Return the longest sum of one member's own phases."""
    return max((member.rollout_ns + member.train_ns + member.sync_ns for member in members), default=0)


def load_ns(members: Sequence[CycleMember]) -> int:
    """Return the work of the busiest node in a cycle (Weave §4.2, T_load)."""
    loads: dict[Hashable, int] = {}
    for member in members:
        for node in member.nodes:
            loads[node] = loads.get(node, 0) + member.rollout_ns
    return max(sum(member.train_ns for member in members), max(loads.values(), default=0))


def shortest_cycle_ns(members: Sequence[CycleMember]) -> int:
    """Return a lower bound of the cycle. The bound is reached if each member has one rollout node and no
    synchronisation."""
    return max(longest_step_ns(members), load_ns(members))


def cycle_ns(members: Sequence[CycleMember]) -> int:
    """Return the length of a cycle in the repeating schedule, rounded up to the nanosecond."""
    bound_ns = shortest_cycle_ns(members)
    if all(len(member.nodes) == 1 and not member.sync_ns for member in members):
        return bound_ns
    return _critical_ns(members, bound_ns)


def whole_jobs_ns(members: Sequence[CycleMember]) -> int:
    """Return the cycle of members that each hold all of their nodes for a whole step (Gavel's rounds)."""
    return sum(member.rollout_ns + member.train_ns + member.sync_ns for member in members)


def _critical_ns(members: Sequence[CycleMember], least_ns: int) -> int:
    """Lawler's search: start at `least_ns`, and lengthen the cycle while some closed path needs longer per lap."""
    arcs = _arcs(members)
    length_ns = least_ns
    while True:
        found = _longer_path(arcs, 2 * len(members), length_ns)
        if found is None:
            return length_ns
        took_ns, laps = found
        length_ns = -(-took_ns // laps)


def _arcs(members: Sequence[CycleMember]) -> list[tuple[int, int, int, int]]:
    """Return (from, to, ns, laps): `to` begins at the earliest `ns` after `from` began, `laps` cycles before.

    The rollout of member i is 2i, its training 2i + 1.
    """
    arcs: list[tuple[int, int, int, int]] = []
    orders: dict[Hashable, list[int]] = {}
    for i, member in enumerate(members):
        arcs.append((2 * i, 2 * i + 1, member.rollout_ns, 0))
        arcs.append((2 * i + 1, 2 * i, member.train_ns + member.sync_ns, 1))
        for node in member.nodes:
            orders.setdefault(node, []).append(i)
    for order in orders.values():
        for i, following in zip(order, [*order[1:], order[0]], strict=True):
            arcs.append((2 * i, 2 * following, members[i].rollout_ns, int(following <= i)))
    last = len(members) - 1
    for i, member in enumerate(members):
        following = 0 if i == last else i + 1
        arcs.append((2 * i + 1, 2 * following + 1, member.train_ns, int(i == last)))
    return arcs


def _longer_path(arcs: Sequence[tuple[int, int, int, int]], count: int, length_ns: int) -> tuple[int, int] | None:
    """Return length and laps of a closed path that takes longer than `length_ns` a lap; None if there is none."""
    longest = [0] * count
    came: list[tuple[int, int, int] | None] = [None] * count
    changed = -1
    for _ in range(count):
        changed = -1
        for start, end, ns, laps in arcs:
            reached = longest[start] + ns - laps * length_ns
            if reached > longest[end]:
                longest[end], came[end], changed = reached, (start, ns, laps), end
        if changed < 0:
            return None
    place = changed
    for _ in range(count):
        step = came[place]
        assert step is not None
        place = step[0]
    first, took_ns, laps_all = place, 0, 0
    while True:
        step = came[place]
        assert step is not None
        place, took_ns, laps_all = step[0], took_ns + step[1], laps_all + step[2]
        if place == first:
            return took_ns, laps_all
