"""The orchestrator's end of the worker connections: tickets, sessions, epochs and frames. No policy.

- A worker shows its lease's one-time token and gets a session. The session's key buys the connection back, each
  time under the next epoch; whatever an older epoch still has to say is never heard.
- Several runs share one gateway. A worker says for which it works, and comes in at that run's door.
- A session is read no faster than its time and its orders can need; one that says ten times as much is over.
- A frame reaches the listener only if it can be true (`elastic.runtime.validation`). A worker that sends another
  is refused for ever.
- Unauthenticated peers are few (`elastic.protocol.admission`), or as many as the workers that may all come back at
  once. What is refused is counted and logged at a bounded rate.

Everything runs on the event loop's thread, and the listener is called synchronously from it.
"""

import asyncio
import errno
import hashlib
import hmac
from collections.abc import Callable, Set
from typing import Any, Protocol, TypeAlias

import msgspec
import structlog

from elastic.core.types import WorkerId
from elastic.protocol import wire
from elastic.protocol.admission import Admission, UnauthenticatedLimits
from elastic.protocol.connection import Connection, MessageCodec, SessionRefused
from elastic.protocol.endpoint import Address
from elastic.protocol.tickets import TicketRefused
from elastic.protocol.tls import Certificate
from elastic.runtime.allowances import SessionAllowances
from elastic.runtime.refusals import FRAME, UNAUTHENTICATED, RefusalCount, Refusals
from elastic.runtime.validation import Claims, bounds_of, without_figures
from elastic.system.outages import Outage
from providers.pending_workers import Applicant, PendingWorkers

log = structlog.get_logger(__name__)

FENCED_KEPT = 256
"""Fenced workers that are told why they are refused; older ones are refused as unknown, and nothing of them is kept."""
HELD_S_MAX = 1.0
"""Longest time for which a session that says too much is not read, before its allowance is looked at again."""
FAR_TOO_MUCH = "far more than its time and its orders can need"
TOO_MUCH = "more than its time and its orders can need: read no faster"
UNREAD_TIMEOUT_S = 5.0
"""Longest time in which a worker may read nothing of what waits for it."""
WorkerLink: TypeAlias = Connection[wire.FromOrchestrator, memoryview]
"""The gateway's end of a connection. It hears frames, because what of them may be meant depends on the worker."""
CODEC = MessageCodec[wire.FromOrchestrator, memoryview](
    wire.encode, lambda body: body, wire.MAX_HELLO_BYTES, 4 * wire.MAX_FRAME_BYTES, UNREAD_TIMEOUT_S
)


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

    def on_disconnected(self, worker: WorkerId, epoch: int, goodbye: bool) -> None:
        """`goodbye` when the worker drained and said so; its Goodbye has come as a message before."""
        ...

    def on_barred(self, worker: WorkerId, epoch: int, cause: str) -> None:
        """The worker sent what it cannot mean or may not say, and is refused from now on."""
        ...


class Gateway:
    """TCP server for the worker connections of any number of runs, each of which has a `Door` of its own."""

    def __init__(
        self,
        limits: UnauthenticatedLimits | None = None,
        codec: MessageCodec[wire.FromOrchestrator, memoryview] = CODEC,
    ) -> None:
        self._doors: dict[str, Door] = {}
        self._refusals = Refusals()
        self._admission = Admission(codec, self._greet, limits, self._refused, self._expected)

    async def start(self, host: str = "127.0.0.1", port: int = 0, certificate: Certificate | None = None) -> str:
        """Listen, on a free port if `port` is 0, with TLS where there is a certificate; returns the `host:port`.

        Raises `GatewayError` when the address cannot be had.
        """
        try:
            return await self._admission.start(host, port, certificate)
        except OSError as error:
            words = f"cannot listen for workers on {Address(host, port)}: {error.strerror or error}"
            raise cannot_listen(error, f"{words}; name a free port, or 0 for any") from error

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

    @property
    def connections(self) -> Set[WorkerLink]:
        """All that are open, of workers or not."""
        return self._admission.connections

    async def aclose(self) -> None:
        """Stop listening and end every connection; no listener hears anything more. Safe to call twice."""
        for door in tuple(self._doors.values()):
            door.close()
        await self._admission.aclose()

    def refuse(self, link: WorkerLink, reason: str) -> None:
        """Close the connection of somebody who is no worker, and count it."""
        self._admission.refuse(link, reason)

    def _expected(self) -> int:
        """How many workers there are that may dial."""
        return sum(len(door._sessions) for door in self._doors.values())

    def _refused(self, reason: str) -> None:
        self._refusals.note(UNAUTHENTICATED, reason, _now_s())

    def _greet(self, link: WorkerLink, body: memoryview) -> None:
        """Let an unauthenticated peer in at its run's door. Raises `SessionRefused` or `WireError`."""
        hello = wire.decode_hello(body)
        door = self._doors.get(hello.run)
        if door is None:
            raise SessionRefused(UNKNOWN)
        if hello.ticket:
            door._have_wait(link, hello)
        else:
            door._admit(link, hello)


class Door:
    """One run's way through the gateway: `expect` a worker before it dials, `send` while it is connected.

    Runs know nothing of each other's workers, whatever these are called. Use `Gateway.open`. Who comes by a ticket
    waits in the `pending_workers`, where there is one.
    """

    def __init__(
        self, gateway: Gateway, run: str, listener: WorkerListener, welcome: wire.Welcome, *, cuts_silent: bool
    ) -> None:
        self.held = False
        self.flush_interval_s = welcome.flush_interval_s
        self.pending_workers: PendingWorkers | None = None
        self._cuts_silent = cuts_silent
        self._gateway = gateway
        self._run = run
        self._listener = listener
        self._welcome = welcome
        self._sessions: dict[WorkerId, _Session] = {}
        self._fenced: dict[WorkerId, None] = {}
        """Those of the sessions that are, the first one first."""
        self._refusals = Refusals()
        self._loop = asyncio.get_running_loop()

    def close(self) -> None:
        """End the run's connections and refuse new ones. The listener is not called any more. Safe to call twice."""
        for session in self._sessions.values():
            session.cut()
        self._sessions.clear()
        if self.pending_workers is not None:
            self.pending_workers.close()
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
        """Let `worker` in with `token`, until it has spoken; then it comes back with `key`. Its `engine` settings, its
        `relay` and `relay_token` are the welcome's unless they are given.

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
        if session is not None and session.link is not None and session.epoch == epoch:
            session.link.send(message)
            session.claims.ordered(message)
            if session.allowances is not None:
                session.allowances.ordered(message)

    def flush_every(self, interval_s: float) -> None:
        """Have all workers send their tokens so often from now on."""
        self.flush_interval_s = interval_s
        for session in self._sessions.values():
            if session.link is not None:
                session.link.send(wire.FlushEvery(interval_s))

    def hold(self, held: bool) -> None:
        """Stop reading from all workers while `held`, because their messages cannot be handled fast enough. Writing
        goes on."""
        self.held = held
        for session in self._sessions.values():
            self._read_or_not(session)

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
        """The worker will never be expected again: it cannot authenticate itself from now on."""
        self._fenced.pop(worker, None)
        session = self._sessions.pop(worker, None)
        if session is not None:
            session.cut()

    def blame(self, worker: WorkerId, reason: str, what: str) -> None:
        """Count and show a frame, or a turn, that the worker should have done otherwise; it goes on."""
        self._refusals.note(worker, reason, _now_s(), what)

    def refusals(self) -> list[RefusalCount]:
        """Return the refusals so far: of unauthenticated peers, who name no known run, and of this run's workers."""
        return [*self._gateway._refusals.counts(), *self._refusals.counts()]

    # What connections call.

    def _admit(self, link: WorkerLink, hello: wire.Hello) -> None:
        """Open or resume the session of an unauthenticated peer that has said hello. Raises `SessionRefused`."""
        session = self._authenticated(hello)
        self._check_openings(session)
        self._end_epoch(session)
        session = self._authenticated(hello)  # the listener may have fenced it just now
        self._open(session, link, hello.secret if hello.resume else "")

    def _check_openings(self, session: "_Session") -> None:
        """Raises `SessionRefused` for a session that begins anew too often."""
        if session.allowances is None:
            return
        openings, reason = session.allowances.openings, "begins anew too often"
        openings.use(1, _now_s())
        if openings.far_beyond:
            self._bar(session, reason)
            raise SessionRefused(session.fenced)
        if openings.wait_s(_now_s()):
            self._refusals.note(session.worker, reason, _now_s(), "connection")
            raise SessionRefused(reason, retry=True)

    def _open(self, session: "_Session", link: WorkerLink, key: str, worker: WorkerId = "") -> None:
        """Begin the session's next epoch; its bearer is told its name where it is a `worker` that has none yet."""

        def heard(bodies: list[memoryview]) -> None:
            for body in bodies:
                if link.open:
                    self._hear(session, body)
            if link.open:
                self._slow_down(session)

        def ended(cause: Exception) -> None:
            if session.link is link:
                log.info("connection lost", worker=session.worker, cause=str(cause))
                self._end_epoch(session)

        key = session.open(link, key)
        link.take_over(
            f"worker {session.worker}",
            heard,
            ended,
            lambda error: self._bar(session, str(error)),
            wire.MAX_WORKER_FRAME_BYTES,
        )
        now = {"session_key": key, "epoch": session.epoch, "worker": worker, "flush_interval_s": self.flush_interval_s}
        link.send(msgspec.structs.replace(session.welcome, **now))
        link.beat(wire.Ping(), self._welcome.heartbeat_interval_s)
        self._read_or_not(session)

    def _have_wait(self, link: WorkerLink, hello: wire.Hello) -> None:
        """Let the holder of a ticket wait for a lease. Raises `SessionRefused`."""
        room = self.pending_workers
        if room is None:
            raise SessionRefused("this run takes nobody who joins by ticket")
        try:
            terms = room.check(hello.ticket, hello.secret)
        except TicketRefused as refusal:
            raise SessionRefused(str(refusal)) from refusal

        def heard(bodies: list[memoryview]) -> None:
            for body in bodies:
                _check_still_there(body)

        def broken(error: wire.WireError) -> None:
            self._gateway.refuse(link, str(error))

        def turn_away(reason: str) -> None:
            link.close(wire.RefusedFrame(reason, retry=False))

        applicant = Applicant(terms, lambda worker: self._open(self._sessions[worker], link, "", worker), turn_away)
        link.take_over(f"who came by ticket {hello.ticket}", heard, lambda _: room.leave(applicant), broken)
        link.beat(wire.Waiting(), self._welcome.heartbeat_interval_s)
        link.watch(self._welcome.silence_timeout_s)
        room.enter(applicant)

    def _authenticated(self, hello: wire.Hello) -> "_Session":
        session = self._sessions.get(hello.worker)
        if session is None:
            raise SessionRefused(UNKNOWN)
        session.check(hello)
        return session

    def _hear(self, session: "_Session", body: memoryview) -> None:
        """Take one frame of a session. Raises `WireError` for one that cannot be meant, which is its last."""
        if session.allowances is not None:
            session.allowances.said(len(body), _now_s())
            if session.allowances.far_beyond:
                raise wire.WireError(FAR_TOO_MUCH)
        message = wire.decode_from_worker(body)
        session.spoken()
        session.claims.check(message, _now_s())
        if isinstance(message, wire.WeightsReport):
            message = self._believable(session, message)
        if isinstance(message, wire.Heartbeat) and session.ready:
            message = self._in_time(session, message)
        if message is not None:
            self._receive(session, message)

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

    def _slow_down(self, session: "_Session") -> None:
        """Read nothing while the session has said more than it may."""
        if session.link is None or session.allowances is None:
            return
        wait_s = session.allowances.wait_s(_now_s())
        if wait_s and session.slowed is None:
            self.blame(session.worker, TOO_MUCH, FRAME)
        session.allowances.held(wait_s, _now_s())
        if session.allowances.far_beyond:
            self._bar(session, FAR_TOO_MUCH)
            return
        session.go_on()
        if wait_s:
            session.slowed = self._loop.call_later(min(wait_s, HELD_S_MAX), self._slow_down, session)
        self._read_or_not(session)

    def _read_or_not(self, session: "_Session") -> None:
        if session.link is not None:
            session.link.hold(self.held or session.slowed is not None)

    def _bar(self, session: "_Session", cause: str) -> None:
        """Refuse a worker for ever for what it sent, and tell the listener."""
        self._refusals.note(session.worker, cause, _now_s())
        session.fenced = f"what this worker sent was refused: {cause}"
        session.cut(wire.RefusedFrame(session.fenced, retry=False))
        self._listener.on_barred(session.worker, session.epoch, cause)

    def _receive(self, session: "_Session", message: wire.FromWorker) -> None:
        if isinstance(message, wire.StillThere) and not session.ready:
            return
        greeting = isinstance(message, wire.Ready | wire.Hello)
        if session.ready is greeting or isinstance(message, wire.Hello):
            raise wire.WireError(f"{wire.kind_of(message)} {'after' if session.ready else 'before'} Ready")
        if isinstance(message, wire.Ready):
            session.ready = True
            if self._cuts_silent and session.speaks and session.link is not None:
                session.link.watch(self._welcome.silence_timeout_s)
            self._listener.on_ready(session.worker, session.epoch, message)
        else:
            session.said_goodbye = isinstance(message, wire.Goodbye)
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


def _now_s() -> float:
    return asyncio.get_running_loop().time()


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()


class _Session:
    """The gateway's record of one worker. It keeps digests of secrets; a key only until the worker has spoken."""

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
        self.link: WorkerLink | None = None
        self.ready = False
        self.said_goodbye = False
        self.fenced = ""
        self.late_beat: wire.Heartbeat | None = None
        """The last one of those that came too soon after others."""
        self.beat_timer: asyncio.TimerHandle | None = None
        self.slowed: asyncio.TimerHandle | None = None
        """While nothing is read because too much was said."""
        self._token = _digest(token)
        self._key = _digest(key)
        self._untold_key = "" if epoch else key

    @property
    def speaks(self) -> bool:
        """Whether it says all the time that it lives: not while it boots, and a trainer may have no time for that."""
        return self.ready and self.allowances is not None

    def check(self, hello: wire.Hello) -> None:
        """Raises `SessionRefused` unless `hello` opens or resumes this session.

        One may be resumed that this process has never opened: an earlier one did, and had no time to journal it.
        """
        if not hmac.compare_digest(_digest(hello.secret), self._key if hello.resume else self._token):
            raise SessionRefused(UNKNOWN)
        if self.fenced:
            raise SessionRefused(self.fenced)
        if not hello.resume and not self._untold_key:
            raise SessionRefused("this token has been used")

    def open(self, link: WorkerLink, key: str) -> str:
        """Begin the next epoch on `link`; returns the session's key, the same in every epoch, also if it is not
        given."""
        key = key or self._untold_key
        self.epoch += 1
        self.claims.begin_epoch()
        self.link = link
        return key

    def spoken(self) -> None:
        """Note that the worker has its key. Until then a welcome may have been lost, or too late for it, and its token
        lets it in once more, in place of its former connection."""
        self._untold_key = ""

    def forget_beat(self) -> None:
        self.late_beat = None
        if self.beat_timer is not None:
            self.beat_timer.cancel()
            self.beat_timer = None

    def go_on(self) -> None:
        if self.slowed is not None:
            self.slowed.cancel()
            self.slowed = None

    def cut(self, last: wire.RefusedFrame | None = None) -> None:
        """End the connection without a word to the listener."""
        link, self.link = self.link, None
        self.forget_beat()
        self.go_on()
        self.ready = self.said_goodbye = False
        if link is not None:
            link.close(last)
