"""Reads of runs' journals, apart from the server: in processes beside it.

A project's user may write anything into its runs' directories, at any moment. SQLite maps files of a database into
memory, waits for locks, and follows the pages that it finds. So the reader of such a database may be killed by a
signal, hang, or fill its memory, and what it finds may be of any type. The processes that read have limits of time and
memory, and the reads of one user take at most `PER_OWNER` of them.
"""

import functools
import os
import resource
import traceback
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import structlog

from elastic.report.trajectories import NoSuchTrajectory
from elastic.runtime.journal import JournalError
from elastic.server.side_processes import NoneFree, SideLimits, SideProcesses, answer_orders

P = ParamSpec("P")
T = TypeVar("T")

log = structlog.get_logger(__name__)

LIMIT_S = 60.0
"""Longest that a read takes, such as the report of a long run."""
MEMORY_BYTES = 2**30
"""The memory of one process, besides the files that it maps."""
PER_OWNER = 2
LIMITS = SideLimits(processes=16, per_owner=PER_OWNER, kept=4, waiting=256, waiting_per_owner=64, wait_s=5.0)
TOLD = (JournalError, NoSuchTrajectory, OSError)
"""Errors that reads raise. Others come of files that say what no run writes."""
_apart = False
"""Whether this process is one of these."""


class CannotBeRead(TimeoutError):
    """The read took too long, its process has ended, or it found what no run writes."""


def apart(limit_s: float = LIMIT_S) -> Callable[[Callable[Concatenate[Path, P], T]], Callable[Concatenate[Path, P], T]]:
    """Make calls of a module's function, which reads the directory that is its first argument, in such a process.

    Arguments, results and exceptions are copies. The function may besides raise `CannotBeRead`.
    """

    def made(read: Callable[Concatenate[Path, P], T]) -> Callable[Concatenate[Path, P], T]:
        @functools.wraps(read)
        def call(directory: Path, *args: P.args, **kwargs: P.kwargs) -> T:
            if _apart:
                return read(directory, *args, **kwargs)
            return _processes.read(limit_s, call, directory, *args, **kwargs)

        return call

    return made


@dataclass(frozen=True)
class _ReadAnswer:
    """What a read returns, which of the errors that are told it raises, or where it failed otherwise."""

    value: Any = None
    error: Exception | None = None
    fault: str = ""


class ReadingProcesses(SideProcesses):
    """Processes that read, for the owners of directories."""

    def __init__(self) -> None:
        super().__init__(__name__, LIMITS)

    def read(self, limit_s: float, read: Callable[..., T], directory: Path, *args: object, **kwargs: object) -> T:
        """Return what `read` returns for these arguments. Raises what it raises of `TOLD`, and `CannotBeRead`."""
        try:
            answer = self.ask(_owner_of(directory), (read, directory.absolute(), args, kwargs), limit_s)
        except NoneFree:
            raise CannotBeRead(f"{directory.name}: other files of its owner are still being read") from None
        except (EOFError, OSError) as error:
            log.warning("a process that reads a run's files is ended", directory=str(directory), error=repr(error))
            raise CannotBeRead(f"{directory.name}: its files cannot be read now") from error
        if answer.error is not None:
            raise answer.error
        if answer.fault:
            log.warning("a run's files say what no run writes", directory=str(directory), fault=answer.fault)
            raise CannotBeRead(f"{directory.name}: its files say what no run writes")
        return answer.value


def _owner_of(directory: Path) -> Hashable:
    """Return whose reads delay each other: those of another user, or of one directory of our own."""
    try:
        uid = directory.stat().st_uid
    except OSError:
        return directory
    return directory if uid == os.geteuid() else uid


_processes = ReadingProcesses()
warm = _processes.warm


def _answer(order: Any) -> _ReadAnswer:
    read, directory, args, kwargs = order
    try:
        return _ReadAnswer(read(directory, *args, **kwargs))
    except MemoryError:
        raise
    except TOLD as error:
        return _ReadAnswer(error=error)
    except Exception:
        return _ReadAnswer(fault=traceback.format_exc(limit=-3))


def main(descriptor: int) -> None:
    """Answer until the server closes the socket of this descriptor."""
    global _apart
    _apart = True
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, most))
    # What is read is imported before the first order, which would wait for it.
    from elastic.server.history import journals, trajectories  # noqa: F401

    answer_orders(descriptor, _answer)
