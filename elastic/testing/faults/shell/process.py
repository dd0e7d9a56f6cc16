"""Simulated processes: each has a loop of its own, on a machine of the world."""

from collections.abc import Callable, Coroutine
from typing import Any

from elastic.core.types import Nanoseconds
from elastic.system.host import HOST
from elastic.testing.faults.shell.answers import host_of
from elastic.testing.faults.shell.models import ModelDevice
from elastic.testing.faults.shell.network import NetworkLoop


class Process:
    """A simulated process: a loop, and the tasks on it."""

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
        loop.context.run(HOST.set, host_of(loop.machine, loop.network))
        self.main = loop.create_task(work(), context=loop.context)

    @property
    def alive(self) -> bool:
        return self.loop.alive

    def end_after(self, callbacks: int, then: Callable[[], None]) -> None:
        """Run `callbacks` more callbacks, wherever that leads, and kill the process."""
        if self.callbacks_left is None:
            self.callbacks_left, self.at_its_end = callbacks, then

    def freeze(self, until_ns: Nanoseconds) -> None:
        """Run nothing of it until then."""
        self.frozen_until_ns = max(self.frozen_until_ns, until_ns)

    def cut(self) -> None:
        """Break all its connections."""
        for transport in list(self.loop.transports):
            transport.abort()

    def step(self) -> None:
        if self.callbacks_left is None:
            self.loop.step()
        elif self.callbacks_left:
            self.callbacks_left -= 1
            self.loop.step(1)
        else:
            self.at_its_end()
