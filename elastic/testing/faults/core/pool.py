"""A model of the pool that grants a world's trainer its permits for a device which other jobs share.

The pool grants a permit late, recalls it some time later, and takes it back at its end if the trainer has not yielded
it: then it halts what computes. A trainer never yields while it computes. Permits outlive the orchestrator's crashes.
"""

from typing import TYPE_CHECKING

from elastic.core import events as e
from elastic.core.types import NS_PER_S, Nanoseconds
from elastic.testing.faults.core.settings import MS

if TYPE_CHECKING:
    from elastic.testing.faults.core.world import SimulatedWorld

SLICE_NS = (500 * MS, 6 * NS_PER_S)
"""Time from a grant to its recall."""
NOTICES_NS = (200 * MS, 2 * NS_PER_S)
"""How much shorter or longer than training a group a recall leaves; while faults strike, the first may be all."""


class SharedDeviceViolated(AssertionError):
    """A trainer computes on a device that it has left to other jobs."""


class ModelledPool:
    """`elastic.runtime.ports.Pool` in a simulated world."""

    def __init__(self, world: "SimulatedWorld", within_ns: Nanoseconds) -> None:
        self.held: int | None = None
        self.asked = False
        self.granted = self.taken = 0
        """How many permits there were, and of them those that were not yielded in time."""
        self.progress: list[tuple[int, int, int]] = []
        self._world = world
        self._within_ns = within_ns
        self._until_ns: Nanoseconds = 0
        self._asks = 0

    def ask_permit(self) -> None:
        if self.asked or self.held is not None:
            return
        self.asked = True
        self._asks += 1
        ask = self._asks
        self._world.loop.after(self._world.rng.randint(MS, self._within_ns * 3 // 4), lambda: self._grant(ask))

    def yield_permit(self, permit: int | None, *, finished: bool) -> None:
        if permit is None:
            self.asked = False
        elif permit == self.held:
            trainer = self._world.trainer()
            if trainer is not None and trainer.computes:
                raise SharedDeviceViolated(f"permit {permit} is yielded by a trainer that goes on computing")
            self._end()

    def report_progress(self, step: int, done: int, of: int) -> None:
        self.progress.append((step, done, of))

    def take_up(self, permit: int | None, *, asked: bool, last: int) -> None:
        if permit is not None and permit != self.held:
            self._tell(e.PermitEnded(permit=permit, cause="while nobody listened"))
        if self.held is not None and permit != self.held:
            if asked and self.held > last:
                self._tell(e.PermitGranted(permit=self.held, deadline_ns=self._until_ns))
                return
            self._end()
        if asked and self.held is None:
            self.ask_permit()
        if not asked:
            self.asked = False

    def _grant(self, ask: int) -> None:
        if not self.asked or ask != self._asks:
            return
        world = self._world
        self.asked = False
        self.granted += 1
        self.held = permit = self.granted
        slice_ns, train_ns = world.rng.randint(*SLICE_NS), world.settings.train_ns
        notice_ns = 2 * train_ns + NOTICES_NS[1]
        if world.striking() and world.rng.random() < 1 / 2:
            notice_ns = NOTICES_NS[0]
        self._until_ns = world.loop.now_ns + slice_ns + 2 * notice_ns
        if (trainer := world.trainer()) is not None:
            trainer.permit()
        self._tell(e.PermitGranted(permit=permit, deadline_ns=self._until_ns))
        world.loop.after(slice_ns, lambda: self._recall(permit, notice_ns))
        world.loop.at(self._until_ns, lambda: self._take(permit))

    def _recall(self, permit: int, notice_ns: Nanoseconds) -> None:
        if permit == self.held:
            self._until_ns = self._world.loop.now_ns + notice_ns
            self._tell(e.PermitRecalled(permit=permit, until_ns=self._until_ns))
            self._world.loop.at(self._until_ns, lambda: self._take(permit))

    def _take(self, permit: int) -> None:
        if permit == self.held:
            self.taken += 1
            self._end()
            self._tell(e.PermitEnded(permit=permit, cause="not yielded in time"))

    def _end(self) -> None:
        self.held = None
        if (trainer := self._world.trainer()) is not None:
            trainer.halt()

    def _tell(self, event: e.Event) -> None:
        self._world.listener()(event)
