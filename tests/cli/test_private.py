"""What a run writes, hands to others and leaves: a real run, with a reward function of ill manners."""

import contextlib
import json
import os
import stat
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from elastic.runtime.journal import DirectoryStore, JournalError, RunDirectory, StepRow

TIMEOUT_S = 120

REWARD = """
import json, os, pathlib, subprocess, sys

HERE = pathlib.Path(__file__).parent

def reward(trajectory):
    if not (HERE / "told").exists():
        command = [sys.executable, "-c", "import time; time.sleep(600)"]
        child = subprocess.Popen(command, start_new_session=True)
        (HERE / "partial").write_text(json.dumps({"pid": child.pid, "environment": dict(os.environ)}))
        (HERE / "partial").rename(HERE / "told")
    return float(sum(trajectory["token_ids"]) % 2)
"""
"""Starts a process in a session of its own, and says what it inherited."""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the reward `ill_mannered` is installed."""
    directory = tmp_path / "site"
    about = directory / "ill_mannered-1.0.dist-info"
    about.mkdir(parents=True)
    (directory / "ill_mannered.py").write_text(REWARD)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: ill-mannered\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[elastic.rewards]\nill_mannered = ill_mannered:reward\n")
    monkeypatch.setenv("PYTHONPATH", str(directory))
    return directory


def until(condition: Callable[[], Any], process: "subprocess.Popen[str]") -> Any:
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        if found := condition():
            return found
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    raise AssertionError("it did not come true")


def steps_of(run_dir: Path) -> int:
    try:
        with RunDirectory(run_dir).newest_journal() as journal:
            return len(journal.rows(StepRow))
    except JournalError:
        return 0


def environments_of(processes: list[psutil.Process]) -> list[dict[str, str]]:
    """The environments of those that have not ended meanwhile."""
    found: list[dict[str, str]] = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            found.append(process.environ())
    return found


def is_alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def open_to_others(directory: Path) -> Iterator[Path]:
    for path in (directory, *directory.rglob("*")):
        if not path.is_symlink() and path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            yield path


@pytest.mark.nightly
@pytest.mark.slow
def test_a_run_keeps_its_secrets_and_ends_what_a_killed_one_left(
    start, config: Path, site: Path, processes_of, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A live run by the command line, killed and resumed: its files and environments are looked at from outside."""
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "theirs")
    monkeypatch.setenv("JUDGE_KEY", "the judge's")
    asked = ("rewards.name=ill_mannered", "rewards.timeout_s=60", 'run.pass_env=["JUDGE_KEY"]', "run.steps=1000")
    options = [word for override in asked for word in ("--set", override)]
    process = start("run", config, *options, preexec=lambda: os.umask(0o022))
    told = json.loads(until(lambda: (site / "told").exists() and (site / "told").read_text(), process))
    (run_dir,) = (run.path for run in DirectoryStore(config.parent / "runs").runs())
    try:
        until(lambda: steps_of(run_dir) >= 1, process)
        environments = until(lambda: len(found := environments_of(processes_of(run_dir.name))) >= 2 and found, process)
        for environment in (told["environment"], *environments):
            assert "AWS_SECRET_ACCESS_KEY" not in environment
            assert environment["JUDGE_KEY"] == "the judge's"
        process.kill()
        process.communicate()
        assert is_alive(told["pid"])
        resumed = start("run", "--resume", run_dir, "--set", f"run.steps={steps_of(run_dir) + 1}")
        out, err = resumed.communicate(timeout=TIMEOUT_S)
        assert resumed.returncode == 0, (out, err)
        assert not is_alive(told["pid"])
    finally:
        if is_alive(told["pid"]):
            psutil.Process(told["pid"]).kill()
    assert processes_of(run_dir.name) == []
    assert not list((run_dir / "leases").glob("*.json"))
    assert list(open_to_others(run_dir)) == []


def test_a_simulated_run_is_private(elastic, config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    former = os.umask(0o022)
    try:
        assert elastic("simulate", config).code == 0
        assert os.umask(0o022) == 0o022
    finally:
        os.umask(former)
    (run_dir,) = (run.path for run in DirectoryStore(config.parent / "runs").runs())
    assert list(open_to_others(run_dir)) == []
