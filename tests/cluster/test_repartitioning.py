"""Groups formed anew: what no single move can do, what stands in the way, and against plain enumeration."""

from collections.abc import Iterator, Sequence

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.core.cluster import JobRequest
from elastic.core.cluster.policy import Relocation
from policies.placement import PLACEMENTS, PlacementRules
from policies.regrouping import brought_together
from policies.repartitioning import NEIGHBOURS, formed_anew
from tests.cluster.conftest import SPEC, View, group, job, view
from tests.seeds import examples

OURS = PLACEMENTS["ours"]


def trains(name: str, train: int, **more: object) -> JobRequest:
    """It bears a cycle of 100, and has so little to roll out that one node will do for a group."""
    return job(name, 1, train, slo=100.5 / (1 + train), **more)


P = trains("p", 60, restart_ns=1000)
"""Moving it never pays."""
Q, R, S, T = (trains(name, train) for name, train in zip("qrst", (30, 50, 20, 40), strict=True))
FIVE = msgspec.structs.replace(SPEC, rollout=(msgspec.structs.replace(SPEC.rollout[0], memory_bytes=5),))
"""So many states fit on a node of either kind."""


def pool_of(*groups: Sequence[JobRequest]) -> View:
    made = [group(f"g{i}", 1, *((each, (f"n{i}",)) for each in members)) for i, members in enumerate(groups)]
    return view(*made, requests=tuple(each for members in groups for each in members))._replace(spec=FIVE)


def told(moves: Sequence[Relocation]) -> list[tuple[str, str | None, tuple[str, ...]]]:
    return [(move.job, move.to.group, move.to.rollout) for move in moves]


def test_a_group_is_given_back_by_an_exchange_that_no_single_move_could_begin() -> None:
    # t trains for 40 and fits neither beside p and q (90) nor beside r and s (70), until q goes there.
    pool = pool_of((P, Q), (R, S), (T,))
    assert brought_together(OURS, pool, ["g2"]) == []
    assert told(formed_anew(OURS, pool, ["g2"])) == [("q", "g1", ("n1",))]
    # t had to wait for q to leave.
    assert told(formed_anew(OURS, pool_of((P,), (R, S, Q), (T,)), ["g0", "g1"])) == [("t", "g0", ("n0",))]
    assert formed_anew(OURS, pool_of((P, T), (R, S, Q)), ["g0"]) == []


class Held(View):
    """A pool in which one job cannot move, or bears no restart."""

    held = "t"

    def movable(self, job: str) -> bool:
        return job != self.held


class Tight(View):
    def limit_after_restart_ns(self, job: str) -> int:
        return 99 if job == "q" else 100


def test_who_cannot_move_or_would_miss_its_slo_stays() -> None:
    groups = pool_of((P, Q), (R, S), (T,))
    assert formed_anew(OURS, Held(*groups), ["g2"]) == []
    # With q the second group would take 100, and q bears 99 after its restart.
    assert formed_anew(OURS, Tight(*groups), ["g2"]) == []


def test_what_a_move_costs_must_be_saved_within_the_time_that_is_left() -> None:
    # The first group's nodes cost 40 an hour, for the 100 ns that t goes on; q and t cost as much while they restart.
    cheap, dear = (msgspec.structs.replace(Q, restart_ns=ns) for ns in (98, 99))
    assert told(formed_anew(OURS, pool_of((P, cheap), (R, S), (T,)), ["g2"])) == [("q", "g1", ("n1",))]
    assert formed_anew(OURS, pool_of((P, dear), (R, S), (T,)), ["g2"]) == []


def test_others_than_single_rollout_nodes_are_left_alone() -> None:
    synced = job("y", 1, 30, slo=100.5 / 31, rollout_nodes=2)
    two = group("g0", 1, (P, ("n0",)), (synced, ("n0", "m0")))
    rest = pool_of((), (R, S), (T,)).groups
    pool = view(two, rest["g1"], rest["g2"], requests=(P, synced, R, S, T))
    assert formed_anew(OURS, pool, ["g2"]) == []
    wide = group("g2", 2, (T, ("n2",)))
    pool = view(pool_of((P, Q)).groups["g0"], rest["g1"], wide, requests=(P, Q, R, S, T))
    # g2 trains on two nodes: it is no neighbour of the others.
    assert formed_anew(OURS, pool, ["g2"]) == []


def priced(groups: Sequence[Sequence[JobRequest]]) -> int:
    """Of an hour of groups that need one rollout node each."""
    return (FIVE.rollout[0].nano_usd_per_hour + FIVE.train[0].nano_usd_per_hour) * len(groups)


def partitions(jobs: Sequence[JobRequest]) -> Iterator[list[list[JobRequest]]]:
    if not jobs:
        yield []
        return
    for rest in partitions(jobs[1:]):
        yield [[jobs[0]], *rest]
        for i, block in enumerate(rest):
            yield [*rest[:i], [jobs[0], *block], *rest[i + 1 :]]


def bears(block: Sequence[JobRequest]) -> bool:
    return sum(each.plan.train_ns for each in block if each.plan) <= 100 and len(block) <= 5


def settled(pool: View) -> list[list[JobRequest]]:
    """The groups once nothing moves any more."""
    for _ in range(30):
        moves = formed_anew(OURS, pool, list(pool.groups))
        if not moves:
            return [[pool.requests[name] for name in each.members] for each in pool.groups.values()]
        pool = moved(pool, moves)
    raise AssertionError("moves without an end")


def moved(pool: View, moves: Sequence[Relocation]) -> View:
    where = {name: each.name for each in pool.groups.values() for name in each.members}
    where |= {move.job: move.to.group or "" for move in moves}
    groups: dict[str, list[JobRequest]] = {}
    for name, home in where.items():
        groups.setdefault(home, []).append(pool.requests[name])
    return pool_of(*groups.values())


@given(st.lists(st.lists(st.integers(5, 90), min_size=1, max_size=3), min_size=2, max_size=4))
@settings(max_examples=examples(12, 30), deadline=None)
def test_moves_come_to_an_end_and_never_to_dearer_groups(lengths: list[list[int]]) -> None:
    groups = [[trains(f"{i}-{j}", ns) for j, ns in enumerate(each)] for i, each in enumerate(lengths)]
    groups = [each for each in groups if bears(each)]
    after = settled(pool_of(*groups))
    assert all(bears(each) for each in after)
    assert priced(after) <= priced(groups)


def test_what_fills_the_nodes_exactly_shares_them() -> None:
    host = job("h", 60, 40, slo=1.0, rollout_bytes=3, train_bytes=3, restart_ns=999)
    for rollout_ns, rollout_bytes, train_bytes, way in (
        (40, 2, 2, [(("n0",), 0)]),
        (41, 2, 2, [((), 1)]),
        (40, 3, 2, [((), 1)]),
        (40, 2, 3, []),
        (39, 2, 2, []),
    ):
        mover = job("a", rollout_ns, 100 - rollout_ns, slo=1.0, rollout_bytes=rollout_bytes, train_bytes=train_bytes)
        moves = formed_anew(OURS, pool_of((host,), (mover,)), [])
        assert [(move.to.rollout, move.to.new_rollout) for move in moves] == way


def test_newcomers_share_a_new_node_that_they_fill_exactly() -> None:
    host = job("h", 90, 10, slo=1.0, restart_ns=999)
    first, second = job("a", 60, 40, slo=1.0), job("b", 40, 50, slo=100.5 / 90)
    moves = formed_anew(OURS, pool_of((host,), (first,), (second,)), [])
    # The node has no name before a is there: b follows at the next look.
    assert [(move.job, move.to.rollout, move.to.new_rollout) for move in moves] == [("a", (), 1)]


def test_the_longest_rollouts_take_the_room_that_there_is_and_the_fullest_node() -> None:
    host = job("h", 40, 20, slo=100.5 / 60, restart_ns=999)
    short, long = job("a", 30, 20, slo=100.5 / 50), job("b", 60, 20, slo=100.5 / 80)
    moves = formed_anew(OURS, pool_of((host,), (short,), (long,)), [])
    assert [(move.job, move.to.rollout, move.to.new_rollout) for move in moves] == [("b", ("n0",), 0), ("a", (), 1)]
    busy, large = job("h", 50, 20, slo=2.0, restart_ns=999), job("i", 20, 20, slo=9.0, rollout_bytes=3, restart_ns=999)
    both = group("g0", 1, (large, ("m",)), (busy, ("n",)))
    pool = view(both, group("g1", 1, (short, ("o",))), requests=(busy, large, short))._replace(spec=FIVE)
    assert told(formed_anew(OURS, pool, [])) == [("a", "g0", ("n",))]


def test_the_next_best_where_a_restart_leaves_too_little_for_the_best() -> None:
    a, q, c = trains("a", 60, steps=2, restart_ns=150), trains("q", 40, steps=2), trains("c", 30, restart_ns=999)
    pool = pool_of((a,), (q,), (c,))
    assert told(formed_anew(OURS, pool, [])) == [("q", "g0", ("n0",))]
    assert told(formed_anew(OURS, Tight(*pool), [])) == [("q", "g2", ("n2",))]


def test_nothing_is_formed_anew_beside_a_group_that_keeps_no_slo_as_it_is() -> None:
    singles = [trains(f"j{i}", 30) for i in range(4)]
    assert formed_anew(OURS, pool_of(*([each] for each in singles)), []) != []
    late = trains("x", 60), trains("y", 60)
    assert formed_anew(OURS, pool_of(late, *([each] for each in singles)), []) == []


def moving(each: JobRequest) -> int:
    """What it costs that the job moves: its own nodes while it restarts; never nothing."""
    prices = FIVE.rollout[0].nano_usd_per_hour, FIVE.train[0].nano_usd_per_hour
    return max(1, each.restart_ns) * (each.rollout_nodes * prices[0] + each.train_nodes * prices[1])


def lasting(block: Sequence[JobRequest]) -> int:
    """What one rollout and one training node cost until the last of the block ends."""
    return priced([block]) * max(each.steps for each in block) * 100


@given(
    st.lists(
        st.tuples(st.integers(5, 90), st.integers(1, 20), st.sampled_from((0, 1, 30, 300, 2000)), st.integers(1, 2)),
        min_size=2,
        max_size=6,
    )
)
@settings(max_examples=examples(20, 50), deadline=None)
def test_what_is_paid_until_they_end_moves_included_is_the_least_there_is(
    told_of: list[tuple[int, int, int, int]],
) -> None:
    jobs = [
        trains(f"j{i}", train, steps=steps, restart_ns=restart_ns, train_bytes=size)
        for i, (train, steps, restart_ns, size) in enumerate(told_of)
    ]
    pool = pool_of(*([each] for each in jobs))
    moves = formed_anew(OURS, pool, [])
    after = moved(pool, moves).groups.values()
    paid = sum(moving(pool.request(move.job)) for move in moves)
    paid += sum(lasting([pool.request(name) for name in each.members]) for each in after)
    least = min(
        sum(lasting(block) + sum(map(moving, block)) - max(map(moving, block)) for block in each)
        for each in partitions(jobs)
        if all(bears(block) and sum(one.train_bytes for one in block) <= 5 for block in each)
    )
    assert paid == least


def test_at_most_so_many_neighbours_are_looked_at() -> None:
    singles = [trains(f"j{i:02}", 30) for i in range(14)]
    pool = pool_of(*([each] for each in singles))
    moves = formed_anew(OURS, pool, ["g13"])
    # Three make a group.
    assert len(moves) == NEIGHBOURS - -(-NEIGHBOURS // 3)
    assert "j13" in {name for move in moves for name in (move.job, *pool.groups[move.to.group or ""].members)}


def test_only_where_a_cycle_is_one_of_turns() -> None:
    rules = PlacementRules(whole_jobs=True, moves=True)
    assert formed_anew(rules, pool_of((P, Q), (R, S), (T,)), ["g2"]) == []
