"""Reads of runs' journals, apart from the server: in processes beside it.

A project's user may write anything into its runs' directories, at any moment. SQLite maps files of a database into
memory, waits for locks, and follows the pages that it finds. So the reader of such a database may be killed by a
signal, hang, or fill its memory. The processes that read have limits of time and memory, and the reads of one user take
at most `PER_OWNER` of them.
"""

import atexit
import contextlib
import functools
import os
import pickle
import resource
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import structlog

from elastic.server.side_processes import SideProcess, answer_orders

P = ParamSpec("P")
T = TypeVar("T")

log = structlog.get_logger(__name__)

LIMIT_S = 60.0
"""Longest that a read takes, such as the report of a long run."""
WAIT_S = 5.0
"""Longest that a read waits for a process."""
MEMORY_BYTES = 2**30
"""Of one process, besides the files that it maps."""
PROCESSES, PER_OWNER, KEPT = 16, 2, 4
"""At once, for one owner of directories, and while there is nothing to read."""
_apart = False
"""Whether this process is one of these."""


class CannotBeRead(TimeoutError):
    """The read took too long, or its process has ended."""


def apart(limit_s: float = LIMIT_S) -> Callable[[Callable[Concatenate[Path, P], T]], Callable[Concatenate[Path, P], T]]:
    """Make calls of a module's function, which reads the directory that is its first argument, in such a process.

    Arguments, results and exceptions are copies. The function may besides raise `CannotBeRead`.
    """

    def made(read: Callable[Concatenate[Path, P], T]) -> Callable[Concatenate[Path, P], T]:
        @functools.wraps(read)
        def call(directory: Path, *args: P.args, **kwargs: P.kwargs) -> T:
            if _apart:
                return read(directory, *args, **kwargs)
            return _processes.ask(limit_s, call, directory, *args, **kwargs)

        return call

    return made


@dataclass(frozen=True)
class _ReadAnswer:
    value: Any = None
    error: Exception | None = None


class ReadingProcesses:
    """Processes that read, started as they are needed. Threads may share them."""

    def __init__(self) -> None:
        self._free: list[SideProcess] = []
        self._busy: Counter[object] = Counter()
        self._changed = threading.Condition()

    def ask(self, limit_s: float, read: Callable[..., T], directory: Path, *args: object, **kwargs: object) -> T:
        with self._process(directory) as process:
            order = pickle.dumps((read, directory.absolute(), args, kwargs))
            answer = pickle.loads(process.ask(order, limit_s))
        if answer.error is not None:
            raise answer.error
        return answer.value

    @property
    def busy(self) -> int:
        """How many reads there are now."""
        return self._busy.total()

    def end(self) -> None:
        """End the processes that nobody uses."""
        with self._changed:
            ended, self._free = self._free, []
        for process in ended:
            process.end()

    @contextlib.contextmanager
    def _process(self, directory: Path) -> Iterator[SideProcess]:
        owner = _owner_of(directory)
        process, keep = self._take(owner, directory), False
        try:
            if process is None:
                process = SideProcess(__name__)
                process.ready()
            yield process
            keep = True
        except (EOFError, OSError) as error:
            log.warning("a process that reads a run's files is ended", directory=str(directory), error=repr(error))
            raise CannotBeRead(f"{directory.name}: its files cannot be read now") from error
        finally:
            with self._changed:
                self._busy[owner] -= 1
                if not self._busy[owner]:
                    del self._busy[owner]
                keep = keep and len(self._free) < KEPT
                self._free += [process] if process is not None and keep else []
                self._changed.notify_all()
            if process is not None and not keep:
                process.end()

    def _take(self, owner: object, directory: Path) -> SideProcess | None:
        """Return a free process, or None where a new one may be started. Raises `CannotBeRead`."""
        until_s = time.monotonic() + WAIT_S
        with self._changed:
            while self._busy[owner] >= PER_OWNER or self._busy.total() >= PROCESSES:
                if not self._changed.wait(until_s - time.monotonic()):
                    raise CannotBeRead(f"{directory.name}: other files of its owner are still being read")
            self._busy[owner] += 1
            return self._free.pop() if self._free else None


def _owner_of(directory: Path) -> object:
    """Return whose reads delay each other: those of another user, or of one directory of our own."""
    try:
        uid = directory.stat().st_uid
    except OSError:
        return directory
    return directory if uid == os.geteuid() else uid


_processes = ReadingProcesses()
atexit.register(_processes.end)


def _answer(order: bytes) -> bytes:
    read, directory, args, kwargs = pickle.loads(order)
    try:
        answer = _ReadAnswer(read(directory, *args, **kwargs))
    except MemoryError:
        raise
    except Exception as error:
        answer = _ReadAnswer(error=error)
    return pickle.dumps(answer)


def main(descriptor: int) -> None:
    """Answer until the server closes the socket of this descriptor."""
    global _apart
    _apart = True
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, most))
    # What is read is imported before the first order, which would wait for it.
    from elastic.server.history import journals, trajectories  # noqa: F401

    answer_orders(descriptor, _answer)


if __name__ == "__main__":
    from elastic.server.history import apart as this

    # What is sent is of this module, and not of `__main__`.
    this.main(int(sys.argv[1]))
