"""Two jobs of ours take turns on one set of devices, live, while processes of theirs are killed."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from elastic.report import summarise
from elastic.runtime.journal import RunDirectory
from tests.pool.live import STEPS, LivePool

pytestmark = [pytest.mark.slow, pytest.mark.alone]


@pytest.fixture
def pool(tmp_path: Path, checkpoint: Path) -> Iterator[LivePool]:
    pool = LivePool(tmp_path, checkpoint)
    pool.start()
    yield pool
    pool.stop()


@pytest.mark.nightly
@pytest.mark.timeout(200)
def test_two_jobs_take_turns_and_survive_kills_of_each_others_processes(pool: LivePool) -> None:
    with ThreadPoolExecutor() as both:  # One after the other, the first may be over before the second is there.
        for submitted in (
            both.submit(pool.submit, "one", 1),
            both.submit(pool.submit, "two", 2, "--providers", "spot"),
        ):
            submitted.result()
    one, two = str(pool.run_dir("one")), str(pool.run_dir("two"))
    kills = {"one": ("run", "--resume", one), "two": ("pool-resident", two)}

    def struck(jobs: dict[str, dict[str, Any]]) -> bool:
        """Each once it has a step: whichever comes first may be over before the other has one."""
        for job in [job for job in kills if jobs[job]["steps_done"]]:
            pool.kill(*kills.pop(job))
        return not kills

    pool.until(struck)
    jobs = pool.until(lambda jobs: all(job["over"] for job in jobs.values()))
    assert {job["state"] for job in jobs.values()} == {"finished"}
    assert [job["steps_done"] for job in jobs.values()] == [STEPS, STEPS]
    assert pool.processes("pool-resident", one) == pool.processes("pool-resident", two) == []
    for run, kinds, least in (
        (one, ("LeaseGranted", "PermitGranted"), 2 * STEPS + 1),
        (two, ("PermitGranted",), STEPS),
    ):
        with RunDirectory(Path(run)).journals() as journals:
            turns = [event for journal in journals for _, event in journal.events_of(*kinds)]
        assert len(turns) >= least, "a rollout and a training phase a step, and the trainer's lease"
    assert set(summarise(RunDirectory(Path(one))).providers) == {"trainer", "pool"}
    assert summarise(RunDirectory(Path(two))).providers["spot"].tokens > 0, "its own worker has done turns of its"
    assert len(RunDirectory(Path(one)).journal_paths()) == 2, "it was taken up once"
