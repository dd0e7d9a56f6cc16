"""Ways into groups: just enough nodes, matched training pools, and the composition that each policy is."""

import msgspec
import pytest

from elastic.core.cluster.groups import planned
from elastic.core.cluster.policy import SliceView
from policies.drift import NoDrift, SloAtStake
from policies.placement import PLACEMENTS
from policies.regrouping import brought_together
from policies.tails import LongTail, NoTails
from tests.cluster.conftest import group, job, placed, view


def test_rollout_scaling_takes_just_enough_nodes() -> None:
    a = job("a", 100, 20, slo=1.2, rollout_nodes=2)
    pool = view(group("g", 1, (a, ("n1", "n2"))))
    # One shared node would make its cycle 200; two new ones keep it.
    choice = placed("weave", job("b", 100, 20, slo=1.2, rollout_nodes=2), pool)
    assert (choice.how, choice.rollout, choice.new_rollout, choice.marginal_nano_usd_per_hour) == ("scaled", (), 2, 20)
    # A short rollout fits beside a's on one node or two, and needs none.
    choice = placed("weave", job("c", 20, 10, slo=4.0, rollout_nodes=2), pool)
    assert (choice.how, choice.rollout, choice.cycle_ns) == ("packed", ("n1", "n2"), 120)


def test_training_is_matched_to_the_groups_pool_and_never_scaled() -> None:
    a = job("a", 100, 100, train_nodes=2)
    pool = view(group("g", 2, (a, ("n1",))))
    newcomer = job("b", 100, 100, slo=1.0, train_nodes=1, train_efficiency=1.0)
    choice = placed("weave", newcomer, pool)
    # On two nodes b trains for 50: its own step is 150 in a cycle of 200, which is its solo time.
    assert (choice.group, choice.cycle_ns, choice.new_train) == ("g", 200, 0)
    assert planned(newcomer, 2, pool.spec.train[0]).train_ns == 50
    assert planned(msgspec.structs.replace(newcomer, train_efficiency=0.5), 2, pool.spec.train[0]).train_ns == 67
    assert planned(a, 1, pool.spec.train[0]).train_ns == 200


def test_memory_of_a_node_bounds_its_members() -> None:
    members = tuple(job(name, 10, 10, slo=9.0) for name in "abc")
    pool = view(group("g", 1, *((each, ("n1",)) for each in members)), requests=members)
    choice = placed("ours", job("d", 10, 10, slo=9.0), pool)
    assert (choice.how, choice.new_rollout) == ("scaled", 1)
    choice = placed("ours", job("d", 10, 10, slo=9.0, train_bytes=3), pool)
    assert choice.how == "new"


@pytest.mark.parametrize(("policy", "how"), [("solo", "new"), ("naive", "packed"), ("gavel", "new"), ("weave", "new")])
def test_a_job_that_would_slow_another_beyond_its_slo(policy: str, how: str) -> None:
    pool = view(group("g", 1, (job("a", 100, 100, slo=1.1), ("n1",))))
    choice = placed(policy, job("b", 150, 150, slo=5.0), pool)
    assert choice.how == how


def test_jobs_that_take_turns_by_whole_steps_share_where_both_bear_it() -> None:
    pool = view(group("g", 1, (job("a", 100, 100, slo=2.0), ("n1",))))
    choice = placed("gavel", job("b", 100, 100, slo=2.0), pool)
    assert (choice.how, choice.cycle_ns) == ("packed", 400)


def test_ours_takes_the_fullest_place_of_the_group_that_lives_anyway() -> None:
    long = job("long", 100, 40, slo=2.0, steps=900)
    short = job("short", 100, 40, slo=2.0, steps=5)
    pool = view(group("g1", 1, (short, ("n1",))), group("g2", 1, (long, ("n2",))), requests=(long, short))
    newcomer = job("b", 60, 40, slo=3.0, steps=100)
    choice = placed("ours", newcomer, pool)
    assert choice.group == "g2"
    first = placed("weave", newcomer, pool)
    assert first.group == "g1"


def test_a_tail_moves_to_the_fewest_nodes_only_where_somebody_waits() -> None:
    nodes = ("n1", "n2", "n3", "n4")
    due = SliceView(
        done=80,
        of=100,
        nodes=nodes,
        wanted=nodes,
        waiting_nodes=4,
        waiting_ns=100,
        left_ns=50,
        planned_ns=200,
        shortens_ns=100,
    )
    assert LongTail().keeps(due) == ("n1",)
    assert LongTail().keeps(msgspec.structs.replace(due, done=79)) is None
    assert LongTail().keeps(msgspec.structs.replace(due, waiting_ns=0)) is None
    assert LongTail(done_share=0.5).keeps(msgspec.structs.replace(due, done=60)) == ("n1", "n2")
    assert LongTail().keeps(msgspec.structs.replace(due, nodes=("n1",), wanted=("n1",))) is None
    assert LongTail().keeps(msgspec.structs.replace(due, done=0, of=0)) is None
    # A node is a quarter of what waits: three of them are worth a nanosecond to it, or none.
    worth = msgspec.structs.replace(due, planned_ns=10)
    assert LongTail().keeps(msgspec.structs.replace(worth, waiting_ns=4)) == ("n1",)
    assert LongTail().keeps(msgspec.structs.replace(worth, waiting_ns=2)) is None
    assert LongTail().keeps(msgspec.structs.replace(due, shortens_ns=21)) == ("n1",)
    assert LongTail().keeps(msgspec.structs.replace(due, shortens_ns=20)) is None
    assert NoTails().keeps(due) is None


def test_a_tail_stays_on_devices_for_which_nobody_waits() -> None:
    due = SliceView(
        done=80,
        of=100,
        nodes=("n1", "n2", "n3", "n4"),
        wanted=("n1", "n3"),
        waiting_nodes=2,
        waiting_ns=100,
        left_ns=50,
        planned_ns=200,
        shortens_ns=100,
    )
    assert LongTail().keeps(due) == ("n2",)
    assert LongTail(done_share=0.2).keeps(msgspec.structs.replace(due, done=30)) == ("n1", "n2", "n4")
    # Of what the next job needs the phase has half, and of that half only one device would come free.
    more = msgspec.structs.replace(due, done=30, waiting_nodes=4, planned_ns=250)
    assert LongTail(done_share=0.2).keeps(more) is None


def test_who_has_grown_most_strays_once_an_slo_is_at_stake() -> None:
    a, b = job("a", 100, 100, slo=1.2), job("b", 80, 80, slo=2.0)
    shared = group("g", 1, (a, ("n1",)), (b, ("n1",)))
    assert SloAtStake().strays(shared, {"a": (100, 100), "b": (140, 80)}) is None
    assert SloAtStake().strays(shared, {"a": (101, 100), "b": (150, 80)}) == "b"
    assert SloAtStake().strays(shared, {"b": (150, 80)}) == "b"
    assert SloAtStake().strays(group("h", 1, (a, ("n1",))), {"a": (500, 500)}) is None
    assert NoDrift().strays(shared, {"b": (500, 80)}) is None


def test_nobody_strays_who_has_not_grown_and_whoever_has_by_a_nanosecond_does() -> None:
    a, b = job("a", 100, 100, slo=1.0), job("b", 100, 100)
    assert SloAtStake().strays(group("g", 1, (a, ("n1",)), (b, ("n1",))), {"b": (101, 100)}) == "b"
    tight = group("g", 1, (a, ("n1",)), (job("c", 120, 100), ("n1",)))
    assert SloAtStake().strays(tight, {}) is None


def test_jobs_that_move_into_one_group_each_get_a_node_that_will_be_there() -> None:
    x, y, z = (job(name, rollout, 10, slo=3.0, steps=50) for name, rollout in (("x", 110), ("y", 100), ("z", 80)))
    host = job("host", 180, 20, slo=1.0, steps=50)
    pool = view(
        group("g", 1, (x, ("n1",)), (y, ("n2",)), (z, ("n3",))),
        group("h", 1, (host, ("n4",))),
        requests=(x, y, z, host),
    )
    moves = brought_together(PLACEMENTS["ours"], pool, ["g"])
    assert [move.job for move in moves] == ["x", "y", "z"]
    # z would fit beside y on the node that y brings, which has no name yet.
    assert [(move.to.group, move.to.rollout, move.to.new_rollout) for move in moves] == [("h", (), 1)] * 3
