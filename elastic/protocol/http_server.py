"""HTTP servers with bounds on what a peer may hold, send or leave unread, so that unauthenticated peers cost them
little.

- A request's head is whole within `head_timeout_s` and has at most `HEAD_BYTES_MAX` bytes (else 400).
- A body has at most `body_bytes_max` bytes (else 413) and keeps a least pace (else 408).
- There are at most `connections_max` connections. When all are taken, the address with the most loses its oldest one
  without a request in work. An address that dials more often than `dials_per_s` is hung up on.
- `CallerLimits` bounds the requests in work, streams included, of one token and of one address (else 429). Some places
  are kept for callers that have few.
- An answer that its peer does not read is dropped after `unread_timeout_s`.
"""

import asyncio
import base64
import binascii
import contextlib
import functools
import hashlib
import ipaddress
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator
from ipaddress import IPv4Network, IPv6Network
from typing import Any, Protocol, cast
from urllib.parse import urlsplit

import msgspec
import uvicorn
from h11 import SEND_BODY
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, cookie_parser
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from elastic.protocol.sockets import DIALS_PER_S, DialRates, address_of, network_of
from elastic.protocol.tls import Certificate, TlsServer, oldest_of_crowd

HOSTS_KEPT = 64
"""Names that clients call a server by, of which it is known whether they are its own."""
HEAD_BYTES_MAX = 16 * 1024
"""No client of ours sends a tenth of this; what is larger waits in memory before anybody may see it."""
GATHERED_BYTES_MAX = 64 * 1024
ACCEPTED_AT_ONCE = 64
"""Connections that are accepted before those that stand get their turn."""
ACCEPT_PAUSE_S = 0.1
CONNECTION = "elastic.connection"
GRACEFUL_SHUTDOWN_S = 2
"""For requests in work when the server ends."""


class PeerLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What one server lets its peers hold."""

    connections_max: int = 256
    head_timeout_s: float = 5.0
    unread_timeout_s: float = 30.0
    dials_per_s: float = DIALS_PER_S
    """Dials of one address a second, on average; `connections_max` at once."""
    bearer_share: float = 0.5
    """The part of all places that one bearer of a token may have in work."""
    address_share: float = 0.75
    """The part of all places that one address may have in work."""
    kept_share: float = 0.1
    """The part of all places that is kept for bearers and addresses that have none in work."""
    proxies: tuple[IPv4Network | IPv6Network, ...] = ()
    """Networks whose `x-forwarded-for` counts. They have no bounds per address."""
    linger_timeout_s: float = 2.0
    """For the rest of a body that nobody wants, so that its sender gets to read the answer."""


class BodyLimits:
    """ASGI middleware: bounds every request's body, in bytes and in time.

    `bytes_max_of` a method and a path is what its bodies may have, where that is not `bytes_max`.
    The body may take `timeout_s` and a second more for each `bytes_per_s_min` bytes of it. Starlette's own handlers
    turn what is raised (`HTTPException`: 413, 408) into the application's kind of answer. A client that leaves within
    its body is no error: nobody waits for an answer.
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
        with contextlib.suppress(ClientDisconnect):
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


class CallerLimits:
    """ASGI middleware: bounds the requests in work of one bearer of a token, and of one address, before they are read.

    Requests for a path of `health` are always let in. `cookie` names the one that a session shows. `refuse` makes the
    answer (429) to what is beyond the bounds.
    """

    def __init__(
        self,
        app: ASGIApp,
        refuse: Callable[[int, str], Response],
        limits: PeerLimits | None = None,
        health: Collection[str] = (),
        cookie: str = "",
    ) -> None:
        self._app = app
        self._refuse = refuse
        self._cookie = cookie
        self._limits = limits = limits or PeerLimits()
        self._health = frozenset(health)
        self._most_of_bearer = max(1, int(limits.connections_max * limits.bearer_share))
        self._most_of_address = max(1, int(limits.connections_max * limits.address_share))
        self._open_to_all = max(1, int(limits.connections_max * (1 - limits.kept_share)))
        self._in_work: Counter[bytes] = Counter()
        self._all = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in self._health:
            await self._app(scope, receive, send)
            return
        callers = self._callers(scope)
        crowded = self._all >= self._open_to_all
        for caller, most in callers.items():
            if (has := self._in_work.get(caller, 0)) < (1 if crowded else most):
                continue
            answer = self._refuse(429, f"{has} requests of this caller are in work, streams included")
            answer.headers["retry-after"] = "1"
            await answer(scope, receive, send)
            return
        self._all += 1
        self._in_work.update(callers.keys())
        try:
            await self._app(scope, receive, send)
        finally:
            self._all -= 1
            for caller in callers:
                self._in_work[caller] -= 1
                if not self._in_work[caller]:
                    del self._in_work[caller]

    def _callers(self, scope: Scope) -> dict[bytes, int]:
        """Return what the request counts for, each with its bound: its key or session, if it shows any, and its
        address."""
        headers = Headers(scope=scope)
        peer = scope.get("client")
        address = peer[0] if peer else ""
        if is_within(address, self._limits.proxies):
            said = ",".join(headers.getlist("x-forwarded-for")).rpartition(",")[2].strip()
            address = _host_of(said) or address
        token = presented_key(headers) or cookie_parser(headers.get("cookie", "")).get(self._cookie, "")
        callers = {network_of(address).encode(): self._most_of_address}
        if token:
            callers[hashlib.sha256(token.encode()).digest()] = self._most_of_bearer
        return callers


def presented_key(headers: Headers) -> str:
    """Return the key of a request: a bearer token, an `x-api-key`, or the password of basic authentication."""
    scheme, _, value = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return value.strip()
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(value, validate=True).decode().partition(":")[2]
        except (binascii.Error, UnicodeDecodeError):
            return ""
    return headers.get("x-api-key", "")


def too_many(status: int, detail: str) -> Response:
    """Refuse a request in plain text."""
    return PlainTextResponse(detail, status)


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
    protocol = functools.partial(_BoundedProtocol, limits=limits or PeerLimits(), peers={})
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
    drained: Callable[[], Awaitable[object]] | None = None,
    accepted_at_once: int = ACCEPTED_AT_ONCE,
    plain: Collection[IPv4Network | IPv6Network] = (),
    **options: Any,
) -> AsyncIterator[str]:
    """Serve `app` on `listener` for a while, on the running loop; yields its URL. Signals are left to the caller.

    With a `certificate` by HTTPS, and to peers of `plain` networks also without. At the end nothing more is accepted,
    and `drained` is waited for before requests in work are ended. `options` are uvicorn's.
    Where several processes accept on one socket, few connections `accepted_at_once` are shared out evenly.
    """
    limits = limits or PeerLimits()
    server = EmbeddedServer(server_config(app, limits, **options))
    address = address_of(listener)
    task = asyncio.create_task(server.serve(sockets=[]), name="http server")
    door: TlsServer | DialLimit | None = None
    try:
        await server.up
        if certificate is not None:
            most, timeout_s = limits.connections_max, limits.head_timeout_s
            door = TlsServer(
                listener,
                certificate,
                server.protocol,
                most,
                timeout_s,
                may_be_plain=lambda address: is_within(address, plain),
            )
        else:
            door = DialLimit(listener, server.protocol, limits, accepted_at_once)
        yield f"{'http' if certificate is None else 'https'}://{address}"
    finally:
        if door is not None:
            door.close()
            if drained is not None:
                await drained()
        server.should_exit = True
        await asyncio.wait({task}, timeout=close_timeout_s)
        task.cancel()
        await asyncio.wait({task}, timeout=close_timeout_s)


class UnsignalledServer(uvicorn.Server):
    """Leaves signals to the process that runs it."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class EmbeddedServer(UnsignalledServer):
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


class DialLimit:
    """Accepts connections on a socket that listens, from now on; each gets a protocol.

    An address that dials too often is hung up on at once, which costs little; it waits for its turn as others do not.
    """

    def __init__(
        self,
        listener: socket.socket,
        make_protocol: Callable[[], asyncio.Protocol],
        limits: PeerLimits,
        accepted_at_once: int = ACCEPTED_AT_ONCE,
    ) -> None:
        self._at_once = accepted_at_once
        self._listener = listener
        self._make_protocol = make_protocol
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._rates = DialRates(limits.connections_max, limits.dials_per_s)
        self._opening: set[asyncio.Task[Any]] = set()
        self._closed = False
        listener.setblocking(False)
        self._loop.add_reader(listener, self._accept)

    def close(self) -> None:
        """Stop listening; connections that stand go on."""
        self._closed = True
        self._loop.remove_reader(self._listener)
        for task in self._opening:
            task.cancel()
        self._listener.close()

    def _accept(self) -> None:
        for _ in range(self._at_once):
            try:
                connection, peer = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError:  # No descriptor is left.
                self._loop.remove_reader(self._listener)
                self._loop.call_later(ACCEPT_PAUSE_S, self._resume)
                return
            if not self._may_dial(peer[0]):
                connection.close()
                continue
            connection.setblocking(False)
            task = self._loop.create_task(self._open(connection))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    def _resume(self) -> None:
        if not self._closed:
            self._loop.add_reader(self._listener, self._accept)

    async def _open(self, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._make_protocol, connection)
        except OSError:
            connection.close()

    def _may_dial(self, address: str) -> bool:
        return is_within(address, self._limits.proxies) or self._rates.admits(address, self._loop.time())


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


class ServedConnection(Protocol):
    """The connection by which a request came, among its scope's `extensions` under `CONNECTION`."""

    @property
    def gone(self) -> bool:
        """Whether nothing more reaches the client."""
        ...

    def cut(self) -> None:
        """Close it in the middle of an answer, which the client takes for a failure."""
        ...

    @property
    def chunked(self) -> bool:
        """Whether a body without a length comes in chunks."""
        ...

    async def write_chunk(self, data: bytes) -> None:
        """Write a chunk of an answer that was begun without a length, past what is between the application and the
        socket: of what a stream costs that would be a large part."""
        ...


class _BoundedProtocol(H11Protocol):
    """One connection. `peers` has the server's connections that have no request in work, the oldest first, each with
    its address."""

    def __init__(self, *, limits: PeerLimits, peers: "dict[_BoundedProtocol, str]", **options: Any) -> None:
        super().__init__(**options)
        self._limits = limits
        self._idle = peers
        self._owed: asyncio.TimerHandle | None = None
        """Cuts the connection unless the peer sends what it owes: a head, or the rest of an unwanted body."""
        self._unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        _send_at_once(transport)
        super().connection_made(cast(asyncio.Transport, _GatheringTransport(transport, self.loop)))
        self._address = network_of(self.client[0] if self.client else "")
        self._idle[self] = self._address
        self._owe(self._limits.head_timeout_s)
        if len(self.connections) > self._limits.connections_max:
            oldest = oldest_of_crowd(self._idle.items())
            del self._idle[oldest]
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

    @property
    def gone(self) -> bool:
        return self.transport.is_closing()

    def cut(self) -> None:
        self.transport.close()

    @property
    def chunked(self) -> bool:
        return self.scope is not None and self.scope["http_version"] == "1.1" and self.scope["method"] != "HEAD"

    async def write_chunk(self, data: bytes) -> None:
        if self.flow.write_paused:
            await self.flow.drain()
        if not self.transport.is_closing():
            self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    def handle_events(self) -> None:
        super().handle_events()
        if self._in_work:
            # Before the request's task has begun.
            cast(dict[str, Any], self.scope).setdefault("extensions", {})[CONNECTION] = self
            self._idle.pop(self, None)
            self._settle()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing() or self._in_work:
            return
        self._idle[self] = self._address
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


def is_within(address: str, networks: Collection[IPv4Network | IPv6Network]) -> bool:
    """Tell whether an address is in one of the networks; one of IPv6 that stands for one of IPv4 counts as that."""
    if not networks:
        return False
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return False
    found = getattr(found, "ipv4_mapped", None) or found
    return any(found in network for network in networks)


def _host_of(forwarded: str) -> str:
    """Return the address of what a proxy says, which may have a port. Empty where it says none."""
    if _is_address(forwarded):
        return forwarded
    try:
        name = urlsplit(f"//{forwarded}").hostname or ""
    except ValueError:
        return ""
    return name if _is_address(name) else ""


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
