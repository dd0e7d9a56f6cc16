"""The clock of this machine's boot. It goes on while the machine is suspended, as bills and leases do.

An event loop's own clock stands still meanwhile, so that timeouts count only the time in which something could happen.
"""

import asyncio
from collections.abc import Callable

import msgspec

from elastic.system.host import here

CLOCK_LOOK_S = 1.0
"""How often a wait for a time of the boot's clock looks at it."""


def boottime_ns() -> int:
    """Return the time since the machine's boot."""
    return here().boottime_ns()


def suspended_ns() -> int:
    """Return for how long of the time since its boot the machine was suspended, but for some microseconds."""
    return boottime_ns() - here().monotonic_ns()


class Suspensions:
    """For how long the machine was suspended since this was made."""

    LEAST_NS = 10_000_000
    """A shorter suspension is not told from the time between the looks at two clocks."""

    def __init__(self, suspended_ns: Callable[[], int] = suspended_ns) -> None:
        self._suspended_ns, self._before_ns = suspended_ns, suspended_ns()
        self._slept_ns = self._told_ns = 0

    def slept_ns(self) -> int:
        """Return all of it."""
        slept_ns = self._suspended_ns() - self._before_ns
        if slept_ns - self._slept_ns > self.LEAST_NS:
            self._slept_ns = slept_ns
        return self._slept_ns

    def news_ns(self) -> int:
        """Return how much has come since this was last asked."""
        before_ns, self._told_ns = self._told_ns, self.slept_ns()
        return self._told_ns - before_ns


class Began(msgspec.Struct, frozen=True):
    """When something's time began: by the clock of this boot, which knows of no leaps, and by the calendar."""

    boot: str
    boottime_ns: int = msgspec.field(name="monotonic_ns")
    unix_ns: int

    @classmethod
    def now(cls) -> "Began":
        return cls(here().boot_id(), boottime_ns(), here().unix_ns())

    def since_ns(self) -> int:
        now = Began.now()
        return now.boottime_ns - self.boottime_ns if now.boot == self.boot else now.unix_ns - self.unix_ns


class ClockTimer:
    """Calls `action` once `now_ns`, a clock that goes on in suspensions, shows `when_ns`."""

    def __init__(self, now_ns: Callable[[], int], when_ns: int, action: Callable[[], object]) -> None:
        self._now_ns, self._when_ns, self._action = now_ns, when_ns, action
        self._set()

    def _set(self) -> None:
        left_s, loop = (self._when_ns - self._now_ns()) / 1e9, asyncio.get_running_loop()
        if left_s > CLOCK_LOOK_S:
            self._handle = loop.call_later(CLOCK_LOOK_S, self._set)
        else:
            self._handle = loop.call_later(max(0.0, left_s), self._action)

    def cancel(self) -> None:
        self._handle.cancel()


async def sleep_until(now_ns: Callable[[], int], when_ns: int) -> None:
    """Wait until `now_ns`, a clock that goes on in suspensions, shows `when_ns`."""
    rung = asyncio.Event()
    timer = ClockTimer(now_ns, when_ns, rung.set)
    try:
        await rung.wait()
    finally:
        timer.cancel()
