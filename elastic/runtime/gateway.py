"""The orchestrator's end of the worker connections: tickets, sessions, epochs and frames. No policy.

- A worker shows its lease's one-time token and gets a session. The session's key buys the connection back, each
  time under the next epoch; whatever an older epoch still has to say is never heard.
- Several runs share one gateway. A worker says for which it works, and comes in at that run's door.
- A session is read no faster than its time and its orders can need; one that says ten times as much is over.
- A frame reaches the listener only if it can be true (`elastic.runtime.validation`). A worker that sends another
  is refused for ever.
- Strangers are few, before and after they have spoken TLS. The oldest goes when there are too many, and what is
  refused is counted and logged at a bounded rate.

Everything runs on the event loop's thread, and the listener is called synchronously from it.
"""

import asyncio
import errno
import hashlib
import hmac
from collections.abc import Callable
from typing import Any, Protocol, cast

import msgspec
import structlog

from elastic.core.types import WorkerId
from elastic.protocol import wire
from elastic.protocol.endpoint import Address
from elastic.protocol.sockets import address_of, listening_socket
from elastic.protocol.tickets import TicketRefused
from elastic.protocol.tls import Certificate, TlsServer, oldest_of_crowd
from elastic.runtime.allowances import SessionAllowances
from elastic.runtime.refusals import STRANGERS, RefusalCount, Refusals
from elastic.runtime.validation import Claims, bounds_of, without_figures
from elastic.system.outages import Outage
from providers.waiting_room import Applicant, WaitingRoom

log = structlog.get_logger(__name__)

BACKLOG = 1024
"""Connections that wait to be accepted. Where they do not fit, the kernel lets a worker wait a second."""
CLOSE_GRACE_S = 1.0
"""How long a closed connection may still take to deliver its last frame."""
FENCED_KEPT = 256
"""Fenced workers that are told why they are refused; older ones are refused as unknown, and nothing of them is kept."""
HELD_S_MAX = 1.0
"""Longest time for which a session that says too much is not read, before its allowance is looked at again."""
FAR_TOO_MUCH = "far more than its time and its orders can need"
TOO_MUCH = "more than its time and its orders can need: read no faster"
LAST_LOOK_S = 0.1
"""Grace after a silence: this process may have been held up, with the worker's messages still unread."""


class GatewayError(Exception):
    """The gateway cannot listen; the message says where and why."""


class GatewayOutage(GatewayError, Outage):
    """What the gateway needs is not to be had now: its address is taken, or a relay does not answer."""


def cannot_listen(error: OSError, words: str) -> GatewayError:
    return (GatewayOutage if error.errno == errno.EADDRINUSE else GatewayError)(words)


class WorkerListener(Protocol):
    """Receives the calls of an epoch: `on_ready`, then messages, then `on_disconnected`.

    A connection that is lost before its worker is ready is never reported. `on_barred` is a worker's last call.
    """

    def on_ready(self, worker: WorkerId, epoch: int, ready: wire.Ready) -> None: ...

    def on_message(self, worker: WorkerId, epoch: int, message: wire.FromWorker) -> None: ...

    def on_tokens(self, worker: WorkerId, epoch: int, tokens: wire.Tokens, body: memoryview) -> None:
        """A message like others; `body` is the frame that it was decoded from."""
        ...

    def on_disconnected(self, worker: WorkerId, epoch: int, goodbye: bool) -> None:
        """`goodbye` when the worker drained and said so; its Goodbye has come as a message before."""
        ...

    def on_barred(self, worker: WorkerId, epoch: int, cause: str) -> None:
        """The worker sent what it cannot mean or may not say, and is refused from now on."""
        ...


class GatewayLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits on the cost of a peer.

    A peer is dropped when more than `unread_bytes` wait for it, or when it has read nothing of the backlog for
    `unread_timeout_s`. At most `unauthenticated` peers may be without a Hello, each for `handshake_timeout_s`; beyond
    that number, the address with the most such connections loses its oldest.
    """

    handshake_timeout_s: float = 5.0
    unauthenticated: int = 256
    unread_bytes: int = 4 * wire.MAX_FRAME_BYTES
    unread_timeout_s: float = 5.0


class Gateway:
    """TCP server for the worker connections of any number of runs, each of which has a `Door` of its own."""

    def __init__(self, limits: GatewayLimits | None = None) -> None:
        self._limits = limits or GatewayLimits()
        self._doors: dict[str, Door] = {}
        self._connections: set[_Connection] = set()
        self._strangers: dict[_Connection, None] = {}
        """In the order in which they came."""
        self._refusals = Refusals()
        self._server: asyncio.Server | TlsServer | None = None

    async def start(self, host: str = "127.0.0.1", port: int = 0, certificate: Certificate | None = None) -> str:
        """Listen, on a free port if `port` is 0, with TLS where there is a certificate; returns the `host:port`.

        Raises `GatewayError` when the address cannot be had.
        """
        try:
            self._server = await self._listen(host, port, certificate)
        except OSError as error:
            words = f"cannot listen for workers on {Address(host, port)}: {error.strerror or error}"
            raise cannot_listen(error, f"{words}; name a free port, or 0 for any") from error
        return str(address_of(self._server.sockets[0]))

    async def _listen(self, host: str, port: int, certificate: Certificate | None) -> "asyncio.Server | TlsServer":
        def connection() -> asyncio.Protocol:
            return _Connection(self, self._limits)

        if certificate is None:
            return await asyncio.get_running_loop().create_server(connection, host, port, backlog=BACKLOG)
        limits, listener = self._limits, listening_socket(host, port, BACKLOG)
        most, timeout_s = limits.unauthenticated, limits.handshake_timeout_s
        return TlsServer(listener, certificate, connection, most, timeout_s, self._not_encrypted)

    def _not_encrypted(self, address: str, reason: str) -> None:
        self._refusals.note(STRANGERS, reason, _now_s())

    def open(self, run: str, listener: WorkerListener, welcome: wire.Welcome, *, cuts_silent: bool = False) -> "Door":
        """Let a run's workers in from now on, whom `listener` hears. Raises `ValueError` where it has a door already.

        `welcome` says what every worker is told; its session key and epoch are filled in for each. With `cuts_silent`
        a connection ends of which nothing was heard for the welcome's `silence_timeout_s`, as the worker's end of it
        does: beyond this machine a link can be cut and nobody says so.
        """
        if run in self._doors:
            raise ValueError(f"run {run!r} has a door already")
        door = self._doors[run] = Door(self, run, listener, welcome, cuts_silent=cuts_silent)
        return door

    async def aclose(self) -> None:
        """Stop listening and end every connection; no listener hears anything more. Safe to call twice."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for door in tuple(self._doors.values()):
            door.close()
        for connection in tuple(self._connections):
            connection.close()
        if self._connections:
            await asyncio.wait([connection.lost for connection in self._connections], timeout=2 * CLOSE_GRACE_S)

    # What connections call.

    def _connected(self, connection: "_Connection") -> None:
        """Let a new connection stay for its Hello; where there are too many, another one goes for it."""
        self._connections.add(connection)
        self._strangers[connection] = None
        if len(self._strangers) > self._limits.unauthenticated:
            oldest = oldest_of_crowd((stranger, stranger.address) for stranger in self._strangers)
            self._refuse_stranger(oldest, "too many connections are waiting to be let in", retry=True)

    def _disconnected(self, connection: "_Connection") -> None:
        self._connections.discard(connection)
        self._strangers.pop(connection, None)

    def _refuse_stranger(self, stranger: "_Connection", reason: str, *, retry: bool = False) -> None:
        self._strangers.pop(stranger, None)
        self._refusals.note(STRANGERS, reason, _now_s())
        stranger.close(wire.RefusedFrame(reason, retry=retry))

    def _greet(self, connection: "_Connection", hello: wire.Hello) -> None:
        """Let a stranger that has said hello in at its run's door. Raises `_NotAdmitted`."""
        door = self._doors.get(hello.run)
        if door is None:
            raise _NotAdmitted(UNKNOWN)
        if hello.ticket:
            door._have_wait(connection, hello)
        else:
            door._admit(connection, hello)
        self._strangers.pop(connection, None)


class Door:
    """One run's way through the gateway: `expect` a worker before it dials, `send` while it is connected.

    Runs know nothing of each other's workers, whatever these are called. Use `Gateway.open`. Who comes by a ticket
    waits in the `waiting_room`, where there is one.
    """

    def __init__(
        self, gateway: Gateway, run: str, listener: WorkerListener, welcome: wire.Welcome, *, cuts_silent: bool
    ) -> None:
        self.held = False
        self.waiting_room: WaitingRoom | None = None
        self._cuts_silent = cuts_silent
        self._gateway = gateway
        self._run = run
        self._listener = listener
        self._welcome = welcome
        self._sessions: dict[WorkerId, _Session] = {}
        self._fenced: dict[WorkerId, None] = {}
        """Those of the sessions that are, the first one first."""
        self._waiting: set[_Connection] = set()
        self._refusals = Refusals()
        self._loop = asyncio.get_running_loop()
        self._pulse = self._loop.call_later(welcome.heartbeat_interval_s, self._beat)

    def close(self) -> None:
        """End the run's connections and refuse new ones. The listener is not called any more. Safe to call twice."""
        self._pulse.cancel()
        for session in self._sessions.values():
            session.cut()
        self._sessions.clear()
        if self.waiting_room is not None:
            self.waiting_room.close()
        self._gateway._doors.pop(self._run, None)

    def expect(
        self,
        worker: WorkerId,
        token: str,
        key: str,
        engine: dict[str, Any] | None = None,
        relay_token: str | None = None,
        relay: str | None = None,
        *,
        trains: bool = False,
        epoch: int = 0,
        served_bytes: Callable[[], int] | None = None,
    ) -> None:
        """Let `worker` in, once, with `token`; then it comes back with `key`. Its `engine` settings, its `relay` and
        `relay_token` are the welcome's unless they are given.

        It may say what the trainer says if it `trains`. `served_bytes` says how much the relay has served, if that is
        known. With an `epoch` that it had with an earlier process of this
        run its token is spent. Raises `ValueError` for a worker that is known already.
        """
        if worker in self._sessions:
            raise ValueError(f"worker {worker} is already expected")
        welcome = self._welcome
        if engine is not None:
            welcome = msgspec.structs.replace(welcome, engine=engine)
        if relay_token is not None:
            welcome = msgspec.structs.replace(welcome, relay_token=relay_token)
        if relay is not None:
            welcome = msgspec.structs.replace(welcome, relay=relay)
        claims = Claims(bounds_of(welcome.engine, welcome.model, trains=trains), served_bytes)
        allowances = None
        if not trains:
            allowances = SessionAllowances(welcome.heartbeat_interval_s, welcome.silence_timeout_s, _now_s())
        self._sessions[worker] = _Session(worker, token, key, epoch, welcome, claims, allowances)

    def expects(self, worker: WorkerId) -> bool:
        return worker in self._sessions

    def send(self, worker: WorkerId, epoch: int, message: wire.FromOrchestrator) -> None:
        """Queue a frame; those of one loop iteration go out in one write. No-op unless `epoch` is connected."""
        session = self._sessions.get(worker)
        if session is not None and session.connection is not None and session.epoch == epoch:
            session.connection.send(message)
            if session.allowances is not None:
                session.allowances.ordered(message)

    def hold(self, held: bool) -> None:
        """Stop reading from all workers while `held`, because their messages cannot be handled fast enough. Writing
        goes on."""
        self.held = held
        for session in self._sessions.values():
            if session.connection is not None:
                session.connection.hold(held)

    def fence(self, worker: WorkerId, reason: str = "fenced") -> None:
        """Close the worker's connection and refuse it for ever; nothing of it surfaces any more."""
        session = self._sessions.get(worker)
        if session is not None:
            session.fenced = session.fenced or reason
            session.cut(wire.RefusedFrame(reason, retry=False))
            self._fenced[worker] = None
            if len(self._fenced) > FENCED_KEPT:
                self.forget(next(iter(self._fenced)))

    def forget(self, worker: WorkerId) -> None:
        """The worker will never be expected again: it is a stranger from now on."""
        self._fenced.pop(worker, None)
        session = self._sessions.pop(worker, None)
        if session is not None:
            session.cut()

    def blame(self, worker: WorkerId, reason: str, what: str) -> None:
        """Count and show that the worker, which goes on, has done `what` it should not have."""
        self._refusals.note(worker, reason, _now_s(), what)

    def refusals(self) -> list[RefusalCount]:
        """Return the refusals so far: of strangers, who name no known run, and of this run's workers."""
        return [*self._gateway._refusals.counts(), *self._refusals.counts()]

    def _beat(self) -> None:
        self._pulse = self._loop.call_later(self._welcome.heartbeat_interval_s, self._beat)
        for session in tuple(self._sessions.values()):
            if session.connection is not None:
                session.connection.send(wire.Ping())
                session.connection.check_reading()
                if self._cuts_silent and session.speaks and not self.held:
                    session.connection.check_heard(self._welcome.silence_timeout_s)
        for connection in tuple(self._waiting):
            connection.send(wire.Waiting())
            connection.check_heard(self._welcome.silence_timeout_s)

    # What connections call.

    def _admit(self, connection: "_Connection", hello: wire.Hello) -> None:
        """Open or resume the session of a stranger that has said hello. Raises `_NotAdmitted`."""
        session = self._authenticated(hello)
        self._check_openings(session)
        self._end_epoch(session)
        session = self._authenticated(hello)  # the listener may have fenced it just now
        self._open(session, connection, hello.secret if hello.resume else "")

    def _check_openings(self, session: "_Session") -> None:
        """Raises `_NotAdmitted` for a session that begins anew too often."""
        if session.allowances is None:
            return
        openings, reason = session.allowances.openings, "begins anew too often"
        openings.use(1, _now_s())
        if openings.far_beyond:
            self._bar(session, reason)
            raise _NotAdmitted(session.fenced)
        if openings.wait_s(_now_s()):
            self._refusals.note(session.worker, reason, _now_s(), "connection")
            raise _NotAdmitted(reason, retry=True)

    def _open(self, session: "_Session", connection: "_Connection", key: str, worker: WorkerId = "") -> None:
        """Begin the session's next epoch; its bearer is told its name where it is a `worker` that has none yet."""
        key = session.open(connection, key)
        connection.bear(self, session)
        welcome = msgspec.structs.replace(session.welcome, session_key=key, epoch=session.epoch, worker=worker)
        connection.send(welcome)

    def _have_wait(self, connection: "_Connection", hello: wire.Hello) -> None:
        """Let the holder of a ticket wait for a lease. Raises `_NotAdmitted`."""
        room = self.waiting_room
        if room is None:
            raise _NotAdmitted("this run takes nobody who joins by ticket")
        try:
            terms = room.check(hello.ticket, hello.secret)
        except TicketRefused as refusal:
            raise _NotAdmitted(str(refusal)) from refusal

        def left() -> None:
            self._waiting.discard(connection)
            room.leave(applicant)

        def admit(worker: WorkerId) -> None:
            self._waiting.discard(connection)
            self._open(self._sessions[worker], connection, "", worker)

        def turn_away(reason: str) -> None:
            self._waiting.discard(connection)
            connection.close(wire.RefusedFrame(reason, retry=False))

        applicant = Applicant(terms, admit, turn_away)
        connection.wait(self, left)
        self._waiting.add(connection)
        connection.send(wire.Waiting())
        room.enter(applicant)

    def _authenticated(self, hello: wire.Hello) -> "_Session":
        session = self._sessions.get(hello.worker)
        if session is None:
            raise _NotAdmitted(UNKNOWN)
        session.check(hello)
        return session

    def _hear(self, session: "_Session", body: memoryview) -> None:
        """Take one frame of a session; one that cannot be meant is its last."""
        try:
            if session.allowances is not None:
                session.allowances.said(len(body), _now_s())
                if session.allowances.far_beyond:
                    raise wire.WireError(FAR_TOO_MUCH)
            message = wire.decode_from_worker(body)
            session.claims.check(message, _now_s())
            if isinstance(message, wire.WeightsReport):
                message = self._believable(session, message)
            if isinstance(message, wire.Heartbeat) and session.ready:
                message = self._in_time(session, message)
            if message is not None:
                self._receive(session, message, body)
        except wire.WireError as error:
            self._bar(session, str(error))

    def _believable(self, session: "_Session", report: wire.WeightsReport) -> wire.WeightsReport | None:
        """What is believed of a report on weights. What cannot be counts against the worker, and is not shown."""
        allowances, found = session.allowances, session.claims.doubt(report, _now_s())
        if allowances is not None and not allowances.reported(_now_s()):
            self._refusals.note(session.worker, "about weights that it was not told to load", _now_s(), "report")
            return None
        if found:
            self._refusals.note(session.worker, found, _now_s(), "report")
            return without_figures(report)
        return report

    def _in_time(self, session: "_Session", beat: wire.Heartbeat) -> wire.Heartbeat | None:
        """The heartbeat, or None if it comes too soon after others: then the last one of those is heard later."""
        wait_s = 0.0 if session.allowances is None else session.allowances.beaten(_now_s())
        if not wait_s:
            session.forget_beat()
            return beat
        if session.beat_timer is None:
            session.beat_timer = self._loop.call_later(wait_s, self._hear_beat, session)
        session.late_beat = beat
        return None

    def _hear_beat(self, session: "_Session") -> None:
        beat = session.late_beat
        session.forget_beat()
        if beat is not None and not session.said_goodbye and (late := self._in_time(session, beat)) is not None:
            self._listener.on_message(session.worker, session.epoch, late)

    def _bar(self, session: "_Session", cause: str) -> None:
        """Refuse a worker for ever for what it sent, and tell the listener."""
        self._refusals.note(session.worker, cause, _now_s())
        session.fenced = f"what this worker sent was refused: {cause}"
        session.cut(wire.RefusedFrame(session.fenced, retry=False))
        self._listener.on_barred(session.worker, session.epoch, cause)

    def _receive(self, session: "_Session", message: wire.FromWorker, body: memoryview) -> None:
        if isinstance(message, wire.StillThere) and not session.ready:
            return
        greeting = isinstance(message, wire.Ready | wire.Hello)
        if session.ready is greeting or isinstance(message, wire.Hello):
            raise wire.WireError(f"{wire.kind_of(message)} {'after' if session.ready else 'before'} Ready")
        if isinstance(message, wire.Ready):
            session.ready = True
            self._listener.on_ready(session.worker, session.epoch, message)
        else:
            session.said_goodbye = isinstance(message, wire.Goodbye)
            if isinstance(message, wire.Tokens):
                self._listener.on_tokens(session.worker, session.epoch, message, body)
            else:
                self._listener.on_message(session.worker, session.epoch, message)

    def _end_epoch(self, session: "_Session") -> None:
        """End the session's present epoch, if there is one, and tell the listener."""
        announced, goodbye = session.ready, session.said_goodbye
        session.cut()
        if announced:
            self._listener.on_disconnected(session.worker, session.epoch, goodbye)


def _check_still_there(body: memoryview) -> None:
    """Raise `WireError` for a message that a peer may not send while it waits for a lease."""
    message = wire.decode_from_worker(body)
    if not isinstance(message, wire.StillThere):
        raise wire.WireError(f"{type(message).__name__} of somebody who waits for a lease")


UNKNOWN = "unknown worker or wrong token"


class _NotAdmitted(Exception):
    """No session for this Hello; the message says why, and `retry` whether it may be said again."""

    def __init__(self, reason: str, *, retry: bool = False) -> None:
        super().__init__(reason)
        self.retry = retry


def _now_s() -> float:
    return asyncio.get_running_loop().time()


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()


class _Session:
    """The gateway's record of one worker. It keeps digests of secrets; a key only until the key is sent."""

    def __init__(
        self,
        worker: WorkerId,
        token: str,
        key: str,
        epoch: int,
        welcome: wire.Welcome,
        claims: Claims,
        allowances: SessionAllowances | None,
    ) -> None:
        self.worker = worker
        self.allowances = allowances
        """None for the trainer, who says what he is asked for, and has the run's future."""
        self.welcome = welcome
        self.claims = claims
        self.epoch = epoch
        self.connection: _Connection | None = None
        self.ready = False
        self.said_goodbye = False
        self.fenced = ""
        self.late_beat: wire.Heartbeat | None = None
        """The last one of those that came too soon after others."""
        self.beat_timer: asyncio.TimerHandle | None = None
        self._token = _digest(token)
        self._key = _digest(key)
        self._untold_key = "" if epoch else key

    @property
    def speaks(self) -> bool:
        """Whether it says all the time that it lives: not while it boots, and a trainer may have no time for that."""
        return self.ready and self.allowances is not None

    def check(self, hello: wire.Hello) -> None:
        """Raises `_NotAdmitted` unless `hello` opens or resumes this session.

        One may be resumed that this process has never opened: an earlier one did, and had no time to journal it.
        """
        if not hmac.compare_digest(_digest(hello.secret), self._key if hello.resume else self._token):
            raise _NotAdmitted(UNKNOWN)
        if self.fenced:
            raise _NotAdmitted(self.fenced)
        if not hello.resume and self.epoch:
            raise _NotAdmitted("this token has been used")

    def open(self, connection: "_Connection", key: str) -> str:
        """Begin the next epoch on `connection`; returns the session's key, the same in every epoch, also if it is not
        given."""
        key = key or self._untold_key
        self._untold_key = ""
        self.epoch += 1
        self.connection = connection
        return key

    def forget_beat(self) -> None:
        self.late_beat = None
        if self.beat_timer is not None:
            self.beat_timer.cancel()
            self.beat_timer = None

    def cut(self, last: wire.RefusedFrame | None = None) -> None:
        """End the connection without a word to the listener."""
        connection, self.connection = self.connection, None
        self.forget_beat()
        self.ready = self.said_goodbye = False
        if connection is not None:
            connection.close(last)


class _Connection(asyncio.Protocol):
    """One TCP connection: a stranger until its Hello, then the bearer of one epoch of a session."""

    _transport: asyncio.Transport

    def __init__(self, gateway: Gateway, limits: GatewayLimits) -> None:
        self.session: _Session | None = None
        self.address = ""
        self._door: Door
        """Where there is a session, or somebody who waits for one."""
        self._gateway = gateway
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self.lost: asyncio.Future[None] = self._loop.create_future()
        self._open = False
        self._frames = wire.FrameBuffer(wire.MAX_HELLO_BYTES)
        self._outbox: list[bytes] = []
        self._sent_bytes = 0
        self._read_bytes = 0
        self._read_at_s = self._loop.time()
        self._heard_s = self._loop.time()
        self._handshake: asyncio.TimerHandle | None = None
        self._slowed: asyncio.TimerHandle | None = None
        """While nothing is read because too much was said."""
        self._left: Callable[[], None] | None = None
        """Of somebody who waits: to be called when it does not any more."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is not a subclass
        self._open = True
        peer = transport.get_extra_info("peername")
        self.address = str(peer[0]) if peer else ""
        self._handshake = self._loop.call_later(self._limits.handshake_timeout_s, self._too_late)
        self._gateway._connected(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end()
        self._gateway._disconnected(self)
        self.lost.set_result(None)

    def data_received(self, data: bytes) -> None:
        self._heard_s = self._loop.time()
        try:
            for body in self._frames.feed(data):
                if not self._open:
                    return
                if self.session is not None:
                    self._door._hear(self.session, body)
                elif self._left is not None:
                    _check_still_there(body)
                else:
                    self._gateway._greet(self, wire.decode_hello(body))
        except (wire.WireError, _NotAdmitted) as error:
            if self.session is not None:
                self._door._bar(self.session, str(error))
            else:
                retry = isinstance(error, _NotAdmitted) and error.retry
                self._gateway._refuse_stranger(self, str(error), retry=retry)
        self._slow_down()

    def _slow_down(self) -> None:
        """Read nothing while the session has said more than it may."""
        session = self.session
        if not self._open or session is None or session.allowances is None:
            return
        wait_s = session.allowances.wait_s(self._loop.time())
        if wait_s and self._slowed is None:
            self._door.blame(session.worker, TOO_MUCH, "frame")
        if self._slowed is not None:
            self._slowed.cancel()
        session.allowances.held(wait_s, self._loop.time())
        if session.allowances.far_beyond:
            self._door._bar(session, FAR_TOO_MUCH)
            return
        self._slowed = self._loop.call_later(min(wait_s, HELD_S_MAX), self._slow_down) if wait_s else None
        self.hold(self._door.held)

    def send(self, message: wire.FromOrchestrator) -> None:
        """Queue a frame for the single write at the end of this loop iteration."""
        if not self._open:
            return
        if not self._outbox:
            self._loop.call_soon(self._flush)
        self._outbox.append(wire.encode(message))

    def check_reading(self) -> None:
        """Drop a peer that for too long has read nothing of what waits for it."""
        if not self._open:
            return
        waiting_bytes = self._transport.get_write_buffer_size()
        read_bytes = self._sent_bytes - waiting_bytes
        if not waiting_bytes or read_bytes != self._read_bytes:
            self._read_bytes, self._read_at_s = read_bytes, self._loop.time()
        elif self._loop.time() - self._read_at_s > self._limits.unread_timeout_s:
            self._drop(waiting_bytes)

    def check_heard(self, timeout_s: float, looked: bool = False) -> None:
        """Drop a peer of which nothing was heard for too long, once what waits to be read has been."""
        if not self._open or self._door.held or self._loop.time() - self._heard_s <= timeout_s:
            return
        if not looked:
            self._loop.call_later(LAST_LOOK_S, self.check_heard, timeout_s, True)
            return
        log.warning("worker is not heard", worker=self.session and self.session.worker, silence_s=timeout_s)
        self._stop()
        self._transport.abort()
        self._end()

    def close(self, last: wire.RefusedFrame | None = None) -> None:
        """Send what is queued, then `last`, and close; cut after a grace if the peer does not take it."""
        if not self._open:
            return
        if last is not None:
            self._outbox.append(wire.encode(last))
        self._flush()
        self._stop()
        self._transport.close()
        self._loop.call_later(CLOSE_GRACE_S, self._transport.abort)

    def wait(self, door: Door, left: Callable[[], None]) -> None:
        """Let the identified peer wait to be let in. `left` is called if it goes away before."""
        self._cancel_handshake()
        self._door, self._left = door, left

    def bear(self, door: Door, session: "_Session") -> None:
        """Bear an epoch of this session from now on."""
        self._door, self.session, self._left = door, session, None
        self._cancel_handshake()
        self._frames.max_frame_bytes = wire.MAX_WORKER_FRAME_BYTES
        self.hold(door.held)

    def hold(self, held: bool) -> None:
        """Read nothing more of a worker, or go on; strangers have only so long to say hello, and are read."""
        held = held or self._slowed is not None
        if not self._open or self.session is None or self._transport.is_reading() is not held:
            return
        if held:
            self._transport.pause_reading()
        else:
            self._heard_s = self._loop.time()
            self._transport.resume_reading()

    def _flush(self) -> None:
        if not self._open or not self._outbox:
            return
        data = b"".join(self._outbox)
        self._outbox.clear()
        waiting_bytes = self._transport.get_write_buffer_size() + len(data)
        if waiting_bytes > self._limits.unread_bytes:
            self._drop(waiting_bytes)
        else:
            self._transport.write(data)
            self._sent_bytes += len(data)

    def _drop(self, waiting_bytes: int) -> None:
        log.warning("worker does not read", worker=self.session and self.session.worker, waiting_bytes=waiting_bytes)
        self._stop()
        self._transport.abort()
        self._end()

    def _stop(self) -> None:
        self._open = False
        self._outbox.clear()
        self._cancel_handshake()
        if self._slowed is not None:
            self._slowed.cancel()
            self._slowed = None

    def _end(self) -> None:
        """The connection is of no further use: end its epoch, unless a later one has begun."""
        self._stop()
        if self._left is not None:
            self._left()
            self._left = None
        if self.session is not None and self.session.connection is self:
            self._door._end_epoch(self.session)

    def _too_late(self) -> None:
        self._gateway._refuse_stranger(self, f"no Hello within {self._limits.handshake_timeout_s} s", retry=True)

    def _cancel_handshake(self) -> None:
        if self._handshake is not None:
            self._handshake.cancel()
            self._handshake = None
