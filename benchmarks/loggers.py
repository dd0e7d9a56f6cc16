"""Kills of a run and of the process that brings its steps to loggers: each step is one row in each of them.

The example runs with small settings, and `[logging] to` has all loggers (W&B offline, MLflow in a database on this
machine). At seeded moments the orchestrator, the loggers' process, or both are killed with SIGKILL,
and `elastic run --resume` goes on; at last `elastic track` brings what is left, and is killed, too. Then the loggers'
own files are counted: `rows` are the steps of the run times the loggers, `rows_twice` and `rows_missing` what differs
from one row a step. `us_per_row` is what it takes to read a row from the journal, samples included, and
`us_per_write` what each logger takes for it, or W&B's process takes off our hands.

`make test-loggers` sets up an environment that has the loggers.
"""
# pyright: reportMissingImports=false

import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import ROOT
from benchmarks._common import Arguments, Figures, benchmark
from benchmarks._crashes import CrashingRun
from benchmarks._processes import program
from benchmarks._runs import elastic, prepare
from benchmarks._waiting import until
from elastic.report.texts import Reading, with_texts
from elastic.report.tracking import LOGGERS, SampleBounds, StepSource, TrackedRow, TrackedRun, logger_named
from elastic.runtime.journal import RunDirectory
from elastic.system.sqlite import open_sqlite

PYTHON = ROOT / ".cache" / "loggers" / "bin" / "python"
SEED = 7
PROJECT = "elastic"
SETTINGS = ("rollout.groups=4", "rollout.group_size=4", "trainer.checkpoint_every_steps=2", "logging.every_s=0.1")
KINDS = ("logger", "run", "both")
FULL_KILLS, FULL_STEPS = 20, 40
QUICK_KILLS, QUICK_STEPS = 2, 4
AFTERWARDS = 3
"""Kills of `elastic track` on the run that has ended, in full mode."""
WAIT_S = (0.5, 4.0)
TIMED = 5


class TrackedCrashes(CrashingRun):
    """A run with a process that brings its steps to loggers."""

    def tracker(self) -> int | None:
        with suppress(OSError, ValueError):
            record = json.loads((self.run_dir / "leases" / "tracker.json").read_bytes())
            return next((one["pid"] for one in record["processes"].values()), None)
        return None

    def kill_either(self, kind: str) -> None:
        if kind != "run" and (pid := self.until("a tracker", lambda: self.tracker() or (self.ended() and -1))) > 0:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if kind == "logger":
            self.kills[kind] += 1
        else:
            self.kill("orchestrator")
            self.resume()


def steps_in(logger: str, run: str, kept: Path) -> list[int]:
    """The steps of the rows that a logger has, read off its files."""
    match logger:
        case "tensorboard":
            from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

            events = [event for path in kept.glob("events*") for event in EventFileLoader(str(path)).Load()]
            return [event.step for event in events if any(one.tag == "time/step" for one in event.summary.value)]
        case "wandb":
            from elastic.report.tracking.to_wandb import steps_in as steps_of

            return [step for path in kept.glob("wandb/offline-run-*/*.wandb") for step in steps_of(path)]
        case "mlflow":
            query, path = "SELECT step FROM metrics WHERE key = 'time/step'", kept / "mlflow.db"
        case _:
            query, path = "SELECT step FROM metrics", Path(os.environ["TRACKIO_DIR"]) / f"{PROJECT}.db"
    with closing(open_sqlite(path, "ro")) as connection:
        return [step for (step,) in connection.execute(query)]


def crash(directory: Path, loggers: Sequence[str], kills: int, steps: int, afterwards: int) -> Figures:
    rng = random.Random(SEED)
    to = json.dumps(list(loggers))
    settings = (f"run.steps={steps}", f"logging.to={to}", *SETTINGS)
    struck = 0
    with TrackedCrashes.of_example(directory / "runs", *settings, seed=SEED) as run:
        for number in range(kills):
            run.until("a token, or the end", lambda: run.has_gone_on() or run.ended())
            pause_s = rng.uniform(*WAIT_S)
            until("its end", run.ended, pause_s, must=False)
            if run.ended():
                break
            run.kill_either(KINDS[number % len(KINDS)])
            struck += 1
        run.wait()
        leftovers = run.leftovers()
    for _ in range(afterwards):
        struck += begun_and_killed(run.run_dir, loggers, rng.uniform(*WAIT_S))
    elastic("track", str(run.run_dir), "--to", ",".join(loggers))
    expected = range(steps)
    twice = missing = 0
    for logger in loggers:
        found = Counter(steps_in(logger, run.run_dir.name, run.run_dir / "tracking" / logger))
        twice += sum(count - 1 for count in found.values()) + sum(step not in expected for step in found)
        missing += sum(step not in found for step in expected)
    return {
        "rows": steps * len(loggers),
        "rows_twice": twice,
        "rows_missing": missing,
        "kills": struck,
        "by": dict(run.kills),
        "leftovers": len(leftovers),
        **times(run.run_dir, loggers, directory),
    }


def begun_and_killed(run_dir: Path, loggers: Sequence[str], pause_s: float) -> bool:
    """Whether `elastic track` was killed before its end."""
    command = [sys.executable, "-m", "elastic.cli", "track", str(run_dir), "--to", ",".join(loggers)]
    with program(command, ends_within_s=pause_s, stderr=subprocess.DEVNULL) as process:
        pass
    return process.returncode == -signal.SIGKILL


def times(run_dir: Path, loggers: Sequence[str], directory: Path) -> Figures:
    reading = Reading.of(json.loads((run_dir / "config.json").read_text()))
    read_us, rows = list[float](), list[TrackedRow]()
    for _ in range(TIMED):
        source = StepSource(
            RunDirectory(run_dir),
            SampleBounds(trajectories=4, bytes=16_384),
            partial(with_texts, reading=reading),
        )
        began_s = time.perf_counter()
        source.poll(over=True)
        rows = [source.row(step) for step in source.finished]
        read_us.append((time.perf_counter() - began_s) * 1e6 / max(1, len(rows)))
        source.close()
    write_us: dict[str, float] = {}
    for name in loggers:
        own = TrackedRun(name=f"{run_dir.name}-timed", project="timed", directory=directory / "timed")
        logger = logger_named(name, own)
        logger.open()
        began_s = time.perf_counter()
        for row in rows:
            logger.write(row)
        write_us[name] = (time.perf_counter() - began_s) * 1e6 / max(1, len(rows))
        logger.close()
    return {"us_per_row": median(read_us), "us_per_write": write_us}


def main(arguments: Arguments) -> Figures:
    there = [name for name, kind in LOGGERS.items() if importlib.util.find_spec(kind.needs) is not None]
    missing = [name for name in LOGGERS if name not in there]
    why: Mapping[str, Any] = {
        "skipped_because": f"{', '.join(missing)}: `make test-loggers` sets up what has them" if missing else None
    }
    if not there:
        nothing = dict.fromkeys(("rows", "rows_twice", "rows_missing", "us_per_row"))
        return {**nothing, **why}
    if arguments.quick:
        there = ["tensorboard"] if "tensorboard" in there else there[:1]
    prepare()
    directory = arguments.scratch
    os.environ |= {"TRACKIO_DIR": str(directory / "trackio"), "WANDB_MODE": "offline"}
    os.environ.pop("MLFLOW_TRACKING_URI", None)
    if arguments.quick:
        return {**crash(directory, there, QUICK_KILLS, QUICK_STEPS, 0), **why}
    return {**crash(directory, there, FULL_KILLS - AFTERWARDS, FULL_STEPS, AFTERWARDS), **why}


if __name__ == "__main__":
    if PYTHON.exists() and Path(sys.prefix) != PYTHON.parents[1]:
        os.execv(PYTHON, [str(PYTHON), *sys.argv])
    benchmark(__doc__, main)
