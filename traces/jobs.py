"""Traces of jobs on a shared cluster: when each came and how long it ran.

A file has a header and one job a line: `arrival_s,duration_s`, arrivals in order and from 0 on.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from traces.rows import rows

COLUMNS = ("arrival_s", "duration_s")


@dataclass(frozen=True, slots=True)
class TracedJob:
    arrival_s: float
    duration_s: float


def read_jobs(path: Path) -> Sequence[TracedJob]:
    """The jobs of a trace. Raises `TraceError` for disorder, negative times or anything else that is no such file."""
    jobs: list[TracedJob] = []
    with rows(path, COLUMNS) as read:
        for row in read:
            job = TracedJob(row.number("arrival_s", jobs[-1].arrival_s if jobs else 0.0), row.number("duration_s"))
            if not job.duration_s:
                raise row.wrong("duration_s 0", "more than 0")
            jobs.append(job)
    return jobs
