"""Connections in memory between simulated processes. Bytes arrive in order; late, in pieces, twice, or not at all."""

import asyncio
import errno
import os
import socket
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any

import httpx
import msgspec

from elastic.core.types import NS_PER_S, Nanoseconds
from elastic.protocol import wire
from elastic.protocol.endpoint import Address
from elastic.protocol.wire import FrameBuffer
from elastic.testing.faults.shell.loops import Machine, ProcessLoop, WorldClock

_decode_tokens = msgspec.msgpack.Decoder(wire.Tokens).decode
APART_NS = 1000
"""Time between two pieces of a connection, so that rounding of a loop's time cannot swap them."""
RESET_S = 0.001
ACCEPT_RETRY_S = 1.0
"""Time after which a loop that could not accept a connection tries again, as asyncio's loops do."""
ONCE = frozenset(
    {"Hello", "Ready", "Goodbye", "Welcome", "Refused"}
    | {"NodeAgentHello", "JobHello", "NodeAgentWelcome", "JobWelcome"}
)
"""Frames that begin or end an epoch. A connection that repeated them would violate the protocol; so would one that
repeated the end of an attempt, whose slot is taken back."""


@dataclass(slots=True, kw_only=True)
class Weather:
    """The quality of connections: shares of the pieces sent, and times in seconds."""

    latency_s: tuple[float, float] = (0.0002, 0.004)
    split: float = 0.0
    """Share of pieces that arrive as two."""
    slow: float = 0.0
    """Share of pieces that are delayed, together with everything after them."""
    slow_s: float = 1.0
    refused: float = 0.0
    """Share of connection attempts that fail."""

    @property
    def bad(self) -> bool:
        return self.slow > 0 or self.refused > 0


class Network:
    """The addresses on which processes listen. `weather` may change at any time; `dialled` is told of every attempt
    to connect."""

    def __init__(self, chance: Random) -> None:
        self.weather = Weather()
        self.chance = chance
        self.dialled: Callable[[NetworkLoop], None] = lambda _: None
        self.serve_http: Callable[[str], httpx.BaseTransport] | None = None
        """Carries HTTP requests to a URL."""
        self.socketpair: Callable[[], Any] = socket.socketpair
        self._listening: dict[tuple[str, int], _Server] = {}
        self._taken: set[tuple[str, int]] = set()
        self._port = 40_000
        self._addresses = 0

    def address(self) -> str:
        self._addresses += 1
        return f"10.0.{self._addresses // 250}.{self._addresses % 250}"

    def http_transport(self, url: str) -> httpx.BaseTransport | None:
        return None if self.serve_http is None else self.serve_http(url)

    def listen(self, loop: "NetworkLoop", factory: Callable[[], Any], host: str, port: int) -> "_Server":
        """Listen on an address. Raises `OSError` if a living process listens there."""
        if not port:
            self._port += 1
            port = self._port
        there = self._listening.get((host, port))
        if (host, port) in self._taken or (there is not None and there.open and there.loop.alive):
            raise OSError(98, "Address already in use")
        server = self._listening[host, port] = _Server(loop, factory, host, port)
        return server

    def take(self, address: str) -> None:
        """Let an unrelated program listen on this address from now on."""
        self._taken.add(Address.parse(address))

    def is_taken(self, address: str) -> bool:
        return Address.parse(address) in self._taken

    def reach(self, host: str, port: int) -> "_Server":
        """Return the listener of an address. Raises `ConnectionRefusedError` if there is none."""
        server = self._listening.get((host, port))
        refused = self.chance.random() < self.weather.refused
        if server is None or not server.open or not server.loop.alive or refused:
            raise ConnectionRefusedError(111, "Connection refused")
        return server


class NetworkLoop(ProcessLoop):
    """A process's loop with sockets on the network.

    While its machine is out of descriptors it accepts no connection, and makes none.
    """

    def __init__(self, clock: WorldClock, machine: Machine, network: Network) -> None:
        super().__init__(clock, machine)
        self.network = network
        self.address = network.address()
        self.repeats_until_ns: Nanoseconds = 0
        self.transports: dict[WorldTransport, None] = {}
        self.pipes: dict[WorldTransport, None] = {}
        """Connections inside the machine, which no fault of a network touches."""
        self.launch: Callable[..., Any] | None = None
        """Starts a child process of this one: `subprocess_exec`, where there is one."""
        self.signal_handlers: dict[int, Callable[[], object]] = {}

    def add_signal_handler(self, sig: int, callback: Callable[..., object], *args: Any) -> None:
        self.signal_handlers[sig] = partial(callback, *args)

    def remove_signal_handler(self, sig: int) -> bool:
        return self.signal_handlers.pop(sig, None) is not None

    async def create_server(self, protocol_factory: Any, host: Any = None, port: Any = None, **_: Any) -> Any:
        return self.network.listen(self, protocol_factory, host, port or 0)

    async def subprocess_exec(self, protocol_factory: Any, *command: Any, **options: Any) -> Any:
        assert self.launch is not None
        await asyncio.sleep(0)
        return self.launch(protocol_factory, command, options)

    async def create_connection(
        self, protocol_factory: Any, host: Any = None, port: Any = None, *, sock: Any = None, **_: Any
    ) -> Any:
        if sock is not None:
            return sock.connected(protocol_factory)
        network = self.network
        network.dialled(self)
        if self.machine.is_out_of_descriptors():
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        await asyncio.sleep(network.chance.uniform(*network.weather.latency_s))
        server = network.reach(host, port)
        here = protocol_factory()
        near, far = (
            WorldTransport(self, here, address=server.host),
            WorldTransport(server.loop, None, address=self.address),
        )
        near.peer, far.peer = far, near
        server.loop.call_soon(self._accepted_by, server, far)
        here.connection_made(near)
        return near, here

    @staticmethod
    def _accepted_by(server: "_Server", far: "WorldTransport") -> None:
        """Accept a connection in the server's process. The kernel completed it earlier."""
        loop = server.loop
        if loop.machine.is_out_of_descriptors():
            loop.call_later(ACCEPT_RETRY_S, loop._accepted_by, server, far)
        elif not server.open:
            far.abort()
        elif not far.lost:
            far.protocol = server.factory()
            far.protocol.connection_made(far)
            far._read()

    def kill(self, noticed: bool) -> None:
        """Kill the process. If `noticed`, its peers see their connections reset; else they see nothing."""
        self.alive = False
        for transport in [*self.transports, *self.pipes]:
            peer = transport.peer
            if (noticed or transport in self.pipes) and peer is not None and peer.loop.alive:
                reset = ConnectionResetError(104, "Connection reset by peer")
                peer.loop.at_world(transport.opens_ns(RESET_S), peer.lose, reset)

    def stall(self, until_ns: Nanoseconds) -> None:
        """Let no byte pass the process's connections until `until_ns`, in either direction."""
        for transport in self.transports:
            transport.stalled_until_ns = until_ns
            if transport.peer is not None:
                transport.peer.stalled_until_ns = until_ns


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
class WorldTransport(asyncio.Transport):
    """One end of a connection. Written bytes are under way until the other end has read them."""

    loop: NetworkLoop
    protocol: Any
    address: str
    """The address of the other end."""
    peer: "WorldTransport | None" = None
    unread: deque[bytes] = field(default_factory=deque[bytes])
    """Bytes that have arrived while nothing reads them."""
    on_way: deque[bytes] = field(default_factory=deque[bytes])
    on_way_bytes: int = 0
    free_ns: Nanoseconds = 0
    stalled_until_ns: Nanoseconds = 0
    reading: bool = True
    closing: bool = False
    lost: bool = False

    def __post_init__(self) -> None:
        super().__init__()
        self.loop.transports[self] = None

    def opens_ns(self, after_s: float) -> Nanoseconds:
        """Return when a message that takes `after_s` can reach the other end."""
        return max(self.stalled_until_ns, self.loop.clock.now_ns + round(after_s * NS_PER_S))

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self.closing or self.lost or not data:
            return
        content = bytes(data)
        assert self.peer is not None
        now_ns = self.loop.clock.now_ns
        if max(self.loop.repeats_until_ns, self.peer.loop.repeats_until_ns) > now_ns:
            content = _repeated(content)
        weather, chance = self.loop.network.weather, self.loop.network.chance
        if weather.split and chance.random() < weather.split:
            cut = chance.randrange(len(content))
            if cut:
                self._send(content[:cut])
            content = content[cut:]
        self._send(content)

    def _send(self, piece: bytes) -> None:
        weather, chance, peer = self.loop.network.weather, self.loop.network.chance, self.peer
        assert peer is not None
        delay_s = chance.uniform(*weather.latency_s)
        if weather.slow and chance.random() < weather.slow:
            delay_s += chance.uniform(0, weather.slow_s)
        self.on_way_bytes += len(piece)
        self.free_ns = max(self.free_ns + APART_NS, self.opens_ns(delay_s))
        peer.on_way.append(piece)
        peer.loop.at_world(self.free_ns, peer._arrive)

    def _arrive(self) -> None:
        self.unread.append(self.on_way.popleft())  # In order, also after a suspension.
        self._read()

    def _read(self) -> None:
        while self.reading and self.unread and not self.lost and self.protocol is not None:
            piece = self.unread.popleft()
            if self.peer is not None:
                self.peer.on_way_bytes -= len(piece)
            self.protocol.data_received(piece)

    def lose(self, cause: Exception | None) -> None:
        """Drop the connection."""
        if self.lost:
            return
        self.lost = self.closing = True
        self.loop.transports.pop(self, None)
        if self.protocol is not None:
            self.protocol.connection_lost(cause)

    def close(self) -> None:
        """Close the connection after everything written has left."""
        if not self.closing:
            self.closing = True
            self.loop.at_world(max(self.free_ns, self.loop.clock.now_ns) + 100 * APART_NS, self._end, None)

    def abort(self) -> None:
        self.closing = True
        self.loop.call_soon(self._end, ConnectionAbortedError(103, "aborted"))

    def _end(self, cause: Exception | None) -> None:
        peer = self.peer
        if peer is not None and peer.loop.alive and not peer.lost:
            peer.loop.at_world(self.opens_ns(RESET_S), peer.lose, None)
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
        return (self.address, 1024) if name == "peername" else default


def _repeated(content: bytes) -> bytes:
    """Return the frames with each one repeated, except for frames that must come once."""
    frames: list[bytes] = []
    for body in FrameBuffer().feed(content):
        frame = len(body).to_bytes(4, "big") + bytes(body)
        frames += [frame] * (1 if _comes_once(body) else 2)
    return b"".join(frames)


def _comes_once(body: memoryview) -> bool:
    try:
        message = msgspec.msgpack.decode(body)
        return message[0] in ONCE or (message[0] == "Tokens" and bool(_decode_tokens(body).chunks.ends))
    except (msgspec.DecodeError, UnicodeDecodeError, TypeError, LookupError):  # a Byzantine worker's
        return False
