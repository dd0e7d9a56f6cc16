"""The whole job on vLLM: two reserved workers, one of whose vLLM is killed, and one that is killed itself."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

pytest.importorskip("vllm")

EXAMPLE = Path(__file__).parents[3] / "examples" / "frozenlake-vllm.toml"
STEPS = 4
TIMEOUT_S = 1500.0

pytestmark = pytest.mark.timeout(TIMEOUT_S + 60)


def _processes(run: subprocess.Popen, part: str) -> list[psutil.Process]:
    found = []
    for process in psutil.Process(run.pid).children(recursive=True):
        try:
            if part in " ".join(process.cmdline()):
                found.append(process)
        except psutil.Error:
            continue
    return found


def test_the_example_trains_through_kills(tmp_path):
    """Every step is done, nothing is lost or counted twice, and nothing is left behind."""
    overrides = [f"run.directory={tmp_path}", f"run.steps={STEPS}"]
    command = [sys.executable, "-m", "elastic.cli", "run", str(EXAMPLE)]
    command += [part for override in overrides for part in ("--set", override)]
    log = tmp_path / "log"
    with log.open("wb") as output:
        run = subprocess.Popen(command, stdout=output, stderr=output, cwd=EXAMPLE.parents[1])
        seen: set[int] = set()
        try:
            for step, part in ((1, "elastic.engine.vllm.process"), (2, "elastic.cli worker")):
                _until(run, lambda step=step: f"step {step}/" in log.read_text(errors="replace"), log)
                victims = [p for p in _processes(run, part) if "--trainer" not in p.cmdline()]
                os.kill(victims[0].pid, signal.SIGKILL)
                seen |= {process.pid for process in psutil.Process(run.pid).children(recursive=True)}
            _until(run, lambda: run.poll() is not None, log)
        finally:
            run.kill()
    assert run.returncode == 0, log.read_text()[-4000:]
    (run_dir,) = (path for path in tmp_path.iterdir() if path.is_dir())
    command = [sys.executable, "-m", "elastic.cli", "report", str(run_dir), "--json"]
    report = json.loads(subprocess.run(command, check=True, capture_output=True, timeout=120).stdout)
    found = len(report["steps"]), report["trajectories_failed"], report["ledger_imbalance_ns"]
    assert found == (STEPS, {}, 0)
    assert not [pid for pid in seen if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"]


def _until(run: subprocess.Popen, condition, log: Path) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline_s, log.read_text()[-4000:]
        assert run.poll() is None or condition(), log.read_text()[-4000:]
        time.sleep(0.2)
