"""The trainer's device: whether it generates or trains, and what it was ordered.

It generates while awake and trains while asleep, never both. Where other jobs share it, it does either only by permit,
and is parked otherwise: asleep, without anything to do. When its connection or the device itself is lost, the
outstanding order stands and is given again, to the same device or to its replacement; orders are idempotent.

Source: docs/design.md, "The trainer's device"; RLBoost §4.1.
"""

from enum import StrEnum

from msgspec import UNSET, UnsetType

from elastic.core import commands as c
from elastic.core import events as e
from elastic.core.fleet import Worker
from elastic.core.run_state import Deadlines, Handlers, RunState
from elastic.core.steps import Group
from elastic.core.trainer_permit import PermitState, TrainerPermit
from elastic.core.turn_manager import TurnManager
from elastic.core.types import NS_PER_S, WorkerId, WorkerState

RELEASES = 3
"""Times that a provider is asked to confirm the end of the trainer's lease until another one is given up."""


class TrainerMode(StrEnum):
    """What the trainer's device is doing. RESTING and WAKING are the ways between AWAKE and ASLEEP."""

    ABSENT = "absent"
    AWAKE = "awake"
    RESTING = "resting"
    ASLEEP = "asleep"
    WAKING = "waking"


class TrainerDevice:
    def __init__(self, run: RunState, turns: TurnManager, permit: TrainerPermit) -> None:
        self._run = run
        self._turns = turns
        self._permit = permit
        self._changing: TrainerMode | None = None
        self._session: tuple[WorkerId, int] | None = None
        self.order: c.TrainGroup | c.UpdateWeights | None = None
        """The outstanding order, None once the trainer has reported it done."""
        self.handlers: Handlers = {
            e.WorkerSlept: self._on_slept,
            e.WorkerAwoke: self._on_awoke,
        }
        self.due: Deadlines = {
            "training": self._training_due,
            "waking": lambda _: run.fail("the trainer's device did not change between training and generating"),
            "replacement": self._replacement_due,
        }

    @property
    def mode(self) -> TrainerMode:
        trainer = self._run.fleet.trainer
        if trainer is not None and trainer.state is WorkerState.READY:
            return TrainerMode.AWAKE
        if trainer is not None and trainer.state is WorkerState.ASLEEP:
            return self._changing or TrainerMode.ASLEEP
        return TrainerMode.ABSENT

    @property
    def training(self) -> str | None:
        """The group that it was told to train."""
        return self.order.group if isinstance(self.order, c.TrainGroup) else None

    @property
    def free(self) -> bool:
        """Asleep and permitted to compute, and neither training nor about to."""
        return self._permit.allows and not self.at_work and self.mode is TrainerMode.ASLEEP

    @property
    def at_work(self) -> bool:
        """Training a group or updating the weights, or told to."""
        return self._run.timers.waiting("training", "trainer")

    @property
    def idle(self) -> bool:
        """Whether nothing is under way on it, for certain."""
        trainer = self._run.fleet.trainer
        if trainer is None or trainer.state in (WorkerState.GONE, WorkerState.DRAINING):
            return True
        return self.mode is TrainerMode.ASLEEP and not self.at_work

    def _training_due(self, _: str) -> None:
        """The run fails; where others train it waits on, for as long as they do."""
        if self._run.serving is None:
            self._run.fail(self._late())
        else:
            self._run.wait("training", "trainer", self._run.limits.train_timeout_ns)

    def _replacement_due(self, _: str) -> None:
        """As `_training_due`. What goes on waiting is found by `follow`."""
        if self._run.serving is None:
            self._run.fail("the trainer's device was lost, and no other one came in time")

    def _late(self) -> str:
        """Why the run fails whose trainer did not carry out its order in time."""
        order, within_s = self.order, self._run.limits.train_timeout_ns / NS_PER_S
        what = f"train group {order.group}" if isinstance(order, c.TrainGroup) else "finish the step"
        loss = f"; its loss is {self._run.plan.own_loss}" if self._run.plan.own_loss else ""
        return f"the trainer did not {what} within {within_s:g} s (trainer.step_timeout_s){loss}"

    def follow(self) -> None:
        """Notice that the trainer's device is gone, or has come back under another session, and what it may do."""
        self._follow_session()
        if self._permit.needed:
            self._follow_permit()

    def _follow_permit(self) -> None:
        """Give way once the permit is recalled, stop at once when it is over, and go on under the next one."""
        state = self._permit.state
        if state is PermitState.HELD:
            if self.order is not None and self.mode is TrainerMode.ASLEEP and not self.at_work:
                self._send_order(self.order)
        elif state is PermitState.RECALLED:
            if self.mode in (TrainerMode.AWAKE, TrainerMode.WAKING):
                self.rest("its permit is recalled")
        else:
            self._run.timers.clear("training", "trainer")
            if self.mode in (TrainerMode.AWAKE, TrainerMode.WAKING):
                self.rest("its permit is over")
            if self.mode is TrainerMode.RESTING and self._run.fleet.trainer is not None:
                self._turns.take_away(self._run.fleet.trainer, "its permit is over")

    def _follow_session(self) -> None:
        run, trainer = self._run, self._run.fleet.trainer
        session = None if trainer is None or run.trainer_away else (trainer.id, trainer.epoch)
        if session is not None and session == self._session:
            return
        if session != self._session:
            self._session = session
            self._be_heard_no_more()
            if session is not None and run.version is not None:
                self._put_to_sleep()
        coming = trainer is not None and trainer.state in (WorkerState.BOOTING, WorkerState.DETACHED)
        if session is not None or coming or run.version is None:
            run.timers.clear("replacement", "trainer")
        elif not run.timers.waiting("replacement", "trainer"):
            limits = run.limits
            giving_back_ns = limits.drain_timeout_ns + RELEASES * limits.release_timeout_ns
            run.wait("replacement", "trainer", giving_back_ns + limits.retry_max_ns + limits.acquire_timeout_ns)

    def _be_heard_no_more(self) -> None:
        """Stop waiting for changes and orders of the former session: no answer to them can come."""
        self._changing = None
        for what in ("waking", "training"):
            self._run.timers.clear(what, "trainer")

    def rest(self, reason: str) -> None:
        """Stop generating: partial responses are handed over, then the device is the trainer's."""
        trainer = self._put_to_sleep()
        if trainer.state is not WorkerState.ASLEEP:
            self._run.fleet.move(trainer, WorkerState.ASLEEP, self._run.now_ns, reason)
        self._turns.await_handover(trainer, reason)

    def _put_to_sleep(self) -> Worker:
        trainer = self._change(TrainerMode.RESTING)
        self._run.out.append(c.SleepWorker(worker=trainer.id, epoch=trainer.epoch))
        return trainer

    def wake(self) -> None:
        trainer = self._change(TrainerMode.WAKING)
        self._run.out.append(c.WakeWorker(worker=trainer.id, epoch=trainer.epoch))

    def train(self, step: int, group: Group, slot: int) -> None:
        run = self._run
        overtaken = group.oldest_token is not None and group.oldest_token < run.oldest_version
        self._send_order(
            c.TrainGroup(
                group=group.id,
                trajectories=tuple(group.finished),
                step=step,
                slot=slot,
                bounds=run.agreement.terms,
                oldest_version=run.oldest_version if overtaken else 0,
            )
        )

    def update(self, step: int, version: int, empty_slots: tuple[int, ...], source: str | UnsetType = UNSET) -> None:
        pulled = self._run.fleet.loading_versions
        self._send_order(
            c.UpdateWeights(step=step, version=version, empty_slots=empty_slots, pulled=pulled, source=source)
        )

    def _send_order(self, order: c.TrainGroup | c.UpdateWeights) -> None:
        self.order = order
        self._run.wait("training", "trainer", self._run.limits.train_timeout_ns)
        self._run.out.append(order)

    def done(self) -> None:
        """The outstanding order is carried out."""
        self.order = None
        self._run.timers.clear("training", "trainer")

    def abandon(self) -> None:
        self.done()
        self._be_heard_no_more()
        self._run.timers.clear("replacement", "trainer")

    def _change(self, mode: TrainerMode) -> Worker:
        trainer = self._run.fleet.trainer
        assert trainer is not None
        self._changing = mode
        self._run.wait("waking", "trainer", self._run.limits.train_timeout_ns)
        return trainer

    def _changed(self, event: e.WorkerSlept | e.WorkerAwoke, mode: TrainerMode) -> Worker | None:
        """The trainer, if this is the change that was asked of it."""
        worker = self._run.heard_from(event.worker, event.epoch)
        if worker is None or worker is not self._run.fleet.trainer or self.mode is not mode:
            return None
        self._changing = None
        self._run.timers.clear("waking", "trainer")
        return worker

    def _on_slept(self, event: e.WorkerSlept) -> None:
        worker = self._changed(event, TrainerMode.RESTING)
        if worker is not None:
            self._turns.take_away(worker, "seeding ended")
            if self.order is not None and self._permit.allows:
                self._send_order(self.order)

    def _on_awoke(self, event: e.WorkerAwoke) -> None:
        worker = self._changed(event, TrainerMode.WAKING)
        if worker is not None:
            self._run.fleet.move(worker, WorkerState.READY, self._run.now_ns, "seeding")
