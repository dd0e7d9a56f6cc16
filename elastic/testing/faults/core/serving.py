"""What a serving host has to do besides rollouts: bursts of requests of its own, which come first (invariant 8)."""

from typing import TYPE_CHECKING

from elastic.core.types import Nanoseconds
from elastic.testing.faults.core.settings import MS
from elastic.testing.faults.core.worker import SimulatedWorker

if TYPE_CHECKING:
    from elastic.testing.faults.core.world import SimulatedWorld

BURST_NS = (50 * MS, 1500 * MS)
LOOK_NS = 20 * MS
"""How often a request that waits looks whether rollouts have left."""


class ServingFirstViolated(AssertionError):
    """A request has waited longer for rollouts to leave than it may."""


class SimulatedServingLoad:
    """Bursts on one host, `gap_ns` apart on average. While one lasts, the host lends nothing.

    Requests wait for rollouts no longer than the iteration under way takes.
    """

    def __init__(self, world: "SimulatedWorld", worker: SimulatedWorker, gap_ns: Nanoseconds) -> None:
        self._world = world
        self._worker = worker
        self._gap_ns = gap_ns

    def begin(self) -> None:
        self._world.loop.after(self._world.rng.randint(0, 2 * self._gap_ns), self._arrive)

    def _arrive(self) -> None:
        if self._worker.alive:
            self._worker.press(self._world.rng.randint(*BURST_NS))
            self._watch(self._worker.iterations)
            self.begin()

    def _watch(self, iterations: int) -> None:
        """Look at the host for as long as it is its own."""
        worker = self._worker
        if worker.alive and worker.pressed:
            if worker.holds_turns and worker.iterations > iterations:
                raise ServingFirstViolated(f"{worker.id}: rollouts stay while requests wait")
            self._world.loop.after(LOOK_NS, lambda: self._watch(iterations))
