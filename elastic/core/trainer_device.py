"""The trainer's device: it generates awake and trains asleep, never both, and here is what it is at.

Source: docs/design.md, "The trainer's device"; RLBoost §4.1.
"""

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any

from elastic.core import commands as c
from elastic.core import events as e
from elastic.core.fleet import Worker
from elastic.core.run_state import RunState
from elastic.core.steps import Group
from elastic.core.turn_desk import TurnDesk
from elastic.core.types import WorkerState


class TrainerMode(StrEnum):
    """What the trainer's device is doing. RESTING and WAKING are the ways between the other two."""

    ABSENT = "absent"
    AWAKE = "awake"
    RESTING = "resting"
    ASLEEP = "asleep"
    WAKING = "waking"


class TrainerDevice:
    def __init__(self, run: RunState, turns: TurnDesk) -> None:
        self._run = run
        self._turns = turns
        self._changing: TrainerMode | None = None
        self.training: str | None = None
        self.handlers: Mapping[type[e.Event], Callable[[Any], None]] = {
            e.WorkerSlept: self._on_slept,
            e.WorkerAwoke: self._on_awoke,
        }
        self.due: Mapping[str, Callable[[str], None]] = {
            "training": lambda _: run.fail("the trainer did not finish in time"),
            "waking": lambda _: run.fail("the trainer's device did not change between training and generating"),
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
    def free(self) -> bool:
        """Asleep, and neither training nor about to."""
        return not self.at_work and self.mode is TrainerMode.ASLEEP

    @property
    def at_work(self) -> bool:
        """Training a group or updating the weights, or told to."""
        return self._run.timers.waiting("training", "trainer")

    def rest(self, reason: str) -> None:
        """Stop generating: partial responses are handed over, then the device is the trainer's."""
        trainer = self._change(TrainerMode.RESTING)
        self._run.fleet.move(trainer, WorkerState.ASLEEP, self._run.now_ns, reason)
        self._turns.await_handover(trainer, reason)
        self._run.out.append(c.SleepWorker(worker=trainer.id, epoch=trainer.epoch))

    def wake(self) -> None:
        trainer = self._change(TrainerMode.WAKING)
        self._run.out.append(c.WakeWorker(worker=trainer.id, epoch=trainer.epoch))

    def train(self, step: int, group: Group, slot: int) -> None:
        self.training = group.id
        self._expect_training()
        self._run.out.append(c.TrainGroup(group=group.id, trajectories=tuple(group.finished), step=step, slot=slot))

    def update(self, step: int, version: int, empty_slots: tuple[int, ...]) -> None:
        self._expect_training()
        pulled = self._run.fleet.loading_versions
        self._run.out.append(c.UpdateWeights(step=step, version=version, empty_slots=empty_slots, pulled=pulled))

    def done(self) -> None:
        """What it was last asked to train or update is done."""
        self.training = None
        self._run.timers.clear("training", "trainer")

    def abandon(self) -> None:
        self.done()
        self._changing = None
        self._run.timers.clear("waking", "trainer")

    def _change(self, mode: TrainerMode) -> Worker:
        trainer = self._run.fleet.trainer
        assert trainer is not None
        self._changing = mode
        self._run.wait("waking", "trainer", self._run.limits.train_timeout_ns)
        return trainer

    def _changed(self, event: e.WorkerSlept | e.WorkerAwoke, mode: TrainerMode) -> Worker | None:
        """The trainer, if this is the change that was asked of it."""
        worker = self._run.hear(event.worker, event.epoch)
        if worker is None or worker is not self._run.fleet.trainer or self.mode is not mode:
            return None
        self._changing = None
        self._run.timers.clear("waking", "trainer")
        return worker

    def _on_slept(self, event: e.WorkerSlept) -> None:
        worker = self._changed(event, TrainerMode.RESTING)
        if worker is not None:
            self._turns.take_away(worker, "seeding ended")

    def _on_awoke(self, event: e.WorkerAwoke) -> None:
        worker = self._changed(event, TrainerMode.WAKING)
        if worker is not None:
            self._run.fleet.move(worker, WorkerState.READY, self._run.now_ns, "seeding")

    def _expect_training(self) -> None:
        self._run.wait("training", "trainer", self._run.limits.train_timeout_ns)
