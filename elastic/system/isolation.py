"""Loops that serve all: one item that cannot be worked on ends no loop, and is tried again later, ever more rarely.

A loop looks again and again for items (`IsolatedLoop.repeat`), and attempts each, and its look, within
`IsolatedLoop.attempt`. An unexpected exception is counted, logged within bounds, and makes the item wait; the loop
settles the item, as what it is about wants it. What is expected to fail the loop catches itself.
"""

import asyncio
import contextlib
import threading
import time
import traceback
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import NoReturn, TypeVar

import structlog

from elastic.system.outages import backoff
from elastic.system.plain_values import told

T = TypeVar("T")

log = structlog.get_logger(__name__)

LOGGED_AT_ONCE, LOGGED_EVERY_S = 20, 10.0
"""A process logs so many faults at once, and then one in so many seconds. All are counted."""
ITEMS_KEPT = 10_000
"""Items of one loop whose faults are remembered; the oldest are forgotten first."""


WORDS_CHARACTERS = 300


class LoopFaults:
    """The unexpected exceptions of one process's loops. Any thread may note one."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._room, self._room_at_s, self._unsaid = float(LOGGED_AT_ONCE), clock(), 0
        self.last = ""
        """The last fault in words."""

    def counts(self) -> dict[str, int]:
        """Return the number of faults by loop."""
        with self._lock:
            return dict(self._counts)

    def note(self, loop: str, item: str, words: str, error: BaseException, wait_s: float) -> None:
        """Count a fault, and log it if there is room."""
        with self._lock:
            self._counts[loop] += 1
            self.last = f"{loop}, {item or 'itself'}: {words}"
            now_s = self._clock()
            self._room = min(self._room + (now_s - self._room_at_s) / LOGGED_EVERY_S, LOGGED_AT_ONCE)
            self._room_at_s = now_s
            if self._room < 1:
                self._unsaid += 1
                return
            self._room -= 1
            unsaid, self._unsaid = self._unsaid, 0
        frames = traceback.extract_tb(error.__traceback__)[-4:]
        at = " < ".join(f"{frame.filename.rpartition('/')[2]}:{frame.lineno}" for frame in reversed(frames))
        log.error(
            "unexpected; the loop goes on", loop=loop, item=item, error=words, at=at, wait_s=wait_s, unsaid=unsaid
        )


@dataclass
class ItemAttempt:
    """One attempt at an item. `fault` says what went wrong unexpectedly, once the attempt is over."""

    fault: str = ""


class IsolatedLoop:
    """The items of one loop; the item "" is the loop itself. An item that failed waits from `base_s` up to `max_s`.

    Exceptions of the types in `outages` are no item's fault: they end the look, and the next one comes in its time.
    Threads may attempt different items.
    """

    def __init__(
        self,
        name: str,
        faults: LoopFaults,
        base_s: float = 1.0,
        max_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
        outages: tuple[type[Exception], ...] = (),
    ) -> None:
        self._name, self._faults, self._clock, self._outages = name, faults, clock, outages
        self._base_s, self._max_s = base_s, max_s
        self._failed: OrderedDict[str, tuple[int, float]] = OrderedDict()
        """How often in a row an item has failed, and when it may be tried again."""
        self._woken = asyncio.Event()
        self._runs_on: asyncio.AbstractEventLoop | None = None

    def wait_s(self, item: str = "") -> float:
        """Return how long the item still waits; 0 if it may be tried."""
        return max(0.0, self._failed.get(item, (0, 0.0))[1] - self._clock())

    def has_failed(self, item: str) -> bool:
        """Return whether the last attempt at the item failed."""
        return item in self._failed

    @contextlib.contextmanager
    def attempt(self, item: str = "") -> Iterator[ItemAttempt]:
        """A context for work on an item: an unexpected exception ends only this context."""
        made = ItemAttempt()
        try:
            yield made
        except self._outages:
            raise
        except Exception as error:
            made.fault = told(error, WORDS_CHARACTERS)
            times = self._failed.pop(item, (0, 0.0))[0]
            wait_s = backoff(times, self._base_s, self._max_s)
            self._failed[item] = times + 1, self._clock() + wait_s
            if len(self._failed) > ITEMS_KEPT:
                self._failed.popitem(last=False)
            self._faults.note(self._name, item, made.fault, error, wait_s)
        else:
            self._failed.pop(item, None)

    async def repeat(self, look: Callable[[], Awaitable[object]], every_s: float) -> NoReturn:
        """Look until cancelled: every `every_s`, at once when woken, and later after a fault."""
        self._runs_on = asyncio.get_running_loop()
        while True:
            self._woken.clear()
            try:
                with self.attempt():
                    await look()
            except self._outages as error:
                log.warning("a loop waits for what does not answer", loop=self._name, error=str(error))
            await asyncio.sleep(self.wait_s())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(every_s):
                    await self._woken.wait()

    def wake(self) -> None:
        """Have the loop look now. Any thread may call this."""
        if self._runs_on is not None:
            with contextlib.suppress(RuntimeError):  # It has been closed: the next caller will look.
                self._runs_on.call_soon_threadsafe(self._woken.set)

    async def persist(self, item: str, work: Callable[[], Awaitable[T]]) -> T:
        """Work on an item until that has gone without a fault; returns what came of it."""
        while True:
            with self.attempt(item):
                return await work()
            await asyncio.sleep(self.wait_s(item))
