"""A resident that died starts anew, and no other job's turn waits for it."""

import itertools

import pytest

from elastic.core.cluster import JobRequest, NodeKind, PhasePlan, PoolSpec
from elastic.core.cluster import events as e
from elastic.core.cluster.types import JobId, JobState, NodeId, PhaseKind
from elastic.testing.faults.pool.pool_processes import JobDraw, S
from elastic.testing.faults.pool.pool_worlds import PoolFaults, PoolSetting, PoolWorld

PLAN = PhasePlan(rollout_ns=100 * S, train_ns=60 * S)
SHORTER = PhasePlan(rollout_ns=80 * S, train_ns=48 * S)
STEPS = 14
LATE_NS = 15 * S
"""Messages, parking, and how often a job looks whether it computes."""


def neighbours(seed: int) -> PoolSetting:
    """Two jobs on a small pool, and no faults."""
    kind = NodeKind(gpus=8, memory_bytes=3, nano_usd_per_hour=S)
    requests = [
        JobRequest(id=f"job-{number}", slo=4.0, plan=PLAN, steps=STEPS, rollout_bytes=1, train_bytes=1)
        for number in range(2)
    ]
    return PoolSetting(
        seed=seed,
        policy="ours",
        spec=PoolSpec.uniform(rollout=kind, train=kind, rollout_nodes=1, train_nodes=1),
        jobs=tuple(
            JobDraw(request=request, profile=SHORTER, at_ns=1 + number, steady=True)
            for number, request in enumerate(requests)
        ),
        faults=PoolFaults(until_ns=0),
    )


class Neighbours:
    """A world in which, while the first job rolls out, or the second one does, the second one's rollout resident dies,
    and the next one takes `start_ns` to come up."""

    def __init__(self, seed: int, start_ns: int, *, in_slice: bool) -> None:
        self.stepped: dict[JobId, list[int]] = {}
        self.killed_ns = 0
        self._start_ns, self._jobs = start_ns, ("job-1", "job-0") if in_slice else ("job-0", "job-1")
        self.world = PoolWorld(neighbours(seed), self._watch)
        self.world.excused = 10**9
        self.world.run()

    def _watch(self, event: e.ClusterEvent) -> None:
        if isinstance(event, e.JobProgressed):
            self.stepped.setdefault(event.job, []).append(self.world.loop.now_ns)
        if self.killed_ns or len(self.stepped.get("job-0", ())) <= 3 or "job-1" not in self.stepped:
            return
        assert self.world.shell is not None
        cluster, (inside, waiting) = self.world.shell.cluster, self._jobs
        for permit in cluster.permits.values():
            if permit.job == inside and permit.phase is PhaseKind.ROLLOUT and cluster.jobs[waiting].asked == "rollout":
                self.killed_ns = self.world.loop.now_ns
                self.world.loop.after(1, lambda node=permit.nodes[0]: self._kill(node))

    def _kill(self, node: NodeId) -> None:
        self.world.starts_ns[node, "job-1"] = self._start_ns
        self.world.node_agents[node].kill("job-1")

    def longest_step_ns(self, job: JobId, since_ns: int = 0, until_ns: int = 10**18) -> int:
        """Of the steps that lie in this time."""
        steps = itertools.pairwise(self.stepped[job])
        return max((end_ns - at_ns for at_ns, end_ns in steps if since_ns <= at_ns and end_ns <= until_ns), default=0)


@pytest.mark.parametrize("in_slice", [False, True], ids=["parked", "in its slice"])
@pytest.mark.parametrize("start_s", [5, 150, 2000, 10**6], ids=["soon", "a cycle", "long", "never"])
def test_a_neighbour_goes_on_as_if_alone_while_a_resident_starts_and_as_planned_beyond(start_s: int, in_slice: bool):
    for seed in range(1):
        world = Neighbours(seed, start_s * S, in_slice=in_slice)
        assert {record.state for record in world.world.records().values()} == {JobState.FINISHED}
        assert world.killed_ns
        up_ns = world.killed_ns + min(start_s * S, int(4.0 * PLAN.solo_ns))
        assert world.longest_step_ns("job-0", world.killed_ns, up_ns) <= PLAN.solo_ns + LATE_NS, seed
        under_way = next(end_ns for end_ns in world.stepped["job-0"] if end_ns > world.killed_ns)
        assert under_way - world.killed_ns <= PLAN.solo_ns + 2 * LATE_NS, seed
        planned_ns = 2 * PLAN.rollout_ns
        assert world.longest_step_ns("job-0") <= 1.1 * planned_ns + 2 * LATE_NS, seed
        killed_in = next(end_ns for end_ns in world.stepped["job-1"] if end_ns > world.killed_ns)
        back_ns = world.killed_ns + min(start_s * S, world.world.limits.start_ns + 10 * S)
        assert killed_in <= back_ns + 3 * planned_ns, seed
