"""The connection of a script to its pool: a thread that dials, redials, and keeps what the script wants and holds.

The script's own thread waits here for a turn only. While the pool's process is away, a phase goes on; the pool hears of
the phase's end once its process is back.
"""

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple, TypeVar

import msgspec

from elastic.core.cluster.types import PhaseKind
from elastic.pool import connection as links
from elastic.pool import messages as w
from elastic.pool.connection import LinkLost, NotLetIn, PoolLink
from elastic.pool.phases import PhaseError
from elastic.protocol.endpoint import Endpoint

AWAY_S = 3_600.0
"""How long the pool's process may be away before the script gives up."""
CLOSE_S = 5.0

Consolidate = Callable[[tuple[str, ...]], None]
T = TypeVar("T")
_log = logging.getLogger("elastic.pool.phases")


class ScriptTurn(NamedTuple):
    """A permit that the script holds. `until_s` is the deadline, by `time.monotonic`."""

    permit: int
    phase: PhaseKind
    nodes: tuple[str, ...]
    until_s: float


class PhaseClient:
    """A script's connection to its pool, for one thread at a time. It keeps messages while the pool's process is
    away."""

    def __init__(self, endpoint: Endpoint, job: str, token: str, placement: int, away_s: float = AWAY_S) -> None:
        self._endpoint, self._away_s = endpoint, away_s
        self._who = (job, token, placement)
        self._process = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="elastic phases", daemon=True)
        self._link: PoolLink[w.ToJob] | None = None
        self._talk: asyncio.Task[None] | None = None
        self._gone: PhaseError | None = None
        self._wanted: w.AskPhase | None = None
        self._waiter: asyncio.Future[ScriptTurn] | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._grant_within_s = 0.0
        self._held: ScriptTurn | None = None
        self._recalled = False
        self._over = ""
        self._yielded: w.YieldPhase | None = None
        self._steps: int | None = None
        self._consolidate: Consolidate | None = None

    @property
    def recalled(self) -> bool:
        """Whether the script should end its turn: the pool has recalled the permit, or has taken it."""
        return self._recalled or bool(self._over)

    def ask(self, phase: PhaseKind, *, both: bool = False) -> ScriptTurn:
        """Wait for a turn. Raises `PhaseError` if the pool gives none. An interrupted call withdraws the request."""
        try:
            return self._there(self._ask(w.AskPhase(phase, both=both)))
        except PhaseError:
            raise
        except BaseException:
            self._there(self._abandon())
            raise

    def yield_turn(self, turn: ScriptTurn, *, finished: bool, switch_s: float) -> None:
        """Give the turn's nodes back. The script's states must be off the device."""
        self._there(self._yield(turn, w.YieldPhase(turn.permit, finished, switch_s)))

    def progress(self, done: int, of: int) -> None:
        self._there(self._progress(done, of))

    def steps_done(self, steps: int) -> None:
        self._there(self._tell_steps(steps))

    def on_consolidate(self, callback: Consolidate) -> None:
        self._consolidate = callback

    def close(self) -> None:
        """Send all pending messages, if the pool's process is there, and end the thread."""
        if not self._thread.is_alive() or os.getpid() != self._process:
            return
        with contextlib.suppress(TimeoutError, PhaseError):
            asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(CLOSE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_S)

    def _there(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run the coroutine on the client's thread and return its result."""
        if os.getpid() != self._process:
            coroutine.close()
            raise PhaseError(f"process {os.getpid()} was forked from {self._process}, which speaks for this script")
        if self._thread.ident is None:
            self._thread.start()
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    # What follows runs on the client's thread.

    async def _ask(self, wish: w.AskPhase) -> ScriptTurn:
        self._join()
        self._wanted = wish
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            if self._gone is not None:
                raise self._gone
            self._send(wish)
            self._count_down()
            return await self._waiter
        finally:
            self._stop_counting()
            if self._wanted is not None:
                self._send(w.WithdrawPhase(wish.phase, wish.both))
            self._wanted, self._waiter = None, None

    async def _abandon(self) -> None:
        """Yield a turn that was granted after the script had stopped waiting."""
        if self._held is not None:
            await self._yield(self._held, w.YieldPhase(self._held.permit, finished=False))

    async def _yield(self, turn: ScriptTurn, told: w.YieldPhase) -> None:
        over, self._over, self._recalled, self._held = self._over, "", False, None
        if over:
            _log.warning("permit %d counted no more when its phase ended: %s", turn.permit, over)
            return
        self._yielded = told
        self._send(told)

    async def _progress(self, done: int, of: int) -> None:
        if self._held is not None:
            self._send(w.PhaseProgress(self._held.permit, done, of))

    async def _tell_steps(self, steps: int) -> None:
        self._steps = steps
        self._send(w.StepsDone(steps))

    async def _close(self) -> None:
        if self._talk is not None:
            self._talk.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._talk
        if self._link is not None:
            await self._link.aclose()

    def _join(self) -> None:
        if self._talk is None or (self._talk.done() and self._gone is None):
            self._talk = asyncio.create_task(self._converse(), name="script to pool")

    def _hello(self) -> w.JobHello:
        job, token, placement = self._who
        held = 0 if self._held is None else self._held.permit
        return w.JobHello(w.POOL_PROTOCOL_VERSION, job, token, placement, script=True, held=held)

    async def _converse(self) -> None:
        try:
            while True:
                self._link, welcome = await links.join(
                    self._endpoint, links.TO_JOB, self._hello, w.JobWelcome, self._away_s
                )
                self._link.watch(welcome.silence_s)
                self._welcomed(welcome)
                try:
                    while True:
                        self._hear(await self._link.receive())
                except LinkLost as error:
                    _log.warning("%s; dialling again", error)
                self._link = None
                self._stop_counting()
        except (LinkLost, NotLetIn, ValueError) as error:
            self._end(PhaseError(f"no session with the pool at {self._endpoint.address}: {error}"))

    def _welcomed(self, welcome: w.JobWelcome) -> None:
        self._grant_within_s = welcome.grant_within_s
        if self._steps is not None:
            self._send(w.StepsDone(self._steps))
        known = {permit.permit: permit for permit in welcome.permits}
        if self._held is not None and self._held.permit not in known:
            self._over = self._over or "the pool knows of it no more"
        for permit in known.values():
            if self._held is not None and permit.permit == self._held.permit:
                self._held = self._held._replace(nodes=permit.nodes)
                self._recalled = self._recalled or permit.recalled
            elif self._yielded is not None and permit.permit == self._yielded.permit:
                self._send(self._yielded)
            else:
                self._granted(w.Granted(permit.permit, permit.phase, permit.nodes, permit.left_s, permit.both))
        if self._wanted is not None:
            self._send(self._wanted)
            self._count_down()

    def _hear(self, message: w.ToJob) -> None:
        match message:
            case w.Granted():
                self._granted(message)
            case w.Recalled(permit=permit) if self._holds(permit):
                self._recalled = True
            case w.PermitOver(permit=permit, cause=cause) if self._holds(permit):
                self._over = cause or "it was taken"
            case w.TailMove(permit=permit, nodes=nodes) if self._holds(permit) and self._consolidate is not None:
                threading.Thread(
                    target=self._call, args=(self._consolidate, permit, nodes), name="consolidate", daemon=True
                ).start()
            case w.PoolRefused(reason=reason):
                self._refuse(PhaseError(f"the pool gives no turn: {reason}"))
            case _:
                pass

    def _granted(self, granted: w.Granted) -> None:
        turn = ScriptTurn(granted.permit, granted.phase, granted.nodes, time.monotonic() + granted.left_s)
        if self._holds(granted.permit):
            self._held = turn
        elif (
            self._wanted is not None
            and self._waiter is not None
            and not self._waiter.done()
            and self._wanted.both == granted.both
            and (granted.both or self._wanted.phase is granted.phase)
        ):
            self._wanted = None
            self._held, self._recalled, self._over = turn, False, ""
            self._waiter.set_result(turn)
        elif self._yielded is None or granted.permit > self._yielded.permit:
            self._yielded = w.YieldPhase(granted.permit, finished=True)
            self._send(self._yielded)

    def _holds(self, permit: int) -> bool:
        return self._held is not None and self._held.permit == permit

    def _call(self, callback: Consolidate, permit: int, nodes: tuple[str, ...]) -> None:
        try:
            callback(nodes)
        except Exception:
            _log.exception("the callback for fewer nodes failed: all of them are kept")
            return
        self._loop.call_soon_threadsafe(self._tail_left, permit)

    def _tail_left(self, permit: int) -> None:
        if self._holds(permit):
            self._send(w.TailLeft(permit))

    def _send(self, message: msgspec.Struct) -> None:
        if self._link is not None:
            self._link.send(message)

    def _count_down(self) -> None:
        """Limit the wait for a turn to what the pool has promised. Only time while the pool's process is there
        counts."""
        self._stop_counting()
        if self._link is not None and self._wanted is not None:
            wish, within_s = self._wanted, self._grant_within_s
            late = PhaseError(f"no turn for phase {wish.phase.value!r} came within {within_s:g} s")
            self._deadline = self._loop.call_later(within_s, self._refuse, late)

    def _stop_counting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _refuse(self, error: PhaseError) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(error)

    def _end(self, error: PhaseError) -> None:
        self._gone = error
        self._link = None
        self._refuse(error)
        _log.error("%s", error)
