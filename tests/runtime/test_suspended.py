"""Time in which the machine was suspended counts: the loop's own clock stands still meanwhile, the run's does not."""

import asyncio
import time
from pathlib import Path

import msgspec

from elastic.core.events import LeaseEnded, LeaseGranted
from elastic.core.types import EndCause, Nanoseconds
from elastic.runtime.live import LoopClock
from elastic.system.boot_clock import boottime_ns
from elastic.testing.providers import ProviderRecorder, lease_request
from providers.base_provider import BaseProvider
from providers.markets import LeaseEnding
from tests.providers.conftest import context_of, provider_of


class SuspendedClock:
    """The machine's clock, moved on by what it was suspended."""

    def __init__(self) -> None:
        self.suspended_ns = 0

    def __call__(self) -> Nanoseconds:
        return time.monotonic_ns() + self.suspended_ns


async def test_a_timer_rings_by_the_runs_clock() -> None:
    clock, rung = SuspendedClock(), asyncio.Event()
    LoopClock(clock).at(3600 * 10**9, rung.set)
    await asyncio.sleep(0)
    assert not rung.is_set()
    clock.suspended_ns = 3600 * 10**9
    async with asyncio.timeout(10):
        await rung.wait()


async def test_a_lease_ends_by_the_runs_clock(tmp_path: Path) -> None:
    clock, recorder = SuspendedClock(), ProviderRecorder()
    context = msgspec.structs.replace(context_of("run", tmp_path, 0), now_ns=clock)
    provider: BaseProvider = provider_of("memory", context)
    await provider.start(recorder.emit)
    await provider.acquire(lease_request(1))
    assert isinstance(await recorder.answered("lease-1"), LeaseGranted)
    lease = provider._leases["lease-1"]
    provider._end_at(lease, clock() + 3600 * 10**9, LeaseEnding(EndCause.EXPIRED))
    assert not recorder.of(LeaseEnded)
    clock.suspended_ns = 3600 * 10**9
    assert (await recorder.ended("lease-1")).cause is EndCause.EXPIRED
    await provider.aclose()


def test_the_clock_of_a_boot_goes_on() -> None:
    first = boottime_ns()
    while boottime_ns() == first:
        pass
    assert boottime_ns() > first
