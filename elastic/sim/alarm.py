"""The core's alarm on virtual time: it is woken when it has asked to be."""

from collections.abc import Callable
from functools import partial

from elastic.core.types import Nanoseconds
from elastic.sim.loop import EventLoop, Priority


class Alarm:
    """Calls `wake` when the time that `next_wakeup_ns` last asked for has come; call `arm` after every event.

    The core's clock began at the loop's `began_ns`.
    """

    def __init__(
        self,
        loop: EventLoop,
        next_wakeup_ns: Callable[[], Nanoseconds | None],
        wake: Callable[[], None],
        began_ns: Nanoseconds = 0,
    ) -> None:
        self._loop = loop
        self._next_wakeup_ns = next_wakeup_ns
        self._wake = wake
        self._began_ns = began_ns
        self._set_to_ns: Nanoseconds | None = None

    def arm(self) -> None:
        at_ns = self._next_wakeup_ns()
        if at_ns is not None and (self._set_to_ns is None or at_ns < self._set_to_ns):
            self._set_to_ns = at_ns
            self._loop.at(self._began_ns + at_ns, partial(self._ring, at_ns), Priority.WAKE_UP)

    def _ring(self, at_ns: Nanoseconds) -> None:
        """What the core waits for may have been put off since: then the alarm is set anew."""
        if self._set_to_ns != at_ns:
            return
        self._set_to_ns = None
        due_ns = self._next_wakeup_ns()
        if due_ns is not None and due_ns <= at_ns:
            self._wake()
        else:
            self.arm()
