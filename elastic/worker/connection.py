"""The worker's end of its connection: it dials the orchestrator, opens a session, and sends and receives frames."""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable
from typing import NoReturn, TypeAlias, cast

import msgspec
import structlog
import tenacity

from elastic.core.types import WorkerId
from elastic.protocol import wire
from elastic.protocol.endpoint import Address, Endpoint
from elastic.protocol.tls import TlsError, check_pin, pinning_context
from elastic.system.host import after, here

log = structlog.get_logger(__name__)

UNSENT_BYTES_MAX = 4 * wire.MAX_FRAME_BYTES
"""Unsent bytes beyond which a connection to an orchestrator that does not read counts as lost."""

ATTEMPT_TIMEOUT_S = 5.0
"""Limit of one attempt to connect and to be welcomed."""

CLOSE_TIMEOUT_S = 2.0

LAST_LOOK_S = 0.1
"""Wait after a silence: if this process was held up, the orchestrator's messages are waiting to be read."""

JOIN_TIMEOUT_S = 30.0
"""Limit for the first welcome if the ticket sets none."""

Hear: TypeAlias = Callable[[list[wire.FromOrchestrator]], None]


class Ticket(msgspec.Struct, frozen=True, kw_only=True):
    """The run and worker for which a process dials, and where. `token` is valid for one session; it dials for
    `wait_s`."""

    endpoint: Endpoint
    run: str
    worker: WorkerId
    token: str
    wait_s: float = JOIN_TIMEOUT_S
    ticket: str = ""
    """The name of the ticket, for workers that join by one. The orchestrator then assigns the `worker` name."""


class ConnectionLost(Exception):
    """The connection is gone or dead; dialling again may help."""


class LostInWaiting(ConnectionLost):
    """The connection was lost while the worker waited for a lease. Its time to wait begins anew."""


class SessionRefused(Exception):
    """The orchestrator refuses this worker; `retry` says whether dialling again can help."""

    def __init__(self, reason: str, retry: bool) -> None:
        super().__init__(reason)
        self.retry = retry


class Connection(asyncio.Protocol):
    """The connection to the orchestrator. Sending never waits: frames queue up to `UNSENT_BYTES_MAX`.

    The event loop delivers received frames directly, without a task in between. Frames wait until `listen` is called.
    """

    transport: asyncio.Transport

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._frames = wire.FrameBuffer()
        self._waiting: list[wire.FromOrchestrator] = []
        self._hear: Hear = self._waiting.extend
        self._heard_s = self._loop.time()
        self._stirred = asyncio.Event()
        self._over = asyncio.Event()
        self._cause: Exception | None = None

    def send(self, message: wire.FromWorker) -> None:
        """Queue a frame; silently drops it when the connection is gone, which `listen` then reports."""
        if self.transport.is_closing():
            return
        self.transport.write(wire.encode(message))
        if self.transport.get_write_buffer_size() > UNSENT_BYTES_MAX:
            self.abort()

    async def greet(self, hello: wire.Hello, timeout_s: float) -> wire.Welcome:
        """Send the hello and wait for the welcome, for `timeout_s` or as long as the orchestrator asks.

        Raises `SessionRefused`, `LostInWaiting` if it was told to wait before, or else `ConnectionLost`.
        """
        waited = False
        self.send(hello)
        while True:
            try:
                first = await self._first(timeout_s)
            except ConnectionLost as loss:
                raise LostInWaiting(str(loss)) if waited else loss from None
            match first:
                case wire.Welcome():
                    return first
                case wire.RefusedFrame(reason=reason, retry=retry):
                    raise SessionRefused(reason, retry)
                case wire.Waiting():
                    if not waited:
                        log.info("waiting for a lease", ticket=hello.ticket)
                    waited = True
                    self.send(wire.StillThere())
                case _:
                    raise ConnectionLost(f"the orchestrator broke the protocol: {type(first).__name__} before Welcome")

    async def _first(self, timeout_s: float) -> wire.FromOrchestrator:
        """Return the first message. Raises `ConnectionLost` if there is none."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._stirred.wait()
        except TimeoutError as error:
            raise _silent(timeout_s) from error
        if not self._waiting:
            assert self._cause is not None
            raise self._cause
        first = self._waiting.pop(0)
        if not self._waiting and self._cause is None:
            self._stirred.clear()
        return first

    async def listen(self, hear: Hear, timeout_s: float) -> NoReturn:
        """Have `hear` called with what arrives, and has arrived since the welcome, for as long as this waits.

        Raises `ConnectionLost`, also after `timeout_s` of silence, and whatever `hear` raises.
        """
        waiting, self._waiting = self._waiting, []
        self._hear = hear
        try:
            if waiting:
                hear(waiting)
            while True:
                await self._over_within(self._heard_s + timeout_s - self._loop.time())
                heard_s = self._heard_s
                if self._loop.time() - heard_s >= timeout_s:
                    await self._over_within(LAST_LOOK_S)
                    if self._heard_s == heard_s:
                        raise _silent(timeout_s)
        finally:
            self._hear = self._waiting.extend

    async def _over_within(self, timeout_s: float) -> None:
        """Wait for `timeout_s`. Raises the cause as soon as the connection is of no more use."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._over.wait()
        if self._cause is not None:
            raise self._cause

    def abort(self) -> None:
        """Cut the connection; what was not sent is dropped."""
        self.transport.abort()

    async def aclose(self) -> None:
        """Sends what is queued and closes. Cuts the connection where that takes too long."""
        self.transport.close()
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._over.wait()
        except TimeoutError:
            self.abort()

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is not a subclass

    def data_received(self, data: bytes) -> None:
        self._heard_s = self._loop.time()
        if self._cause is not None:
            return
        try:
            if messages := [message for body in self._frames.feed(data) if (message := self._read(body)) is not None]:
                self._hear(messages)
                self._stirred.set()
        except wire.WireError as error:
            self._end(ConnectionLost(f"the orchestrator broke the protocol: {error}"))
        except Exception as error:
            self._end(error)

    def _read(self, body: memoryview) -> wire.FromOrchestrator | None:
        """Return the message; None for an order that cannot be read, which is given back: the connection is sound, and
        would bring the same order again. Raises `WireError`."""
        try:
            return wire.decode_from_orchestrator(body)
        except wire.UnreadableOrder as error:
            log.error("order not read", error=str(error))
            self.send(error.answer())
            return None

    def connection_lost(self, exc: Exception | None) -> None:
        broken = "the orchestrator closed the connection" if exc is None else f"the connection broke: {exc}"
        self._end(ConnectionLost(broken))

    def _end(self, cause: Exception) -> None:
        self._cause = self._cause or cause
        self._stirred.set()
        self._over.set()


def _silent(timeout_s: float) -> ConnectionLost:
    return ConnectionLost(f"the orchestrator was silent for {timeout_s} s")


async def dial(ticket: Ticket, key: str, within_s: float) -> tuple[Connection, wire.Welcome]:
    """Dial until welcomed, with a back-off: with a session's `key` to resume it, else with the ticket's token.

    Raises `SessionRefused`; `ConnectionLost` after `within_s` without a welcome; `ValueError` if the ticket has no
    address. Nothing is sent before the peer has proved the identity in the ticket.
    """
    who = wire.PROTOCOL_VERSION, ticket.worker, key or ticket.token, bool(key), here().pid(), here().name()
    hello = wire.Hello(*who, ticket.run, "" if key else ticket.ticket)
    attempts = tenacity.AsyncRetrying(
        retry=tenacity.retry_if_exception(_may_pass),
        wait=tenacity.wait_random_exponential(multiplier=0.1, max=1.0),
        reraise=True,
    )
    timeout_s = min(within_s, ATTEMPT_TIMEOUT_S)
    Address.to_dial(ticket.endpoint.address)  # of which a dial would only say that it cannot be reached
    while True:
        with contextlib.suppress(LostInWaiting):
            return await attempts.copy(stop=after(within_s))(_dial_once, ticket.endpoint, hello, timeout_s)


async def _dial_once(endpoint: Endpoint, hello: wire.Hello, timeout_s: float) -> tuple[Connection, wire.Welcome]:
    connection = await _connect(endpoint, timeout_s)
    try:
        if endpoint.fingerprint:
            check_pin(connection.transport, endpoint.fingerprint)
        return connection, await connection.greet(hello, timeout_s)
    except TlsError as error:
        connection.abort()
        raise SessionRefused(
            f"the orchestrator at {endpoint.address} is not to be believed: {error}; nothing was sent to it; take a "
            "ticket of the run that is there now",
            retry=hello.resume,
        ) from error
    except ConnectionLost as error:
        connection.abort()
        if endpoint.fingerprint or isinstance(error, LostInWaiting):
            raise
        raise ConnectionLost(
            f"{error}; this was plain text: a run beyond loopback speaks TLS, and its tickets have a fingerprint"
        ) from error
    except BaseException:
        connection.abort()
        raise


async def _connect(endpoint: Endpoint, timeout_s: float) -> Connection:
    """Open a connection, encrypted if there is a fingerprint. The caller checks the peer's identity."""
    where = f"the orchestrator at {endpoint.address}"
    tls = pinning_context() if endpoint.fingerprint else None
    try:
        async with asyncio.timeout(timeout_s):
            _, connection = await asyncio.get_running_loop().create_connection(
                Connection, *Address.to_dial(endpoint.address), ssl=tls
            )
    except TimeoutError as error:
        raise ConnectionLost(f"{where} did not answer in {timeout_s} s") from error
    except socket.gaierror as error:
        raise ConnectionLost(
            f"{where} has a name that does not resolve on {socket.gethostname()} ({error.strerror}); advertise another "
            "(run.advertise), or name an address that reaches it (--join HOST:PORT)"
        ) from error
    except ssl.SSLError as error:
        raise ConnectionLost(
            f"{where} does not speak TLS 1.3 ({error.reason or error}); is there a run at this port?"
        ) from error
    except OSError as error:
        raise ConnectionLost(f"{where} cannot be reached: {error.strerror or error}") from error
    return connection


def _may_pass(error: BaseException) -> bool:
    return isinstance(error, ConnectionLost) or (isinstance(error, SessionRefused) and error.retry)
