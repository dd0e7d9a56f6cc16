"""Processes on this machine that never outlive their lease.

Each runs in a session and process group of its own, with its output in `logs/`. They outlive the process that started
them: the run's next one finds them by their record in `leases/`, and what they started by its mark, as
`elastic.system.supervision` has it, and takes them over or ends them.
"""

import asyncio
import shutil
import signal
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import traces
from elastic.core.types import NS_PER_S, EndCause, LeaseId
from elastic.system.compiled import place_below
from elastic.system.last_words import last_words
from elastic.system.processes import OF_SITE, inherited, told_secrets
from elastic.system.supervision import RecordedProcesses, end_left_over, how_ended, records
from providers.base import (
    Emit,
    KnownLease,
    LeaseRequest,
    ProviderContext,
    ProviderSettings,
    ProviderUnavailable,
    worker_environment,
)
from providers.base_provider import BaseProvider, Found, LeaseHandle
from providers.markets import LeaseEnding, Market


class Exit(NamedTuple):
    """How a process ended; `status` as of `subprocess`: negative for a signal, None if another process started it."""

    name: str
    status: int | None
    log: Path

    def __str__(self) -> str:
        how = f"{self.name} {how_ended(self.status)}"
        return how if self.status == 0 else f"{how}; its output is in {self.log}"

    def fault(self, secrets: Iterable[str]) -> str:
        """How it failed, with the last words of its log; empty where it did not, or where others have ended it."""
        status = self.status or 0
        if not (status > 0 or -status in _CRASHES) or status - SHELL_SIGNALS in _OTHERS:
            return ""
        return ": ".join(part for part in (f"its process {how_ended(status)}", last_words(self.log, secrets)) if part)


_CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGSYS)
"""Signals by which a process ends for what it does itself."""
_OTHERS = (signal.SIGHUP, signal.SIGINT, signal.SIGKILL, signal.SIGTERM)
SHELL_SIGNALS = 128
"""What is added to a signal's number in the exit status of a process that ends for it in good order."""


class ProcessGroup:
    """Processes that start, are recorded and die together: those of one lease, or a serving host's.

    Those that an earlier process of the run recorded are watched.
    """

    def __init__(self, context: ProviderContext, recorded: RecordedProcesses) -> None:
        self._context = context
        self._recorded = recorded
        self._members = recorded.adopted()

    def start(
        self, name: str, command: Sequence[str], environment: Mapping[str, str], pass_fds: Sequence[int] = ()
    ) -> None:
        """Start one more process. `environment` is added to what it inherits.

        Raises `OSError`, having left nothing running.
        """
        log = self._log(name)
        log.parent.mkdir(parents=True, exist_ok=True)
        ours = {**place_below(self._context.run_dir), **inherited(*OF_SITE, *self._context.pass_env)}
        with log.open("ab") as output:
            self._members[name] = self._recorded.start(
                name, command, {**ours, **environment}, output, pass_fds=pass_fds
            )

    async def wait(self) -> Exit:
        """Wait until the first of the processes has ended."""
        waits = {asyncio.create_task(process.wait()): name for name, process in self._members.items()}
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waits:
                task.cancel()
        first = done.pop()
        return Exit(waits[first], first.result(), self._log(waits[first]))

    async def kill(self) -> None:
        """SIGKILL everything, and return once it is reaped. Raises `TimeoutError` when it is not in time."""
        members = list(self._members.values())
        for process in members:
            process.kill()
        async with asyncio.timeout(self._context.release_timeout_s):
            for process in members:
                await process.wait()
            await self._recorded.end()
        self._members.clear()

    def _log(self, name: str) -> Path:
        return self._context.run_dir / "logs" / f"{name}.log"


PLACE, AT, BOOTS_AT = "place", "at_ns", "boots_at_ns"
"""What is kept of a lease: its place in the market since when, and when its workers boot, in the run's time."""


class LocalWorkers:
    """The workers of a lease as processes on this machine; they start when told, or when they are to boot."""

    def __init__(self, context: ProviderContext, request: LeaseRequest, recorded: RecordedProcesses) -> None:
        self._context = context
        self._request = request
        self._boots_at_ns = int(recorded.kept[BOOTS_AT])
        self._processes = ProcessGroup(context, recorded)
        self._started = len(recorded.processes) == len(request.tickets)

    async def start(self) -> None:
        """Raises `OSError`, having left nothing behind."""
        try:
            for ticket in self._request.tickets:
                environment = worker_environment(self._context, ticket, self._context.endpoint.here())
                self._processes.start(ticket.worker, self._context.worker_command, environment)
        except BaseException:
            await self._processes.kill()
            raise
        self._started = True

    async def keep(self) -> LeaseEnding:
        if not self._started:
            await asyncio.sleep((self._boots_at_ns - self._context.now_ns()) / NS_PER_S)
            try:
                await self.start()
            except OSError as error:
                return LeaseEnding(EndCause.LOST, f"the worker could not be started: {error}")
        end = await self._processes.wait()
        secrets = [*(ticket.token for ticket in self._request.tickets), *told_secrets()]
        fault = await asyncio.to_thread(end.fault, secrets)
        return LeaseEnding(EndCause.RELEASED if end.status == 0 else EndCause.LOST, str(end), fault)

    async def give_back(self) -> None:
        await self._processes.kill()


def check_command(what: str, command: Sequence[str]) -> None:
    """Raises `ProviderUnavailable` when `command` cannot be run."""
    if not command or shutil.which(command[0]) is None:
        found = repr(command[0]) if command else "nothing"
        raise ProviderUnavailable(f"the command that starts {what} must be an executable file; found {found}")


def new_record(context: ProviderContext, provider: str, name: str, **kept: str) -> RecordedProcesses:
    """Return a record of what a provider is about to start. `kept` is what the run's next process has to know
    besides."""
    return RecordedProcesses(records(context.run_dir), context.run, provider, name, kept)


class LocalProvider(BaseProvider[Any]):
    """Workers on this machine, wherever the market says that they are."""

    on_this_machine: ClassVar[bool] = True
    market_type: ClassVar[type[Market[Any]]] = Market
    workers_type: ClassVar[type[LocalWorkers]] = LocalWorkers

    def __init__(self, name: str, settings: ProviderSettings, context: ProviderContext) -> None:
        try:
            market = self.market_type(name, settings)
        except traces.TraceError as error:
            raise ProviderUnavailable(f"{name}: {error}") from error
        super().__init__(market, context)

    async def start(self, emit: Emit) -> None:
        check_command("a worker", self.context.worker_command)
        await super().start(emit)

    async def launch(self, request: LeaseRequest, place: str) -> LeaseHandle:
        boots_at_ns = self.context.now_ns() + round(self.market.boot_s() * NS_PER_S)
        kept = {PLACE: place, AT: str(self.market.at_ns), BOOTS_AT: str(boots_at_ns)}
        recorded = new_record(self.context, self.name, request.lease, **kept)
        workers = self.workers_type(self.context, request, recorded)
        if self.market.boot_s():
            recorded.write()
        else:
            await workers.start()
        return workers

    async def find(self, known: Mapping[LeaseId, KnownLease]) -> Mapping[LeaseId, Found]:
        """Workers that were being started when the earlier process died are ended, and start anew."""
        found: dict[LeaseId, Found] = {}
        timeout_s = self.context.release_timeout_s
        for recorded in RecordedProcesses.found(records(self.context.run_dir), self.context.run, self.name):
            lease = known.get(recorded.name)
            if lease is None:
                await end_left_over([recorded], timeout_s)
                continue
            if len(recorded.processes) < len(lease.request.tickets):
                async with asyncio.timeout(timeout_s):
                    await recorded.kill()
            workers = self.workers_type(self.context, lease.request, recorded)
            found[recorded.name] = Found(workers, recorded.kept[PLACE], int(recorded.kept[AT]))
        return found
