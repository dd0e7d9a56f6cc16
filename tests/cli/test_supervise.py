"""`elastic run --supervise`: whatever dies, the run goes on, and what happened is said."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from elastic.cli import supervise, upkeep
from elastic.compose.incarnations import PastIncarnations
from elastic.runtime.journal import RunDirectory
from elastic.system.outages import EXIT_OUTAGE
from tests.cli.test_signals import START_TIMEOUT_S, nothing_left, read, run_dirs, until

DIES = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return tmp_path


class Processes:
    """The orchestrator's processes are these programs, one after the other. Waits are noted, and over at once."""

    def __init__(self, *programs: str) -> None:
        self._left = list(programs)
        self.began: list[Sequence[str]] = []
        self.waits_s: list[float] = []

    def start(self, command: Sequence[str]) -> "subprocess.Popen[bytes]":
        self.began.append(command)
        return subprocess.Popen([sys.executable, "-S", "-c", self._left.pop(0)])

    def supervised(self, run_dir: Path, restarts_max: int, *options: str) -> int:
        return supervise.supervise(run_dir, options, restarts_max, start=self.start, wait=self.waits_s.append)


def test_what_dies_is_started_again_until_it_ends(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ours = Processes(DIES, "raise SystemExit(1)", DIES, "")
    assert ours.supervised(run_dir, 5, "--providers", "spot") == 0
    assert all(command[-5:] == ["run", "--resume", str(run_dir), "--providers", "spot"] for command in ours.began)
    said = capsys.readouterr().err.splitlines()
    assert [line.partition(" after")[0] for line in said] == [
        "the orchestrator was killed by SIGKILL",
        "the orchestrator exited with status 1",
        "the orchestrator was killed by SIGKILL",
    ]
    assert said[-1].endswith("(3 of 5)")
    assert ours.waits_s == [1.0, 2.0, 4.0]


def test_there_is_a_limit(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ours = Processes(*[DIES] * 10)
    assert ours.supervised(run_dir, 2) == 1
    assert len(ours.began) == 3
    assert "has been started again 2 times, and is not any more" in capsys.readouterr().err


def test_what_had_settled_is_replaced_at_once_and_forgiven(
    capsys: pytest.CaptureFixture[str],
) -> None:
    ours = Processes(*[DIES] * 4, "")
    ports = {"start": ours.start, "wait": ours.waits_s.append}
    assert upkeep.keep_up([], bool, 1, "it", settled_s=0.0, forgives=True, **ports) == 0
    assert ours.waits_s == []
    assert capsys.readouterr().err.count("again at once (1 of 1)") == 4


def test_what_has_settled_has_a_successor_that_begins_by_a_line_and_ends_without_one() -> None:
    waits = "import sys; sys.exit(0 if sys.argv[1:] == [] else 5 if sys.stdin.readline() else 6)"
    command = [sys.executable, "-S", "-c", waits]
    standby = upkeep.Standby("waits")
    standby.prepare(command)
    assert standby.start(command).wait() == 5
    assert standby.start(command).wait() == 0, "none waits"
    others = psutil.Process().children()
    standby.prepare(command)
    (waiting,) = {*psutil.Process().children()} - {*others}
    standby.close()
    assert not waiting.is_running()


def test_who_is_told_to_end_before_it_hears_of_that_is_not_begun_again() -> None:
    ours = Processes("import time; time.sleep(60)")
    told = {"start": ours.start, "settles": lambda: os.kill(os.getpid(), signal.SIGTERM)}
    assert upkeep.keep_up([], bool, 5, "it", settled_s=0.0, **told) == 130


def test_outages_are_waited_for_and_count_as_no_restart(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outage = f"raise SystemExit({EXIT_OUTAGE})"
    ours = Processes(*[outage] * 4, DIES, outage, "")
    assert ours.supervised(run_dir, 1) == 0
    assert len(ours.began) == 7
    assert capsys.readouterr().err.count("which counts as no restart") == 5


@pytest.mark.parametrize("status", [0, 2, 130])
def test_an_end_is_an_end(run_dir: Path, status: int) -> None:
    ours = Processes(f"raise SystemExit({status})")
    assert ours.supervised(run_dir, 5) == status
    assert len(ours.began) == 1


def test_a_run_that_failed_is_not_begun_again(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervise, "past_incarnations", lambda run: PastIncarnations(status="failed: no capacity"))
    ours = Processes("raise SystemExit(1)")
    assert ours.supervised(run_dir, 5) == 1
    assert len(ours.began) == 1


@pytest.mark.alone
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
