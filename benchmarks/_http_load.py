"""A load generator that costs little of what it shares with the server: HTTP/1.1 over kept connections, by hand.

It sends what any client sends and reads every answer whole; it looks at an answer's status, its length and the data of
its events, and at nothing else.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import cast

_LAST_CHUNK = b"\r\n0\r\n\r\n"


class ServerHungUp(Exception):
    """The server has closed the connection."""


class ReadConnection(asyncio.Protocol):
    """A connection for one request at a time."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._length = -1
        self._chunked = False
        self._status = 0
        self._answer: asyncio.Future[int] | None = None
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    async def get(self, request: bytes, timeout_s: float) -> int:
        """The answer's status, once it is there whole. Raises `ServerHungUp`, `TimeoutError`."""
        if self._transport is None or self._transport.is_closing():
            raise ServerHungUp
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        async with asyncio.timeout(timeout_s):
            return await self._answer

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if self._length < 0:
            end = self._buffer.find(b"\r\n\r\n")
            if end < 0:
                return
            self._status, headers = _head(bytes(self._buffer[:end]))
            self._length = end + 4 + int(headers.get(b"content-length", b"0"))
            self._chunked = headers.get(b"transfer-encoding") == b"chunked"
        if len(self._buffer) >= self._length and (not self._chunked or self._buffer.endswith(_LAST_CHUNK)):
            self._buffer.clear()
            self._length = -1
            if self._answer is not None and not self._answer.done():
                self._answer.set_result(self._status)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(ServerHungUp())

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()


class ReadPool:
    """Connections that are kept, as many as there are; a caller that wants one more waits for it."""

    def __init__(self, host: str, port: int) -> None:
        self._place = host, port
        self._idle: asyncio.LifoQueue[ReadConnection] = asyncio.LifoQueue()

    @contextlib.asynccontextmanager
    async def opened(self, connections: int) -> AsyncIterator[None]:
        opened = [await self._connect() for _ in range(connections)]
        for one in opened:
            self._idle.put_nowait(one)
        yield
        while not self._idle.empty():
            self._idle.get_nowait().close()

    async def get(self, request: bytes, timeout_s: float) -> int:
        """The answer's status. Raises `ServerHungUp`, `OSError`, `TimeoutError`."""
        connection = await self._idle.get()
        try:
            try:
                return await connection.get(request, timeout_s)
            except ServerHungUp:
                # The server ends connections that were idle for a while: as any client does, begin a new one.
                connection = await self._connect()
                return await connection.get(request, timeout_s)
        except TimeoutError:
            connection.close()
            raise
        finally:
            self._idle.put_nowait(connection)

    async def _connect(self) -> ReadConnection:
        host, port = self._place
        _, connection = await asyncio.get_running_loop().create_connection(ReadConnection, host, port)
        return connection


class EventStream(asyncio.Protocol):
    """A stream of server-sent events: each event's data is told as soon as it is there."""

    def __init__(self, request: bytes, told: Callable[[bytes], None], may_be_refused: bool = False) -> None:
        self._request = request
        self._told = told
        self._may_be_refused = may_be_refused
        self._transport: asyncio.Transport | None = None
        self.refused = False
        """Answered with 429; raises `ConnectionError` unless it may be."""
        self._received = bytearray()
        self._events = bytearray()
        self._headed = False
        self.over = False
        self.answered = asyncio.Event()
        """Set once it is known to stand, or not to."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if self.refused:
            return
        self._received += data
        if not self._headed:
            end = self._received.find(b"\r\n\r\n")
            if end < 0:
                return
            status, headers = _head(bytes(self._received[:end]))
            if status == 429 and self._may_be_refused and self._transport is not None:
                self.refused = True
                self._transport.abort()
                return
            if status != 200 or headers.get(b"transfer-encoding") != b"chunked":
                raise ConnectionError(f"the stream is answered with {status}")
            del self._received[: end + 4]
            self._headed = True
            self.answered.set()
        for chunk in self._chunks():
            self._events += chunk
        *events, rest = self._events.split(b"\n\n")
        self._events = bytearray(rest)
        for event in events:
            for line in event.split(b"\n"):
                if line.startswith(b"data: "):
                    self._told(bytes(line[6:]))

    def connection_lost(self, exc: Exception | None) -> None:
        self.over = True
        self.answered.set()

    def _chunks(self) -> list[bytes]:
        found: deque[bytes] = deque()
        while (end := self._received.find(b"\r\n")) >= 0:
            size = int(self._received[:end], 16)
            whole = end + 2 + size + 2
            if len(self._received) < whole:
                break
            found.append(bytes(self._received[end + 2 : whole - 2]))
            del self._received[:whole]
        return list(found)


def request(path: str, host: str, key: str) -> bytes:
    """A GET request as clients send it."""
    said = {"host": host, "authorization": f"Bearer {key}", "accept": "*/*", "user-agent": "elastic-load"}
    lines = "".join(f"{name}: {value}\r\n" for name, value in said.items())
    return f"GET {path} HTTP/1.1\r\n{lines}\r\n".encode()


def _head(head: bytes) -> tuple[int, dict[bytes, bytes]]:
    first, *lines = head.split(b"\r\n")
    headers = (line.partition(b": ") for line in lines)
    return int(first.split(b" ", 2)[1]), {name.lower(): value for name, _, value in headers}
