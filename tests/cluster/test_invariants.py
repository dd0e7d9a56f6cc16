"""The checker finds what is wrong: each invariant of a pool at work, broken by hand."""

from collections.abc import Callable
from functools import partial

import msgspec
import pytest

from elastic.core.cluster import Cluster
from elastic.core.cluster import events as e
from elastic.core.cluster.invariants import ClusterInvariantBroken, check
from elastic.core.cluster.types import DeviceAccount, JobState, PhaseKind, Seat
from tests.cluster.conftest import Driver, timed_job

ROLLOUT, TRAIN = PhaseKind.ROLLOUT, PhaseKind.TRAIN


def at_work() -> Driver:
    """a rolls out, b waits for its time slice, c is alone and waited for, d is placed, q queued, p profiled, s to
    stop."""
    pool = Driver()
    pool.run(timed_job("a"), timed_job("b"), timed_job("c", 300, 300, slo=1.0), timed_job("s", 500, 100, slo=1.0))
    pool.ask("a", ROLLOUT, 0)
    pool.ask("b", ROLLOUT, 1)
    pool.tell(e.JobSubmitted(request=timed_job("d", 40, 20, slo=1.0, train_nodes=3)), 2)
    pool.tell(e.JobSubmitted(request=msgspec.structs.replace(timed_job("p"), plan=None)), 3)
    pool.tick(9)
    return pool


def sets(kind: str, name: str, **fields: object) -> Callable[[Cluster], None]:
    def do(cluster: Cluster) -> None:
        for key, value in fields.items():
            setattr(getattr(cluster.state, kind)[name], key, value)

    return do


set_job, set_node, set_group = (partial(sets, kind) for kind in ("jobs", "nodes", "groups"))


def do(*steps: Callable[[Cluster], object]) -> Callable[[Cluster], None]:
    def all_of(cluster: Cluster) -> None:
        for step in steps:
            step(cluster)

    return all_of


def permit(cluster: Cluster) -> int:
    number = cluster.state.jobs["a"].permit
    assert number is not None
    return number


def test_a_pool_at_work_is_in_order() -> None:
    cluster = at_work().cluster
    check(cluster)
    assert {name: record.state for name, record in cluster.jobs.items()} == {
        "a": JobState.RUNNING,
        "b": JobState.RUNNING,
        "c": JobState.RUNNING,
        "s": JobState.RUNNING,
        "d": JobState.QUEUED,
        "p": JobState.PROFILING,
    }


@pytest.mark.parametrize(
    ("breaks", "words"),
    [
        (set_job("a", permit=7), "permit 1 is not the one that job a has"),
        (set_node("rollout-1", permit=None, user=None), "permit 1 is for rollout-1, which is not held under it"),
        (set_node("rollout-1", permit=2), "rollout-1 is held under permit 2, which is not for it"),
        (set_node("rollout-3", permit=1, user="a"), "rollout-3 is held under permit 1, which is not for it"),
        (lambda cluster: cluster.timers.clear("permit", str(permit(cluster))), "permit 1 has no deadline"),
        (lambda cluster: setattr(cluster.state, "permit_numbers", 0), "permit 1 was never given"),
        (set_node("rollout-1", user=None), "rollout-1: the holder of its permit is its user"),
        (set_node("rollout-2", user="c"), "rollout-2: the holder of its permit is its user"),
        (set_job("a", state=JobState.PLACED), "job a is placed and has a permit"),
        (lambda cluster: cluster.state.free[ROLLOUT].update({"rollout-1": None}), "rollout-1 is both free and of a"),
        (set_node("rollout-1", group=None), "rollout-1 is neither free nor of a group"),
        (set_node("rollout-1", group="group-2"), "rollout-1 is listed in group-1 and is not of it"),
        (set_node("rollout-1", residents={"a": 3, "b": 3}), "rollout-1 has 6 bytes of states; its host memory is 5"),
        (
            lambda cluster: cluster.state.nodes["rollout-1"].residents.pop("b"),
            "job b is pinned to rollout-1 without a state there",
        ),
        (
            lambda cluster: cluster.state.nodes["rollout-1"].residents.update({"c": 1}),
            "job c has a state on rollout-1, where it is no member",
        ),
        (set_group("group-1", members={}), "group-1 has no member"),
        (set_group("group-1", train=()), "group-1 has no training node"),
        (set_job("b", seat=None), "job b is running and has no place"),
        (set_job("d", seat=Seat("group-1", ("rollout-1",))), "job d is queued and has a place"),
        (set_job("b", reserved=Seat("group-2", ("rollout-2",))), "a place is kept for job b, which was not told to"),
        (set_job("b", seat=Seat("group-1", ("rollout-2",))), "members are"),
        (lambda cluster: cluster.timers.clear("queue", "d"), "job d is queued without a deadline"),
        (lambda cluster: cluster.timers.clear("profile", "p"), "job p is profiling without a deadline"),
        (set_job("c", stopping=True), "job c is to stop without a deadline"),
        (lambda cluster: cluster.timers.set("start", "c", 0, 10**18), "c is waited for (start), and nobody needs it"),
        (lambda cluster: cluster.timers.set("queue", "c", 0, 10**18), "c is waited for (queue), and nobody needs it"),
        (lambda cluster: cluster.timers.set("stop", "c", 0, 10**18), "c is waited for (stop), and nobody needs it"),
        (
            lambda cluster: cluster.timers.set("time slice", "b", 0, 10**18),
            "b is waited for (time slice), and nobody needs it",
        ),
        (
            lambda cluster: cluster.timers.set("time slice", "a", 0, 10**18),
            "a is waited for (time slice), and nobody needs it",
        ),
        (lambda cluster: cluster.timers.set("permit", "9", 0, 10**18), "9 is waited for (permit), and nobody"),
        (lambda cluster: cluster.timers.set("yield", "1", 0, 10**18), "1 is waited for (yield), and nobody needs it"),
        (
            do(
                set_job("a", permit=None),
                lambda cluster: cluster.state.permits.clear(),
                set_node("rollout-1", permit=None, user=None),
                lambda cluster: cluster.timers.clear("permit", "1"),
            ),
            "b in group-1 wait for a time slice that nobody has",
        ),
        (
            set_node("rollout-1", accounts_ns={DeviceAccount.SLICE: 5}),
            "the accounts of rollout-1 are not its time",
        ),
        (
            set_node("rollout-3", accounts_ns={DeviceAccount.SLICE: -5, DeviceAccount.IDLE: 5}),
            "an account of rollout-3 is below zero",
        ),
        (lambda cluster: setattr(cluster.state, "pool_billed", cluster.state.pool_billed + 1), "bills are"),
        (set_job("a", billed=1), "bills are"),
        (set_group("group-1", cycle_ns=1), "the cycle of group-1 is 1; of its members it is 200000000000"),
        (
            lambda cluster: setattr(cluster.state.groups["group-1"].members["a"], "limit_ns", 7),
            "job a bears 7",
        ),
    ],
)
def test_the_checker_says_what_is_wrong(breaks: Callable[[Cluster], object], words: str) -> None:
    cluster = at_work().cluster
    breaks(cluster)
    with pytest.raises(ClusterInvariantBroken) as broken:
        check(cluster)
    assert words in str(broken.value)


def test_a_policy_that_keeps_no_slo_is_not_held_to_one() -> None:
    cluster = at_work().cluster
    cluster.state.groups["group-1"].members["a"].limit_ns = 7
    check(cluster, slos=False)
