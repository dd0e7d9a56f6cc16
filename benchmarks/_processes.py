"""Processes that a benchmark starts, none of which outlives it, however it ends.

Whatever these start in turn has the benchmark's scratch directory for its temporary files, and is known by that.
"""

import asyncio
import contextlib
import multiprocessing
import multiprocessing.util
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any, Self, cast

import psutil

from benchmarks import ROOT
from elastic.system.processes import END_S, end_with_parent
from elastic.system.signals import INTERRUPT, TERMINATION, handled
from elastic.weights.shared_memory import remove_leftovers

SCRATCH = "TMPDIR"
"""The variable that every process of a run, a pool or a server inherits."""
IN_MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None
"""A place for files whose disk is not to be measured."""
ANSWER_S = 240.0
POLL_S = 0.05
UNWIND_S = 30
"""From a signal that ends a benchmark, until it is killed."""


@contextlib.contextmanager
def scratch_directory() -> Iterator[Path]:
    """An empty directory, which is gone after the block, as are all processes that were started in it.

    SIGTERM and SIGINT end the block. Where this process is killed, a keeper does the rest.
    """
    directory = Path(tempfile.mkdtemp(prefix="bench-")).resolve()
    # As any directory for temporary files: some processes are other users'.
    directory.chmod(0o1777)
    # That of `multiprocessing` is removed later than this one, so it is not in it.
    beside = multiprocessing.util.get_temp_dir()
    keeper = subprocess.Popen(
        [sys.executable, "-m", __name__, str(os.getpid()), str(directory), beside],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.environ[SCRATCH] = tempfile.tempdir = str(directory)
    own = os.getpid()

    def end(number: int, _: object) -> None:
        if os.getpid() != own:  # A fork, which has this handler.
            os._exit(128 + number)
        end_soon()
        sys.exit(128 + number)

    try:
        with handled(TERMINATION, end):
            yield directory
    finally:
        _end_in(directory)
        keeper.kill()
        keeper.wait()


def end_soon() -> None:
    """Say that a signal ends this process, end those that it waits for, and have the keeper do what is not done in
    time."""
    os.write(sys.stderr.fileno(), f"{Path(sys.argv[0]).name} was ended by a signal\n".encode())
    for child in multiprocessing.active_children():
        child.kill()
    signal.alarm(UNWIND_S)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """What the block starts hears no SIGINT, which a terminal sends to all: this process ends it, and speaks of it."""
    signal.pthread_sigmask(signal.SIG_BLOCK, INTERRUPT)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, INTERRUPT)


def _end_in(directory: Path) -> None:
    """SIGKILL whatever has to do with this directory, and remove it, with what that had in shared memory."""
    ends_s = time.monotonic() + END_S
    while (left := processes_in(directory)) and time.monotonic() < ends_s:
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        time.sleep(POLL_S)
    shutil.rmtree(directory, ignore_errors=True)
    remove_leftovers()


def processes_in(directory: Path) -> list[psutil.Process]:
    """Living processes, but for this one, that have a directory in their command, their environment, or that they are
    in."""
    place, found = str(directory.resolve()), list[psutil.Process]()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            words = [*process.cmdline(), *process.environ().values(), process.cwd()]
            if process.pid != os.getpid() and any(place in word for word in words):
                found.append(process)
    return found


@contextlib.contextmanager
def program(command: Sequence[str], ends_within_s: float = 0.0, **options: Any) -> Iterator["subprocess.Popen[Any]"]:
    """A program that runs beside the block, in the repository's root unless `options` of `subprocess.Popen` say
    otherwise. It is killed after the block, unless it ends by itself within `ends_within_s`."""
    with subprocess.Popen(command, **{"cwd": ROOT, "stdin": subprocess.DEVNULL, **options}) as process:
        try:
            yield process
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(ends_within_s)
        finally:
            process.kill()


class Child:
    """A process that runs `work` with its end of a pipe and these arguments, and tells by it of an exception. It is
    killed at the end of the context, unless it ends by itself within `ends_within_s`."""

    def __init__(
        self,
        work: Callable[..., object],
        *arguments: object,
        context: BaseContext | None = None,
        daemon: bool = True,
        ends_within_s: float = 0.0,
    ) -> None:
        context = context or multiprocessing.get_context("spawn")
        self.pipe, far = context.Pipe()
        self._process = cast(Any, context).Process(target=_work, args=(work, far, *arguments), daemon=daemon)
        self._ends_within_s = ends_within_s
        with uninterrupted():
            self._process.start()
        far.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self._process.join(self._ends_within_s)
        self.close()

    def hear(self, within_s: float = ANSWER_S) -> Any:
        """What it says next. Raises it where it is an exception, and `TimeoutError`."""
        if not self.pipe.poll(within_s):
            raise TimeoutError(f"a process said nothing for {within_s:g} s")
        said = self.pipe.recv()
        if isinstance(said, Exception):
            raise said
        return said

    async def ask(self, question: object, within_s: float = ANSWER_S) -> Any:
        self.pipe.send(question)
        return await asyncio.to_thread(self.hear, within_s)

    def close(self) -> None:
        self._process.kill()
        self._process.join()
        self.pipe.close()


def _work(work: Callable[..., object], pipe: Connection, *arguments: object) -> None:
    end_with_parent()
    # It may have been gone before.
    if (parent := multiprocessing.parent_process()) is None or not parent.is_alive():
        return
    try:
        work(pipe, *arguments)
    except Exception as error:
        pipe.send(error)
        raise


if __name__ == "__main__":
    with contextlib.suppress(ProcessLookupError):
        select.select([os.pidfd_open(int(sys.argv[1]))], [], [])
    for left in sys.argv[2:]:
        _end_in(Path(left))
