"""Processes that are started again when they die: the orchestrator of `elastic run --supervise`, and a pool's."""

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from elastic.cli.output import EXIT_BAD_INPUT, EXIT_FAILED, EXIT_INTERRUPTED, say
from elastic.compose.incarnations import past_incarnations
from elastic.compose.plan import check_live, check_policy, resolve
from elastic.compose.runs import new_run_dir
from elastic.config import Config
from elastic.runtime.journal import RUNNING, UNEXPECTED, RunDirectory
from elastic.system.outages import EXIT_OUTAGE, backoff
from elastic.system.signals import INTERRUPT, handled
from elastic.system.supervision import how_ended

RETRY_BASE_S, RETRY_MAX_S = 1.0, 30.0
BEGIN = b"begin\n"
SETTLED_S = 60.0
"""A process that has lived so long did not die of how it began: the next one is started at once."""


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


def keep_up(
    command: Sequence[str],
    died: Callable[[int], bool],
    restarts_max: int,
    what: str,
    *,
    settled_s: float = SETTLED_S,
    forgives: bool = False,
    start: Callable[[Sequence[str]], "subprocess.Popen[bytes]"] = subprocess.Popen,
    wait: Callable[[float], None] = time.sleep,
    settles: Callable[[], object] = lambda: None,
) -> int:
    """Start the command again, with back-off, whenever its process has died; returns the exit code of the last one.

    `died` judges an exit status. Signals go to the process that there is; one that ends by such a signal, since it
    could not hear of it yet, has not died. A process that was up for `settled_s` is replaced at once; with `forgives`,
    restarts before it do not count. `settles` is called once one has been up for so long.
    """
    restarts = failures = 0
    while True:
        began_s = time.monotonic()
        with _forwarding(start(command)) as (process, told):
            try:
                status = process.wait(settled_s)
            except subprocess.TimeoutExpired:
                settles()
                status = process.wait()
        lived_s = time.monotonic() - began_s
        how = how_ended(status)
        if -status in told:
            return EXIT_INTERRUPTED
        if not died(status):
            return status
        outage, settled = status == EXIT_OUTAGE, lived_s > settled_s
        if settled and not outage:
            failures = 0
            restarts = 0 if forgives else restarts
        delay_s = backoff(failures, RETRY_BASE_S, RETRY_MAX_S)
        if outage:
            say(f"{what} could not begin; again in {delay_s:g} s, which counts as no restart")
        elif restarts == restarts_max:
            say(f"error: {what} {how}; it has been started again {restarts} times, and is not any more")
            return EXIT_FAILED
        else:
            restarts += 1
            when = "at once" if settled else f"in {delay_s:g} s"
            say(f"{what} {how} after {lived_s:.0f} s; again {when} ({restarts} of {restarts_max})")
        if outage or not settled:
            wait(delay_s)
            failures += 1


class Standby:
    """The next process of a command, which has imported what it needs and begins by a line on its standard input. It
    ends without one, as when the process that started it is gone."""

    def __init__(self, option: str) -> None:
        self._option = option
        self._waiting: subprocess.Popen[bytes] | None = None

    def prepare(self, command: Sequence[str]) -> None:
        if self._waiting is None:
            self._waiting = subprocess.Popen([*command, self._option], stdin=subprocess.PIPE)

    def start(self, command: Sequence[str]) -> "subprocess.Popen[bytes]":
        """Have the process that waits begin, or start one if none does."""
        process, self._waiting = self._waiting, None
        if process is not None and process.stdin is not None:
            with contextlib.suppress(BrokenPipeError), process.stdin:
                process.stdin.write(BEGIN)
                process.stdin.flush()
                return process
        return subprocess.Popen(command)

    def close(self) -> None:
        if self._waiting is not None and self._waiting.stdin is not None:
            self._waiting.stdin.close()
            self._waiting.wait()


def _died(run_dir: Path, status: int) -> bool:
    """Whether the process ended without an end of the run."""
    if status in (0, EXIT_BAD_INPUT, EXIT_INTERRUPTED):
        return False
    if status == EXIT_OUTAGE:
        return True
    past = past_incarnations(RunDirectory(run_dir))
    return past.status in ("", RUNNING, UNEXPECTED)


@contextlib.contextmanager
def _forwarding(process: "subprocess.Popen[bytes]") -> Iterator[tuple["subprocess.Popen[bytes]", Sequence[int]]]:
    """A terminal's Ctrl-C reaches the process by itself; what is sent to this one alone is sent on. Yields the process,
    and what was sent on."""
    told: list[int] = []

    def forward(number: int, _: object) -> None:
        told.append(number)
        process.send_signal(number)

    with handled((signal.SIGTERM, signal.SIGHUP), forward), handled(INTERRUPT, lambda *_: None):
        yield process, told
