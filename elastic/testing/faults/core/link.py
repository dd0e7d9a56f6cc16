"""The connection between a worker and the orchestrator, as bad as the plan wants it."""

from collections.abc import Callable

from elastic.core.types import NS_PER_S, Nanoseconds
from elastic.testing.faults.core.faults import SimulatedSurroundings

LATENCY_NS = (NS_PER_S // 1000, NS_PER_S // 100)
LATENESS_NS = (NS_PER_S // 100, 6 * NS_PER_S)


class SimulatedLink:
    """Two directions, each in order and without loss unless a fault strikes a message.

    While a direction is cut, what is sent waits; it arrives when the cut ends.
    """

    def __init__(self, world: SimulatedSurroundings, *, reliable: bool) -> None:
        self._loop = world.loop
        self._rng = world.rng
        self._world = world
        self._reliable = reliable
        self._up_free_ns: Nanoseconds = 0
        self._down_free_ns: Nanoseconds = 0

    def cut_up(self, duration_ns: Nanoseconds) -> None:
        self._up_free_ns = max(self._up_free_ns, self._loop.now_ns + duration_ns)

    def cut_down(self, duration_ns: Nanoseconds) -> None:
        self._down_free_ns = max(self._down_free_ns, self._loop.now_ns + duration_ns)

    def up(self, deliver: Callable[[], None]) -> None:
        """A frame from the worker."""
        fault_rates = self._world.fault_rates
        self._up_free_ns = max(self._up_free_ns, self._loop.now_ns + self._rng.randint(*LATENCY_NS))
        self._send(
            self._up_free_ns, deliver, fault_rates.frame_lost, fault_rates.frame_late, fault_rates.frame_repeated
        )

    def down(self, deliver: Callable[[], None]) -> None:
        """A frame to the worker."""
        fault_rates = self._world.fault_rates
        self._down_free_ns = max(self._down_free_ns, self._loop.now_ns + self._rng.randint(*LATENCY_NS))
        lost, late, repeated = fault_rates.order_lost, fault_rates.order_late, fault_rates.order_repeated
        self._send(self._down_free_ns, deliver, lost, late, repeated)

    def _send(self, at_ns: Nanoseconds, deliver: Callable[[], None], lost: float, late: float, repeated: float) -> None:
        if self._injects(lost):
            return
        self._loop.at(at_ns + (self._rng.randint(*LATENESS_NS) if self._injects(late) else 0), deliver)
        if self._injects(repeated):
            self._loop.at(at_ns + self._rng.randint(*LATENESS_NS), deliver)

    def _injects(self, share: float) -> bool:
        return not self._reliable and self._world.injector.injects(self._rng, share)
