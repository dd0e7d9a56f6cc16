"""A live pool of one node of each kind, with two jobs that take turns on it."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import psutil

from elastic.pool.control_messages import PoolControl
from elastic.protocol.run_control import ControlError

WITHIN_S = 160.0
"""A third of it is enough where nothing else runs on the machine."""
STEPS = 3
POOL = """
[pool]
name = "lab"
directory = "{directory}"
devices = "cpu"
{reached}
[pool.rollout]
nodes = {rollout_nodes}
usd_per_gpu_hour = 1.85
memory_gb = 8
{rollout}
[pool.train]
nodes = {train_nodes}
usd_per_gpu_hour = 5.28
gpus = {train_gpus}
memory_gb = 8
{train}
[limits]
start_s = {start_s}
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
plan = {{ rollout_s = 10, train_s = {train_s}, sync_s = 1, rollout_switch_s = 0.5, train_switch_s = 0.5 }}
"""


class LivePool:
    """Waits for at most `within_s` in all."""

    def __init__(self, tmp_path: Path, checkpoint: Path, within_s: float = WITHIN_S) -> None:
        self.path = tmp_path / "lab"
        self._tmp_path, self._checkpoint, self._within_s = tmp_path, checkpoint, within_s
        self._ends_s = time.monotonic() + within_s

    def elastic(self, *arguments: object, script: Sequence[str] = (), cwd: Path | None = None) -> Any:
        """What a command tells, behind which stands another program's command line if there is one; raises where it
        fails."""
        program = ["--", *script] if script else []
        command = [sys.executable, "-m", "elastic.cli", *map(str, arguments), "--json", *program]
        ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=self._within_s, cwd=cwd)
        assert ended.returncode == 0, (arguments, ended.stdout, ended.stderr)
        return json.loads(ended.stdout)

    def start(
        self,
        *,
        train_gpus: int = 1,
        start_s: float = 60,
        reached: str = "",
        rollout: str = "",
        rollout_nodes: int = 1,
        train: str = "",
        train_nodes: int = 1,
    ) -> None:
        """With what `[pool]` says of how it is `reached`, and `[pool.rollout]` and `[pool.train]` further."""
        file = self._tmp_path / "pool.toml"
        said = {"train_gpus": train_gpus, "start_s": start_s, "reached": reached, "rollout": rollout, "train": train}
        said |= {"rollout_nodes": rollout_nodes, "train_nodes": train_nodes}
        file.write_text(POOL.format(directory=self._tmp_path, **said))
        self.elastic("pool", "start", file)

    def write_job(self, name: str, seed: int, beside: str = "", train_s: float = 10) -> Path:
        """The job's configuration, with what is `beside` the sections that all have. A step is planned to train for
        `train_s`."""
        file = self._tmp_path / f"{name}.toml"
        known = {"name": name, "seed": seed, "steps": STEPS, "train_s": train_s}
        job = JOB.format(**known, directory=self._tmp_path, checkpoint=self._checkpoint)
        file.write_text(job + beside)
        return file

    def submit(self, name: str, seed: int, *options: str, beside: str = "", train_s: float = 10) -> None:
        file = self.write_job(name, seed, beside, train_s)
        self.elastic("jobs", "submit", file, "--name", name, "--pool", self.path, *options)

    def jobs(self) -> dict[str, dict[str, Any]]:
        """Once the pool's process answers."""
        while True:
            try:
                reply = asyncio.run(PoolControl(self.path, 5.0).status())
            except ControlError:
                assert time.monotonic() < self._ends_s
                time.sleep(0.1)
            else:
                return {job["name"]: job for job in msgspec.to_builtins(reply.status.jobs)}

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
        """Kill the one process whose command line has all these words, once it is there."""
        while len(found := self.processes(*words)) != 1:
            assert time.monotonic() < self._ends_s, (words, found)
            time.sleep(0.05)
        (process,) = found
        os.kill(process.pid, signal.SIGKILL)
        return process.pid

    def stop(self) -> None:
        self.elastic("pool", "stop", self.path, "--now")
        assert self.processes("pool-run", str(self.path)) == []
