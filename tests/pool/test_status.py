"""What a pool tells of itself: bills that sum, plans that hold, refusals in numbers; and asking changes nothing."""

import msgspec
import pytest

from elastic.core.cluster import Cluster, ClusterError, NodeKind, PoolSpec, WaitLimits
from elastic.core.cluster import events as e
from elastic.core.cluster.history import cluster_digest
from elastic.core.cluster.types import BeyondQuota, PhaseKind
from elastic.pool.status import PoolStatus, TurnStatus, bills, plan_of, pool_status, turns_of
from policies.clusters import CLUSTER_POLICIES
from tests.cluster.conftest import THREE_OF_EACH, S, timed_job

ONE_OF_EACH = PoolSpec.uniform(
    rollout=NodeKind(gpus=1, memory_bytes=2, nano_usd_per_hour=2 * S),
    train=NodeKind(gpus=1, memory_bytes=2, nano_usd_per_hour=5 * S),
    rollout_nodes=1,
    train_nodes=1,
)


def cluster_of(spec: PoolSpec, *jobs: str) -> Cluster:
    """A cluster in which these equal jobs run, the first of them with a permit for rollouts."""
    cluster = Cluster(spec, CLUSTER_POLICIES["ours"], WaitLimits(), 0)
    for job in jobs:
        cluster.handle(e.JobSubmitted(request=timed_job(job, slo=2.0)), S)
        cluster.handle(e.JobStarted(job=job, placement=cluster.jobs[job].placement), 2 * S)
    cluster.handle(e.PhaseAsked(job=jobs[0], phase=PhaseKind.ROLLOUT), 3 * S)
    return cluster


def test_bills_and_what_is_nobodys_sum_to_what_the_pool_pays_at_any_time() -> None:
    cluster = cluster_of(THREE_OF_EACH, "one", "two")
    for now_ns in (3 * S, 50 * S, 3_600 * S):
        told = pool_status(cluster, now_ns)
        owed = sum(job.usd for job in told.jobs)
        assert owed + told.usd_unbilled == pytest.approx(told.usd)
        assert told.usd == pytest.approx(3 * (2 + 5) * now_ns / (3_600 * S))
        for node in told.nodes:
            assert sum(node.accounts_s.values()) == pytest.approx(now_ns / S)
        assert msgspec.json.decode(msgspec.json.encode(told), type=PoolStatus) == told


def test_turns_that_are_over_are_told_and_are_no_part_of_the_state() -> None:
    cluster, other = (cluster_of(THREE_OF_EACH, "one") for _ in range(2))
    permit = cluster.jobs["one"].permit
    assert permit is not None
    assert turns_of(cluster) == []
    nodes = cluster.permits[permit].nodes
    for one in (cluster, other):
        one.handle(e.PermitYielded(job="one", permit=permit, finished=True), 13 * S)
    assert turns_of(cluster) == [TurnStatus(node, "one", 3.0, 13.0) for node in nodes]
    other.books.turns.clear()
    assert cluster_digest(cluster) == cluster_digest(other)


def test_a_job_alone_would_have_cost_what_its_steps_take_of_its_own_nodes() -> None:
    cluster = cluster_of(THREE_OF_EACH, "one", "two")
    request, plan = cluster.jobs["one"].request, cluster.jobs["one"].request.plan
    assert plan is not None
    cluster.handle(e.JobProgressed(job="one", steps_done=3), 60 * S)
    one, two = pool_status(cluster).jobs
    hours = 3 * plan.solo_ns / (3_600 * S)
    assert one.usd_alone == pytest.approx(hours * cluster.spec.price_alone(request) / S)
    assert two.usd_alone == 0.0


def test_a_bill_that_is_asked_for_is_the_one_that_comes() -> None:
    cluster = cluster_of(THREE_OF_EACH, "one", "two")
    foretold = bills(cluster, 60 * S)
    cluster.handle(e.JobFinished(job="one"), 60 * S)
    assert {job: record.billed for job, record in cluster.jobs.items()} == foretold
    assert min(foretold.values()) > 0


def test_asking_changes_nothing() -> None:
    cluster = cluster_of(THREE_OF_EACH, "one", "two")
    before = cluster_digest(cluster)
    pool_status(cluster, 500 * S)
    plan_of(cluster, timed_job("three", slo=3.0))
    assert cluster_digest(cluster) == before


def test_a_plan_says_where_at_what_price_and_how_slow() -> None:
    packed = plan_of(cluster_of(THREE_OF_EACH, "one"), timed_job("two", slo=1.5)).placement
    assert packed is not None
    assert packed.how == "packed"
    assert packed.members == ["one"]
    assert packed.usd_per_hour == 0.0
    assert packed.planned_slowdown == pytest.approx(1.0)
    new = plan_of(cluster_of(THREE_OF_EACH, "one", "two"), timed_job("three", slo=1.0))
    assert new.placement is not None
    assert new.placement.group is None
    assert new.placement.usd_per_hour == pytest.approx(7.0)
    assert [refusal.group for refusal in new.refusals] == ["group-1"]
    assert new.refusals[0].needed > new.refusals[0].allowed


def test_a_plan_for_who_is_queued_timed_or_rejected() -> None:
    cluster = cluster_of(ONE_OF_EACH, "one", "two")
    queued = plan_of(cluster, timed_job("three", slo=4.0))
    assert queued.placement is None
    assert "0 and 0 are free" in queued.why
    assert queued.refusals[0].reason.startswith("host memory of a training node")
    timed = plan_of(cluster, timed_job("three", plan=None))
    assert timed.placement is None
    assert "would be timed first" in timed.why
    with pytest.raises(ClusterError, match="it fits no rollout node: needed 3 bytes of host memory; largest: 2"):
        plan_of(cluster, timed_job("three", rollout_bytes=3))
    with pytest.raises(ClusterError, match="needed 2 GPUs for its trainer's ranks, on train nodes; largest: 1"):
        plan_of(cluster, timed_job("three", train_gpus=2))


def test_who_waits_for_room_knows_its_place_and_moves_up() -> None:
    cluster = cluster_of(ONE_OF_EACH, "one", "two")
    for job in ("three", "four"):
        cluster.handle(e.JobSubmitted(request=timed_job(job, slo=4.0)), 4 * S)
    assert [job.queue_place for job in pool_status(cluster, 5 * S).jobs] == [None, None, 1, 2]
    cluster.handle(e.CancelRequested(job="three"), 6 * S)
    quota = BeyondQuota("agents", "it has 1 of 1")
    for job in ("five", "six"):
        cluster.handle(e.JobSubmitted(request=timed_job(job), quota=quota), 6 * S)
    jobs = pool_status(cluster, 7 * S).jobs
    assert [job.queue_place for job in jobs] == [None, None, None, 1, 1, 2]
    assert [job.beyond_quota for job in jobs] == [False] * 4 + [True] * 2
    assert plan_of(cluster, timed_job("seven"), quota).why == "it would wait for its quota: it has 1 of 1"


def test_what_would_be_saved_if_a_job_left() -> None:
    jobs = {job.name: job for job in pool_status(cluster_of(THREE_OF_EACH, "one", "two")).jobs}
    assert jobs["one"].saved_if_left_usd_per_hour == 0.0
    assert jobs["one"].planned_slowdown == pytest.approx(1.0)
    alone = pool_status(cluster_of(ONE_OF_EACH, "one")).jobs
    assert alone[0].saved_if_left_usd_per_hour == pytest.approx(7.0)
