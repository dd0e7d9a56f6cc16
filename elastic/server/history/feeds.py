"""Events of runs for any number of followers. Each run's journal is read once for all of them.

Each follower pulls at its own pace. A slow reader delays no other and costs no memory.
"""

import asyncio
import bisect
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import structlog

from elastic.protocol.api import RunEvent
from elastic.runtime.journal import JournalError
from elastic.server.history.events import EventBatch, EventLog, Position, as_sent
from elastic.server.history.journals import Version, version_of
from elastic.server.history.looks import Found, SharedLooks
from elastic.server.history.readers import ReadFiles
from elastic.system.isolation import IsolatedLoop, LoopFaults

log = structlog.get_logger(__name__)

KEPT_EVENTS = 2_000
"""The newest events, which are served from memory."""
WOKEN_AT_ONCE = 8
"""Followers that are told before the loop does anything else."""
ASK_EVERY = 5
"""Reads of a journal for each query of the store whether the run is over."""


class RunFeed:
    """The newest events of one run. `ended` says whether the run is over; it is called when there are no new events."""

    def __init__(
        self,
        run_dir: Path,
        interval_s: float,
        ended: Callable[[], Awaitable[bool]],
        read_files: ReadFiles,
        isolated: IsolatedLoop,
    ) -> None:
        self._read_files = read_files
        self._isolated = isolated
        self.log = EventLog(run_dir)
        self._run_dir = run_dir
        self.followers = 0
        self.over = False
        """Nothing more will come."""
        self._interval_s = interval_s
        self._ended = ended
        self._reads = SharedLooks(0.0)
        self._positions: list[Position] = []
        self._told: list[bytes] = []
        """The events at these, as streams send them."""
        self._floor: Position | None = None
        """What stands behind this is in memory."""
        self._waiting: dict[asyncio.Future[None], None] = {}

    async def run(self) -> None:
        """Read the journal until the run is over, or until cancelled."""
        await self._isolated.persist(self._run_dir.name, self._follow)

    async def _follow(self) -> None:
        position = self._positions[-1] if self._positions else self._floor
        if position is None:
            position = self._floor = await self._reading(self.log.end)
        version: Version | None = None
        asked_s = 0.0
        while True:
            batch, version = await self._reading(lambda at=position, known=version: self._look(at, known))
            position = batch.position
            if batch.events:
                self._keep(batch.events)
            elif batch.whole and time.monotonic() - asked_s > ASK_EVERY * self._interval_s:
                asked_s = time.monotonic()
                if await self._ended():
                    # What was written between the last look and the end of the run comes first.
                    batch = await self._reading(lambda at=position: self.log.read(at))
                    position = batch.position
                    self._keep(batch.events)
                    self.over = batch.whole
            if batch.events or self.over:
                await self._wake()
            if self.over:
                return
            if batch.whole:
                await asyncio.sleep(self._interval_s)

    async def after(self, position: Position) -> tuple[bytes, Position, bool]:
        """Return the events behind a position as streams send them, how far they reach, and whether they are all.

        Raises `JournalError` and `OSError`.
        """
        if self._floor is not None and position >= self._floor:
            begin = bisect.bisect_right(self._positions, position)
            return b"".join(self._told[begin:]), self._positions[-1] if self._positions[begin:] else position, True
        return await self._reads.at(position, lambda: self._read_behind(position), self._read_files)

    async def changed_behind(self, position: Position, timeout_s: float) -> bool:
        """Wait until there is an event behind the position or the run is over; at most `timeout_s`."""
        if self.over or (self._positions and self._positions[-1] > position):
            return True
        waiting = asyncio.get_running_loop().create_future()
        self._waiting[waiting] = None
        try:
            async with asyncio.timeout(timeout_s):
                await waiting
        except TimeoutError:
            return False
        finally:
            self._waiting.pop(waiting, None)
        return True

    async def _wake(self) -> None:
        """Have the followers go on, a few at a time: the loop serves others in between."""
        waiting, self._waiting = self._waiting, {}
        for number, one in enumerate(waiting, 1):
            if not one.done():
                one.set_result(None)
            if number % WOKEN_AT_ONCE == 0:
                await asyncio.sleep(0)

    def _read_behind(self, position: Position) -> tuple[bytes, Position, bool]:
        batch = self.log.read(position)
        return b"".join(as_sent(event) for _, event in batch.events), batch.position, batch.whole

    def _look(self, position: Position, known: Version | None) -> tuple[EventBatch, Version | None]:
        """Return the new events behind a position, and the version of the journals they belong to. Reads only if the
        version is not `known`."""
        version = version_of(self._run_dir)
        if version is not None and version == known:
            return EventBatch([], position, True), known
        batch = self.log.read(position)
        return batch, version if batch.whole else None

    def _keep(self, events: list[tuple[Position, RunEvent]]) -> None:
        self._positions += [position for position, _ in events]
        self._told += [as_sent(event) for _, event in events]
        if (excess := len(self._told) - KEPT_EVENTS) > 0:
            self._floor = self._positions[excess - 1]
            del self._positions[:excess], self._told[:excess]

    async def _reading(self, read: Callable[[], Found]) -> Found:
        """Call `read` in a thread, again and again while the journal cannot be read."""
        while True:
            try:
                return await self._read_files(read)
            except (JournalError, OSError) as error:
                log.warning("a journal cannot be read now", error=str(error))
                await asyncio.sleep(10 * self._interval_s)


class Feeds:
    """One feed for each followed run."""

    def __init__(self, interval_s: float, faults: LoopFaults) -> None:
        self._interval_s = interval_s
        self._isolated = IsolatedLoop("feeds", faults)
        self._feeds: dict[str, tuple[RunFeed, asyncio.Task[None]]] = {}

    @contextlib.asynccontextmanager
    async def following(
        self, run: str, run_dir: Path, ended: Callable[[], Awaitable[bool]], read_files: ReadFiles
    ) -> AsyncIterator[RunFeed]:
        """A context: the run's feed, kept while at least one follower uses it."""
        if run not in self._feeds or self._feeds[run][0].over:
            feed = RunFeed(run_dir, self._interval_s, ended, read_files, self._isolated)
            self._feeds[run] = feed, asyncio.create_task(feed.run(), name=f"feed {run}")
        feed, task = self._feeds[run]
        feed.followers += 1
        try:
            yield feed
        finally:
            feed.followers -= 1
            if not feed.followers and self._feeds.get(run, (None, None))[0] is feed:
                del self._feeds[run]
                task.cancel()
                await asyncio.wait({task}, timeout=1.0)
