"""Threads of simulated processes. They are real threads, but one runs at a time, when its process's loop runs it.

A blocking call (a sleep, a lock, another thread's result) gives control back to the loop until its time has come. So a
thread of a killed process never goes on, and one seed gives one history.
"""

import _thread
import contextlib
import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar, TypeVar, cast

from elastic.system.thread_lane import Lane
from elastic.testing.faults.shell.loops import Ordered, ProcessLoop

T = TypeVar("T")


class ThreadBuried(BaseException):
    """Raised in a waiting thread of a dead process, to take the thread apart."""


class SimulatedThread(Ordered):
    """Makes a call that may block, in callbacks of its process's loop."""

    running: ClassVar["SimulatedThread | None"] = None
    """The thread that runs now, if any."""

    def __init__(self, loop: ProcessLoop, call: Callable[[], object], after_s: float = 0.0) -> None:
        self.loop = loop
        self._call = call
        self._context = loop.context.copy()
        self._trace = sys.gettrace()
        """A tracer of the lines that the loop's thread goes through sees these, too."""
        self._carrier: _Carrier | None = None
        self._waits = 0
        """How often it has waited: what wakes it is meant for one of these times."""
        self._woken = self._buried = False
        loop.threads[self] = None
        loop.call_later(after_s, self._go_on, 0)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until woken or until the time is over; returns whether it was woken. Called on this thread."""
        if self._buried:
            raise ThreadBuried
        timer = None if timeout_s is None else self.loop.call_later(max(0.0, timeout_s), self._go_on, self._waits)
        assert self._carrier is not None
        self._carrier.wait()
        if timer is not None:
            timer.cancel()
        if self._buried:
            raise ThreadBuried
        return self._woken

    def waker(self) -> Callable[[], object]:
        """Return a function that wakes the thread from its next wait."""
        return partial(self.loop.call_soon, self._go_on, self._waits, True)

    def hurry(self) -> None:
        """Let it go on until it ends, whatever it waits for."""
        while self._waits >= 0:
            self._go_on(self._waits)

    def bury(self) -> None:
        self._buried = True
        if self._carrier is None:
            self._end()
        else:
            self._go_on(self._waits)

    def _go_on(self, waits: int, woken: bool = False) -> None:
        """Run the thread until it waits again or ends. Called on the loop's thread."""
        if waits != self._waits:
            return
        self._waits += 1
        self._woken = woken
        if self._carrier is None:
            self._carrier = _Carrier.idle.pop() if _Carrier.idle else _Carrier()
            self._carrier.work = self._work
        before, SimulatedThread.running = SimulatedThread.running, self
        self._carrier.go_on()
        SimulatedThread.running = before

    def _work(self) -> None:
        sys.settrace(self._trace)
        try:
            self._context.run(self._call)
        except ThreadBuried:
            pass
        except BaseException as error:
            self.loop.failures.append({"message": "a thread has ended", "exception": error})
        finally:
            self._end()

    def _end(self) -> None:
        self._waits = -1
        del self.loop.threads[self]


class _Carrier:
    """A real thread that runs simulated threads one after the other."""

    idle: ClassVar[list["_Carrier"]] = []

    def __init__(self) -> None:
        self.work: Callable[[], None] = lambda: None
        self._go, self._back = _thread.allocate_lock(), _thread.allocate_lock()
        self._go.acquire()
        self._back.acquire()
        _thread.start_new_thread(self._carry, ())

    def go_on(self) -> None:
        self._go.release()
        self._back.acquire()

    def wait(self) -> None:
        self._back.release()
        self._go.acquire()

    def _carry(self) -> None:
        while True:
            self._go.acquire()
            self.work()
            _Carrier.idle.append(self)
            self._back.release()


os.register_at_fork(after_in_child=_Carrier.idle.clear)


class SimulatedLane(Lane):
    """`elastic.system.thread_lane.Lane` whose calls each begin after a drawn delay."""

    def __init__(self, loop: ProcessLoop) -> None:
        self._loop = loop
        self._calls: deque[Callable[[], None]] = deque()
        self._busy = False

    def submit(self, call: Callable[[], None]) -> None:
        self._calls.append(call)
        if not self._busy:
            self._busy = True
            SimulatedThread(self._loop, self._work, self._loop.offload_s())

    def _work(self) -> None:
        self._calls.popleft()()
        while self._calls:
            sleep(self._loop.offload_s())
            self._calls.popleft()()
        self._busy = False

    def stop(self) -> None:
        pass


class SimulatedCondition(threading.Condition):
    """`threading.Condition` of simulated threads, which wait in virtual time."""

    def wait(self, timeout: float | None = None) -> bool:
        thread, inner = SimulatedThread.running, cast(Any, self)
        if thread is None:
            raise AssertionError("an event loop is made to wait")
        waiter = SimpleNamespace(release=thread.waker())
        inner._waiters.append(waiter)
        state = inner._release_save()
        try:
            return thread.wait(timeout)
        finally:
            inner._acquire_restore(state)
            with contextlib.suppress(ValueError):  # the notifying thread has removed it
                inner._waiters.remove(waiter)

    def wait_for(self, predicate: Callable[[], T], timeout: float | None = None) -> T:
        end_s = None if timeout is None else loop_here().time() + timeout
        while not (result := predicate()):
            left_s = None if end_s is None else end_s - loop_here().time()
            if left_s is not None and left_s <= 0:
                break
            self.wait(left_s)
        return result


class SimulatedLock:
    """`threading.Lock` of simulated threads."""

    def __init__(self) -> None:
        self._free, self._freed = True, SimulatedCondition()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        with self._freed:
            if blocking:
                self._freed.wait_for(lambda: self._free, None if timeout < 0 else timeout)
            acquired, self._free = self._free, False
            return acquired

    def release(self) -> None:
        with self._freed:
            self._free = True
            self._freed.notify()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()


class _PoolFuture(Ordered, Future[Any]):
    def __init__(self) -> None:
        super().__init__()
        self._condition = SimulatedCondition()


class SimulatedPool(Executor):
    """`concurrent.futures.ThreadPoolExecutor` of the process that runs now."""

    def __init__(self, max_workers: int, thread_name_prefix: str = "") -> None:
        self._loop = loop_here()
        self._most = max_workers
        self._calls: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._busy = 0
        self._ended = SimulatedCondition()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future = _PoolFuture()
        self._calls.append((future, partial(fn, *args, **kwargs)))
        if self._busy < self._most:
            self._busy += 1
            SimulatedThread(self._loop, self._work)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        with self._ended:
            while wait and self._busy and self._loop.alive:
                self._ended.wait()

    def _work(self) -> None:
        while self._calls:
            future, call = self._calls.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = call()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)
        self._busy -= 1
        with self._ended:
            self._ended.notify_all()


class StartedThread:
    """`threading.Thread` of the process that runs now."""

    def __init__(self, *, target: Callable[[], object], name: str = "") -> None:
        self._target = target
        self._thread: SimulatedThread | None = None

    def start(self) -> None:
        self._thread = SimulatedThread(loop_here(), self._target)

    def join(self) -> None:
        """Have it come to its end at once: a loop cannot wait for a thread that it has to run."""
        if self._thread is not None:
            self._thread.hurry()


def sleep(duration_s: float) -> None:
    """`time.sleep`. Raises in code that would block an event loop."""
    thread = SimulatedThread.running
    if thread is None:
        raise AssertionError("an event loop is made to sleep")
    thread.wait(duration_s)


def loop_here() -> ProcessLoop:
    """Return the loop of the process that runs now, on any of its threads."""
    if SimulatedThread.running is not None:
        return SimulatedThread.running.loop
    return ProcessLoop.here()
