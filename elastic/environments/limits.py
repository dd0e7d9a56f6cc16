"""Limits of env workers' processes: of memory, CPU time and open files.

They keep an honest mistake from filling a machine, and are no boundary: what a process may do is still its user's.
"""

import os
import resource
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from elastic.system.named_code import current_line

GIB = 1024**3
LEFT_STATUS = 70
"""The exit status of a process whose input has ended, or whose run nobody is at."""
LOOKS = 8
"""How often it is looked, before a process ends for that, whether anybody is at the run."""
CPU_GRACE_S = 5
"""Between the signal that says that the CPU time is used up, and the one that nobody can heed."""


class ProcessLimits(NamedTuple):
    """The limits of each process: its address space, its CPU time, and its open files; None for no limit."""

    memory_gb: float | None = None
    cpu_s: float | None = None
    files: int | None = None

    def hold(self) -> None:
        """Hold from now on, for this process and, each by itself, those that it starts."""
        if self.memory_gb is not None:
            _bound(resource.RLIMIT_AS, round(self.memory_gb * GIB))
        if self.cpu_s is not None:
            _bound(resource.RLIMIT_CPU, max(1, round(self.cpu_s)), CPU_GRACE_S)
        if self.files is not None:
            _bound(resource.RLIMIT_NOFILE, self.files)


def _bound(what: int, most: int, grace: int = 0) -> None:
    """Set a limit, not above the one that cannot be raised."""
    _, hard = resource.getrlimit(what)
    highest = most + grace if hard == resource.RLIM_INFINITY else min(most + grace, hard)
    resource.setrlimit(what, (min(most, highest), highest))


def end_once_abandoned(claimed: Callable[[], bool], after_s: float) -> None:
    """End this process once nobody has been at the run for so long, also where code of others never comes to its end:
    as it is imported, or while it holds up the event loop."""

    def watch() -> None:
        since_s = time.monotonic()
        while time.monotonic() - since_s < after_s:
            time.sleep(after_s / LOOKS)
            with suppress(OSError):
                since_s = time.monotonic() if claimed() else since_s
        os._exit(LEFT_STATUS)

    threading.Thread(target=watch, name="run", daemon=True).start()


def say_where_it_stands(after_s: float, over: threading.Event, say: Callable[[str], None]) -> None:
    """Have it said where this thread stands in code, if what it does is not over by then."""
    thread = threading.get_ident()

    def watch() -> None:
        if not over.wait(after_s):
            say(current_line(sys._current_frames().get(thread)))

    threading.Thread(target=watch, name="start", daemon=True).start()


def end_with_input() -> None:
    """End this process as soon as its standard input does: together with the process that holds the other end,
    whatever is under way."""

    def watch() -> None:
        while os.read(sys.stdin.fileno(), 4096):
            pass
        os._exit(LEFT_STATUS)

    threading.Thread(target=watch, name="input", daemon=True).start()
