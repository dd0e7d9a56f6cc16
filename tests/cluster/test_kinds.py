"""Pools of several kinds of nodes: where jobs go, what they pay, and what follows if a site is away."""

import msgspec
import pytest

from elastic.core.cluster import ClusterError, JobRequest, NodeKind, PoolSpec
from elastic.core.cluster import events as e
from elastic.core.cluster.types import NS_PER_HOUR, WHOLE_MAX, JobState, PhaseKind
from tests.cluster.conftest import Driver, S, timed_job


def kind(name: str, usd: int, nodes: int, site: str = "", **more: int) -> NodeKind:
    node = NodeKind(name=name, nodes=nodes, site=site, gpus=8, memory_bytes=5, nano_usd_per_hour=usd * S)
    return msgspec.structs.replace(node, **more)


TWO_SITES = PoolSpec(
    rollout=(kind("here", 4, 2, "a"), kind("far", 2, 2, "b")),
    train=(kind("trainers", 9, 2, "a"), kind("spare", 6, 1, "b", memory_bytes=1)),
)


def pool(policy: str = "solo", spec: PoolSpec = TWO_SITES) -> Driver:
    return Driver(policy, spec)


def places(driver: Driver, name: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    seat = driver.cluster.jobs[name].seat
    assert seat is not None
    return seat.rollout, driver.cluster.groups[seat.group].train


def test_a_job_gets_the_cheapest_nodes_that_fit_from_any_site_and_trains_at_one() -> None:
    shared = pool()
    shared.run(timed_job("large", rollout_nodes=3, train_nodes=2, train_bytes=1))
    assert places(shared, "large") == (("far-1", "far-2", "here-1"), ("trainers-1", "trainers-2"))
    shared.run(timed_job("small"))
    assert places(shared, "small") == (("here-2",), ("spare-1",))
    assert shared.cluster.price_per_hour() == (2 + 2 + 4 + 9 + 9 + 4 + 6) * S
    assert shared.cluster.dry_run(timed_job("third"))[0] is None


def test_among_equals_the_nodes_at_the_training_site_come_first() -> None:
    spec = PoolSpec(rollout=(kind("far", 2, 2, "b"), kind("here", 2, 2, "a")), train=(kind("trainers", 9, 2, "a"),))
    shared = pool("ours", spec)
    shared.run(timed_job("one"))
    assert places(shared, "one") == (("here-1",), ("trainers-1",))


def test_a_job_is_billed_the_nodes_that_it_has() -> None:
    shared = pool()
    shared.run(timed_job("cheap"), timed_job("dear", rollout_nodes=3))
    shared.tell(e.JobFinished(job="cheap"), 3600)
    shared.tell(e.JobFinished(job="dear"), 3600)
    owed = {name: record.billed / NS_PER_HOUR / S for name, record in shared.cluster.jobs.items()}
    assert owed == {"cheap": 2 + 6, "dear": 2 + 4 + 4 + 9}


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (timed_job("job", rollout_nodes=5), "needed 5 rollout nodes; largest: 4"),
        (timed_job("job", train_nodes=3), "needed 3 train nodes of one kind; largest: 2"),
        (
            timed_job("job", train_gpus=17),
            "needed 17 GPUs for its trainer's ranks, on train nodes of one kind; largest: 16",
        ),
        (timed_job("job", rollout_bytes=6), "needed 6 bytes of host memory; largest: 5"),
        (timed_job("job", rollout_gpus=9), "needed 9 GPUs for a worker; largest: 8"),
    ],
)
def test_a_job_larger_than_any_site_is_rejected_with_what_is_the_largest(request_: JobRequest, words: str) -> None:
    with pytest.raises(ClusterError, match=words):
        pool().cluster.dry_run(request_)


def test_jobs_of_a_site_that_vanishes_wait_with_the_reason_and_go_on_when_it_is_back() -> None:
    shared = pool()
    shared.run(timed_job("one", train_bytes=2), timed_job("two"))
    assert places(shared, "two") == (("far-2",), ("spare-1",))
    shared.tell(e.NodeLost(node="spare-1"), 10)
    assert places(shared, "two")[1] == ("trainers-2",), "it moves while there is room"
    for node in ("trainers-1", "trainers-2"):
        shared.tell(e.NodeLost(node=node), 20)
    waiting = shared.cluster.jobs["one"]
    assert waiting.state is JobState.QUEUED
    assert waiting.reason.endswith("all nodes are away of trainers at site a, spare at site b")
    shared.tell(e.NodeJoined(node="trainers-1", kind="trainers"), 30)
    assert places(shared, "one")[1] == ("trainers-1",)


def test_what_waits_is_told_of_the_free_nodes_that_fit_it() -> None:
    shared = pool()
    shared.run(*(timed_job(f"job-{number}", train_bytes=2) for number in range(3)))
    assert " 1 rollout and 1 train nodes for one of its own 2 and 0 are free" in shared.cluster.jobs["job-2"].reason


def test_a_job_that_is_larger_than_any_pool_would_pay_for_all_that_it_asks_for() -> None:
    most = JobRequest(id="job", slo=2.0, rollout_nodes=WHOLE_MAX, train_nodes=3)
    assert TWO_SITES.price_alone(most) == WHOLE_MAX * 2 * S + 3 * 6 * S


@pytest.mark.parametrize("policy", ["ours", "weave", "gavel", "random", "most_idle", "naive"])
def test_a_worker_of_several_gpus_is_on_nodes_that_have_them(policy: str) -> None:
    spec = PoolSpec(rollout=(kind("pair", 4, 1, gpus=2), kind("one", 2, 2, gpus=1)), train=(kind("trainers", 9, 2),))
    shared = pool(policy, spec)
    shared.run(timed_job("small", 40, 20, slo=9.0), timed_job("wide", 40, 20, slo=9.0, rollout_gpus=2))
    assert places(shared, "wide")[0] == ("pair-1",)
    with pytest.raises(ClusterError, match="needed 2 rollout nodes; largest: 1"):
        shared.cluster.dry_run(timed_job("wider", rollout_nodes=2, rollout_gpus=2))


def test_a_group_that_cannot_grow_says_how_many_gpus_its_nodes_have() -> None:
    spec = PoolSpec(rollout=(kind("one", 2, 1, gpus=1), kind("pair", 4, 1, gpus=2)), train=(kind("trainers", 9, 2),))
    shared = pool("gavel", spec)
    shared.run(timed_job("small", slo=9.0))
    (refusal,) = shared.cluster.dry_run(timed_job("wide", slo=9.0, rollout_gpus=2))[1]
    assert str(refusal) == "group-1: GPUs of its largest rollout node: 2; allowed: 1"


@pytest.mark.parametrize("policy", ["ours", "weave", "gavel", "random", "most_idle", "naive"])
def test_jobs_that_share_keep_within_the_memory_of_each_kind(policy: str) -> None:
    spec = PoolSpec(rollout=(kind("wide", 4, 2), kind("narrow", 2, 2, memory_bytes=1)), train=(kind("trainers", 9, 2),))
    shared = pool(policy, spec)
    jobs = [timed_job(f"job-{number}", 40, 20, slo=9.0, rollout_bytes=1 + number % 2) for number in range(5)]
    shared.run(*jobs)
    held = {node.id: sum(node.residents.values()) for node in shared.cluster.state.nodes.values()}
    assert all(held[node] <= shared.cluster.kind(node).memory_bytes for node in held)
    assert all(shared.cluster.jobs[job.id].seat is not None for job in jobs[:2])
    rollouts = {node for job in jobs if (seat := shared.cluster.jobs[job.id].seat) for node in seat.rollout}
    assert any(shared.cluster.state.nodes[node].phase is PhaseKind.ROLLOUT for node in rollouts)


def test_a_job_whose_gpus_and_memory_are_on_nodes_of_different_kinds_is_rejected_with_both() -> None:
    few = NodeKind(name="few", gpus=1, memory_bytes=9, nano_usd_per_hour=1)
    many = NodeKind(name="many", gpus=8, memory_bytes=4, nano_usd_per_hour=1)
    shared = Driver(spec=PoolSpec(rollout=(msgspec.structs.replace(few, name="rollout"),), train=(few, many)))
    words = "2 GPUs for its trainer's ranks, on train nodes of one kind with 5 bytes of host memory; largest: 1"
    with pytest.raises(ClusterError, match=words):
        shared.cluster.dry_run(timed_job("job", train_gpus=2, train_bytes=5))
