"""Processes on this machine that never outlive their lease.

Each runs in a session and process group of its own, with its output in `logs/`, and is killed with the process that
started it. What survives all the same (a grandchild, or whatever a killed orchestrator left) is found by its record in
`leases/` and its mark, as `elastic.processes` has it.
"""

import asyncio
import contextlib
import os
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from elastic.core.types import EndCause
from elastic.processes import RecordedProcesses, end_recorded, inherited, records
from providers import launch
from providers.base import LeaseRequest, ProviderContext, ProviderUnavailable, worker_environment
from providers.keeper import Ending

WORKER_VARIABLES = ("ELASTIC_WEIGHTS", "ELASTIC_WEIGHTS_GBPS", "ELASTIC_SITE", "ELASTIC_SITE_TOKEN")
"""What a machine may tell its workers, besides what every process of a run inherits; see `elastic.worker.weights`."""


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
        self._children: list[_Child] = []
        self._recorded = RecordedProcesses(records(context.run_dir), context.run, provider, name)

    async def start(
        self, name: str, command: Sequence[str], environment: Mapping[str, str], pass_fds: Sequence[int] = ()
    ) -> None:
        """Start one more process. `environment` is added to what it inherits.

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
                env=inherited(*WORKER_VARIABLES, *self._context.pass_env) | dict(environment) | self._recorded.marks,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                pass_fds=pass_fds,
            )
        self._children.append(_Child(name, process, log))
        try:
            self._recorded.add(process.pid)
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
            await self._recorded.end()
        self._children.clear()


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
    """End what an earlier process left of this provider in this run; returns a line about each lease."""
    return await end_recorded(records(context.run_dir), context.run, provider, context.release_timeout_s)


def _kill_group(child: _Child) -> None:
    # Once the first process is reaped, its group's id could already be another's.
    if child.process.returncode is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.process.pid, signal.SIGKILL)


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
