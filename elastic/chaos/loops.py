"""Event loops of simulated processes: they never wait, a world steps them, and their time is the world's."""

import asyncio
import contextlib
import heapq
import itertools
import random
import time
from asyncio import events
from collections.abc import Callable, Coroutine, Iterator
from contextvars import Context
from typing import Any

from elastic.core.types import NS_PER_S, Nanoseconds

BURIAL_STEPS = 10_000


class Clock:
    """What time it is, everywhere."""

    def __init__(self) -> None:
        self.now_ns: Nanoseconds = NS_PER_S

    @contextlib.contextmanager
    def governs(self, seed: str) -> Iterator[None]:
        """The `time` and `random` modules are the world's meanwhile: production code reads them."""
        names = {
            "monotonic_ns": lambda: self.now_ns,
            "time_ns": lambda: self.now_ns,
            "perf_counter_ns": lambda: self.now_ns,
            "monotonic": lambda: self.now_ns / NS_PER_S,
            "time": lambda: self.now_ns / NS_PER_S,
            "perf_counter": lambda: self.now_ns / NS_PER_S,
        }
        former, chance = {name: getattr(time, name) for name in names}, random.getstate()
        random.seed(seed)
        try:
            for name, tell in names.items():
                setattr(time, name, tell)
            yield
        finally:
            for name, tell in former.items():
                setattr(time, name, tell)
            random.setstate(chance)


_ages = itertools.count()


class _Ordered:
    """Hashes by age and not by address, so that sets of them are gone through in one order in every process."""

    __slots__ = ()
    _age: int

    def __hash__(self) -> int:
        try:
            return self._age
        except AttributeError:
            self._age = next(_ages)
            return self._age

    def __eq__(self, other: object) -> bool:
        return self is other


class _Task(_Ordered, asyncio.Task[Any]):  # pyright: ignore[reportIncompatibleMethodOverride]
    pass


class _Future(_Ordered, asyncio.Future[Any]):  # pyright: ignore[reportIncompatibleMethodOverride]
    pass


class _NoSelector:
    def select(self, timeout: float | None) -> list[Any]:
        return []


class ProcessLoop(asyncio.BaseEventLoop):
    """One process's loop; `drift` is how much faster its clock goes than the world's."""

    def __init__(self, clock: Clock, drift: float = 0.0) -> None:
        super().__init__()
        self._inner: Any = self
        """What asyncio keeps to itself: stepping a loop is nothing that it offers."""
        self._selector = _NoSelector()
        self._clock_resolution = 1e-7
        self._clock = clock
        self._rate = 1 + drift
        self.failures: list[dict[str, Any]] = []
        self.set_exception_handler(lambda _, context: self.failures.append(context))
        self._inner.set_task_factory(self._make_task)

    def _make_task(
        self, loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any], context: Context | None = None
    ) -> asyncio.Task[Any]:
        return _Task(work, loop=loop, context=context)

    def create_future(self) -> asyncio.Future[Any]:
        return _Future(loop=self)

    def time(self) -> float:
        return self._clock.now_ns * self._rate / NS_PER_S

    def _process_events(self, event_list: list[Any]) -> None:
        pass

    def _write_to_self(self) -> None:
        pass

    def next_ns(self) -> Nanoseconds | None:
        """When it has something to do next."""
        if self._inner._ready:
            return self._clock.now_ns
        scheduled = self._inner._scheduled
        while scheduled and scheduled[0]._cancelled:
            heapq.heappop(scheduled)._scheduled = False
            self._inner._timer_cancelled_count = max(0, self._inner._timer_cancelled_count - 1)
        if not scheduled:
            return None
        return max(self._clock.now_ns, round(scheduled[0]._when / self._rate * NS_PER_S))

    def step(self) -> None:
        """Do what is due now."""
        events._set_running_loop(self)
        try:
            self._inner._run_once()
        finally:
            events._set_running_loop(None)

    def bury(self) -> None:
        """Let what is left of a process come to its end, when nothing that it does can matter any more."""
        for _ in range(BURIAL_STEPS):
            if not (tasks := asyncio.all_tasks(self)):
                break
            next_ns = self.next_ns()
            if next_ns is None:
                for task in tasks:
                    task.cancel()
            else:
                self._clock.now_ns = max(self._clock.now_ns, next_ns)
                self.step()
        self.close()

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:
        """A call that blocks takes a moment, and is made then."""
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
        """How long the next call takes that leaves the loop's thread."""
        return random.uniform(0.0001, 0.003)
