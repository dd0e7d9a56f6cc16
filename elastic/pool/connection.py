"""Connections to a pool's process, and between a keeper and its resident: dial, send, receive, detect silence.

- Sending never waits. The unread backlog is bounded; beyond the bound the connection counts as lost.
- Received messages are queued. While the queue is full, nothing is read.
- After `watch` both ends send a message every third of the silence limit. A silent peer counts as lost.
- Before it sends anything to another machine, the dialler compares the peer's certificate with a known fingerprint
  (`elastic.protocol.tls`).
"""

import asyncio
import contextlib
import socket
import ssl
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeAlias, TypeVar, cast

import msgspec
import tenacity

from elastic.pool import messages as w
from elastic.protocol.endpoint import Address, Endpoint
from elastic.protocol.frames import FrameBuffer, WireError, framed
from elastic.protocol.sockets import listening_socket
from elastic.protocol.tls import Certificate, TlsError, TlsServer, check_pin, pinning_context
from elastic.system.host import after

FRAME_BYTES_MAX = 2 * 1024 * 1024
UNSENT_BYTES_MAX = 4 * FRAME_BYTES_MAX
UNRECEIVED_MAX = 1024
"""Messages in the queue above which nothing is read."""
ATTEMPT_TIMEOUT_S = 5.0
"""Limit of one attempt to connect and to be welcomed."""
CLOSE_TIMEOUT_S = 2.0
LAST_LOOK_S = 0.1
"""Wait after a silence: if this process was held up, the peer's messages are waiting to be read."""
STRANGERS_MAX, BACKLOG = 256, 1024

M = TypeVar("M")
W = TypeVar("W")
FromDialler: TypeAlias = w.FromJob | w.FromKeeper

FROM_DIALLER = msgspec.msgpack.Decoder(FromDialler)
TO_JOB = msgspec.msgpack.Decoder(w.ToJob)
TO_KEEPER = msgspec.msgpack.Decoder(w.ToKeeper)
TO_RESIDENT = msgspec.msgpack.Decoder(w.ToResident)
FROM_RESIDENT = msgspec.msgpack.Decoder(w.FromResident)
_encoder = msgspec.msgpack.Encoder()


class LinkLost(Exception):
    """The connection is gone or dead. Dialling again may help."""


class NotLetIn(Exception):
    """The pool's process refuses a session. `retry` says whether dialling again can help."""

    def __init__(self, reason: str, retry: bool) -> None:
        super().__init__(reason)
        self.retry = retry


def encoded(message: msgspec.Struct) -> bytes:
    """Encode one frame. Raises `WireError` if it is larger than its receiver accepts."""
    body = _encoder.encode(message)
    if len(body) > FRAME_BYTES_MAX:
        raise WireError(f"{type(message).__name__} of {len(body)} bytes; at most {FRAME_BYTES_MAX} are allowed")
    return framed(body)


class PoolLink(asyncio.Protocol, Generic[M]):
    """One end of a connection. `receive` returns the peer's messages in order until the connection is lost."""

    transport: asyncio.Transport

    def __init__(self, decoder: "msgspec.msgpack.Decoder[M]", peer: str = "the peer") -> None:
        self.peer = peer
        self._decoder = decoder
        self._loop = asyncio.get_running_loop()
        self._frames = FrameBuffer(FRAME_BYTES_MAX)
        self._received: deque[M] = deque()
        self._stirred = asyncio.Event()
        self._over = asyncio.Event()
        self._cause: LinkLost | None = None
        self._heard_s = self._loop.time()
        self._silence_s = 0.0
        self._pulse: asyncio.TimerHandle | None = None

    @property
    def lost(self) -> bool:
        return self._cause is not None

    def send(self, message: msgspec.Struct) -> None:
        """Queue a frame. Drops it if the connection is gone, which `receive` reports."""
        if self._cause is not None or self.transport.is_closing():
            return
        self.transport.write(encoded(message))
        if self.transport.get_write_buffer_size() > UNSENT_BYTES_MAX:
            self._cut(f"{self.peer} does not read what it is sent")

    async def receive(self) -> M:
        """Return the next message, also one from before the connection was lost. Raises `LinkLost`."""
        while not self._received:
            if self._cause is not None:
                raise self._cause
            self._stirred.clear()
            await self._stirred.wait()
        message = self._received.popleft()
        if len(self._received) < UNRECEIVED_MAX and self._cause is None and not self.transport.is_reading():
            with contextlib.suppress(RuntimeError):
                self.transport.resume_reading()
        return message

    def watch(self, silence_s: float) -> None:
        """Send regular messages from now on, and treat `silence_s` without a message as the loss of the connection."""
        self._silence_s, self._heard_s = silence_s, self._loop.time()
        self._beat()

    def abort(self) -> None:
        """Cut the connection. Unsent frames are dropped."""
        self._cut("this end has cut the connection")

    async def aclose(self) -> None:
        """Send queued frames and close. Cuts the connection if that takes too long."""
        self._still()
        self.transport.close()
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._over.wait()
        except TimeoutError:
            self.transport.abort()

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is not a subclass

    def data_received(self, data: bytes) -> None:
        self._heard_s = self._loop.time()
        if self._cause is not None:
            return
        try:
            for body in self._frames.feed(data):
                message = self._decoder.decode(body)
                if not isinstance(message, w.StillHere):
                    self._received.append(message)
        except (WireError, msgspec.DecodeError, UnicodeDecodeError) as error:
            self._cut(f"{self.peer} broke the protocol: {error}")
        if self._received:
            self._stirred.set()
        if len(self._received) > UNRECEIVED_MAX and self.transport.is_reading():
            self.transport.pause_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(f"{self.peer} closed the connection" if exc is None else f"the connection broke: {exc}")
        self._over.set()

    def _beat(self) -> None:
        if self._cause is not None:
            return
        self.send(w.StillHere())
        self._pulse = self._loop.call_later(self._silence_s / 3, self._beat)
        if self._is_silent():
            self._loop.call_later(LAST_LOOK_S, self._last_look)

    def _last_look(self) -> None:
        if self._cause is None and self._is_silent():
            self._cut(f"{self.peer} was silent for {self._silence_s:g} s")

    def _is_silent(self) -> bool:
        return self.transport.is_reading() and self._loop.time() - self._heard_s > self._silence_s

    def _cut(self, cause: str) -> None:
        self._end(cause)
        self.transport.abort()

    def _end(self, cause: str) -> None:
        self._still()
        self._cause = self._cause or LinkLost(cause)
        self._stirred.set()

    def _still(self) -> None:
        if self._pulse is not None:
            self._pulse.cancel()
            self._pulse = None


async def dial(endpoint: Endpoint, decoder: "msgspec.msgpack.Decoder[M]", timeout_s: float) -> PoolLink[M]:
    """Return a connection to a pool's process after checking its certificate. Raises `LinkLost` or `NotLetIn`."""
    where = f"the pool at {endpoint.address}"
    tls = pinning_context() if endpoint.fingerprint else None
    try:
        async with asyncio.timeout(timeout_s):
            _, link = await asyncio.get_running_loop().create_connection(
                lambda: PoolLink(decoder, "the pool"), *Address.to_dial(endpoint.address), ssl=tls
            )
    except TimeoutError as error:
        raise LinkLost(f"{where} did not answer in {timeout_s:g} s") from error
    except socket.gaierror as error:
        raise LinkLost(f"{where} has a name that does not resolve on {socket.gethostname()}: {error}") from error
    except ssl.SSLError as error:
        raise LinkLost(f"{where} does not speak TLS 1.3 ({error.reason or error})") from error
    except OSError as error:
        raise LinkLost(f"{where} cannot be reached: {error.strerror or error}") from error
    if endpoint.fingerprint:
        try:
            check_pin(link.transport, endpoint.fingerprint)
        except TlsError as error:
            link.abort()
            raise NotLetIn(f"{where} is not to be believed: {error}; nothing was sent to it", retry=True) from error
    return link


async def greet(link: PoolLink[M], hello: msgspec.Struct, welcome: type[W], timeout_s: float) -> W:
    """Send the hello and return the welcome. Raises `NotLetIn` or `LinkLost`."""
    link.send(hello)
    try:
        async with asyncio.timeout(timeout_s):
            first = await link.receive()
    except TimeoutError as error:
        raise LinkLost(f"{link.peer} did not answer in {timeout_s:g} s") from error
    match first:
        case w.PoolRefused(reason=reason, retry=retry):
            raise NotLetIn(reason, retry)
        case _ if isinstance(first, welcome):
            return first
        case _:
            raise LinkLost(f"{link.peer} broke the protocol: {type(first).__name__} before {welcome.__name__}")


async def join(
    endpoint: Endpoint,
    decoder: "msgspec.msgpack.Decoder[M]",
    hello: Callable[[], msgspec.Struct],
    welcome: type[W],
    within_s: float,
) -> tuple[PoolLink[M], W]:
    """Dial with a back-off until welcomed. `hello` is called for every attempt.

    Raises `NotLetIn`; `LinkLost` after `within_s` without a welcome; `ValueError` for an invalid address. The caller
    then calls `PoolLink.watch` with the limit in the welcome.
    """
    Address.to_dial(endpoint.address)
    timeout_s = min(within_s, ATTEMPT_TIMEOUT_S)

    async def once() -> tuple[PoolLink[M], W]:
        link = await dial(endpoint, decoder, timeout_s)
        try:
            return link, await greet(link, hello(), welcome, timeout_s)
        except BaseException:
            link.abort()
            raise

    attempts = tenacity.AsyncRetrying(
        retry=tenacity.retry_if_exception(_may_pass),
        wait=tenacity.wait_random_exponential(multiplier=0.1, max=1.0),
        stop=after(within_s),
        reraise=True,
    )
    return await attempts(once)


def _may_pass(error: BaseException) -> bool:
    return isinstance(error, LinkLost) or (isinstance(error, NotLetIn) and error.retry)


async def listen(
    host: str,
    port: int,
    certificate: Certificate | None,
    connected: Callable[[PoolLink[FromDialler]], None],
    handshake_timeout_s: float = ATTEMPT_TIMEOUT_S,
) -> asyncio.Server | TlsServer:
    """Accept connections, with TLS if there is a certificate, and pass each to `connected`. Raises `OSError`.

    `connected` must bound how many connections have not said hello, and for how long.
    """

    def protocol() -> asyncio.Protocol:
        return _Accepted(connected)

    if certificate is None:
        return await asyncio.get_running_loop().create_server(protocol, host, port, backlog=BACKLOG)
    listener = listening_socket(host, port, BACKLOG)
    return TlsServer(listener, certificate, protocol, STRANGERS_MAX, handshake_timeout_s)


class _Accepted(PoolLink[FromDialler]):
    def __init__(self, connected: Callable[[PoolLink[FromDialler]], None]) -> None:
        super().__init__(FROM_DIALLER, "who dialled")
        self._connected = connected

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._connected(self)


async def over_socket(end: socket.socket, decoder: "msgspec.msgpack.Decoder[M]", peer: str) -> PoolLink[M]:
    """Return a connection over a connected socket, such as that between a keeper and its resident."""
    end.setblocking(False)
    _, link = await asyncio.get_running_loop().create_connection(lambda: PoolLink(decoder, peer), sock=end)
    return link
