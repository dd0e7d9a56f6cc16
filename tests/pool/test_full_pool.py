"""A full pool: who comes queues with a reason and since when, and is placed once there is room."""

from elastic.core.cluster import JobRequest, NodeKind, PhasePlan, PoolSpec
from elastic.core.cluster import events as e
from elastic.core.cluster.types import JobId, JobState
from elastic.pool.ports import JobEntry
from elastic.pool.standing import standing
from elastic.testing.faults.pool.pool_processes import ModelJob, S
from elastic.testing.faults.pool.pool_worlds import PoolFaults, PoolWorld
from policies.clusters import CLUSTER_POLICIES

PLAN = PhasePlan(rollout_ns=100 * S, train_ns=60 * S)
APART_NS = 40 * S


class Crowd(PoolWorld):
    """Each job's state fills more than half of a node's host memory, so that a node has one of them."""

    def __init__(self, seed: int, *, cancels: bool) -> None:
        self.seen: dict[JobId, tuple[int, str, float, float]] = {}
        """Of queued jobs: until when they were, why, and since and until when as the pool told."""
        self._cancels = cancels
        super().__init__({"ours": CLUSTER_POLICIES["ours"]}, seed, PoolFaults(until_ns=0))

    def _draw_job(self, number: int, spec: PoolSpec) -> None:
        if number:
            return
        kind: NodeKind = spec.rollout
        for each in range(3 * max(spec.rollout_nodes, spec.train_nodes)):
            job = f"job-{each}"
            size = kind.memory_bytes // 2 + 1
            request = JobRequest(id=job, slo=3.0, plan=PLAN, steps=3, rollout_bytes=size, train_bytes=size)
            self.jobs[job] = ModelJob(self, request, PLAN, script=False, both=False)
            self.loop.after(each * APART_NS + 1, lambda request=request: self._submit(request))

    def _submit(self, request: JobRequest) -> None:
        self.to_shell(lambda shell: shell.submit(request, JobEntry(job=request.id, directory="")))
        if self._cancels and request.id == "job-4":
            self.cancelled.add(request.id)
            self.loop.after(5 * S, lambda: self.to_shell(lambda shell: shell.cancel(request.id)))

    def _check(self, event: e.ClusterEvent) -> None:
        super()._check(event)
        assert self.shell is not None
        told = standing(self.shell.cluster)
        waits = {wait.key: wait for wait in told.waits if wait.what == "queue"}
        queued = {job.name: job for job in told.jobs if job.state == "queued"}
        assert waits.keys() == queued.keys()
        for job, record in queued.items():
            wait = waits[job]
            self.seen[job] = (self.loop.now_ns, record.reason, wait.since_s, wait.left_s)


def test_who_finds_the_pool_full_queues_with_a_reason_and_since_when_and_is_placed_once_there_is_room():
    for seed in range(6):
        for cancels in (False, True):
            world = Crowd(seed, cancels=cancels)
            world.run()
            assert world.shell is not None
            records = world.records()
            states = {job: record.state for job, record in records.items()}
            assert {*states.values()} <= {JobState.FINISHED, JobState.CANCELLED}
            assert len(world.seen) >= len(world.jobs) // 3
            for job, (until_ns, reason, since_s, _) in world.seen.items():
                assert "free" in reason, reason
                came_s = int(job.removeprefix("job-")) * APART_NS / S
                assert came_s <= since_s <= came_s + 1, (seed, job)
                assert until_ns / S >= since_s
            placed = [job for job in sorted(world.seen, key=lambda name: int(name[4:])) if states[job] != "cancelled"]
            begun = [next(part.at_ns for part in records[job].story if part.state == "placed") for job in placed]
            assert begun == sorted(begun), "who came first is placed first"
