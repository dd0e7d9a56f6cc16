"""Runs of a few steps that time a job alone, before it is placed."""

from elastic.core.cluster import events as e
from elastic.core.cluster.types import JobId, JobState, PhasePlan
from elastic.pool.holdings import PoolHoldings, PoolRoom


class JobProfiles(PoolRoom):
    """Which jobs are timed right now."""

    def __init__(self, pool: PoolHoldings) -> None:
        super().__init__(pool)
        self._running: set[JobId] = set()

    def compare(self, job: JobId) -> None:
        """Begin and end as the cluster wants it."""
        record = self._cluster.jobs[job]
        profiles = record.state is JobState.PROFILING and not self._pool.stopping
        if profiles and job not in self._running:
            self._running.add(job)
            self._ports.profile(self._entries[job])
        elif not profiles and job in self._running:
            self._running.discard(job)
            self._ports.end_profile(job)

    def end_all(self) -> None:
        for job in tuple(self._running):
            self._ports.end_profile(job)
            self._running.discard(job)

    def profiled(self, job: JobId, plan: PhasePlan) -> None:
        self._running.discard(job)
        self._pool.feed(e.JobProfiled(job=job, plan=plan))

    def not_profiled(self, job: JobId, cause: str) -> None:
        self._running.discard(job)
        record = self._cluster.jobs.get(job)
        if record is not None and record.state is JobState.PROFILING and not self._pool.stopping:
            self._pool.feed(e.JobFailed(job=job, cause=cause))
