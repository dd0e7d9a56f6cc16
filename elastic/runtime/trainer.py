"""The run's port to the trainer's process: gives it orders, and brings it up to date when it joins.

A joining trainer says where it stands. It may lack orders, because its process began at a checkpoint or a connection
was lost. It then gets these orders again, in order, with trajectories from the journal; the core hears of its joining
once it stands where the run does.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import structlog
from msgspec import UNSET

from elastic.config import Config
from elastic.core import commands as c
from elastic.core.scheduler import Scheduler
from elastic.core.types import TrajectoryId, WorkerId
from elastic.protocol import wire
from elastic.runtime import states
from elastic.runtime.episodes import RolloutTrajectory
from elastic.runtime.gateway import Door
from elastic.runtime.journal import JournalError, TrajectoryRow, why_unreadable

log = structlog.get_logger(__name__)

Order: TypeAlias = c.TrainGroup | c.DropGroup | c.UpdateWeights
Stored: TypeAlias = Callable[[Sequence[TrajectoryId]], Mapping[TrajectoryId, TrajectoryRow]]
"""Reads these trajectories' rows from the journal."""


def kept_steps(config: Config) -> int:
    """How many steps' orders to keep: no checkpoint that a trainer may begin at is older."""
    return (states.KEEP + 1) * config.trainer.checkpoint_every_steps


class OutOfStep(Exception):
    """The trainer stands where none of its orders can have led it; the message says where."""


def missing(
    orders: Sequence[Order],
    outstanding: Order | None,
    newest: int,
    version: int,
    groups: set[str],
    slots: set[int],
    source: str = "",
) -> list[Order]:
    """Return the orders that a trainer lacks, given its version, which is of an offer's `source`, and the groups and
    slots that it has got since.

    The run is at version `newest`, or will be after the `outstanding` order, which the trainer gets anyway. Any other
    update beyond that was of an offer that was refused since. Raises `OutOfStep`.
    """
    ahead = isinstance(outstanding, c.UpdateWeights) and outstanding.source in (UNSET, source)
    if version > newest + ahead:
        raise OutOfStep(f"it is at version {version}, and the run at {newest}")
    if version < newest and not any(isinstance(order, c.UpdateWeights) and order.step == version for order in orders):
        raise OutOfStep(f"it is at version {version}, the run at {newest}, and what was trained between is not kept")
    kept = [
        one for one in orders if not isinstance(one, c.UpdateWeights) or one.version <= newest or one == outstanding
    ]
    now = [order for order in kept if order.step == version]
    if unknown := groups - {order.group for order in now if isinstance(order, c.TrainGroup)}:
        raise OutOfStep(f"it has trained on {', '.join(sorted(unknown))} in step {version}, which it was not told to")
    empty = {slot for order in now if isinstance(order, c.UpdateWeights) for slot in order.empty_slots}
    if strange := slots - empty - {order.slot for order in now if not isinstance(order, c.UpdateWeights)}:
        raise OutOfStep(f"it has filled the slots {sorted(strange)} of step {version}, which it was not told to")

    def lacks(order: Order) -> bool:
        match order:
            case c.TrainGroup():
                return order.group not in groups
            case c.DropGroup():
                return order.slot not in slots
            case c.UpdateWeights():
                return True

    later = [order for order in kept if order.step > version]
    return [order for order in [*filter(lacks, now), *later] if order != outstanding]


class GatewayTrainer:
    """`elastic.runtime.ports.TrainerPort` over the gateway.

    `stored` reads what trajectories came to, `stop` ends the run for a cause; `keep_steps` as of `kept_steps`.
    `discard` removes the trainer's checkpoint of a version, so that its successor begins before it; raises `OSError`.
    """

    def __init__(
        self,
        door: Door,
        scheduler: Scheduler,
        stored: Stored,
        stop: Callable[[str], None],
        keep_steps: int,
        discard: Callable[[int], None],
    ) -> None:
        self._door = door
        self._scheduler = scheduler
        self._stored = stored
        self._stop = stop
        self._keep_steps = keep_steps
        self._discard = discard
        self._orders: list[Order] = []
        self._joining: tuple[WorkerId, int] | None = None
        """The worker and its epoch that is being brought up to date."""
        self._lacking: deque[Order] = deque()
        """Orders that it still lacks; it is carrying out the first."""
        self._joined: Callable[[], None] = lambda: None

    # What the run sees

    def train(self, order: c.TrainGroup, batch: list[RolloutTrajectory]) -> None:
        self._send(_train(order, batch))

    def skip(self, order: c.DropGroup, dropped: list[RolloutTrajectory]) -> None:
        self._send(_skip(order, dropped))

    def update(self, order: c.UpdateWeights) -> None:
        self._send(_update(order))

    def remember(self, order: Order) -> None:
        if order in self._orders:
            return
        self._orders.append(order)
        if isinstance(order, c.UpdateWeights):
            self._orders = [kept for kept in self._orders if kept.step > order.step - self._keep_steps]
            if order.source is not UNSET:  # What was offered before it for this step was refused.
                self._orders = [kept for kept in self._orders if kept.step != order.step or kept == order]

    def saved(self) -> object:
        return self._orders

    def restore(self, saved: list[Order]) -> None:
        self._orders = saved

    def reaches(self, version: int) -> bool:
        """Whether a trainer that stands at this version, between two steps, can be brought to where the run is."""
        core = self._scheduler
        if self._is_given_up(version):
            return True
        try:
            missing(self._orders, core.trainer_order, core.version or 0, version, set(), set())
        except OutOfStep:
            return core.version is None
        return True

    # What comes from the trainer

    def join(self, worker: WorkerId, epoch: int, ready: wire.Ready, joined: Callable[[int], None]) -> None:
        """The trainer is there at a version. `joined` is called with it once it stands where the run does."""
        version, core = ready.weights_version, self._scheduler
        assert version is not None
        if core.version is None:
            joined(version)
            return
        try:
            lacking = missing(
                self._orders,
                core.trainer_order,
                core.version,
                version,
                set(ready.groups),
                set(ready.slots),
                ready.source,
            )
        except OutOfStep as error:
            if self._is_given_up(version):
                self._step_back(worker, version)
                return
            self._refuse(worker, f"the trainer is out of step with the journal: {error}")
            return
        log.info("the trainer joins", worker=worker, version=version, orders=len(lacking))
        self._joining, self._lacking = (worker, epoch), deque(lacking)
        stands = max(version, core.version)
        self._joined = lambda: joined(stands)
        self._go_on()

    def answered(self, worker: WorkerId, epoch: int, message: wire.FromWorker) -> bool:
        """Whether this is about an order of long ago, whose answer the core has had."""
        if self._joining != (worker, epoch) or not self._lacking:
            return False
        match self._lacking[0], message:
            case _, wire.TrainerFailedFrame(error=error):
                self._stop(f"the trainer failed: {error}")
            case _, wire.UpdateRefused(version=version, reason=reason):
                self._stop(f"version {version}, which was served, is not kept, and cannot be read again: {reason}")
            case (c.TrainGroup(group=at), wire.Trained(group=done)) | (
                c.UpdateWeights(version=at),
                wire.Stepped(version=done),
            ) if at == done:
                self._lacking.popleft()
                self._go_on()
            case _:
                return isinstance(message, wire.Trained | wire.Stepped)
        return True

    def _go_on(self) -> None:
        """Send the lacking orders up to the next one that is answered, so that unread messages stay bounded."""
        assert self._joining is not None
        while self._lacking:
            try:
                messages = self._again(self._lacking[0])
            except (JournalError, OSError) as error:
                self._stop(why_unreadable(error) or f"the journal could not be read: {error}")
                return
            for message in messages:
                self._door.send(*self._joining, message)
            if not isinstance(self._lacking[0], c.DropGroup):
                return
            self._lacking.popleft()
        self._joined()

    def _is_given_up(self, version: int) -> bool:
        """Whether a trainer at this version, which nothing asks for, has kept an offer that was refused since."""
        core = self._scheduler
        return core.serving is not None and core.version is not None and version == core.version + 1

    def _step_back(self, worker: WorkerId, version: int) -> None:
        """Have a successor of the worker begin before this version."""
        log.warning("the importer has kept what was refused since; another one begins before it", version=version)
        try:
            self._discard(version)
        except OSError as error:
            self._stop(f"the checkpoint of version {version}, whose offer was refused, cannot be removed: {error}")
            return
        self._door.fence(worker, f"version {version} was refused")

    def _refuse(self, worker: WorkerId, cause: str) -> None:
        """A process of before is replaced by one that begins at the checkpoint; where that is refused nothing helps."""
        log.warning("trainer refused", worker=worker, cause=cause)
        self._door.fence(worker, cause)
        known = self._scheduler.fleet.workers.get(worker)
        if known is None or not known.epoch:
            self._stop(cause)

    def _again(self, order: Order) -> Sequence[wire.FromOrchestrator]:
        match order:
            case c.TrainGroup():
                rows = self._stored(order.trajectories)
                return _train(order, [RolloutTrajectory.of(rows[trajectory]) for trajectory in order.trajectories])
            case c.DropGroup():
                rows = self._stored(order.trajectories)
                return _skip(order, [RolloutTrajectory.of(row) for row in rows.values() if row.reward is not None])
            case c.UpdateWeights():
                return _update(order)

    def _send(self, messages: Sequence[wire.FromOrchestrator]) -> None:
        trainer = self._scheduler.trainer()
        if trainer is not None:
            for message in messages:
                self._door.send(trainer.id, trainer.epoch, message)


def _train(order: c.TrainGroup, batch: Sequence[RolloutTrajectory]) -> Sequence[wire.FromOrchestrator]:
    workers = {worker for episode in batch for worker in episode.workers}
    bounds = {worker: bound for worker, bound in order.bounds if worker in workers}
    data = [row for episode in batch for row in episode.data()]
    frame = wire.TrainGroupFrame(order.step, order.group, order.slot, data, bounds, order.oldest_version)
    return wire.in_parts(frame)


def _skip(order: c.DropGroup, dropped: Sequence[RolloutTrajectory]) -> Sequence[wire.FromOrchestrator]:
    assert order.slot is not None
    tokens = sum(episode.policy_tokens for episode in dropped)
    data = [row for episode in dropped for row in episode.data()]
    return wire.in_parts(wire.SkipGroup(order.step, order.group, order.slot, order.reason, tokens, data))


def _update(order: c.UpdateWeights) -> Sequence[wire.FromOrchestrator]:
    reason = "no group of use was left for it"
    skipped = [wire.SkipGroup(order.step, "", slot, reason) for slot in order.empty_slots]
    source = "" if order.source is UNSET else order.source
    return [*skipped, wire.UpdateFrame(order.step, order.version, list(order.pulled), source)]
