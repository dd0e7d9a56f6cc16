"""A resident that died starts anew, and no other job's turn waits for it."""

import itertools

import pytest

from elastic.core.cluster import JobRequest, PhasePlan, PoolSpec
from elastic.core.cluster import events as e
from elastic.core.cluster.types import JobId, JobState, NodeId, PhaseKind
from elastic.pool import messages as w
from elastic.pool.ports import JobEntry
from elastic.testing.faults.pool.pool_processes import ModelJob, S
from elastic.testing.faults.pool.pool_worlds import PoolFaults, PoolWorld
from policies.clusters import CLUSTER_POLICIES

PLAN = PhasePlan(rollout_ns=100 * S, train_ns=60 * S)
SHORTER = PhasePlan(rollout_ns=80 * S, train_ns=48 * S)
STEPS = 14
LATE_NS = 15 * S
"""Messages, parking, and how often a job looks whether it computes."""


class _SteadyJob(ModelJob):
    """One that does not think better of what it has asked for, and keeps to its plan."""

    def _ask(self) -> None:
        if self.alive and not self.granted:
            self.say(w.AskPhase(self.phase))


class Neighbours(PoolWorld):
    """Two jobs on one node of each kind, and no faults but one: while the first one rolls out, or the second one does,
    the second one's rollout resident dies, and the next one takes `start_ns` to come up."""

    def __init__(self, seed: int, start_ns: int, *, in_slice: bool) -> None:
        self.stepped: dict[JobId, list[int]] = {}
        self.killed_ns = 0
        self._start_ns, self._in_slice = start_ns, in_slice
        super().__init__({"ours": CLUSTER_POLICIES["ours"]}, seed, PoolFaults(until_ns=0))
        self.excused = 10**9

    def _draw_job(self, number: int, spec: PoolSpec) -> None:
        job = f"job-{number}"
        request = JobRequest(id=job, slo=4.0, plan=PLAN, steps=STEPS, rollout_bytes=1, train_bytes=1)
        if number < 2:
            self.jobs[job] = _SteadyJob(self, request, SHORTER, script=False, both=False)
            entry = JobEntry(job=job, directory="")
            self.loop.after(1 + number, lambda: self.to_shell(lambda shell: shell.submit(request, entry)))

    def _check(self, event: e.ClusterEvent) -> None:
        super()._check(event)
        if isinstance(event, e.JobProgressed):
            self.stepped.setdefault(event.job, []).append(self.loop.now_ns)
        shell = self.shell
        assert shell is not None
        struck = "job-1" if self._in_slice else "job-0"
        if not self.killed_ns and len(self.stepped.get("job-0", ())) > 3 and "job-1" in self.stepped:
            for permit in shell.cluster.permits.values():
                if permit.job == struck and permit.phase is PhaseKind.ROLLOUT and self._other_waits():
                    self.killed_ns = self.loop.now_ns
                    self.loop.after(1, lambda node=permit.nodes[0]: self._kill(node))

    def _other_waits(self) -> bool:
        assert self.shell is not None
        return self.shell.cluster.jobs["job-0" if self._in_slice else "job-1"].asked is PhaseKind.ROLLOUT

    def _kill(self, node: NodeId) -> None:
        self.killed_ns = self.loop.now_ns
        self.starts_ns[node, "job-1"] = self._start_ns
        self.keepers[node].kill("job-1", "killed")

    def longest_step_ns(self, job: JobId, since_ns: int = 0, until_ns: int = 10**18) -> int:
        """Of the steps that lie in this time."""
        steps = itertools.pairwise(self.stepped[job])
        return max((end_ns - at_ns for at_ns, end_ns in steps if since_ns <= at_ns and end_ns <= until_ns), default=0)


@pytest.mark.parametrize("in_slice", [False, True], ids=["parked", "in its slice"])
@pytest.mark.parametrize("start_s", [5, 150, 2000, 10**6], ids=["soon", "a cycle", "long", "never"])
def test_a_neighbour_goes_on_as_if_alone_while_a_resident_starts_and_as_planned_beyond(start_s: int, in_slice: bool):
    for seed in range(4):
        world = Neighbours(seed, start_s * S, in_slice=in_slice)
        world.run()
        assert world.shell is not None
        assert {record.state for record in world.records().values()} == {JobState.FINISHED}
        assert world.killed_ns
        up_ns = world.killed_ns + min(start_s * S, int(4.0 * PLAN.solo_ns))
        assert world.longest_step_ns("job-0", world.killed_ns, up_ns) <= PLAN.solo_ns + LATE_NS, seed
        under_way = next(end_ns for end_ns in world.stepped["job-0"] if end_ns > world.killed_ns)
        assert under_way - world.killed_ns <= PLAN.solo_ns + 2 * LATE_NS, seed
        planned_ns = 2 * PLAN.rollout_ns
        assert world.longest_step_ns("job-0") <= 1.1 * planned_ns + 2 * LATE_NS, seed
        killed_in = next(end_ns for end_ns in world.stepped["job-1"] if end_ns > world.killed_ns)
        back_ns = world.killed_ns + min(start_s * S, world.limits.start_ns + 10 * S)
        assert killed_in <= back_ns + 3 * planned_ns, seed
