"""Ways into groups: just enough nodes, matched training pools, and the composition that each policy is."""

from typing import NamedTuple

import msgspec
import pytest

from elastic.cluster import JobRequest, NodeKind, PhasePlan, PoolSpec
from elastic.cluster.cycle import cycle_ns
from elastic.cluster.groups import JobGroup, planned
from elastic.cluster.policy import SliceView
from policies.drift import NoDrift, SloAtStake
from policies.placement import PLACEMENTS
from policies.tails import LongTail, NoTails

SPEC = PoolSpec(
    rollout=NodeKind(gpus=8, memory_bytes=3, nano_usd_per_hour=10),
    train=NodeKind(gpus=8, memory_bytes=5, nano_usd_per_hour=30),
    rollout_nodes=9,
    train_nodes=9,
)


def job(name: str, rollout: int, train: int, slo: float = 2.0, **more: object) -> JobRequest:
    plan = PhasePlan(rollout_ns=rollout, train_ns=train)
    return msgspec.structs.replace(JobRequest(id=name, slo=slo, plan=plan, rollout_bytes=1, train_bytes=1), **more)


class View(NamedTuple):
    """A pool as a policy sees it, without a cluster."""

    groups: dict[str, JobGroup]
    requests: dict[str, JobRequest]
    spec: PoolSpec = SPEC
    free_rollout: int = 9
    free_train: int = 9
    arrivals: int = 1

    def request(self, job: str) -> JobRequest:
        return self.requests[job]

    def remaining_ns(self, job: str) -> int:
        return self.requests[job].steps * 100

    def limit_after_restart_ns(self, job: str) -> int:
        return self.requests[job].limit_ns

    def movable(self, job: str) -> bool:
        return True


def group(name: str, train: int, *pinned: tuple[JobRequest, tuple[str, ...]]) -> JobGroup:
    nodes = tuple(dict.fromkeys(node for _, its in pinned for node in its))
    made = JobGroup(
        name=name,
        train=tuple(f"{name}-t{i}" for i in range(train)),
        rollout=nodes,
        members={request.id: planned(request, train, its) for request, its in pinned},
    )
    made.follow(cycle_ns)
    return made


def view(*groups: JobGroup, requests: tuple[JobRequest, ...] = ()) -> View:
    return View({each.name: each for each in groups}, {request.id: request for request in requests})


def test_rollout_scaling_takes_just_enough_nodes() -> None:
    a = job("a", 100, 20, slo=1.2, rollout_nodes=2)
    pool = view(group("g", 1, (a, ("n1", "n2"))))
    # One shared node would make its cycle 200; two new ones keep it.
    choice = PLACEMENTS["weave"].place(job("b", 100, 20, slo=1.2, rollout_nodes=2), pool)
    assert choice is not None
    assert (choice.how, choice.rollout, choice.new_rollout, choice.marginal_nano_usd_per_hour) == ("scaled", (), 2, 20)
    # A short rollout fits beside a's on one node or two, and needs none.
    choice = PLACEMENTS["weave"].place(job("c", 20, 10, slo=4.0, rollout_nodes=2), pool)
    assert choice is not None
    assert (choice.how, choice.rollout, choice.cycle_ns) == ("packed", ("n1", "n2"), 120)


def test_training_is_matched_to_the_groups_pool_and_never_scaled() -> None:
    a = job("a", 100, 100, train_nodes=2)
    pool = view(group("g", 2, (a, ("n1",))))
    newcomer = job("b", 100, 100, slo=1.0, train_nodes=1, train_efficiency=1.0)
    choice = PLACEMENTS["weave"].place(newcomer, pool)
    assert choice is not None
    # On two nodes b trains for 50: its own step is 150 in a cycle of 200, which is its solo time.
    assert (choice.group, choice.cycle_ns, choice.new_train) == ("g", 200, 0)
    assert planned(newcomer, 2, ()).train_ns == 50
    assert planned(msgspec.structs.replace(newcomer, train_efficiency=0.5), 2, ()).train_ns == 67
    assert planned(a, 1, ()).train_ns == 200


def test_memory_of_a_node_bounds_its_members() -> None:
    members = tuple(job(name, 10, 10, slo=9.0) for name in "abc")
    pool = view(group("g", 1, *((each, ("n1",)) for each in members)), requests=members)
    choice = PLACEMENTS["ours"].place(job("d", 10, 10, slo=9.0), pool)
    assert choice is not None
    assert (choice.how, choice.new_rollout) == ("scaled", 1)
    choice = PLACEMENTS["ours"].place(job("d", 10, 10, slo=9.0, train_bytes=3), pool)
    assert choice is not None
    assert choice.how == "new"


@pytest.mark.parametrize(("policy", "how"), [("solo", "new"), ("naive", "packed"), ("gavel", "new"), ("weave", "new")])
def test_a_job_that_would_slow_another_beyond_its_slo(policy: str, how: str) -> None:
    pool = view(group("g", 1, (job("a", 100, 100, slo=1.1), ("n1",))))
    choice = PLACEMENTS[policy].place(job("b", 150, 150, slo=5.0), pool)
    assert choice is not None
    assert choice.how == how


def test_jobs_that_take_turns_by_whole_steps_share_where_both_bear_it() -> None:
    pool = view(group("g", 1, (job("a", 100, 100, slo=2.0), ("n1",))))
    choice = PLACEMENTS["gavel"].place(job("b", 100, 100, slo=2.0), pool)
    assert choice is not None
    assert (choice.how, choice.cycle_ns) == ("packed", 400)


def test_ours_takes_the_fullest_place_of_the_group_that_lives_anyway() -> None:
    long = job("long", 100, 40, slo=2.0, steps=900)
    short = job("short", 100, 40, slo=2.0, steps=5)
    pool = view(group("g1", 1, (short, ("n1",))), group("g2", 1, (long, ("n2",))), requests=(long, short))
    newcomer = job("b", 60, 40, slo=3.0, steps=100)
    choice = PLACEMENTS["ours"].place(newcomer, pool)
    assert choice is not None
    assert choice.group == "g2"
    first = PLACEMENTS["weave"].place(newcomer, pool)
    assert first is not None
    assert first.group == "g1"


def test_a_tail_moves_to_the_fewest_nodes_only_where_somebody_waits() -> None:
    nodes = ("n1", "n2", "n3", "n4")
    due = SliceView(done=80, of=100, nodes=nodes, waiting_ns=100, left_ns=50)
    assert LongTail().keeps(due) == ("n1",)
    assert LongTail().keeps(msgspec.structs.replace(due, done=79)) is None
    assert LongTail().keeps(msgspec.structs.replace(due, waiting_ns=0)) is None
    assert LongTail(done_share=0.5).keeps(msgspec.structs.replace(due, done=60)) == ("n1", "n2")
    assert LongTail().keeps(msgspec.structs.replace(due, nodes=("n1",))) is None
    assert LongTail().keeps(msgspec.structs.replace(due, done=0, of=0)) is None
    assert NoTails().keeps(due) is None


def test_who_has_grown_most_strays_once_an_slo_is_at_stake() -> None:
    a, b = job("a", 100, 100, slo=1.2), job("b", 80, 80, slo=2.0)
    shared = group("g", 1, (a, ("n1",)), (b, ("n1",)))
    assert SloAtStake().strays(shared, {"a": (100, 100), "b": (140, 80)}) is None
    assert SloAtStake().strays(shared, {"a": (101, 100), "b": (150, 80)}) == "b"
    assert SloAtStake().strays(shared, {"b": (150, 80)}) == "b"
    assert SloAtStake().strays(group("h", 1, (a, ("n1",))), {"a": (500, 500)}) is None
    assert NoDrift().strays(shared, {"b": (500, 80)}) is None


def test_jobs_that_move_into_one_group_each_get_a_node_that_will_be_there() -> None:
    x, y, z = (job(name, rollout, 10, slo=3.0, steps=50) for name, rollout in (("x", 110), ("y", 100), ("z", 80)))
    host = job("host", 180, 20, slo=1.0, steps=50)
    pool = view(
        group("g", 1, (x, ("n1",)), (y, ("n2",)), (z, ("n3",))),
        group("h", 1, (host, ("n4",))),
        requests=(x, y, z, host),
    )
    moves = PLACEMENTS["ours"].relocations(pool, ["g"])
    assert [move.job for move in moves] == ["x", "y", "z"]
    # z would fit beside y on the node that y brings, which has no name yet.
    assert [(move.to.group, move.to.rollout, move.to.new_rollout) for move in moves] == [("h", (), 1)] * 3
