"""Simulated pools of many jobs: a workload file in, a report out. The same `Cluster` as live, on virtual time."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from pydantic import BaseModel, ConfigDict, Field

from elastic.compose.pool_config import PoolNodesConfig, cluster_policies, job_request, one_or_several, pool_spec
from elastic.config import ConfigError, JobNeeds, JobPlanConfig, read_sections, validate
from elastic.core.cluster import ClusterError, NodeKind, PoolSpec
from elastic.report.jobs import NodeSlice, PoolReport
from elastic.report.pool import history_of, pool_report
from elastic.simulation.jobs.phases import Arrival, phased
from elastic.simulation.jobs.workloads import PROFILES, RESTART_S, from_trace
from elastic.simulation.jobs.world import JobsWorld, S
from traces import TraceError, find
from traces.jobs import read_jobs

OPTIMA = ("optimum", "optimum_unsaturated")

AtLeastOne = Annotated[int, Field(ge=1)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class PoolNodes(PoolNodesConfig):
    """Nodes of one kind, by default as large as a real one is."""

    nodes: AtLeastOne
    gpus: AtLeastOne = 8
    memory_gb: Annotated[float, Field(ge=0)] = 1000.0


SeveralNodes = Annotated[tuple[PoolNodes, ...], one_or_several(PoolNodes), Field(min_length=1)]


class WorkloadPool(_Part):
    rollout: SeveralNodes
    train: SeveralNodes


class WorkloadJob(JobNeeds, JobPlanConfig):
    """One job; its phases are planned at its token limit, and last `shortest` to 1 of that."""

    name: str
    at_s: float = 0.0
    slo: float
    steps: AtLeastOne
    rollout_memory_gb: Annotated[float, Field(ge=0)] = 0.0
    train_memory_gb: Annotated[float, Field(ge=0)] = 0.0
    restart_s: Annotated[float, Field(ge=0)] = float(RESTART_S)
    shortest: Annotated[float, Field(gt=0, le=1)] = 1.0


class WorkloadTrace(_Part):
    """Jobs from a trace's arrivals and durations, one node of each kind for each; `residents` fit on a node."""

    name: str
    profile: str = "mixed"
    slo: tuple[float, float] = (1.0, 2.0)
    jobs: AtLeastOne = 300
    residents: AtLeastOne = 5
    shortest: Annotated[float, Field(gt=0, le=1)] = 1.0


class Workload(_Part):
    seed: int = 0
    pool: WorkloadPool
    jobs: list[WorkloadJob] = []
    trace: WorkloadTrace | None = None


def load_workload(path: Path) -> Workload:
    """Raises `ConfigError` that names the file, the key, what was found and what is allowed."""
    workload = validate(Workload, read_sections(path), str(path))
    if bool(workload.jobs) == (workload.trace is not None):
        raise ConfigError(
            f"{path}: found {'both' if workload.jobs else 'neither'} jobs and a trace; allowed: one of them"
        )
    return workload


def arrivals_of(workload: Workload, where: str) -> list[Arrival]:
    """Raises `ConfigError` for jobs that cannot be, disorder and negative times."""
    try:
        if workload.trace is not None:
            return _traced(workload.trace, workload.seed)
        names = Counter(job.name for job in workload.jobs)
        for name, times in names.items():
            if times > 1:
                raise ClusterError(f"job {name}: found {times} of that name; allowed: one")
        earliest_s = 0.0
        for job in workload.jobs:
            if job.at_s < earliest_s:
                raise ClusterError(
                    f"job {job.name}: at_s: found {job.at_s:g}; allowed: at least {earliest_s:g}, in order"
                )
            earliest_s = job.at_s
        return [
            Arrival(
                at_ns=round(job.at_s * S),
                request=job_request(job.name, job, job.steps, job),
                shortest=job.shortest,
            )
            for job in workload.jobs
        ]
    except (ClusterError, ConfigError, TraceError) as error:
        raise ConfigError(f"{where}: {error}") from error


def _traced(trace: WorkloadTrace, seed: int) -> list[Arrival]:
    if not 1 <= trace.slo[0] <= trace.slo[1]:
        raise ClusterError(f"trace.slo: found {list(trace.slo)}; allowed: two bounds in order, at least 1")
    if trace.profile not in PROFILES:
        raise ClusterError(f"trace.profile: found {trace.profile!r}; allowed: {', '.join(PROFILES)}")
    jobs = read_jobs(find(trace.name))[: trace.jobs]
    return [
        msgspec.structs.replace(arrival, shortest=trace.shortest)
        for arrival in from_trace(jobs, trace.profile, trace.slo, seed)
    ]


def spec_of(workload: Workload, where: str) -> PoolSpec:
    pool = workload.pool
    try:
        spec = pool_spec(pool.rollout, pool.train)
        if workload.trace is None:
            return spec
        # A trace's jobs take one share each, so that so many fit.
        return PoolSpec(rollout=_sharing(spec.rollout, workload.trace), train=_sharing(spec.train, workload.trace))
    except ClusterError as error:
        raise ConfigError(f"{where}: {error}") from error


def _sharing(kinds: Sequence[NodeKind], trace: WorkloadTrace) -> tuple[NodeKind, ...]:
    return tuple(msgspec.structs.replace(kind, memory_bytes=trace.residents) for kind in kinds)


def simulate_jobs(workload: Workload, policy: str, where: str) -> tuple[PoolReport, list[NodeSlice]]:
    """Live through the workload under the named policy. Raises `ConfigError`, also for a job that no pool can take."""
    try:
        policies = cluster_policies(policy, where="--policy")
    except ConfigError as error:
        bound = (
            " (of an optimum there would be only a bound here: benchmarks/jobs_scale.py)" if policy in OPTIMA else ""
        )
        raise ConfigError(f"{error}{bound}") from None
    spec, arrivals = spec_of(workload, where), arrivals_of(workload, where)
    world = JobsWorld(spec, policies)
    for arrival in arrivals:
        if workload.trace is None:
            try:
                world.cluster.dry_run(arrival.request)
            except ClusterError as error:
                raise ConfigError(f"{where}: {error}") from error
    jobs = phased(world, arrivals, workload.seed)
    history = history_of(world.run().journal, policies)
    alone_ns = {job: each.alone_ns for job, each in jobs.items()}
    return pool_report(history, policy, now_ns=world.loop.now_ns, alone_ns=alone_ns), history.slices
