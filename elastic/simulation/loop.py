"""Virtual time: actions in order of (time, priority, sequence), so that ties break the same way in every run."""

import heapq
from collections.abc import Callable
from enum import IntEnum

from elastic.core.types import Nanoseconds


class Priority(IntEnum):
    """Among actions of the same instant, what has happened comes before the core's own wake-up."""

    EVENT = 0
    WAKE_UP = 1


class EventLoop:
    """A discrete-event loop. Nothing but its actions and `pass_to` moves time."""

    def __init__(self) -> None:
        self.now_ns: Nanoseconds = 0
        self._sequence = 0
        self._stopped = False
        self._heap: list[tuple[Nanoseconds, int, int, Callable[[], object]]] = []

    def at(self, when_ns: Nanoseconds, action: Callable[[], object], priority: Priority = Priority.EVENT) -> None:
        if when_ns < self.now_ns:
            when_ns = self.now_ns
        heapq.heappush(self._heap, (when_ns, priority, self._sequence, action))
        self._sequence += 1

    def after(self, delay_ns: Nanoseconds, action: Callable[[], object]) -> None:
        self.at(self.now_ns + delay_ns, action)

    def next_ns(self) -> Nanoseconds | None:
        """When the next action is due; None if none is left."""
        return self._heap[0][0] if self._heap else None

    def step(self) -> None:
        """Take the next action."""
        self.now_ns, _, _, action = heapq.heappop(self._heap)
        action()

    def pass_to(self, when_ns: Nanoseconds) -> None:
        """Time passes without an action, for worlds that also wake by other clocks. It never goes backwards."""
        self.now_ns = max(self.now_ns, when_ns)

    def stop(self) -> None:
        """No action after this one."""
        self._stopped = True

    def run(self, until_ns: Nanoseconds) -> None:
        """Take actions until one calls `stop`, until none is left, or until time would pass `until_ns`."""
        heap = self._heap
        while not self._stopped and heap and heap[0][0] <= until_ns:
            self.step()


class VirtualClock:
    """The loop's time for a run (`elastic.runtime.ports.Clock`). It is never late."""

    def __init__(self, loop: EventLoop) -> None:
        self._loop = loop

    def now_ns(self) -> Nanoseconds:
        return self._loop.now_ns

    def slept_ns(self) -> Nanoseconds:
        return 0

    def at(self, when_ns: Nanoseconds, action: Callable[[], None]) -> None:
        self._loop.at(when_ns, action, Priority.WAKE_UP)
