"""Runs that are interrupted, killed and resumed, with providers and real processes."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elastic.runtime.journal import DirectoryStore, JournalError, RunDirectory, StepRow
from elastic.weights.directory import MEMORY_LINK

pytestmark = pytest.mark.slow

PROVIDERS = ("--providers", "serving,spot")
START_TIMEOUT_S = 120
STOP_TIMEOUT_S = 40


def until(condition: Callable[[], Any], within_s: float, process: "subprocess.Popen[str] | None" = None) -> Any:
    """The condition's first true value."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if found := condition():
            return found
        if process is not None and process.poll() is not None:
            raise AssertionError(f"ended with {process.returncode}: {process.communicate()}")
        time.sleep(0.05)
    raise AssertionError(f"{condition} did not come true within {within_s} s")


def run_dirs(config: Path) -> list[Path]:
    return [run.path for run in DirectoryStore(config.parent / "runs").runs()]


def read(run_dir: Path) -> tuple[dict[str, str], list[int]]:
    """The journal's meta, and the numbers of the steps that are done."""
    try:
        with RunDirectory(run_dir).newest_journal() as journal:
            return journal.meta(), [row.step for row in journal.rows(StepRow)]
    except JournalError:
        return {}, []


def nothing_left(run_dir: Path, processes_of: Any) -> bool:
    return not processes_of(run_dir.name) and not list((run_dir / "leases").glob("*.json"))


def interrupted(
    start: Any, elastic: Any, refused: Any, config: Path, processes_of: Any, *, steps: bool
) -> tuple[Path, list[int]]:
    """The directory of a run that was interrupted as it began, or once it had made a step, and its steps."""
    process = start("run", config, "--set", "run.steps=1000", "--set", "weights.relay=http")
    (run_dir,) = until(lambda: run_dirs(config), START_TIMEOUT_S, process)
    until(lambda: read(run_dir)[1] if steps else processes_of(run_dir.name), START_TIMEOUT_S, process)

    refused(elastic("run", "--resume", run_dir), "still going on in another process")

    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=STOP_TIMEOUT_S)
    assert process.returncode == 130, err
    assert err.count("stopping: ") == 1
    assert "killing" not in err
    assert "Traceback" not in err
    assert f"elastic run --resume {run_dir}" in err
    assert "report" in out
    assert nothing_left(run_dir, processes_of)
    meta, done = read(run_dir)
    assert meta["status"] == "failed: interrupted"
    assert done == list(range(len(done)))
    return run_dir, done


def test_an_interrupted_run_leaves_nothing_and_says_how_it_goes_on(
    start, elastic, refused, config: Path, processes_of
) -> None:
    """A whole live run, interrupted: only real processes can be left behind."""
    interrupted(start, elastic, refused, config, processes_of, steps=False)


@pytest.mark.nightly
def test_an_interrupted_run_goes_on_where_it_was_and_is_told_of(
    start, elastic, refused, config: Path, processes_of
) -> None:
    run_dir, steps = interrupted(start, elastic, refused, config, processes_of, steps=True)
    total = len(steps) + 1
    process = start("run", "--resume", run_dir, "--set", f"run.steps={total}", "--json")
    out, err = process.communicate(timeout=START_TIMEOUT_S)
    assert process.returncode == 0, err
    assert f"step {total}/{total}" in err
    meta, more = read(run_dir)
    assert meta["status"] == "finished"
    assert more == list(range(len(steps), total))
    assert (run_dir / "journal.2.sqlite").is_file()
    assert nothing_left(run_dir, processes_of)
    is_told(elastic, run_dir, json.loads(out))

    code, _, err = elastic("run", "--resume", run_dir)
    assert code == 0, err
    assert f"all {total} steps" in err
    assert not (run_dir / "journal.3.sqlite").exists()


def is_told(elastic: Any, run_dir: Path, told: dict[str, Any]) -> None:
    """What the finished run printed is what its report says, in each of its shapes."""
    assert Path(told["report"]) == run_dir / "report.html"
    assert Path(told["report"]).is_file()
    code, out, err = elastic("report", "--directory", run_dir.parent, "--json")
    assert (code, err) == (0, "")
    assert json.loads(out).items() <= told.items()
    code, out, err = elastic("runs", "--directory", run_dir.parent, "--json")
    assert (code, err) == (0, "")
    (row,) = json.loads(out)["runs"]
    assert (row["run"], row["status"]) == (run_dir.name, "finished")
    code, out, _ = elastic("report", "--directory", run_dir.parent, "--md")
    assert code == 0
    assert out.startswith("#")


@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGHUP])
def test_stops_when_nobody_listens_any_more(start, config: Path, processes_of, number: signal.Signals) -> None:
    """As with `2>&1 | tee` and Ctrl-C, which ends both, or a terminal that is closed."""
    process = start("run", config, "--set", "run.steps=1000", "--set", "weights.relay=http")
    (run_dir,) = until(lambda: run_dirs(config), START_TIMEOUT_S, process)
    until(lambda: processes_of(run_dir.name), START_TIMEOUT_S, process)
    process.stdout.close()
    process.stderr.close()
    process.send_signal(number)
    assert process.wait(STOP_TIMEOUT_S) == 130
    assert read(run_dir)[0]["status"] == "failed: interrupted"
    assert nothing_left(run_dir, processes_of)


def test_a_second_signal_kills_at_once(start, config: Path, processes_of) -> None:
    """A whole live run whose workers are frozen: no stand-in ignores a signal as they do."""
    process = start("run", config, "--providers", "spot", "--set", "scheduler.drain_timeout_s=60")
    (run_dir,) = until(lambda: run_dirs(config), START_TIMEOUT_S, process)
    frozen = until(lambda: processes_of(run_dir.name), START_TIMEOUT_S, process)
    for worker in frozen:
        os.kill(worker.pid, signal.SIGSTOP)
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=STOP_TIMEOUT_S)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert read(run_dir)[0]["status"] == "failed: interrupted"
    assert nothing_left(run_dir, processes_of)


@pytest.mark.parametrize("relay", ["http"])
@pytest.mark.nightly
def test_what_waits_for_an_orchestrator_that_stays_away_ends_by_itself_and_leaves_nothing(
    start, config: Path, processes_of, relay: str
) -> None:
    terms = ("run.steps=1000", "run.orchestrator_timeout_s=3", f"weights.relay={relay}")
    process = start("run", config, *PROVIDERS, *(word for term in terms for word in ("--set", term)))
    (run_dir,) = until(lambda: run_dirs(config), START_TIMEOUT_S, process)
    until(lambda: read(run_dir)[1], START_TIMEOUT_S, process)
    place = (run_dir / "weights" / MEMORY_LINK).readlink()
    process.kill()
    process.communicate()
    assert processes_of(run_dir.name)
    assert place.exists()
    until(lambda: not processes_of(run_dir.name), STOP_TIMEOUT_S)
    assert not place.exists()
