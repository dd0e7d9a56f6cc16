"""One end of a connection that carries frames: dial, send, receive, notice silence and a peer that does not read.

Runs and their workers, pools and their node agents, jobs and residents speak over it, each in the messages of a
`MessageCodec`.

- Sending never waits. The frames of one loop iteration are one write. The unread backlog is bounded; beyond the bound
  the connection counts as lost.
- Messages that have arrived are heard by `hear`, or wait for `receive`. While too many wait, nothing is read.
- Before it sends anything to another machine, the dialler compares the peer's certificate with a known fingerprint
  (`elastic.protocol.tls`).
"""

import asyncio
import math
import socket
import ssl
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, NoReturn, TypeVar, cast

import structlog
import tenacity

from elastic.protocol.endpoint import Address, Endpoint
from elastic.protocol.frames import FrameBuffer, RefusedFrame, UnreadableFrame, WireError
from elastic.protocol.tls import TlsError, check_pin, pinning_context
from elastic.system.host import after

log = structlog.get_logger(__name__)

UNRECEIVED_MAX = 1024
"""Messages that wait to be received, above which nothing is read."""
ATTEMPT_TIMEOUT_S = 5.0
"""Limit of one attempt to connect and to be welcomed."""
CLOSE_GRACE_S = 2.0
"""How long a closed connection may still take to deliver its last frames."""
LAST_LOOK_S = 0.1
"""Wait after a silence: if this process was held up, the peer's messages are waiting to be read."""

SaysT = TypeVar("SaysT")
HearsT = TypeVar("HearsT")
WelcomeT = TypeVar("WelcomeT")


class ConnectionLost(Exception):
    """The connection is gone or dead. Dialling again may help."""


class LostInWaiting(ConnectionLost):
    """The connection was lost after the peer had asked to wait for its welcome."""


class SessionRefused(Exception):
    """There is no session; raised at either end. `retry` says whether dialling again can help."""

    def __init__(self, reason: str, *, retry: bool = False) -> None:
        super().__init__(reason)
        self.retry = retry


@dataclass(frozen=True)
class MessageCodec(Generic[SaysT, HearsT]):
    """What one end says and hears, and what its peer may cost.

    `decode` returns None for a message that is not to be heard. The connection is dropped when more than `unread_bytes`
    wait for the peer, or when it has read nothing of the backlog for `unread_timeout_s`. A connection that is watched
    for silence says `idle` regularly, if there is one, so that the peer hears something.
    """

    encode: Callable[[SaysT | RefusedFrame], bytes]
    decode: Callable[[memoryview], HearsT | None]
    max_frame_bytes: int
    unread_bytes: int
    unread_timeout_s: float = math.inf
    idle: SaysT | None = None


class Connection(asyncio.Protocol, Generic[SaysT, HearsT]):
    """One end of a connection, whose other end messages call `peer`. `opened` is called with it once it stands.

    What arrives waits for `receive` or `listen`, unless somebody takes the connection over.
    """

    transport: asyncio.Transport

    def __init__(
        self,
        codec: MessageCodec[SaysT, HearsT],
        peer: str,
        opened: Callable[["Connection[SaysT, HearsT]"], None] = lambda _: None,
    ) -> None:
        self.peer = peer
        self.hear: Callable[[list[HearsT]], None] = self._keep
        self.cause: Exception | None = None
        """Why the connection is of no further use, if it is not."""
        self._broken: Callable[[WireError], None] = self._drop_peer
        self._ended: Callable[[Exception], None] = lambda _: None
        self._codec = codec
        self._opened = opened
        self._loop = asyncio.get_running_loop()
        self.lost: asyncio.Future[None] = self._loop.create_future()
        """Done once the socket is closed."""
        self._frames = FrameBuffer(codec.max_frame_bytes)
        self._outbox: list[bytes] = []
        self._received: deque[HearsT] = deque()
        self._stirred = asyncio.Event()
        self._closing = False
        self._sent_bytes = self._read_bytes = 0
        self._heard_s = self._read_at_s = self._loop.time()
        self._beating: asyncio.TimerHandle | None = None
        self._watching: asyncio.TimerHandle | None = None

    @property
    def open(self) -> bool:
        """Whether more can be said and heard."""
        return self.cause is None and not self._closing

    @property
    def heard_s(self) -> float:
        """When something was last heard, by the loop's clock."""
        return self._heard_s

    @property
    def address(self) -> str:
        """The peer's host."""
        peer = self.transport.get_extra_info("peername")
        return str(peer[0]) if peer else ""

    @property
    def own_host(self) -> str:
        """This end's host, as the peer's network knows it."""
        own = self.transport.get_extra_info("sockname")
        return str(own[0]) if own else ""

    def take_over(
        self,
        peer: str,
        hear: Callable[[list[HearsT]], None],
        ended: Callable[[Exception], None] = lambda _: None,
        broken: Callable[[WireError], None] | None = None,
        max_frame_bytes: int | None = None,
    ) -> None:
        """Be called from now on, instead of who was before: `hear` with what arrives, and `ended` with the cause once
        the connection is of no further use.

        A peer that breaks the protocol, or of which `hear` says so by a `WireError`, is cut off, unless it is left to
        `broken`. Beats and watching are over.
        """
        self._still()
        self.peer, self.hear, self._ended, self._broken = peer, hear, ended, broken or self._drop_peer
        self._frames.max_frame_bytes = max_frame_bytes or self._frames.max_frame_bytes

    def send(self, message: SaysT) -> None:
        """Queue a frame for the write at the end of this loop iteration. Drops it if the connection is gone."""
        if not self.open:
            return
        if not self._outbox:
            self._loop.call_soon(self._flush)
        self._outbox.append(self._codec.encode(message))

    async def receive(self) -> HearsT:
        """Return the next message, also one from before the connection was lost. Raises `ConnectionLost`."""
        while not self._received:
            if self.cause is not None:
                raise self.cause
            self._stirred.clear()
            await self._stirred.wait()
        message = self._received.popleft()
        if len(self._received) < UNRECEIVED_MAX:
            self.hold(False)
        return message

    async def listen(self, hear: Callable[[list[HearsT]], None]) -> NoReturn:
        """Have `hear` called with what arrives, and has arrived before, for as long as this waits.

        Raises `ConnectionLost`, and whatever `hear` raises.
        """

        def attempt(messages: list[HearsT]) -> None:
            try:
                hear(messages)
            except Exception as error:
                self._end(error)

        waiting = [*self._received]
        self._received.clear()
        self.hear = attempt
        try:
            if waiting:
                hear(waiting)
            self.hold(False)
            while self.cause is None:
                self._stirred.clear()
                await self._stirred.wait()
            raise self.cause
        finally:
            self.hear = self._keep

    def hold(self, held: bool) -> None:
        """Read nothing more, or go on. A peer that is not read is not taken to be silent."""
        if not self.open or self.transport.is_closing() or self.transport.is_reading() is not held:
            return
        if held:
            self.transport.pause_reading()
        else:
            self._heard_s = self._loop.time()
            self.transport.resume_reading()

    def watch(self, silence_s: float) -> None:
        """Treat `silence_s` in which nothing is heard as the loss of the connection, from now on."""
        if self._codec.idle is not None:
            self.beat(self._codec.idle, silence_s / 3)
        if self._watching is not None:
            self._watching.cancel()
        self._look(silence_s)

    def beat(self, message: SaysT, interval_s: float) -> None:
        """Send this message now and regularly, instead of an earlier one, and drop a peer that does not read."""
        if self._beating is not None:
            self._beating.cancel()
        self._beat(message, interval_s)

    def abort(self) -> None:
        """Cut the connection, with no more than a try to send what is queued. Does nothing if it is closing already."""
        if self.open:
            self._flush()
            self._cut("this end has cut the connection")

    def close(self, last: RefusedFrame | None = None) -> None:
        """Send what is queued, then `last`, and close. Cuts the connection if the peer does not take it in time."""
        if not self.open:
            return
        if last is not None:
            self._outbox.append(self._codec.encode(last))
        self._flush()
        self._closing = True
        self._still()
        self.transport.close()
        self._loop.call_later(CLOSE_GRACE_S, self.transport.abort)

    async def aclose(self) -> None:
        """Close, and wait until that is done."""
        self.close()
        await asyncio.wait([self.lost], timeout=2 * CLOSE_GRACE_S)

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is not a subclass
        self._opened(self)

    def data_received(self, data: bytes) -> None:
        self._heard_s = self._loop.time()
        if not self.open:
            return
        try:
            messages = [heard for body in self._frames.feed(data) if (heard := self._decoded(body)) is not None]
            if messages:
                self.hear(messages)
        except WireError as error:
            if self.open:
                self._broken(error)

    def connection_lost(self, exc: Exception | None) -> None:
        how = f"{self.peer} closed the connection" if exc is None else f"the connection broke: {exc}"
        self._end(ConnectionLost(how))
        self.lost.set_result(None)

    def _decoded(self, body: memoryview) -> HearsT | None:
        """Return the message; None for one that cannot be read, which is given back: the connection is sound, and
        another one would bring the same."""
        try:
            return self._codec.decode(body)
        except UnreadableFrame as error:
            log.error("message not read", peer=self.peer, error=str(error))
            self.send(error.answer())
            return None

    def _keep(self, messages: list[HearsT]) -> None:
        self._received.extend(messages)
        self._stirred.set()
        if len(self._received) > UNRECEIVED_MAX:
            self.hold(True)

    def _drop_peer(self, error: WireError) -> None:
        self._cut(f"{self.peer} broke the protocol: {error}")

    def _flush(self) -> None:
        data = b"".join(self._outbox)
        self._outbox.clear()
        if not data or not self.open or self.transport.is_closing():
            return
        if self.transport.get_write_buffer_size() + len(data) > self._codec.unread_bytes:
            self._cut(f"{self.peer} does not read what it is sent")
        else:
            self.transport.write(data)
            self._sent_bytes += len(data)

    def _beat(self, message: SaysT, interval_s: float) -> None:
        if not self.open:
            return
        self._beating = self._loop.call_later(interval_s, self._beat, message, interval_s)
        self.send(message)
        waiting_bytes = self.transport.get_write_buffer_size()
        read_bytes = self._sent_bytes - waiting_bytes
        if not waiting_bytes or read_bytes != self._read_bytes:
            self._read_bytes, self._read_at_s = read_bytes, self._loop.time()
        elif self._loop.time() - self._read_at_s > self._codec.unread_timeout_s:
            self._cut(f"{self.peer} does not read what it is sent")

    def _look(self, silence_s: float, last: bool = False) -> None:
        if not self.open:
            return
        left_s = self._heard_s + silence_s - self._loop.time() if self.transport.is_reading() else silence_s
        if left_s > 0:
            self._watching = self._loop.call_later(left_s, self._look, silence_s)
        elif not last:
            self._watching = self._loop.call_later(LAST_LOOK_S, self._look, silence_s, True)
        else:
            self._cut(f"{self.peer} was silent for {silence_s:g} s")

    def _cut(self, cause: str) -> None:
        self.transport.abort()
        self._end(ConnectionLost(cause))

    def _end(self, cause: Exception) -> None:
        if self.cause is not None:
            return
        self.cause = cause
        self._still()
        self._outbox.clear()
        self._stirred.set()
        self._ended(cause)

    def _still(self) -> None:
        for timer in (self._beating, self._watching):
            if timer is not None:
                timer.cancel()


class Peer(NamedTuple):
    """The peer that is dialled, in the words of messages to users: its name, and what helps when dialling it fails.

    `changes` says whether another one may have its certificate later. The pause before each attempt to dial it is up to
    `pause_growth` times as long as the one before, from 0.1 s to 1 s: of a peer that few dial, and that is soon back
    when it was away, little more than 1.
    """

    name: str
    unresolved: str = ""
    not_tls: str = ""
    not_believed: str = ""
    in_plain_text: str = ""
    changes: bool = True
    pause_growth: float = 2.0


@dataclass(frozen=True)
class Greeting(Generic[SaysT]):
    """How a dialler introduces itself. `hello` is called for every attempt.

    The peer answers with a `welcome`, or refuses, or asks to wait with a `waiting`, which is answered with
    `still_there` as often as it comes.
    """

    hello: Callable[[], SaysT]
    welcome: type
    waiting: type | None = None
    still_there: SaysT | None = None


async def dial(
    endpoint: Endpoint, peer: Peer, codec: MessageCodec[SaysT, HearsT], greeting: Greeting[SaysT], within_s: float
) -> tuple[Connection[SaysT, HearsT], Any]:
    """Dial with a back-off until welcomed; returns the connection and the welcome.

    Raises `SessionRefused`; `ConnectionLost` after `within_s` without a welcome; `ValueError` for an invalid address.
    Nothing is sent before the peer has proved the identity in the endpoint.
    """
    timeout_s = min(within_s, ATTEMPT_TIMEOUT_S)
    Address.to_dial(endpoint.address)  # of which a dial would only say that it cannot be reached

    async def once() -> tuple[Connection[SaysT, HearsT], Any]:
        connection = await _connect(endpoint, peer, codec, timeout_s)
        try:
            return connection, await _greet(connection, greeting, timeout_s)
        except ConnectionLost as error:
            connection.abort()
            if endpoint.fingerprint or not peer.in_plain_text or isinstance(error, LostInWaiting):
                raise
            raise ConnectionLost(f"{error}; {peer.in_plain_text}") from error
        except BaseException:
            connection.abort()
            raise

    attempts = tenacity.AsyncRetrying(
        retry=tenacity.retry_if_exception(_may_pass),
        wait=tenacity.wait_random_exponential(multiplier=0.1, max=1.0, exp_base=peer.pause_growth),
        stop=after(within_s),
        reraise=True,
    )
    return await attempts(once)


async def over_socket(end: socket.socket, codec: MessageCodec[SaysT, HearsT], peer: str) -> Connection[SaysT, HearsT]:
    """Return a connection over a connected socket."""
    end.setblocking(False)
    _, connection = await asyncio.get_running_loop().create_connection(lambda: Connection(codec, peer), sock=end)
    return connection


async def _connect(
    endpoint: Endpoint, peer: Peer, codec: MessageCodec[SaysT, HearsT], timeout_s: float
) -> Connection[SaysT, HearsT]:
    where = f"{peer.name} at {endpoint.address}"
    tls = pinning_context() if endpoint.fingerprint else None
    try:
        async with asyncio.timeout(timeout_s):
            _, connection = await asyncio.get_running_loop().create_connection(
                lambda: Connection(codec, peer.name), *Address.to_dial(endpoint.address), ssl=tls
            )
    except TimeoutError as error:
        raise ConnectionLost(f"{where} did not answer in {timeout_s:g} s") from error
    except socket.gaierror as error:
        here = socket.gethostname()
        raise ConnectionLost(
            f"{where} has a name that does not resolve on {here} ({error.strerror}){peer.unresolved}"
        ) from error
    except ssl.SSLError as error:
        raise ConnectionLost(f"{where} does not speak TLS 1.3 ({error.reason or error}){peer.not_tls}") from error
    except OSError as error:
        raise ConnectionLost(f"{where} cannot be reached: {error.strerror or error}") from error
    try:
        if endpoint.fingerprint:
            check_pin(connection.transport, endpoint.fingerprint)
    except TlsError as error:
        connection.abort()
        raise SessionRefused(
            f"{where} is not to be believed: {error}; nothing was sent to it{peer.not_believed}", retry=peer.changes
        ) from error
    return connection


async def _greet(connection: Connection[SaysT, HearsT], greeting: Greeting[SaysT], timeout_s: float) -> Any:
    """Say hello and return the welcome. Raises `SessionRefused` or `ConnectionLost`."""
    waited = False
    connection.send(greeting.hello())
    while True:
        try:
            async with asyncio.timeout(timeout_s):
                first = await connection.receive()
        except (TimeoutError, ConnectionLost) as error:
            lost = str(error) or f"{connection.peer} was silent for {timeout_s:g} s"
            raise (LostInWaiting if waited else ConnectionLost)(lost) from error
        if isinstance(first, RefusedFrame):
            raise SessionRefused(first.reason, retry=first.retry)
        if isinstance(first, greeting.welcome):
            return first
        if greeting.waiting is None or not isinstance(first, greeting.waiting):
            named = f"{type(first).__name__} before {greeting.welcome.__name__}"
            raise ConnectionLost(f"{connection.peer} broke the protocol: {named}")
        if not waited:
            log.info("asked to wait for a welcome", by=connection.peer)
        waited = True
        if greeting.still_there is not None:
            connection.send(greeting.still_there)


def _may_pass(error: BaseException) -> bool:
    return isinstance(error, ConnectionLost) or (isinstance(error, SessionRefused) and error.retry)
