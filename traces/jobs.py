"""Traces of jobs on a shared cluster: when each came and how long it ran.

A file has a header and one job a line: `arrival_s,duration_s`, arrivals in order and from 0 on.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from traces.errors import TraceError, at_line, numbered_lines

HEADER = "arrival_s,duration_s"


@dataclass(frozen=True, slots=True)
class TracedJob:
    arrival_s: float
    duration_s: float


def read_jobs(path: Path) -> Sequence[TracedJob]:
    """The jobs of a trace. Raises `TraceError` for disorder, negative times or anything else that is no such file."""
    jobs: list[TracedJob] = []
    with numbered_lines(path) as lines:
        for number, line in lines:
            if number == 1:
                if line != HEADER:
                    raise at_line(path, 1, repr(line), f"the header {HEADER}")
                continue
            jobs.append(_job(path, number, line, jobs[-1].arrival_s if jobs else 0.0))
    if not jobs:
        raise TraceError(f"{path}: no job in it")
    return jobs


def _job(path: Path, number: int, line: str, earliest_s: float) -> TracedJob:
    try:
        arrival_s, duration_s = map(float, line.split(","))
    except ValueError:
        raise at_line(path, number, repr(line), f"two numbers: {HEADER}") from None
    if not earliest_s <= arrival_s < float("inf"):
        raise at_line(path, number, f"arrival_s {arrival_s:g}", f"at least {earliest_s:g}: arrivals come in order")
    if not 0 < duration_s < float("inf"):
        raise at_line(path, number, f"duration_s {duration_s:g}", "more than 0")
    return TracedJob(arrival_s, duration_s)
