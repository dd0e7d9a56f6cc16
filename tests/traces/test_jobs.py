"""Traces of jobs: the windows as the design counted them, and files with disorder or negative times refused."""

from pathlib import Path
from statistics import mean

import pytest

from traces import TraceError, data_path
from traces.jobs import read_jobs


@pytest.mark.parametrize(
    ("name", "span_h", "mean_h", "longest_h", "at_once"),
    [("philly-ed69ec", 598, 16.4, 61.4, 46), ("philly-ee9e8c", 560, 15.0, 247.6, 25)],
)
def test_the_windows_are_those_that_are_described(
    name: str, span_h: float, mean_h: float, longest_h: float, at_once: int
) -> None:
    jobs = read_jobs(data_path(name))
    assert len(jobs) == 300
    assert jobs[-1].arrival_s / 3600 == pytest.approx(span_h, abs=0.5)
    assert mean(job.duration_s for job in jobs) / 3600 == pytest.approx(mean_h, abs=0.05)
    assert max(job.duration_s for job in jobs) / 3600 == pytest.approx(longest_h, abs=0.05)
    changes = sorted(change for job in jobs for change in ((job.arrival_s, 1), (job.arrival_s + job.duration_s, -1)))
    active = most = 0
    for _, change in changes:
        active += change
        most = max(most, active)
    assert most == at_once


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("when,how_long\n", "1: found 'when,how_long'; allowed: the header arrival_s,duration_s"),
        ("arrival_s,duration_s\n5,10\n4,10\n", "3: found arrival_s '4'; allowed: a number from 5 on"),
        ("arrival_s,duration_s\n-1,10\n", "2: found arrival_s '-1'; allowed: a number from 0 on"),
        ("arrival_s,duration_s\n1,-10\n", "2: found duration_s '-10'; allowed: a number from 0 on"),
        ("arrival_s,duration_s\n1,0\n", "2: found duration_s 0; allowed: more than 0"),
        ("arrival_s,duration_s\n1,nan\n", "2: found duration_s 'nan'"),
        ("arrival_s,duration_s\n1\n", "2: found 1 fields in '1'; allowed: 2"),
        ("arrival_s,duration_s\n", "no rows"),
    ],
)
def test_a_trace_that_cannot_be_is_refused(tmp_path: Path, lines: str, words: str) -> None:
    path = tmp_path / "jobs.csv"
    path.write_text(lines)
    with pytest.raises(TraceError, match=words):
        read_jobs(path)
