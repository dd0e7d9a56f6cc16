"""A process that is started again whenever it dies, with the next one ready where that matters."""

import contextlib
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence

from elastic.cli.output import EXIT_FAILED, EXIT_INTERRUPTED, say
from elastic.system.outages import EXIT_OUTAGE, backoff
from elastic.system.signals import INTERRUPT, handled
from elastic.system.supervision import how_ended

RETRY_BASE_S, RETRY_MAX_S = 1.0, 30.0
BEGIN = b"begin\n"
SETTLED_S = 60.0
"""A process that has lived so long did not die of how it began: the next one is started at once."""


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
