"""A bad link between real sockets: a TCP proxy that delays, limits, stalls, cuts and resets connections."""

import asyncio
import contextlib
from dataclasses import dataclass

from elastic.protocol.endpoint import Address
from elastic.protocol.sockets import address_of

READ_BYTES = 1 << 16
IN_FLIGHT_PIECES = 1024
"""Pieces under way in one direction of a connection, beyond which the sender waits."""


@dataclass(slots=True, kw_only=True)
class LinkQuality:
    """`delay_s` is the delay of one direction; `bytes_per_s` limits all connections together, in each direction."""

    delay_s: float = 0.0
    bytes_per_s: float | None = None


@dataclass(slots=True)
class _Direction:
    carried_bytes: int = 0
    free_s: float = 0.0
    """The time at which everything sent so far has crossed."""


class BadLink:
    """Listens, and forwards every connection to `upstream` (host:port) and back. Its `quality` may change at any time.

    While it is `cut`, no byte passes and no peer is told: connections stay open, and new ones get no answer.
    """

    def __init__(self, upstream: str, quality: LinkQuality | None = None) -> None:
        self.quality = quality or LinkQuality()
        self._upstream = Address.parse(upstream)
        self._directions = _Direction(), _Direction()
        self._whole = asyncio.Event()
        self._whole.set()
        self._connections: dict[asyncio.Task[None], list[asyncio.StreamWriter]] = {}
        self._server: asyncio.Server | None = None

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> str:
        """Listen; returns the address (host:port). Raises `OSError`."""
        self._server = await asyncio.start_server(self._accept, host, port)
        return str(address_of(self._server.sockets[0]))

    @property
    def carried_up_bytes(self) -> int:
        """The bytes that have reached `upstream`."""
        return self._directions[0].carried_bytes

    def cut(self) -> None:
        self._whole.clear()

    def mend(self) -> None:
        self._whole.set()

    def reset(self) -> None:
        """Break every connection, as a gateway that has lost its tables does."""
        for work, writers in tuple(self._connections.items()):
            for writer in writers:
                writer.transport.abort()
            work.cancel()

    async def aclose(self) -> None:
        if self._server is not None:
            self._server.close()
        tasks = list(self._connections)
        self.reset()
        if tasks:
            await asyncio.wait(tasks)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers = [writer]
        work = asyncio.create_task(self._connect(reader, writers), name="bad link")
        self._connections[work] = writers
        work.add_done_callback(self._connections.pop)

    async def _connect(self, reader: asyncio.StreamReader, writers: list[asyncio.StreamWriter]) -> None:
        try:
            await self._whole.wait()
            far_reader, far_writer = await asyncio.open_connection(*self._upstream)
            writers.append(far_writer)
            up, down = self._directions
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._carry(reader, far_writer, up))
                tasks.create_task(self._carry(far_reader, writers[0], down))
        except* (OSError, RuntimeError):  # uvloop says the latter of a connection that is closed
            pass
        finally:
            for writer in writers:
                writer.transport.abort()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, direction: _Direction) -> None:
        """Forward until one end closes. Bytes under way then still arrive."""
        under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(IN_FLIGHT_PIECES)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._deliver(writer, under_way, direction))
            data = b"?"
            while data:
                data = await reader.read(READ_BYTES)
                await under_way.put((self._arrival_s(len(data), direction), data))

    def _arrival_s(self, size_bytes: int, direction: _Direction) -> float:
        now_s = asyncio.get_running_loop().time()
        if self.quality.bytes_per_s is not None:
            now_s = direction.free_s = max(direction.free_s, now_s) + size_bytes / self.quality.bytes_per_s
        return now_s + self.quality.delay_s

    async def _deliver(
        self,
        writer: asyncio.StreamWriter,
        under_way: "asyncio.Queue[tuple[float, bytes]]",
        direction: _Direction,
    ) -> None:
        loop = asyncio.get_running_loop()
        while True:
            arrives_s, data = await under_way.get()
            await asyncio.sleep(arrives_s - loop.time())
            await self._whole.wait()
            if not data:
                with contextlib.suppress(OSError, RuntimeError):
                    writer.write_eof()
                return
            direction.carried_bytes += len(data)
            writer.write(data)
            await writer.drain()
