"""Event loops of simulated processes. They never wait: a world steps them, and they read their machine's clocks."""

import asyncio
import heapq
import itertools
import random
import sqlite3
from asyncio import events
from collections.abc import Callable, Iterator
from contextvars import Context, copy_context
from typing import TYPE_CHECKING, Any, ClassVar

from elastic.core.types import NS_PER_S, Nanoseconds

if TYPE_CHECKING:
    from elastic.testing.faults.shell.threads import SimulatedThread

BURIAL_STEPS = 10_000
EPOCH_NS = 1_700_000_000 * NS_PER_S


class Machine:
    """The clocks of one machine. They run at `rate` times the world's rate; the calendar is `ahead_ns` ahead.

    The monotonic clock stands still while the machine is suspended, the clock of its boot does not. No process of it
    runs meanwhile. Both restart when it is rebooted.
    """

    def __init__(self, world: "WorldClock", rate: float = 1.0) -> None:
        self.rate = rate
        self.ahead_ns: Nanoseconds = 0
        self.boots = 1
        self.no_descriptors_until_ns: Nanoseconds = 0
        self.connect: Callable[..., sqlite3.Connection] = sqlite3.connect
        """Opens databases on its disk."""
        self._world = world
        self._suspended_ns: Nanoseconds = 0
        self.since_ns = self._at_ns = world.now_ns

    def monotonic_ns(self) -> Nanoseconds:
        passed_ns = max(0, self._world.now_ns - self.since_ns)
        return self._at_ns + (passed_ns if self.rate == 1 else round(passed_ns * self.rate))

    def suspended_ns(self) -> Nanoseconds:
        return self._suspended_ns

    def boottime_ns(self) -> Nanoseconds:
        return self.monotonic_ns() + self._suspended_ns

    def unix_ns(self) -> Nanoseconds:
        return EPOCH_NS + self._world.now_ns + self.ahead_ns

    def world_ns(self, monotonic_ns: Nanoseconds) -> Nanoseconds:
        """Return the world's time at which the machine's monotonic clock shows `monotonic_ns`."""
        passed_ns = monotonic_ns - self._at_ns
        return self.since_ns + (passed_ns if self.rate == 1 else round(passed_ns / self.rate))

    def is_out_of_descriptors(self) -> bool:
        return self.no_descriptors_until_ns > self._world.now_ns

    def suspend(self, duration_ns: Nanoseconds) -> None:
        now_ns = max(self.since_ns, self._world.now_ns)
        until_ns = max(now_ns, self._world.now_ns + duration_ns)
        self._suspended_ns += round((until_ns - now_ns) * self.rate)
        self._at_ns, self.since_ns = self.monotonic_ns(), until_ns

    def reboot(self) -> None:
        self._suspended_ns = 0
        self._at_ns, self.since_ns = NS_PER_S, self._world.now_ns
        self.boots += 1


class WorldClock:
    """The world's time."""

    def __init__(self) -> None:
        self.now_ns: Nanoseconds = NS_PER_S


class Ordered:
    """An object that hashes by age instead of address, so that sets have the same order in every process."""

    __slots__ = ()
    ages: ClassVar[Iterator[int]] = itertools.count()
    """Counts the objects of one world, since the order of a set depends on the hash values themselves."""
    _age: int

    @classmethod
    def begin_anew(cls) -> None:
        cls.ages = itertools.count()

    def __hash__(self) -> int:
        try:
            return self._age
        except AttributeError:
            self._age = next(Ordered.ages)
            return self._age

    def __eq__(self, other: object) -> bool:
        return self is other


class _Task(Ordered, asyncio.Task[Any]):  # pyright: ignore[reportIncompatibleMethodOverride]
    pass


class _Future(Ordered, asyncio.Future[Any]):  # pyright: ignore[reportIncompatibleMethodOverride]
    pass


class ProcessLoop(asyncio.BaseEventLoop):
    """The loop of one process on a machine."""

    def __init__(self, clock: WorldClock, machine: Machine) -> None:
        super().__init__()
        self._inner: Any = self
        """What asyncio keeps to itself: stepping a loop is nothing that it offers."""
        self._clock_resolution = 1e-7
        self.clock = clock
        self.machine = machine
        self.alive = True
        self.context = copy_context()
        """The context of what other processes have it call: theirs is of another process."""
        self.failures: list[dict[str, Any]] = []
        self.threads: dict[SimulatedThread, None] = {}
        self._head: Any = None
        """What comes first of what is scheduled, at `_head_ns` as long as its machine's clock goes on."""
        self._head_ns = self._head_since_ns = 0
        self.set_exception_handler(lambda _, context: self.failures.append(context))
        self._inner.set_task_factory(self._make_task)

    @classmethod
    def here(cls) -> "ProcessLoop":
        """Return the loop of the process that is being stepped."""
        loop = events._get_running_loop()
        assert isinstance(loop, cls)
        return loop

    def _make_task(
        self, loop: asyncio.AbstractEventLoop, work: Any, context: Context | None = None
    ) -> asyncio.Task[Any]:
        return _Task(work, loop=loop, context=context)

    def create_future(self) -> asyncio.Future[Any]:
        return _Future(loop=self)

    def time(self) -> float:
        return self.machine.monotonic_ns() / NS_PER_S

    def call_soon(self, callback: Callable[..., object], *args: Any, context: Context | None = None) -> asyncio.Handle:
        return super().call_soon(callback, *args, context=context or self._context())

    def call_at(
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return super().call_at(when, callback, *args, context=context or self._context())

    def _context(self) -> Context | None:
        return None if events._get_running_loop() is self else self.context

    def _write_to_self(self) -> None:
        pass

    def at_world(self, when_ns: Nanoseconds, callback: Callable[..., object], *arguments: Any) -> None:
        """Call back at a time of the world, unless the machine is suspended then."""
        delay_ns = when_ns - self.clock.now_ns
        self.call_later(delay_ns * self.machine.rate / NS_PER_S, callback, *arguments)

    def next_ns(self) -> Nanoseconds | None:
        """Return when the loop next has work."""
        now_ns = max(self.clock.now_ns, self.machine.since_ns)
        if self._inner._ready:
            return now_ns
        scheduled = self._inner._scheduled
        while scheduled and scheduled[0].cancelled():
            heapq.heappop(scheduled)._scheduled = False
        if not scheduled:
            return None
        head, since_ns = scheduled[0], self.machine.since_ns
        if head is not self._head or since_ns != self._head_since_ns:
            self._head, self._head_since_ns = head, since_ns
            self._head_ns = self.machine.world_ns(round(head.when() * NS_PER_S))
        return self._head_ns if self._head_ns > now_ns else now_ns

    def step(self, most: int | None = None) -> None:
        """Run the callbacks that are due now, or the first `most` of them."""
        ready, scheduled = self._inner._ready, self._inner._scheduled
        end_s = self.time() + self._clock_resolution
        while scheduled and scheduled[0].when() <= end_s:
            handle = heapq.heappop(scheduled)
            handle._scheduled = False
            ready.append(handle)
        events._set_running_loop(self)
        try:
            for _ in range(len(ready) if most is None else min(most, len(ready))):
                handle = ready.popleft()
                if not handle.cancelled():
                    handle._run()
        finally:
            events._set_running_loop(None)

    def bury(self) -> None:
        """Take the rest of a process apart once nothing that it does can matter."""
        for thread in list(self.threads):
            thread.bury()
        tasks = asyncio.all_tasks(self)
        for _ in range(BURIAL_STEPS):
            tasks = {task for task in tasks if not task.done()} or asyncio.all_tasks(self)
            if not tasks:
                break
            next_ns = self.next_ns()
            if next_ns is None:
                for task in asyncio.all_tasks(self):
                    task.cancel()
            else:
                self.clock.now_ns = max(self.clock.now_ns, next_ns)
                self.step()
        self.close()

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:
        """Make a blocking call after a short delay."""
        future = self.create_future()

        def call() -> None:
            if future.cancelled():
                return
            try:
                future.set_result(func(*args))
            except BaseException as error:
                future.set_exception(error)

        self.call_later(self.offload_s(), call)
        return future

    def offload_s(self) -> float:
        """Return how long the next call outside of the loop's thread takes."""
        return random.uniform(0.0001, 0.003)
