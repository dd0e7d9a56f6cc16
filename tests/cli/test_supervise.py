"""`elastic run --supervise`: whatever dies, the run goes on, and what happened is said."""

import os
import signal
import sys
from pathlib import Path

import psutil
import pytest

from elastic.cli import supervise
from elastic.compose.incarnations import PastIncarnations
from elastic.runtime.journal import RunDirectory
from elastic.system.outages import EXIT_OUTAGE
from tests.cli.test_signals import START_TIMEOUT_S, nothing_left, read, run_dirs, until

pytestmark = pytest.mark.alone

DIES = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return tmp_path


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervise, "RETRY_BASE_S", 0.01)
    monkeypatch.setattr(supervise, "RETRY_MAX_S", 0.02)


def processes(monkeypatch: pytest.MonkeyPatch, *programs: str) -> list[list[str]]:
    """Have the orchestrator's processes be these, one after the other; the commands that started them."""
    left, began, popen = list(programs), list[list[str]](), supervise.subprocess.Popen

    def start(command: list[str]) -> object:
        began.append(command)
        return popen([sys.executable, "-c", left.pop(0)])

    monkeypatch.setattr(supervise.subprocess, "Popen", start)
    return began


def test_what_dies_is_started_again_until_it_ends(
    run_dir: Path, quick: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    began = processes(monkeypatch, DIES, "raise SystemExit(1)", DIES, "")
    assert supervise.supervise(run_dir, ["--providers", "spot"], 5) == 0
    assert all(command[-5:] == ["run", "--resume", str(run_dir), "--providers", "spot"] for command in began)
    said = capsys.readouterr().err.splitlines()
    assert [line.partition(" after")[0] for line in said] == [
        "the orchestrator was killed by SIGKILL",
        "the orchestrator exited with status 1",
        "the orchestrator was killed by SIGKILL",
    ]
    assert said[-1].endswith("(3 of 5)")


def test_there_is_a_limit(
    run_dir: Path, quick: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    began = processes(monkeypatch, *[DIES] * 10)
    assert supervise.supervise(run_dir, [], 2) == 1
    assert len(began) == 3
    assert "has been started again 2 times, and is not any more" in capsys.readouterr().err


def test_what_had_settled_is_replaced_at_once_and_forgiven(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    processes(monkeypatch, *[DIES] * 4, "")
    monkeypatch.setattr(supervise, "RETRY_BASE_S", 3600.0)
    assert supervise.keep_up([], bool, 1, "it", settled_s=0.0, forgives=True) == 0
    assert capsys.readouterr().err.count("again at once (1 of 1)") == 4


def test_outages_are_waited_for_and_count_as_no_restart(
    run_dir: Path, quick: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    outage = f"raise SystemExit({EXIT_OUTAGE})"
    began = processes(monkeypatch, *[outage] * 4, DIES, outage, "")
    assert supervise.supervise(run_dir, [], 1) == 0
    assert len(began) == 7
    assert capsys.readouterr().err.count("which counts as no restart") == 5


@pytest.mark.parametrize("status", [0, 2, 130])
def test_an_end_is_an_end(run_dir: Path, quick: None, monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    began = processes(monkeypatch, f"raise SystemExit({status})")
    assert supervise.supervise(run_dir, [], 5) == status
    assert len(began) == 1


def test_a_run_that_failed_is_not_begun_again(run_dir: Path, quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervise, "past_incarnations", lambda run: PastIncarnations(status="failed: no capacity"))
    began = processes(monkeypatch, "raise SystemExit(1)")
    assert supervise.supervise(run_dir, [], 5) == 1
    assert len(began) == 1


@pytest.mark.nightly
def test_a_run_outlives_its_orchestrator(start, config: Path, processes_of) -> None:
    process = start("run", config, "--supervise", "--providers", "spot", "--set", "run.steps=6", "--json")
    (run_dir,) = until(lambda: run_dirs(config), START_TIMEOUT_S, process)
    until(lambda: len(read(run_dir)[1]) >= 2, START_TIMEOUT_S, process)
    (orchestrator,) = psutil.Process(process.pid).children()
    workers = {worker.pid for worker in processes_of(run_dir.name)} - {orchestrator.pid}
    os.kill(orchestrator.pid, signal.SIGKILL)
    out, err = process.communicate(timeout=2 * START_TIMEOUT_S)
    assert process.returncode == 0, err
    assert "the orchestrator was killed by SIGKILL" in err
    assert '"outcome":"finished"' in out
    assert workers
    assert [path.name for path in RunDirectory(run_dir).journal_paths()] == ["journal.sqlite", "journal.2.sqlite"]
    assert nothing_left(run_dir, processes_of)
