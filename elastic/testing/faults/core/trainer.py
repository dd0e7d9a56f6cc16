"""The trainer's process: a worker that learns while it sleeps, one order after the other."""

from collections import deque
from typing import TYPE_CHECKING

from elastic.core import commands as c
from elastic.core import events as e
from elastic.core.types import Account, LeaseId, Nanoseconds, WorkerId, WorkerRole
from elastic.testing.faults.core.learner import LearnerViolated, Order
from elastic.testing.faults.core.settings import MS
from elastic.testing.faults.core.worker import SimulatedWorker

if TYPE_CHECKING:
    from elastic.testing.faults.core.world import SimulatedWorld

HALTED_NS = 10**18
REPLY_NS = 50 * MS
"""The longest that it takes from a checkpoint to the orchestrator's hearing of its version."""


class SimulatedTrainer(SimulatedWorker):
    """A trainer. A new process begins with the checkpoint and has caught up with its run's orders before it joins. A
    trainer that comes back after a lost connection, or to another orchestrator, keeps its state."""

    def __init__(self, world: "SimulatedWorld", name: WorkerId, lease: LeaseId) -> None:
        world.learner.restart()
        self._learner = world.learner
        super().__init__(world, name, lease, WorkerRole.TRAINER, world.learner.version)
        self._has_device = True
        self._works = False
        self._halts = 0
        if not world.permits():
            self.halt()
        self._waiting: deque[Order] = deque()
        self._joins_under: int | None = None
        """The epoch of a connection under which it is to join once it has caught up."""

    @property
    def computes(self) -> bool:
        return self._works

    @property
    def parked_ns(self) -> Nanoseconds:
        """How long others had its device, as far as it has kept accounts."""
        return self._accounts_ns.get(Account.PARKED, 0)

    def _spent_on(self) -> Account:
        return super()._spent_on() if self._has_device else Account.PARKED

    def permit(self) -> None:
        """Give the trainer its device: interrupted work begins again."""
        self._account()
        self._has_device, self._hung_until_ns = True, 0
        self._go_on()

    def halt(self) -> None:
        """Give the device to other jobs."""
        self._account()
        self._has_device, self._hung_until_ns = False, HALTED_NS
        self._works = False
        self._halts += 1

    def be_told(self, epoch: int, order: Order) -> None:
        """An order from the core sets out on the link."""
        self.link.down(lambda: self._act(lambda: self._take(epoch, order)))

    def _take(self, epoch: int, order: Order) -> None:
        if epoch == self.epoch and self._connected:
            self._queue([order])

    def _join(self) -> None:
        assert self._session is not None
        orders = self._session.trainer_orders()
        missing = [order for order in orders if order not in self._waiting and not self._learner.has(order)]
        catches_up = self._joins_under is not None and bool(self._waiting)
        if missing or catches_up:
            self._joins_under = self.epoch
            self._queue(missing)
        else:
            self._joins_under = None
            super()._join()

    def _queue(self, orders: list[Order]) -> None:
        idle = not self._waiting
        self._waiting.extend(orders)
        if idle and orders:
            self._go_on()

    def _go_on(self) -> None:
        if self._works:
            return
        if self._waiting:
            settings, done = self._world.settings, self._learner.has(self._waiting[0])
            if not (done or self._has_device):
                return
            takes_ns: Nanoseconds = 0 if done else self._world.rng.randint(1, settings.train_ns)
            self._works, halts = True, self._halts
            self._world.loop.after(takes_ns, lambda: self._act(lambda: self._finish(halts)))
        elif self._joins_under == self.epoch and self._connected:
            self._joins_under = None
            super()._join()

    def _finish(self, halts: int) -> None:
        """Write the checkpoint before any peer hears of its version."""
        if halts != self._halts:
            return  # It lost the device meanwhile.
        self._works = False
        order, settings = self._waiting.popleft(), self._world.settings
        if not (self.asleep or self._joins_under is not None or self._learner.has(order)):
            raise LearnerViolated("the trainer's device generates while it trains")
        reply_ns: Nanoseconds = 0
        if isinstance(order, c.UpdateWeights):
            reply_ns = self._world.rng.randrange(REPLY_NS)
            saves = order.version % settings.checkpoint_every_steps == 0 or order.version == settings.plan.steps
        else:
            saves = False
        self._learner.carry_out(order, save=saves)
        self.version = self._learner.version
        self._world.loop.after(reply_ns, lambda: self._act(lambda: self._answer(order)))
        self._go_on()

    def _answer(self, order: Order) -> None:
        if isinstance(order, c.TrainGroup):
            self._say(e.GroupTrained(worker=self.id, epoch=self.epoch, group=order.group))
        else:
            self._say(e.WeightsPublished(worker=self.id, epoch=self.epoch, version=order.version))
