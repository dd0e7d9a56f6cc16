"""The worker's end of its connection: dialling the orchestrator, the session, and frames either way."""

import asyncio
import contextlib
import os
import socket
import ssl

import tenacity

from elastic import wire

UNSENT_BYTES_MAX = 4 * wire.MAX_FRAME_BYTES
"""What may wait for an orchestrator that does not read; beyond it the connection counts as lost."""

ATTEMPT_TIMEOUT_S = 5.0
"""For one attempt to connect and be welcomed."""

CLOSE_TIMEOUT_S = 2.0

_READ_BYTES = 1 << 18


class ConnectionLost(Exception):
    """The connection is gone or dead; dialling again may help."""


class SessionRefused(Exception):
    """The orchestrator does not let this worker in; `retry` says whether dialling again can help."""

    def __init__(self, reason: str, retry: bool) -> None:
        super().__init__(reason)
        self.retry = retry


LAST_LOOK_S = 0.1


class Connection:
    """A connection that has been welcomed. Sending never waits: frames queue up to `UNSENT_BYTES_MAX`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._frames = wire.FrameBuffer()
        self._arrived: list[wire.FromOrchestrator] = []

    def send(self, message: wire.FromWorker) -> None:
        """Queue a frame; silently drops it when the connection is gone, which `receive` then reports."""
        if self._writer.is_closing():
            return
        self._writer.write(wire.encode(message))
        if self._writer.transport.get_write_buffer_size() > UNSENT_BYTES_MAX:
            self.abort()

    async def receive(self, timeout_s: float) -> list[wire.FromOrchestrator]:
        """The next messages, at least one. Raises `ConnectionLost`, also after `timeout_s` of silence."""
        try:
            while not self._arrived:
                data = await self._read(timeout_s)
                if not data:
                    raise ConnectionLost("the orchestrator closed the connection")
                self._arrived = [wire.decode_from_orchestrator(body) for body in self._frames.feed(data)]
        except TimeoutError as error:
            raise ConnectionLost(f"the orchestrator was silent for {timeout_s} s") from error
        except OSError as error:
            raise ConnectionLost(f"the connection broke: {error}") from error
        except wire.WireError as error:
            raise ConnectionLost(f"the orchestrator broke the protocol: {error}") from error
        messages, self._arrived = self._arrived, []
        return messages

    async def _read(self, timeout_s: float) -> bytes:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                return await self._reader.read(_READ_BYTES)
        # It may be this process that was held up; then what the orchestrator said waits to be read.
        async with asyncio.timeout(LAST_LOOK_S):
            return await self._reader.read(_READ_BYTES)

    async def welcome(self, timeout_s: float) -> wire.Welcome:
        """The first message. Raises `SessionRefused` if it is a refusal, else as `receive`."""
        first, *self._arrived = await self.receive(timeout_s)
        match first:
            case wire.Welcome():
                return first
            case wire.Refused(reason=reason, retry=retry):
                raise SessionRefused(reason, retry)
            case _:
                raise ConnectionLost(f"the orchestrator broke the protocol: {type(first).__name__} before Welcome")

    def abort(self) -> None:
        """Cut the connection; what was not sent is dropped."""
        self._writer.transport.abort()

    async def aclose(self) -> None:
        """Send what is queued and close, or cut it when that takes too long."""
        self._writer.close()
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._writer.wait_closed()
        except (TimeoutError, OSError):
            self.abort()


async def dial(
    join: str, worker: str, secret: str, *, resume: bool, within_s: float, tls: ssl.SSLContext | None = None
) -> tuple[Connection, wire.Welcome]:
    """Dial `join` (host:port) until welcomed, backing off in between.

    Raises `SessionRefused`, or `ConnectionLost` when there was no welcome for `within_s`.
    """
    hello = wire.Hello(wire.PROTOCOL_VERSION, worker, secret, resume, os.getpid(), socket.gethostname())
    attempts = tenacity.AsyncRetrying(
        retry=tenacity.retry_if_exception(_may_pass),
        wait=tenacity.wait_random_exponential(multiplier=0.1, max=1.0),
        stop=tenacity.stop_after_delay(within_s),
        reraise=True,
    )
    return await attempts(_dial_once, *_address(join), hello, min(within_s, ATTEMPT_TIMEOUT_S), tls)


async def _dial_once(
    host: str, port: int, hello: wire.Hello, timeout_s: float, tls: ssl.SSLContext | None
) -> tuple[Connection, wire.Welcome]:
    where = f"{host}:{port}"
    try:
        async with asyncio.timeout(timeout_s):
            connection = Connection(*await asyncio.open_connection(host, port, ssl=tls))
    except TimeoutError as error:
        raise ConnectionLost(f"the orchestrator at {where} did not answer in {timeout_s} s") from error
    except OSError as error:
        raise ConnectionLost(f"the orchestrator at {where} cannot be reached: {error.strerror or error}") from error
    connection.send(hello)
    try:
        return connection, await connection.welcome(timeout_s)
    except BaseException:
        connection.abort()
        raise


def _may_pass(error: BaseException) -> bool:
    return isinstance(error, ConnectionLost) or (isinstance(error, SessionRefused) and error.retry)


def _address(join: str) -> tuple[str, int]:
    host, colon, port = join.rpartition(":")
    with contextlib.suppress(ValueError):
        if colon and host and 0 < int(port) < 65_536:
            return host.strip("[]"), int(port)
    raise ValueError(f"join address {join!r}: expected host:port")
