"""Connections in memory between simulated processes: bytes in order, late, in pieces, or not any more."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from elastic.chaos.loops import ProcessLoop
from elastic.core.types import NS_PER_S, Nanoseconds

APART_NS = 1000
"""Between two pieces of a connection, so that no rounding of a loop's time turns them round."""


@dataclass(slots=True, kw_only=True)
class Weather:
    """How bad connections are; shares of the pieces that are sent, and times in seconds."""

    latency_s: tuple[float, float] = (0.0002, 0.004)
    split: float = 0.0
    """Pieces that arrive as two."""
    slow: float = 0.0
    """Pieces that are held up, with all that comes after them."""
    slow_s: float = 1.0
    refused: float = 0.0
    """Connections that are not made."""


class Network:
    """Who listens where. `weather` may be changed at any time."""

    def __init__(self, chance: Random) -> None:
        self.weather = Weather()
        self.chance = chance
        self._listening: dict[tuple[str, int], _Server] = {}
        self._port = 40_000

    def listen(self, loop: "NetworkLoop", factory: Callable[[], Any], host: str, port: int) -> "_Server":
        """Raises `OSError` where somebody listens who lives."""
        if not port:
            self._port += 1
            port = self._port
        there = self._listening.get((host, port))
        if there is not None and there.open and there.loop.alive:
            raise OSError(98, "Address already in use")
        server = self._listening[host, port] = _Server(loop, factory, host, port)
        return server

    def reach(self, host: str, port: int) -> "_Server":
        """Raises `ConnectionRefusedError` where nobody listens."""
        server = self._listening.get((host, port))
        befallen = self.chance.random() < self.weather.refused
        if server is None or not server.open or not server.loop.alive or befallen:
            raise ConnectionRefusedError(111, "Connection refused")
        return server


class NetworkLoop(ProcessLoop):
    """A process's loop with sockets on the network."""

    def __init__(self, clock: Any, network: Network, drift: float = 0.0) -> None:
        super().__init__(clock, drift)
        self.network = network
        self.alive = True
        self.transports: dict[_Transport, None] = {}

    async def create_server(self, protocol_factory: Any, host: Any = None, port: Any = None, **_: Any) -> Any:
        return self.network.listen(self, protocol_factory, host, port or 0)

    async def create_connection(self, protocol_factory: Any, host: Any = None, port: Any = None, **_: Any) -> Any:
        network = self.network
        await asyncio.sleep(network.chance.uniform(*network.weather.latency_s))
        server = network.reach(host, port)
        here, there = protocol_factory(), None
        near, far = _Transport(self, here), _Transport(server.loop, None)
        near.peer, far.peer = far, near

        def accept() -> None:
            nonlocal there
            there = far.protocol = server.factory()
            there.connection_made(far)

        server.loop.call_soon(accept)
        here.connection_made(near)
        return near, here

    def kill(self, noticed: bool) -> None:
        """The process is gone. Its peers see its connections reset if that is `noticed`, else nothing at all."""
        self.alive = False
        for transport in list(self.transports):
            peer = transport.peer
            if noticed and peer is not None and peer.loop.alive:
                peer.loop.call_later(0.001, peer.lose, ConnectionResetError(104, "Connection reset by peer"))


@dataclass(eq=False)
class _Server:
    loop: NetworkLoop
    factory: Callable[[], Any]
    host: str
    port: int
    open: bool = True

    def close(self) -> None:
        self.open = False

    @property
    def sockets(self) -> "list[_Server]":
        return [self]

    def getsockname(self) -> tuple[str, int]:
        return self.host, self.port


@dataclass(eq=False)
class _Transport(asyncio.Transport):
    """One end of a connection. What is written is on its way until the other end has read it."""

    loop: NetworkLoop
    protocol: Any
    peer: "_Transport | None" = None
    unread: list[bytes] = field(default_factory=list[bytes])
    """That has arrived while nobody reads."""
    on_way_bytes: int = 0
    free_ns: Nanoseconds = 0
    reading: bool = True
    closing: bool = False
    lost: bool = False

    def __post_init__(self) -> None:
        super().__init__()
        self.loop.transports[self] = None

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self.closing or self.lost or not data:
            return
        weather, chance = self.loop.network.weather, self.loop.network.chance
        content = bytes(data)
        cut = chance.randrange(len(content)) if chance.random() < weather.split else 0
        for piece in (content[:cut], content[cut:]):
            if piece:
                self._send(piece)

    def _send(self, piece: bytes) -> None:
        weather, chance = self.loop.network.weather, self.loop.network.chance
        delay_s = chance.uniform(*weather.latency_s)
        if chance.random() < weather.slow:
            delay_s += chance.uniform(0, weather.slow_s)
        peer = self.peer
        assert peer is not None
        self.on_way_bytes += len(piece)
        now_ns = self.loop._clock.now_ns
        self.free_ns = max(self.free_ns + APART_NS, now_ns + round(delay_s * NS_PER_S))
        peer.loop.call_later((self.free_ns - now_ns) / NS_PER_S, peer._arrive, piece)

    def _arrive(self, piece: bytes) -> None:
        self.unread.append(piece)
        self._read()

    def _read(self) -> None:
        while self.reading and self.unread and not self.lost:
            if self.protocol is None:
                self.loop.call_later(0.0001, self._read)
                return
            piece = self.unread.pop(0)
            if self.peer is not None:
                self.peer.on_way_bytes -= len(piece)
            self.protocol.data_received(piece)

    def lose(self, cause: Exception | None) -> None:
        """The connection is gone."""
        if self.lost:
            return
        self.lost = self.closing = True
        self.loop.transports.pop(self, None)
        if self.protocol is not None:
            self.protocol.connection_lost(cause)

    def close(self) -> None:
        """After what was written has left."""
        if not self.closing:
            self.closing = True
            delay_s = max(0, self.free_ns - self.loop._clock.now_ns) / NS_PER_S + 0.0001
            self.loop.call_later(delay_s, self._end, None)

    def abort(self) -> None:
        self.closing = True
        self.loop.call_soon(self._end, ConnectionAbortedError(103, "aborted"))

    def _end(self, cause: Exception | None) -> None:
        peer = self.peer
        if peer is not None and peer.loop.alive and not peer.lost:
            peer.loop.call_later(0.001, peer.lose, None)
        self.lose(None)

    def is_closing(self) -> bool:
        return self.closing

    def get_write_buffer_size(self) -> int:
        return self.on_way_bytes

    def is_reading(self) -> bool:
        return self.reading and not self.closing

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True
        self.loop.call_soon(self._read)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return ("127.0.0.1", id(self) % 60_000) if name == "peername" else default
