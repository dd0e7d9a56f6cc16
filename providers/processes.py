"""Processes on this machine that never outlive their lease.

Each runs in a session and process group of its own, with its output in `logs/`, and on Linux it is killed with
the process that started it. What survives all the same (a grandchild, or any process elsewhere) is found through
a record in `leases/`, which names the run and each process by its id and the time of its start.
"""

import asyncio
import contextlib
import os
import shutil
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import psutil

from elastic.core.types import EndCause
from providers import launch
from providers.base import LeaseRequest, ProviderContext, ProviderUnavailable, worker_environment
from providers.keeper import Ending

RUN_VARIABLE = "ELASTIC_RUN"
START_TOLERANCE_S = 1.0
"""Start times are read from a clock that may be set meanwhile; a process id is not used again this soon."""
POLL_S = 0.01


class _Process(msgspec.Struct, frozen=True):
    pid: int
    started_s: float


class _Record(msgspec.Struct, frozen=True):
    run: str
    provider: str
    name: str
    processes: list[_Process]


class Exit(NamedTuple):
    """How a process ended; `status` as of `subprocess`: negative for a signal."""

    name: str
    status: int
    log: Path

    def __str__(self) -> str:
        how = f"exited with status {self.status}" if self.status >= 0 else f"was killed by {_signal(-self.status)}"
        return f"{self.name} {how}" if self.status == 0 else f"{self.name} {how}; its output is in {self.log}"


class _Child(NamedTuple):
    name: str
    process: asyncio.subprocess.Process
    log: Path


class ProcessGroup:
    """Processes that start, are recorded and die together: those of one lease, or a serving host's."""

    def __init__(self, context: ProviderContext, provider: str, name: str) -> None:
        self._context = context
        self._provider = provider
        self._name = name
        self._children: list[_Child] = []
        self._record = context.run_dir / "leases" / f"{name}.json"

    async def start(
        self, name: str, command: Sequence[str], environment: Mapping[str, str], pass_fds: Sequence[int] = ()
    ) -> None:
        """Start one more process. `environment` is added to ours.

        Raises `OSError`, having started nothing. When cancelled, the process may have started and is ours to kill.
        """
        starting = asyncio.create_task(self._start(name, command, environment, pass_fds))
        try:
            await asyncio.shield(starting)
        except asyncio.CancelledError:
            # Cut short, the event loop would kill the process without telling anyone when it is dead.
            await asyncio.gather(starting, return_exceptions=True)
            raise

    async def _start(
        self, name: str, command: Sequence[str], environment: Mapping[str, str], pass_fds: Sequence[int]
    ) -> None:
        log = self._context.run_dir / "logs" / f"{name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", launch.__file__, str(os.getpid()), *command),
                env={**os.environ, **environment, RUN_VARIABLE: self._context.run},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                pass_fds=pass_fds,
            )
        self._children.append(_Child(name, process, log))
        try:
            self._write_record()
        except OSError:
            _kill_group(self._children[-1])
            await process.wait()
            self._children.pop()
            raise

    async def wait(self) -> Exit:
        """Wait until the first of the processes has ended."""
        waits = {asyncio.create_task(child.process.wait()): child for child in self._children}
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waits:
                task.cancel()
        child = waits[done.pop()]
        assert child.process.returncode is not None
        return Exit(child.name, child.process.returncode, child.log)

    async def kill(self) -> None:
        """SIGKILL everything, and return once it is reaped. Raises `TimeoutError` when it is not in time."""
        children = list(self._children)
        for child in children:
            _kill_group(child)
        async with asyncio.timeout(self._context.release_timeout_s):
            for child in children:
                await child.process.wait()
                await _kill_rest(child.process.pid)
        self._children.clear()
        self._record.unlink(missing_ok=True)

    def _write_record(self) -> None:
        processes = [_Process(pid, _started_s(pid)) for pid in (child.process.pid for child in self._children)]
        record = _Record(self._context.run, self._provider, self._name, processes)
        self._record.parent.mkdir(parents=True, exist_ok=True)
        partial = self._record.with_suffix(".partial")
        partial.write_bytes(msgspec.json.encode(record))
        partial.replace(self._record)


class LocalWorkers:
    """The workers of a lease as processes on this machine; they start when told, or after `boot_delay_s`."""

    def __init__(
        self, context: ProviderContext, provider: str, request: LeaseRequest, boot_delay_s: float = 0.0
    ) -> None:
        self._context = context
        self._request = request
        self._boot_delay_s = boot_delay_s
        self._processes = ProcessGroup(context, provider, request.lease)
        self._started = False

    async def start(self) -> None:
        """Raises `OSError`, having left nothing behind."""
        try:
            for ticket in self._request.tickets:
                environment = worker_environment(self._context, ticket)
                await self._processes.start(ticket.worker, self._context.worker_command, environment)
        except BaseException:
            await self._processes.kill()
            raise
        self._started = True

    async def keep(self) -> Ending:
        if not self._started:
            await asyncio.sleep(self._boot_delay_s)
            try:
                await self.start()
            except OSError as error:
                return Ending(EndCause.LOST, f"the worker could not be started: {error}")
        end = await self._processes.wait()
        return Ending(EndCause.RELEASED if end.status == 0 else EndCause.LOST, str(end))

    async def give_back(self) -> None:
        await self._processes.kill()


def check_command(what: str, command: Sequence[str]) -> None:
    """Raises `ProviderUnavailable` when `command` cannot be run."""
    if not command or shutil.which(command[0]) is None:
        found = repr(command[0]) if command else "nothing"
        raise ProviderUnavailable(f"the command that starts {what} must be an executable file; found {found}")


async def reconcile(context: ProviderContext, provider: str) -> list[str]:
    """Kill what an earlier process left of this provider in this run; returns a line about each lease."""
    lines: list[str] = []
    for path in sorted((context.run_dir / "leases").glob("*.json")):
        try:
            record = msgspec.json.decode(path.read_bytes(), type=_Record)
        except msgspec.DecodeError as error:
            lines.append(f"{path}: not a lease's record ({error}); left as it is")
            continue
        if (record.run, record.provider) == (context.run, provider):
            killed = await _kill_survivors(record, context.release_timeout_s)
            path.unlink(missing_ok=True)
            did = f"killed {', '.join(map(str, killed))}" if killed else "nothing of it was alive"
            lines.append(f"lease {record.name} of {provider}: {did}")
    return lines


async def _kill_survivors(record: _Record, timeout_s: float) -> list[int]:
    killed: set[int] = set()
    async with asyncio.timeout(timeout_s):
        while survivors := [member for process in record.processes for member in _survivors(record.run, process)]:
            killed.update(_kill(survivor) for survivor in survivors)
            await asyncio.sleep(POLL_S)
    return sorted(killed)


def _survivors(run: str, process: _Process) -> Iterator[psutil.Process]:
    """The recorded process and the rest of its group, unless its id has passed to another process since."""
    try:
        if abs(psutil.Process(process.pid).create_time() - process.started_s) > START_TOLERANCE_S:
            return
    except psutil.NoSuchProcess:
        pass
    for member in _group(process.pid):
        try:
            younger = member.create_time() >= process.started_s - START_TOLERANCE_S
            if younger and member.environ().get(RUN_VARIABLE) == run:
                yield member
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue


def _kill_group(child: _Child) -> None:
    # Once the first process is reaped, its group's id could already be another's.
    if child.process.returncode is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.process.pid, signal.SIGKILL)


async def _kill_rest(group_id: int) -> None:
    while members := list(_group(group_id)):
        for member in members:
            _kill(member)
        await asyncio.sleep(POLL_S)


def _kill(process: psutil.Process) -> int:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.kill()
    return process.pid


def _group(group_id: int) -> Iterator[psutil.Process]:
    """The living members of a process group; zombies are not."""
    for pid in psutil.pids():
        try:
            if os.getpgid(pid) == group_id and _alive(process := psutil.Process(pid)):
                yield process
        except (ProcessLookupError, PermissionError, psutil.NoSuchProcess):
            continue


def _alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _started_s(pid: int) -> float:
    try:
        return psutil.Process(pid).create_time()
    except psutil.NoSuchProcess:
        return 0.0


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
