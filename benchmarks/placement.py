"""How long a decision takes, with so many jobs on the pool, as Weave's Table 5 asks. Computed on one core.

The pool is brought to so many jobs by arrivals (phases and SLOs of Weave's Table 6, mixed), then keeps changing: a job
leaves, another comes, and the arrival's whole way through the cluster is timed, its bills included. `regroup_ms` is the
look for moves after it, which no arrival waits for. `optimum_ms` is the time of a proved optimum of so many jobs (the
solver's and that of making its problem); `--quick` has none beyond 5. `theirs_ms` are Weave's printed figures.
"""

import gc
import time
from random import Random

from benchmarks._common import PRINTED, Arguments, Figures, benchmark
from benchmarks._optimum import Optimiser
from elastic.core.cluster import Cluster, WaitLimits
from elastic.core.cluster import commands as c
from elastic.core.cluster import events as e
from elastic.core.cluster.types import JobState
from elastic.simulation.jobs.workloads import from_trace, pool_of
from policies.clusters import CLUSTER_POLICIES
from traces.jobs import TracedJob

SIZES = (5, 9, 13, 100, 500, 1000, 2000)
OPTIMA = (5, 9, 13)
CHANGES, QUICK_CHANGES = 2000, 200
DURATION_S = 50_000.0
SEED = 1


class Changing:
    """A pool with so many jobs that keeps changing."""

    def __init__(self, policy: str, jobs: int, changes: int) -> None:
        trace = [TracedJob(float(i), DURATION_S * (0.1 + Random(i).random())) for i in range(jobs + changes)]
        self.requests = [arrival.request for arrival in from_trace(trace, "mixed", (1.0, 2.0), SEED)]
        self.cluster = Cluster(pool_of(5), CLUSTER_POLICIES[policy], WaitLimits(), 0)
        self._rng, self._jobs, self._now_ns = Random(SEED), jobs, 0
        for request in self.requests[:jobs]:
            self.submit(request.id)
            if jobs <= 100:
                self.look_for_moves()

    def submit(self, job: str) -> float:
        """How long the arrival took, in milliseconds."""
        request = self.requests[int(job.removeprefix("job-")) - 1]
        self._now_ns += 1_000_000_000
        began = time.perf_counter()
        out = self.cluster.handle(e.JobSubmitted(request=request), self._now_ns)
        took_ms = (time.perf_counter() - began) * 1e3
        for command in out:
            if isinstance(command, c.StartJob):
                self.cluster.handle(e.JobStarted(job=command.job, placement=command.placement), self._now_ns)
        return took_ms

    def leave(self) -> None:
        self._now_ns += 1_000_000_000
        running = [job for job, record in self.cluster.jobs.items() if record.state is JobState.RUNNING]
        self.cluster.handle(e.JobFinished(job=self._rng.choice(running)), self._now_ns)

    def look_for_moves(self) -> float:
        """The next wake-up, and the moves carried out at once; the wake-up's time in milliseconds."""
        self._now_ns += 2
        began = time.perf_counter()
        out = self.cluster.handle(e.TimePassed(), self._now_ns)
        took_ms = (time.perf_counter() - began) * 1e3
        for command in out:
            if isinstance(command, c.StopJob):
                for start in self.cluster.handle(e.JobStopped(job=command.job, steps_done=0), self._now_ns):
                    if isinstance(start, c.StartJob):
                        self.cluster.handle(e.JobStarted(job=start.job, placement=start.placement), self._now_ns)
        return took_ms


def shares(times_ms: list[float]) -> dict[str, float]:
    ordered = sorted(times_ms)
    return {"p50": ordered[len(ordered) // 2], "p99": ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]}


def decisions(policy: str, jobs: int, changes: int) -> tuple[dict[str, float], dict[str, float], int]:
    pool = Changing(policy, jobs, changes)
    latency_ms, regroup_ms = list[float](), list[float]()
    gc.collect()
    gc.freeze()
    for request in pool.requests[jobs:]:
        pool.leave()
        regroup_ms.append(pool.look_for_moves())
        latency_ms.append(pool.submit(request.id))
        regroup_ms.append(pool.look_for_moves())
    gc.unfreeze()
    return shares(latency_ms), shares(regroup_ms), len(pool.cluster.groups)


def optimum_ms(jobs: int) -> float:
    pool = Changing("ours", jobs, 0)
    requests = {request.id: request for request in pool.requests}
    began = time.perf_counter()
    found = Optimiser(requests, pool.cluster.spec, saturation=False, jobs_max=jobs).of(frozenset(requests))
    assert found.proven, "a bound is no optimum"
    return (time.perf_counter() - began) * 1e3


def main(arguments: Arguments) -> Figures:
    quick = arguments.quick
    changes = QUICK_CHANGES if quick else CHANGES
    found: dict[str, Figures] = {"latency_ms": {}, "regroup_ms": {}, "weave_latency_ms": {}, "groups": {}}
    for jobs in SIZES:
        key = str(jobs)
        found["latency_ms"][key], found["regroup_ms"][key], found["groups"][key] = decisions("ours", jobs, changes)
        if not quick or jobs == SIZES[-1]:
            found["weave_latency_ms"][key], _, _ = decisions("weave", jobs, changes)
    optima = {str(jobs): optimum_ms(jobs) if jobs <= OPTIMA[0] or not quick else None for jobs in OPTIMA}
    return {
        "grain": "computed",
        **found,
        "optimum_ms": optima,
        **PRINTED["weave"]["decisions"],
    }


if __name__ == "__main__":
    benchmark(__doc__, main)
