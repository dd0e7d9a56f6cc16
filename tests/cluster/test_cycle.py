"""How long a cycle lasts: against a simulation of the schedule, and what a fixed order promises."""

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.core.cluster.cycle import cycle_ns, load_ns, shortest_cycle_ns, whole_jobs_ns
from elastic.core.cluster.groups import PlannedMember
from tests.seeds import examples


def member(job: str, rollout: int, train: int, sync: int, nodes: tuple[str, ...]) -> PlannedMember:
    return PlannedMember(
        job=job,
        rollout_ns=rollout,
        train_ns=train,
        sync_ns=sync,
        solo_ns=rollout + train + sync,
        limit_ns=10**9,
        nodes=nodes,
        rollout_bytes=0,
        train_bytes=0,
    )


def members_on(draw: st.DrawFn, nodes: int, most: int, sync: int = 5) -> list[PlannedMember]:
    found: list[PlannedMember] = []
    for i in range(draw(st.integers(1, 5))):
        chosen = draw(st.sets(st.integers(0, nodes - 1), min_size=1, max_size=most))
        rollout, train = draw(st.integers(1, 40)), draw(st.integers(1, 40))
        found.append(
            member(f"j{i}", rollout, train, draw(st.integers(0, sync)), tuple(f"n{n}" for n in sorted(chosen)))
        )
    return found


@st.composite
def on_several_nodes(draw: st.DrawFn) -> list[PlannedMember]:
    return members_on(draw, 4, 3)


@st.composite
def on_one_node_each(draw: st.DrawFn) -> list[PlannedMember]:
    return members_on(draw, 3, 1, 0)


def scheduled_ends(members: Sequence[PlannedMember], cycles: int, shorter: Sequence[float] = ()) -> list[list[float]]:
    """When each member's training ends, cycle by cycle, in the fixed order; phases are `shorter` in turn."""
    free: dict[str, float] = {}
    trainer, ready = 0.0, [0.0] * len(members)
    ends: list[list[float]] = []
    factor = iter(shorter)
    for _ in range(cycles):
        rolled: list[float] = []
        for i, each in enumerate(members):
            begin = max([ready[i], *(free.get(node, 0.0) for node in each.nodes)])
            end = begin + each.rollout_ns * next(factor, 1.0)
            for node in each.nodes:
                free[node] = end
            rolled.append(end)
        row: list[float] = []
        for i, each in enumerate(members):
            trainer = max(trainer, rolled[i]) + each.train_ns * next(factor, 1.0)
            ready[i] = trainer + each.sync_ns
            row.append(trainer)
        ends.append(row)
    return ends


@given(on_several_nodes())
@settings(max_examples=examples(24, 60), deadline=None)
def test_a_cycle_lasts_as_long_as_the_schedule_says(members: list[PlannedMember]) -> None:
    # After a start of at most some cycles the schedule repeats every few cycles: 60 is a multiple of their numbers.
    ends = scheduled_ends(members, 240)
    mean = (ends[-1][0] - ends[-61][0]) / 60
    found = cycle_ns(members)
    assert found - 1 < mean <= found
    assert shortest_cycle_ns(members) <= found <= whole_jobs_ns(members)


@given(on_one_node_each())
@settings(max_examples=examples(16, 40), deadline=None)
def test_with_one_rollout_node_for_each_the_bounds_are_the_cycle(members: list[PlannedMember]) -> None:
    ends = scheduled_ends(members, 240)
    assert (ends[-1][0] - ends[-61][0]) / 60 == cycle_ns(members) == shortest_cycle_ns(members)


def test_synchronisation_that_holds_no_node_can_make_a_cycle_longer_than_the_bounds() -> None:
    members = [member(name, 1, 1, 0, ("n",)) for name in "ab"] + [
        member("c", 1, 1, 3, ("n",)),
        member("d", 2, 2, 0, ("n",)),
    ]
    assert shortest_cycle_ns(members) == 5
    # Two rounds take 11: c's next rollout waits for its weights, and d's for c's.
    assert cycle_ns(members) == 6


def test_rollouts_over_several_nodes_follow_one_another_though_no_node_has_them_all() -> None:
    # B on nodes 1 and 2, C on 2 and 3, D on 3 and 1.
    members = [member("B", 10, 1, 0, ("1", "2")), member("C", 10, 1, 0, ("2", "3")), member("D", 10, 1, 0, ("3", "1"))]
    assert load_ns(members) == 20
    assert cycle_ns(members) == 30


@given(on_several_nodes(), st.lists(st.floats(0.1, 1.0), min_size=60, max_size=60))
@settings(max_examples=examples(16, 40), deadline=None)
def test_in_a_fixed_order_whoever_ends_early_delays_nobody(members: list[PlannedMember], shorter: list[float]) -> None:
    planned, actual = scheduled_ends(members, 8), scheduled_ends(members, 8, shorter)
    assert all(
        early <= late + 1e-6 for a, p in zip(actual, planned, strict=True) for early, late in zip(a, p, strict=True)
    )


def test_first_come_first_served_a_phase_that_ends_early_delays_another() -> None:
    """The queue per node of Weave §5.1: B ends early, trains before A, and A's next step is later than planned."""

    def fifo(rollout_b: int) -> int:
        # A (9 + 2) and B (10 + 8) roll out side by side; whoever comes first to the one trainer trains first.
        arrivals = sorted([(9, "A", 2), (rollout_b, "B", 8)])
        at, ends = 0, dict[str, int]()
        for arrival, job, train in arrivals:
            at = max(at, arrival) + train
            ends[job] = at
        return ends["A"]

    assert fifo(10) == 11
    assert fifo(5) == 15
