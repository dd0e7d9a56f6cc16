"""HTTP servers that strangers can cost little: uvicorn with bounds on what a peer may hold, send or leave unread.

- A request's head is whole within `head_timeout_s` and has at most `HEAD_BYTES_MAX` bytes (else 400).
- A body has at most `body_bytes_max` bytes (else 413) and keeps a least pace (else 408).
- Connections are at most `connections_max`. Of those with no request in work, the oldest goes first.
- An answer that its peer does not read is dropped after `unread_timeout_s`.
"""

import asyncio
import contextlib
import functools
import ipaddress
import socket
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from typing import Any, cast
from urllib.parse import urlsplit

import msgspec
import uvicorn
from h11 import SEND_BODY
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from elastic.sockets import address_of
from elastic.tls import Certificate, TlsServer

HOSTS_KEPT = 64
"""Names that clients call a server by, of which it is known whether they are its own."""
HEAD_BYTES_MAX = 16 * 1024
"""No client of ours sends a tenth of this; what is larger waits in memory before anybody may see it."""
GATHERED_BYTES_MAX = 64 * 1024
GRACEFUL_SHUTDOWN_S = 2
"""For requests in work when the server ends."""


class PeerLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What one server lets its peers hold."""

    connections_max: int = 256
    head_timeout_s: float = 5.0
    unread_timeout_s: float = 30.0
    linger_timeout_s: float = 2.0
    """For the rest of a body that nobody wants, so that its sender gets to read the answer."""


class BodyLimits:
    """ASGI middleware: bounds every request's body, in bytes and in time.

    `bytes_max_of` a method and a path is what its bodies may have, where that is not `bytes_max`.
    The body may take `timeout_s` and a second more for each `bytes_per_s_min` bytes of it. Starlette's own handlers
    turn what is raised (`HTTPException`: 413, 408) into the application's kind of answer.
    """

    def __init__(
        self,
        app: ASGIApp,
        bytes_max: int,
        timeout_s: float = 10.0,
        bytes_per_s_min: float = 16 * 1024,
        bytes_max_of: Callable[[str, str], int | None] = lambda method, path: None,
    ) -> None:
        self._app = app
        self._bytes_max = bytes_max
        self._bytes_max_of = bytes_max_of
        self._timeout_s = timeout_s
        self._bytes_per_s_min = bytes_per_s_min

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        bytes_max = self._bytes_max_of(scope["method"], scope["path"])
        bytes_max = self._bytes_max if bytes_max is None else bytes_max
        await self._app(scope, self._bounded(Headers(scope=scope), receive, bytes_max), send)

    def _bounded(self, headers: Headers, receive: Receive, bytes_max: int) -> Receive:
        declared = headers.get("content-length", "0")
        started_s = time.monotonic()
        received, whole = 0, False

        async def bounded() -> Message:
            nonlocal received, whole
            if whole:
                return await receive()
            # h11 has refused every length that is not a number.
            _check_size(int(declared), bytes_max)
            left_s = started_s + self._timeout_s + received / self._bytes_per_s_min - time.monotonic()
            try:
                async with asyncio.timeout(left_s):
                    message = await receive()
            except TimeoutError:
                raise HTTPException(408, f"the body did not come in time: {received} bytes so far") from None
            received += len(message.get("body", b""))
            _check_size(received, bytes_max)
            whole = not message.get("more_body", False)
            return message

        return bounded


def _check_size(size_bytes: int, bytes_max: int) -> None:
    if size_bytes > bytes_max:
        raise HTTPException(413, f"the body has {size_bytes} bytes or more; at most {bytes_max} are read")


class HostCheck:
    """ASGI middleware: answers only requests for a name that is this server's, so that no page in a browser can
    reach it under a name of its own (DNS rebinding). Addresses are no names, and always allowed; `refuse` makes the
    answer to anything else.
    """

    def __init__(self, app: ASGIApp, names: Collection[str], refuse: Callable[[int, str], Response]) -> None:
        self._app = app
        self._names = {"localhost", *(name.lower() for name in names)}
        self._refuse = refuse
        self._known = functools.lru_cache(HOSTS_KEPT)(self._find_known)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            host = Headers(scope=scope).get("host", "")
            if not self._known(host):
                said = f"this server is not {host[:100]!r}; allowed: its address, or a name of host_names"
                await self._refuse(421, said)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _find_known(self, host: str) -> bool:
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        return name in self._names or _is_address(name)


def server_config(app: ASGIApp, limits: PeerLimits | None = None, **options: Any) -> uvicorn.Config:
    """A uvicorn configuration with these limits; `options` are uvicorn's other ones."""
    protocol = functools.partial(_BoundedProtocol, limits=limits or PeerLimits(), peers=OrderedDict())
    return uvicorn.Config(
        app,
        # uvicorn calls this as it would a class; httptools bounds no head.
        http=cast(type[asyncio.Protocol], protocol),
        h11_max_incomplete_event_size=HEAD_BYTES_MAX,
        ws="none",
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=GRACEFUL_SHUTDOWN_S,
        **options,
    )


@contextlib.asynccontextmanager
async def serving(
    app: ASGIApp,
    listener: socket.socket,
    limits: PeerLimits | None = None,
    close_timeout_s: float = 5.0,
    certificate: Certificate | None = None,
) -> AsyncIterator[str]:
    """Serve `app` on `listener` for a while, on the running loop; yields its URL. Signals are left to the caller.

    With a `certificate` by HTTPS.
    """
    limits = limits or PeerLimits()
    server = _EmbeddedServer(server_config(app, limits))
    address = address_of(listener)
    task = asyncio.create_task(server.serve(sockets=[listener] if certificate is None else []), name="http server")
    encrypted: TlsServer | None = None
    try:
        if certificate is not None:
            await server.up
            most, timeout_s = limits.connections_max, limits.head_timeout_s
            encrypted = TlsServer(listener, certificate, server.protocol, most, timeout_s)
        yield f"{'http' if certificate is None else 'https'}://{address}"
    finally:
        if encrypted is not None:
            encrypted.close()
        server.should_exit = True
        await asyncio.wait({task}, timeout=close_timeout_s)
        task.cancel()
        await asyncio.wait({task}, timeout=close_timeout_s)


class UnsignalledServer(uvicorn.Server):
    """Leaves signals to whoever runs it."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _EmbeddedServer(UnsignalledServer):
    """`up` is done once it serves. What has been accepted elsewhere gets a `protocol` of it."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.up.set_result(None)

    def protocol(self) -> asyncio.Protocol:
        config = self.config
        make = cast(Callable[..., asyncio.Protocol], config.http_protocol_class)
        return make(config=config, server_state=self.server_state, app_state=self.lifespan.state)


class _GatheringTransport:
    """Writes what comes at once in one go: an answer's head and its body are one packet, and one system call.

    What has been gathered is written once the loop comes around, and before it is more than `GATHERED_BYTES_MAX`.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._pieces: list[bytes] = []
        self._size_bytes = 0

    def write(self, piece: bytes) -> None:
        if not piece:
            return
        if not self._pieces:
            self._loop.call_soon(self._flush)
        self._pieces.append(piece)
        self._size_bytes += len(piece)
        if self._size_bytes > GATHERED_BYTES_MAX:
            self._flush()

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        if self._pieces:
            gathered = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
            self._pieces, self._size_bytes = [], 0
            self._transport.write(gathered)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class _BoundedProtocol(H11Protocol):
    """One connection. `peers` has the server's connections that have no request in work, the oldest first."""

    def __init__(self, *, limits: PeerLimits, peers: "OrderedDict[_BoundedProtocol, None]", **options: Any) -> None:
        super().__init__(**options)
        self._limits = limits
        self._idle = peers
        self._owed: asyncio.TimerHandle | None = None
        """Cuts the connection unless the peer sends what it owes: a head, or the rest of an unwanted body."""
        self._unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        _send_at_once(transport)
        super().connection_made(cast(asyncio.Transport, _GatheringTransport(transport, self.loop)))
        self._idle[self] = None
        self._owe(self._limits.head_timeout_s)
        if len(self.connections) > self._limits.connections_max:
            oldest, _ = self._idle.popitem(last=False)
            oldest._cut()

    def connection_lost(self, exc: Exception | None) -> None:
        self._idle.pop(self, None)
        self._settle()
        self.resume_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self._in_work and self._owed is None:
            self._owe(self._limits.head_timeout_s)

    def handle_events(self) -> None:
        super().handle_events()
        if self._in_work:
            self._idle.pop(self, None)
            self._settle()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing() or self._in_work:
            return
        self._idle[self] = None
        if self.conn.their_state is SEND_BODY:
            self._owe(self._limits.linger_timeout_s)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._unread is None:
            self._unread = self.loop.call_later(self._limits.unread_timeout_s, self._cut)

    def resume_writing(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None
        super().resume_writing()

    @property
    def _in_work(self) -> bool:
        # Before the first request there is no cycle, which uvicorn does not declare.
        cycle = cast(Any, self.cycle)
        return cycle is not None and not cycle.response_complete

    def _owe(self, timeout_s: float) -> None:
        self._settle()
        self._owed = self.loop.call_later(timeout_s, self._cut)

    def _settle(self) -> None:
        if self._owed is not None:
            self._owed.cancel()
            self._owed = None

    def _cut(self) -> None:
        self.transport.abort()


def _send_at_once(transport: asyncio.Transport) -> None:
    """Have the kernel hold nothing back.

    asyncio asks for that itself, but not on what a listener of `socket.create_server` accepts (its protocol number is
    0): there an answer in two pieces waits for the peer's delayed acknowledgement, 40 ms.
    """
    peer = transport.get_extra_info("socket")
    if peer is not None and peer.family in (socket.AF_INET, socket.AF_INET6):
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
