"""The time slices of a script from its pool: a thread on which the job's connection lives.

The script's own thread waits here for a time slice only. While the pool's process is away, a phase goes on; the pool
hears of the phase's end once its process is back.
"""

import asyncio
import contextlib
import logging
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from elastic.core.cluster.types import Permit, PhaseKind
from elastic.pool import messages as w
from elastic.pool.client import News, PoolClient, PoolMembership, PoolUnavailable
from elastic.pool.phases import PhaseError

AWAY_S = 3_600.0
"""How long the pool's process may be away before the script gives up."""
CLOSE_S = 5.0

Consolidate = Callable[[tuple[str, ...]], None]
T = TypeVar("T")
_log = logging.getLogger("elastic.pool.phases")


class PhaseClient:
    """A script's connection to its pool, for one thread at a time. It keeps messages while the pool's process is
    away."""

    def __init__(self, membership: PoolMembership) -> None:
        self._client = PoolClient(membership, lambda: self._permit, AWAY_S)
        self._client.on_slices(self._hear)
        self._client.on_permits(self._hear)
        self._client.heard_of = self._heard_of
        self._client.turned_away = self._end
        self._process = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._work, name="elastic phases", daemon=True)
        self._gone: PhaseError | None = None
        self._wanted: tuple[PhaseKind, bool] | None = None
        self._waiter: asyncio.Future[Permit] | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._permit = 0
        """The permit under which the script computes, even if it counts no more."""
        self._consolidate: Consolidate | None = None
        self._consolidating = 0
        """The last permit whose tail the script was told to move."""

    @property
    def recalled(self) -> bool:
        """Whether the script should end its time slice: the pool has recalled the permit, or has taken it."""
        held = self._client.part.permits.get(self._permit)
        return held is None or held.recalled

    def ask(self, phase: PhaseKind, *, both: bool = False) -> Permit:
        """Wait for a time slice. Raises `PhaseError` if the pool gives none. An interrupted call withdraws the
        request."""
        try:
            return self._there(self._ask(phase, both))
        except PhaseError:
            raise
        except BaseException:
            self._there(self._yield(finished=False, switch_s=0.0))
            raise

    def yield_permit(self, *, finished: bool, switch_s: float) -> None:
        """Give the time slice's nodes back. The script's states must be off the device."""
        self._there(self._yield(finished=finished, switch_s=switch_s))

    def progress(self, done: int, of: int) -> None:
        self._there(self._order(lambda client: client.part.report_progress(done, of)))

    def steps_done(self, steps: int) -> None:
        self._there(self._order(lambda client: client.part.report_steps(steps)))

    def on_consolidate(self, callback: Consolidate) -> None:
        self._consolidate = callback

    def close(self) -> None:
        """Send all pending messages, if the pool's process is there, and end the thread."""
        if os.getpid() != self._process:
            return
        if self._thread.ident is None:
            self._loop.close()
        if not self._thread.is_alive():
            return
        with contextlib.suppress(TimeoutError, PhaseError):
            asyncio.run_coroutine_threadsafe(self._client.aclose(), self._loop).result(CLOSE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_S)

    def _work(self) -> None:
        try:
            self._loop.run_forever()
        finally:
            self._loop.run_until_complete(asyncio.sleep(0))  # A connection is closed in the turn after it was told to.
            self._loop.close()

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

    async def _ask(self, phase: PhaseKind, both: bool) -> Permit:
        if self._gone is not None:
            raise self._gone
        try:
            await self._client.open(AWAY_S)
        except PoolUnavailable as error:
            raise PhaseError(f"no session with the pool: {error}") from error
        self._wanted, self._waiter = (phase, both), asyncio.get_running_loop().create_future()
        try:
            self._client.part.ask(phase, both=both)
            self._count_down()
            return await self._waiter
        finally:
            self._stop_counting()
            self._client.part.withdraw(phase)
            self._wanted, self._waiter = None, None

    async def _yield(self, *, finished: bool, switch_s: float) -> None:
        permit, self._permit = self._permit, 0
        self._client.part.leave(permit, finished=finished, switch_s=switch_s)

    async def _order(self, order: Callable[[PoolClient], None]) -> None:
        order(self._client)

    def _hear(self, news: News) -> None:
        match news:
            case w.Granted() if news.permit != self._permit:
                self._granted(self._client.part.permits[news.permit])
            case w.PermitOver() if news.permit == self._permit:
                _log.warning("permit %d counts no more: %s", news.permit, news.cause)
            case w.Granted(tail=tail) if tail and self._consolidating != news.permit and self._consolidate is not None:
                self._consolidating = news.permit
                threading.Thread(
                    target=self._call, args=(self._consolidate, news.permit, tail), name="consolidate", daemon=True
                ).start()
            case _:
                pass

    def _granted(self, permit: Permit) -> None:
        """Take the time slice that is waited for. One of an earlier wish that was on its way is given back."""
        waits = self._waiter is not None and not self._waiter.done() and self._wanted == (permit.phase, permit.both)
        if not waits or self._waiter is None:
            self._client.part.leave(permit.number, finished=True)
            return
        self._permit = permit.number
        self._waiter.set_result(permit)

    def _call(self, callback: Consolidate, permit: int, nodes: tuple[str, ...]) -> None:
        try:
            callback(nodes)
        except Exception:
            _log.exception("the callback for fewer nodes failed: all of them are kept")
            return
        self._loop.call_soon_threadsafe(self._tail_left, permit)

    def _tail_left(self, permit: int) -> None:
        if permit in self._client.part.permits:
            self._client.part.leave_for_tail(permit)

    def _heard_of(self, why: str) -> None:
        """Count only the time while the pool's process is there."""
        if why:
            _log.warning("%s; dialling again", why)
            self._stop_counting()
        else:
            self._count_down()

    def _count_down(self) -> None:
        """Limit the wait for a time slice to what the pool has promised."""
        self._stop_counting()
        if self._wanted is not None and self._client.is_there:
            within_s = self._client.welcome.grant_within_s
            late = PhaseError(f"no time slice for phase {self._wanted[0].value!r} came within {within_s:g} s")
            self._deadline = self._loop.call_later(within_s, self._refuse, late)

    def _stop_counting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _refuse(self, error: PhaseError) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(error)

    def _end(self, reason: str) -> None:
        self._gone = PhaseError(f"no session with the pool: {reason}")
        self._refuse(self._gone)
        _log.error("%s", self._gone)
