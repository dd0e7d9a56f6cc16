"""The orchestrator of `elastic run --supervise`, which is started again when it dies."""

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from elastic.cli.output import EXIT_BAD_INPUT, EXIT_INTERRUPTED
from elastic.cli.upkeep import keep_up
from elastic.compose.incarnations import past_incarnations
from elastic.compose.plan import check_live, check_policy, resolve
from elastic.compose.runs import new_run_dir
from elastic.config import Config
from elastic.runtime.journal import RUNNING, UNEXPECTED, RunDirectory
from elastic.system.outages import EXIT_OUTAGE


def supervise_run(
    config: Config, names: list[str], where: str, resumed: Path | None, options: Sequence[str], restarts_max: int
) -> int:
    """Check what can be checked, then supervise; returns the exit code."""
    plan = resolve(config, names, where)
    check_live(plan)
    if resumed is None:
        check_policy(plan)
    run_dir = resumed or new_run_dir(config)
    return supervise(run_dir, ["--providers", ",".join(plan.providers), *options], restarts_max)


def supervise(
    run_dir: Path,
    options: Sequence[str],
    restarts_max: int,
    *,
    start: Callable[[Sequence[str]], "subprocess.Popen[bytes]"] = subprocess.Popen,
    wait: Callable[[float], None] = time.sleep,
) -> int:
    """Have the run in `run_dir` go on until it has ended; returns the exit code of its last process.

    Each process is `elastic run --resume` with these `options`. One that ends without an end of the run in its journal
    has died: the next goes on from there, at most `restarts_max` times. Signals go to the process that there is.
    """
    command = [sys.executable, "-m", "elastic.cli", "run", "--resume", str(run_dir), *options]
    died = partial(_died, run_dir)
    return keep_up(command, died, restarts_max, "the orchestrator", start=start, wait=wait)


def _died(run_dir: Path, status: int) -> bool:
    """Whether the process ended without an end of the run."""
    if status in (0, EXIT_BAD_INPUT, EXIT_INTERRUPTED):
        return False
    if status == EXIT_OUTAGE:
        return True
    past = past_incarnations(RunDirectory(run_dir))
    return past.status in ("", RUNNING, UNEXPECTED)
