"""A full pool: who comes queues with a reason and since when, and is placed once there is room."""

import pytest

from elastic.core.cluster import JobRequest, NodeKind, PhasePlan, PoolSpec
from elastic.core.cluster import events as e
from elastic.core.cluster.types import JobId, JobState
from elastic.pool.standing import standing
from elastic.testing.faults.pool.pool_processes import JobDraw, S
from elastic.testing.faults.pool.pool_worlds import PoolFaults, PoolSetting, PoolWorld

PLAN = PhasePlan(rollout_ns=100 * S, train_ns=60 * S)
APART_NS = 40 * S
NODES = 2
JOBS = 3 * NODES


def crowd(seed: int) -> PoolSetting:
    """Each job's state fills more than half of a node's host memory, so that a node has one of them."""
    kind = NodeKind(gpus=8, memory_bytes=3, nano_usd_per_hour=S)
    requests = [
        JobRequest(id=f"job-{number}", slo=3.0, plan=PLAN, steps=3, rollout_bytes=2, train_bytes=2)
        for number in range(JOBS)
    ]
    return PoolSetting(
        seed=seed,
        policy="ours",
        spec=PoolSpec(rollout=kind, train=kind, rollout_nodes=NODES, train_nodes=NODES),
        jobs=tuple(
            JobDraw(request=request, profile=PLAN, at_ns=number * APART_NS + 1)
            for number, request in enumerate(requests)
        ),
        faults=PoolFaults(until_ns=0),
    )


@pytest.mark.parametrize("cancels", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_who_finds_the_pool_full_queues_with_a_reason_and_since_when_and_is_placed_once_there_is_room(
    seed: int, cancels: bool
):
    seen: dict[JobId, tuple[int, str, float]] = {}

    def watch(_: e.ClusterEvent) -> None:
        assert world.shell is not None
        told = standing(world.shell.cluster)
        waits = {wait.key: wait for wait in told.waits if wait.what == "queue"}
        queued = {job.name: job for job in told.jobs if job.state == "queued"}
        assert waits.keys() == queued.keys()
        for job, record in queued.items():
            seen[job] = (world.loop.now_ns, record.reason, waits[job].since_s)

    world = PoolWorld(crowd(seed), watch)
    if cancels:
        world.loop.at(4 * APART_NS + 5 * S, lambda: world.cancel("job-4"))
    world.run()
    records = world.records()
    assert {record.state for record in records.values()} <= {JobState.FINISHED, JobState.CANCELLED}
    assert len(seen) == JOBS - NODES
    for job, (until_ns, reason, since_s) in seen.items():
        assert "free" in reason
        came_s = int(job.removeprefix("job-")) * APART_NS / S
        assert came_s <= since_s <= came_s + 1
        assert until_ns / S >= since_s
    placed = [job for job in sorted(seen) if records[job].state is not JobState.CANCELLED]
    begun = [next(part.at_ns for part in records[job].story if part.state == "placed") for job in placed]
    assert begun == sorted(begun), "who came first is placed first"
