"""Two jobs of ours take turns on one set of devices, live, while processes of theirs are killed."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from elastic.pool.control_messages import PoolControl
from elastic.protocol.run_control import ControlError
from elastic.report import summarise
from elastic.runtime.journal import RunDirectory

pytestmark = pytest.mark.slow

WITHIN_S = 160.0
"""A third of it is enough where nothing else runs on the machine."""
STEPS = 3
POOL = """
[pool]
name = "lab"
directory = "{directory}"
[pool.rollout]
nodes = 1
usd_per_gpu_hour = 1.85
memory_gb = 8
[pool.train]
nodes = 1
usd_per_gpu_hour = 5.28
memory_gb = 8
[limits]
start_s = 60
"""
JOB = """
[run]
name = "{name}"
seed = {seed}
steps = {steps}
directory = "{directory}/runs"
[model]
checkpoint = "{checkpoint}"
[environment]
name = "frozenlake"
[environment.settings]
sizes = [4]
[rollout]
groups = 2
group_size = 2
max_turns = 4
max_tokens_per_turn = 8
[engine]
device = "cpu"
max_context_tokens = 192
max_batch = 4
max_pending = 2
[engine.pacing]
prefill_tokens_per_s = 8000
decode_step_s = {{ 1 = 0.04, 4 = 0.05 }}
[providers.spot]
max_workers = 1
usd_per_gpu_hour = 0.5
trace = "rlboost-b"
[job]
slo = 4.0
plan = {{ rollout_s = 10, train_s = 10, sync_s = 1, rollout_switch_s = 0.5, train_switch_s = 0.5 }}
"""


class LivePool:
    def __init__(self, tmp_path: Path, checkpoint: Path) -> None:
        self.path = tmp_path / "lab"
        self._tmp_path, self._checkpoint = tmp_path, checkpoint
        self._ends_s = time.monotonic() + WITHIN_S

    def elastic(self, *arguments: object) -> Any:
        """What a command tells; raises where it fails."""
        command = [sys.executable, "-m", "elastic.cli", *map(str, arguments), "--json"]
        ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=WITHIN_S)
        assert ended.returncode == 0, (arguments, ended.stdout, ended.stderr)
        return json.loads(ended.stdout)

    def start(self) -> None:
        file = self._tmp_path / "pool.toml"
        file.write_text(POOL.format(directory=self._tmp_path))
        self.elastic("pool", "start", file)

    def submit(self, name: str, seed: int, *options: str) -> None:
        file = self._tmp_path / f"{name}.toml"
        file.write_text(
            JOB.format(name=name, seed=seed, steps=STEPS, directory=self._tmp_path, checkpoint=self._checkpoint)
        )
        self.elastic("jobs", "submit", file, "--name", name, "--pool", self.path, *options)

    def jobs(self) -> dict[str, dict[str, Any]]:
        """Once the pool's process answers."""
        while True:
            try:
                standing = asyncio.run(PoolControl(self.path, 5.0).standing())
            except ControlError:
                assert time.monotonic() < self._ends_s
                time.sleep(0.1)
            else:
                return {job["name"]: job for job in msgspec.to_builtins(standing.status.jobs)}

    def until(self, what: Callable[[dict[str, dict[str, Any]]], object]) -> dict[str, dict[str, Any]]:
        while not what(jobs := self.jobs()):
            assert time.monotonic() < self._ends_s, jobs
            assert not any(job["state"] in ("failed", "rejected") for job in jobs.values()), jobs
            time.sleep(0.3)
        return jobs

    def run_dir(self, job: str) -> Path:
        return Path(self.jobs()[job]["directory"])

    def processes(self, *words: str) -> list[psutil.Process]:
        """Those whose command line has all these words."""
        found: list[psutil.Process] = []
        for process in psutil.process_iter():
            try:
                if process.status() != psutil.STATUS_ZOMBIE and set(words) <= set(process.cmdline()):
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def kill(self, *words: str) -> int:
        (process,) = self.processes(*words)
        os.kill(process.pid, signal.SIGKILL)
        return process.pid


@pytest.fixture
def pool(tmp_path: Path, checkpoint: Path) -> Iterator[LivePool]:
    pool = LivePool(tmp_path, checkpoint)
    pool.start()
    yield pool
    pool.elastic("pool", "stop", pool.path, "--now")
    # The lock is free a moment before the processes have ended.
    psutil.wait_procs(pool.processes("pool-run", str(pool.path)), timeout=20.0)
    assert pool.processes("pool-run", str(pool.path)) == []


@pytest.mark.timeout(200)
def test_two_jobs_take_turns_and_survive_kills_of_each_others_processes(pool: LivePool) -> None:
    pool.submit("one", 1)
    pool.submit("two", 2, "--providers", "spot")
    one, two = str(pool.run_dir("one")), str(pool.run_dir("two"))
    pool.until(lambda jobs: jobs["one"]["steps_done"] >= 1)
    pool.kill("run", "--resume", one)
    pool.until(lambda jobs: jobs["two"]["steps_done"] >= 1)
    pool.kill("pool-resident", two)
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
