"""Simulated processes: each has a loop of its own, and lanes for the calls that block."""

from collections.abc import Callable, Coroutine
from typing import Any

from elastic.chaos.models import ModelDevice
from elastic.chaos.network import NetworkLoop
from elastic.core.types import Nanoseconds
from elastic.offload import Lane, lanes


class Process:
    """A simulated process: a loop, and what runs on it."""

    def __init__(
        self, name: str, loop: NetworkLoop, work: Callable[[], Coroutine[Any, Any, Any]], device: ModelDevice
    ) -> None:
        self.name = name
        self.loop = loop
        self.device = device
        self.frozen_until_ns: Nanoseconds = 0
        self.callbacks_left: int | None = None
        """After which it is killed."""
        self.at_its_end: Callable[[], None] = lambda: None
        loop.context.run(lanes.set, lambda _: LoopLane(loop))
        self.main = loop.create_task(work(), context=loop.context)

    @property
    def alive(self) -> bool:
        return self.loop.alive

    def end_after(self, callbacks: int, then: Callable[[], None]) -> None:
        """Let it run for so many more callbacks, wherever that is, and kill it."""
        if self.callbacks_left is None:
            self.callbacks_left, self.at_its_end = callbacks, then

    def step(self) -> None:
        if self.callbacks_left is None:
            self.loop.step()
        elif self.callbacks_left:
            self.callbacks_left -= 1
            self.loop.step(1)
        else:
            self.at_its_end()


class LoopLane(Lane):
    """`elastic.offload.Lane`: each call takes a drawn time, and is made at its end."""

    def __init__(self, loop: NetworkLoop) -> None:
        self._loop = loop
        self._free_s = 0.0

    def submit(self, call: Callable[[], None]) -> None:
        self._free_s = max(self._free_s, self._loop.time()) + self._loop.offload_s()
        self._loop.call_at(self._free_s, call)

    def stop(self) -> None:
        pass
