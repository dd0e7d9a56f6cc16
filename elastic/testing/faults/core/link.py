"""The connection between a worker and the orchestrator, as bad as the plan wants it."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from elastic.core.types import NS_PER_S, Nanoseconds

if TYPE_CHECKING:
    from elastic.testing.faults.core.world import SimulatedWorld

LATENCY_NS = (NS_PER_S // 1000, NS_PER_S // 100)
LATENESS_NS = (NS_PER_S // 100, 6 * NS_PER_S)


class SimulatedLink:
    """Two directions, each in order and without loss unless a fault strikes a message.

    While a direction is stalled, what is sent waits; it arrives when that ends.
    """

    def __init__(self, world: "SimulatedWorld", *, reliable: bool) -> None:
        self._world = world
        self._reliable = reliable
        self._free_ns = {True: 0, False: 0}

    def stall(self, duration_ns: Nanoseconds, *, upwards: bool) -> None:
        self._free_ns[upwards] = max(self._free_ns[upwards], self._world.loop.now_ns + duration_ns)

    def up(self, deliver: Callable[[], None]) -> None:
        """A frame from the worker."""
        rates = self._world.fault_rates
        self._send(True, deliver, rates.frame_lost, rates.frame_late, rates.frame_repeated)

    def down(self, deliver: Callable[[], None]) -> None:
        """A frame to the worker."""
        rates = self._world.fault_rates
        self._send(False, deliver, rates.order_lost, rates.order_late, rates.order_repeated)

    def _send(self, upwards: bool, deliver: Callable[[], None], lost: float, late: float, repeated: float) -> None:
        loop, rng = self._world.loop, self._world.rng
        at_ns = self._free_ns[upwards] = max(self._free_ns[upwards], loop.now_ns + rng.randint(*LATENCY_NS))
        if self._injects(lost):
            return
        loop.at(at_ns + (rng.randint(*LATENESS_NS) if self._injects(late) else 0), deliver)
        if self._injects(repeated):
            loop.at(at_ns + rng.randint(*LATENESS_NS), deliver)

    def _injects(self, share: float) -> bool:
        return not self._reliable and self._world.injector.injects(self._world.rng, share)
