"""Running jobs brought together: against plain enumeration, and what may be given back at which price."""

from collections.abc import Iterator, Mapping, Sequence

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.core.cluster import JobRequest
from elastic.core.cluster.cycle import cycle_ns
from elastic.core.cluster.groups import JobGroup, planned
from elastic.core.cluster.policy import Relocation
from policies.placement import PLACEMENTS
from policies.regrouping import LOOKED_AT, TAKERS, GroupsAfter, Newcomer, brought_together
from tests.cluster.conftest import SPEC, View, group, job, view
from tests.seeds import examples

OURS = PLACEMENTS["ours"]
ROLLOUT, TRAIN = SPEC.rollout[0].nano_usd_per_hour, SPEC.train[0].nano_usd_per_hour


class Some(View):
    """Only jobs alone in their groups may move."""

    def movable(self, job: str) -> bool:
        return len(next(each for each in self.groups.values() if job in each.members).members) == 1


class Hosted(View):
    """Hosts stay where they are."""

    def movable(self, job: str) -> bool:
        return not job.startswith("host")


def hosted(*groups: JobGroup, requests: tuple[JobRequest, ...]) -> Hosted:
    return Hosted(*view(*groups, requests=requests))


def bill(groups: Mapping[str, JobGroup], ends: Mapping[str, int], restarts: int = 0) -> int:
    """What the groups cost until their last members end."""
    prices = {name: ROLLOUT * len(each.rollout) + TRAIN * len(each.train) for name, each in groups.items()}
    return restarts + sum(prices[name] * max(ends[job] for job in each.members) for name, each in groups.items())


def after_move(pool: View, name: str, into: str, nodes: tuple[str, ...], rollout: tuple[str, ...]) -> int | None:
    """The bill once the job has gone into that group, on these of its nodes; None where somebody could not bear it."""
    request, host = pool.requests[name], pool.groups[into]
    mover = planned(request, len(host.train), pool.spec.train[0], nodes)
    members = [*host.members.values(), mover]
    memory = sum(each.rollout_bytes for each in members if set(nodes) & set(each.nodes))
    if cycle_ns(members) > min(each.limit_ns for each in members) or memory > pool.spec.rollout[0].memory_bytes:
        return None
    if sum(each.train_bytes for each in members) > pool.spec.train[0].memory_bytes:
        return None
    grown = msgspec.structs.replace(host, rollout=rollout, members={each.job: each for each in members})
    groups = {key: each for key, each in pool.groups.items() if name not in each.members} | {into: grown}
    ends = {key: pool.remaining_ns(key) for key in pool.requests}
    ends[name] += request.restart_ns
    own = ROLLOUT * request.rollout_nodes + TRAIN * request.train_nodes
    return bill(groups, ends, own * request.restart_ns)


def bills_of_moves(pool: Some) -> Iterator[tuple[str, str, tuple[str, ...], int]]:
    for name in pool.requests:
        for into, host in pool.groups.items():
            if name in host.members or not pool.movable(name):
                continue
            ways: list[tuple[tuple[str, ...], tuple[str, ...]]] = [((node,), host.rollout) for node in host.rollout]
            if pool.free_rollout:
                ways.append((("new",), (*host.rollout, "new")))
            for nodes, rollout in ways:
                cost = after_move(pool, name, into, nodes, rollout)
                if cost is not None:
                    yield name, into, nodes, cost


@st.composite
def pools(draw: st.DrawFn) -> Some:
    groups, requests = list[JobGroup](), list[JobRequest]()
    for i in range(draw(st.integers(2, 4))):
        node, train = f"n{i}", draw(st.sampled_from((1, 1, 2)))
        members = [
            job(
                f"{i}-{k}",
                draw(st.integers(20, 100)),
                draw(st.integers(10, 100)),
                slo=draw(st.sampled_from((1.5, 2.0, 4.0))),
                steps=draw(st.integers(1, 30)),
                train_nodes=train,
                restart_ns=draw(st.sampled_from((0, 10, 150, 400))),
                rollout_bytes=draw(st.integers(1, 2)),
            )
            for k in range(draw(st.sampled_from((1, 1, 1, 2))))
        ]
        made = group(f"g{i}", train, *((each, (node,)) for each in members))
        if made.cycle_ns > made.limit_ns or made.rollout_bytes[node] > SPEC.rollout[0].memory_bytes:
            members = members[:1]
            made = group(f"g{i}", train, (members[0], (node,)))
        groups.append(made)
        requests += members
    pool = view(*groups, requests=tuple(requests))
    return Some(*pool._replace(free_rollout=draw(st.integers(0, 2))))


@given(pools())
@settings(max_examples=examples(60, 150), deadline=None)
def test_the_move_of_a_job_that_is_alone_is_the_cheapest_there_is(pool: Some) -> None:
    stay = bill(pool.groups, {name: pool.remaining_ns(name) for name in pool.requests})
    moves = brought_together(OURS, pool, list(pool.groups))
    least = min((cost for *_, cost in bills_of_moves(pool)), default=stay)
    if least >= stay:
        assert moves == []
        return
    (move,) = moves
    assert move.to.group is not None
    new = move.to.rollout == ()
    assert move.to.new_rollout == int(new)
    rollout = pool.groups[move.to.group].rollout
    nodes, grown = (("new",), (*rollout, "new")) if new else (move.to.rollout, rollout)
    assert after_move(pool, move.job, move.to.group, nodes, grown) == least


def told(moves: Sequence[Relocation]) -> list[tuple[str, str | None, tuple[str, ...], int]]:
    return [(move.job, move.to.group, move.to.rollout, move.to.new_rollout) for move in moves]


def test_one_rollout_node_is_given_back_where_the_group_lives_on() -> None:
    # b alone is on n2, and fits on the node of h, whose job lives longer; a bears nobody.
    a, b, host = (
        job("host-a", 100, 20, slo=1.0, steps=9),
        job("b", 50, 30, slo=9.0),
        job("host", 50, 20, slo=2.0, steps=9),
    )
    groups = (group("g", 1, (a, ("n1",)), (b, ("n2",))), group("host", 1, (host, ("n3",))))
    pool = hosted(*groups, requests=(a, b, host))
    assert told(brought_together(OURS, pool, ["g"])) == [("b", "host", ("n3",), 0)]
    # It gives back 10 an hour for 100 ns: the restart of 40 an hour must be shorter than a quarter of that.
    for restart_ns, moves in ((24, 1), (25, 0)):
        slow = msgspec.structs.replace(b, restart_ns=restart_ns)
        assert len(brought_together(OURS, hosted(*groups, requests=(a, slow, host)), ["g"])) == moves


def test_a_node_of_a_job_that_has_another_is_not_given_back() -> None:
    a, b, host = (
        job("host-a", 100, 20, slo=1.0, steps=9),
        job("b", 50, 20, slo=9.0),
        job("host", 50, 20, slo=2.0, steps=9, rollout_nodes=2),
    )
    wide = msgspec.structs.replace(b, rollout_nodes=2)
    groups = (group("g", 1, (a, ("n1",)), (wide, ("n2", "n3"))), group("host", 1, (host, ("n4", "n5"))))
    assert brought_together(OURS, hosted(*groups, requests=(a, wide, host)), ["g"]) == []


def test_a_restart_costs_all_nodes_of_the_job() -> None:
    # Its nodes are given back 100 ns before its time, and paid as long as it restarts.
    for nodes, train in ((2, 1), (1, 2), (3, 3)):
        host = job("host", 50, 20, slo=9.0, steps=90, rollout_nodes=nodes, train_nodes=train)
        for restart_ns, moves in ((99, 1), (100, 0)):
            mover = job("a", 50, 20, slo=9.0, rollout_nodes=nodes, train_nodes=train, restart_ns=restart_ns)
            on = (tuple(f"{of}{i}" for i in range(nodes)) for of in "mn")
            groups = (group("g", train, (mover, next(on))), group("host", train, (host, next(on))))
            assert len(brought_together(OURS, hosted(*groups, requests=(mover, host)), ["g"])) == moves


def test_jobs_move_together_only_where_each_finds_room() -> None:
    x, y = job("x", 40, 10, slo=4.0), job("y", 30, 10, slo=4.0)
    hosts = [job(f"host{i}", 50, 30, slo=1.3, steps=50) for i in range(2)]
    both = group("g", 1, (x, ("n1",)), (y, ("n1",)))
    apart = [group(f"host{i}", 1, (each, (f"m{i}",))) for i, each in enumerate(hosts)]
    pool = hosted(both, *apart, requests=(x, y, *hosts))
    # The longer first: each host has room for one of them.
    assert told(brought_together(OURS, pool, ["g"])) == [("x", "host0", ("m0",), 0), ("y", "host1", ("m1",), 0)]
    # On one host there is one node for x, and none is free for y beside it.
    only = hosted(both, apart[0], requests=(x, y, hosts[0]))._replace(free_rollout=0)
    assert brought_together(OURS, only, ["g"]) == []


def test_free_nodes_are_given_once() -> None:
    x, y = job("x", 100, 10, slo=4.0, steps=50), job("y", 100, 10, slo=4.0, steps=50)
    host = job("host", 100, 10, slo=1.0, steps=50)
    groups = (group("g", 1, (x, ("n1",)), (y, ("n1",))), group("host", 1, (host, ("m",))))
    pool = hosted(*groups, requests=(x, y, host))
    moves = [("x", "host", (), 1), ("y", "host", (), 1)]
    assert told(brought_together(OURS, pool._replace(free_rollout=2), ["g"])) == moves
    assert brought_together(OURS, pool._replace(free_rollout=1), ["g"]) == []


def test_who_has_taken_a_place_counts_for_those_after_it() -> None:
    host = job("host", 50, 20, slo=2.0)
    pool = hosted(group("host", 1, (host, ("m",))), requests=(host,))
    after = GroupsAfter(pool, None, [(pool.groups["host"], 100)])
    first, second = Newcomer(job("a", 60, 20, slo=2.0)), Newcomer(job("b", 60, 20, slo=2.0))
    packed = after.into("host", OURS, first, new_rollout=0)
    assert packed is not None
    assert (packed.rollout, packed.new_rollout, packed.cycle_ns) == (("m",), 0, 110)
    after.join(first, packed, OURS.cycle)
    assert after.into("host", OURS, second, new_rollout=0) is None
    scaled = after.into("host", OURS, second, new_rollout=1)
    assert scaled is not None
    assert (scaled.rollout, scaled.new_rollout) == ((), 1)


def test_on_the_fullest_node_that_will_do() -> None:
    host, other = job("host", 10, 50, slo=9.0), job("other", 30, 50, slo=9.0)
    pool = view(group("host", 1, (host, ("m",)), (other, ("n",))), requests=(host, other))
    after = GroupsAfter(pool, None, [(pool.groups["host"], 100)])
    way = after.into("host", OURS, Newcomer(job("a", 20, 10, slo=9.0)), new_rollout=0)
    assert way is not None
    assert way.rollout == ("n",)


def test_groups_that_changed_are_looked_at_and_then_the_smallest() -> None:
    """Of many groups of which each could go into the one that lives longest."""
    host = job("host", 10, 1, slo=40.0, steps=10_000, train_bytes=0, rollout_bytes=0)
    many = [job(f"j{i:02}", 10, 10 + i, slo=99.0, steps=100 - i) for i in range(LOOKED_AT + 6)]
    pinned = [group(f"g{i:02}", 1, (each, (f"n{i}",))) for i, each in enumerate(many)]
    pool = hosted(group("host", 1, (host, ("m",))), *reversed(pinned), requests=(host, *many))
    # What lives longest saves most: of those that are looked at, the first.
    assert [move.job for move in brought_together(OURS, pool, [])] == ["j00"]
    backwards = [each.name for each in reversed(pinned)]
    assert [move.job for move in brought_together(OURS, pool, backwards[:LOOKED_AT])] == ["j06"]
    assert [move.job for move in brought_together(OURS, pool, backwards)] == ["j06"]
    assert [move.job for move in brought_together(OURS, pool, ["gone", *backwards[:4]])] == ["j00"]


def test_only_so_many_groups_that_live_longest_take_others() -> None:
    """The only one that has room lives shortest."""
    mover, room = job("mover", 10, 15, slo=9.0, steps=300), job("host", 10, 10, slo=9.0)
    full = [job(f"host{i:03}", 10, 10, slo=1.0, steps=500) for i in range(TAKERS)]
    for number, moves in ((TAKERS - 1, 0), (TAKERS - 2, 1)):
        hosts = full[:number]
        pinned = [group(each.id, 1, (each, (f"n-{each.id}",))) for each in (room, *hosts, mover)]
        pool = hosted(*pinned, requests=(*hosts, mover, room))._replace(free_rollout=0)
        found = brought_together(OURS, pool, ["mover"])
        assert len(found) == moves
