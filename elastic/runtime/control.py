"""The control socket of a live run: requests come in here, and become events of its core. Source: `elastic.control`."""

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import structlog

from elastic.control import (
    REQUEST_BYTES_MAX,
    SOCKET,
    Acknowledged,
    Answer,
    AskStatus,
    CapProvider,
    Refused,
    Request,
    RunStanding,
    SetBudget,
    StopRun,
    socket_address,
)
from elastic.core import events as e
from elastic.core.scheduler import Phase, Scheduler
from elastic.runtime.status import RunStatus

log = structlog.get_logger(__name__)

CONNECTIONS_MAX = 16
REQUEST_TIMEOUT_S = 5.0
"""For a request's line to come, and for its answer to be read."""

_decode_request = msgspec.json.Decoder(Request).decode


class CommandDesk:
    """Turns requests into events of the core. `durable` calls back once all that was fed so far is durable; `providers`
    are those that may be capped."""

    def __init__(
        self,
        scheduler: Scheduler,
        feed: Callable[[e.Event], None],
        durable: Callable[[Callable[[], None]], None],
        providers: Callable[[], Sequence[str]],
        status: Callable[[], RunStatus],
    ) -> None:
        self._scheduler = scheduler
        self._feed = feed
        self._durable = durable
        self._providers = providers
        self._status = status

    async def answer(self, request: Request) -> Answer:
        if isinstance(request, AskStatus):
            status = self._status()
            return RunStanding(run=status.run, pid=os.getpid(), status=msgspec.to_builtins(status))
        event = event_of(request)
        done = self._scheduler.controls.commands.get(request.id)
        if done is None:
            if (refused := self._refused(request)) is not None:
                return refused
            self._feed(event)
        elif done != event.words:
            return Refused(kind="conflict", message=f"command {request.id} was another one: {done}")
        settled: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def settle() -> None:
            if not settled.done():
                settled.set_result(None)

        self._durable(settle)
        await settled
        return Acknowledged(id=request.id, repeated=done is not None)

    def _refused(self, request: StopRun | CapProvider | SetBudget) -> Refused | None:
        core = self._scheduler
        if core.phase in (Phase.STOPPING, Phase.ENDED):
            why = core.failed or core.stopped or "all of its steps are done"
            return Refused(kind="ending", message=f"the run is ending already: {why}")
        if isinstance(request, CapProvider):
            known = self._providers()
            if request.provider == core.plan.trainer_provider:
                own = "the trainer's device is the run's own and cannot be capped; stop the run instead"
                return Refused(kind="unknown_provider", message=own)
            if request.provider not in known:
                found = f"the run has no provider {request.provider!r}; allowed: {', '.join(known) or 'none'}"
                return Refused(kind="unknown_provider", message=found)
        return None


def event_of(request: StopRun | CapProvider | SetBudget) -> e.StopCommanded | e.CapSet | e.BudgetSet:
    match request:
        case StopRun(id=command, reason=reason):
            return e.StopCommanded(command=command, reason=reason)
        case CapProvider(id=command, provider=provider, gpus=gpus):
            return e.CapSet(command=command, provider=provider, gpus=gpus)
        case SetBudget(id=command, usd=usd):
            return e.BudgetSet(command=command, usd=usd)


class ControlSocket:
    """Serves `desk` in the run's directory while it is open. What a peer may hold is bounded: one line, few seconds,
    few connections."""

    def __init__(self, run_dir: Path, desk: CommandDesk) -> None:
        self._run_dir = run_dir
        self._desk = desk
        self._server: asyncio.Server | None = None
        self.connections: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Raises `OSError`. A socket that a former process has left is replaced: the run is claimed by this one."""
        (self._run_dir / SOCKET).unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            with socket_address(self._run_dir) as address:
                listener.bind(address)
            (self._run_dir / SOCKET).chmod(0o600)  # Before it listens nobody can connect.
            self._server = await asyncio.start_unix_server(self._accept, sock=listener, limit=REQUEST_BYTES_MAX)
        except BaseException:
            listener.close()
            raise

    async def aclose(self) -> None:
        if self._server is None:
            return
        (self._run_dir / SOCKET).unlink(missing_ok=True)
        self._server.close()
        for task in list(self.connections):
            task.cancel()
        await asyncio.gather(*self.connections, return_exceptions=True)
        self._server = None

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self.connections) >= CONNECTIONS_MAX:
            writer.transport.abort()
            return
        task = asyncio.create_task(self._serve(reader, writer), name="control")
        self.connections.add(task)
        task.add_done_callback(self.connections.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            answer = await self._answer(reader)
            writer.write(msgspec.json.encode(answer) + b"\n")
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                await writer.drain()
        except (OSError, TimeoutError):
            pass
        except Exception:
            log.exception("control request not answered")
        finally:
            # Whoever does not read its answer is cut off.
            with contextlib.suppress(OSError):
                writer.close()

    async def _answer(self, reader: asyncio.StreamReader) -> Answer:
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                line = await reader.readline()
        except TimeoutError:
            return Refused(kind="invalid", message=f"no line came within {REQUEST_TIMEOUT_S:g} s")
        except ValueError:
            return Refused(kind="invalid", message=f"a request has at most {REQUEST_BYTES_MAX} bytes")
        try:
            request = _decode_request(line)
        except msgspec.DecodeError as error:
            return Refused(kind="invalid", message=str(error))
        return await self._desk.answer(request)
