"""The trainer's weights, as that from which they have learnt: in its process, and in its newest checkpoint."""

from collections.abc import Iterable

from elastic.core import commands as c
from elastic.core.types import TrajectoryId


class LearnerViolated(AssertionError):
    """The trainer was told to learn what it may not."""


class Learner:
    """Weights are `version` and, in order, the groups that they have learnt from. The same order gives the same bits.

    A checkpoint outlives the trainer's process. What was trained after it is trained again in the journal's order, and
    must lead where the process that is gone has been.
    """

    def __init__(self) -> None:
        self.version = 0
        self.checkpoint = 0
        self._learnt: list[c.TrainGroup] = []
        self._saved: tuple[c.TrainGroup, ...] = ()

    @property
    def trajectories(self) -> dict[TrajectoryId, int]:
        """What the weights have learnt from, and in which step."""
        return {t: command.step for command in self._learnt for t in command.trajectories}

    def learn(self, command: c.TrainGroup) -> None:
        known = self.trajectories
        again = [trajectory for trajectory in command.trajectories if trajectory in known]
        if again or command.step != self.version:
            raise LearnerViolated(f"{command} at version {self.version}, which has learnt from {again} already")
        self._learnt.append(command)

    def publish(self, version: int, *, save: bool) -> None:
        """Asked for a second time, after a crash, it is a no-op."""
        if version > self.version:
            self.version = version
            if save:
                self.checkpoint, self._saved = version, tuple(self._learnt)

    def restart(self, journal: Iterable[c.TrainGroup | c.UpdateWeights]) -> int:
        """Begin with the checkpoint and do again what the journal has beyond it; returns how many orders those are."""
        before = self._learnt
        self.version, self._learnt = self.checkpoint, list(self._saved)
        orders = [command for command in journal if command.step >= self.checkpoint]
        for command in orders:
            if isinstance(command, c.TrainGroup):
                self.learn(command)
            else:
                self.publish(command.version, save=False)
        if self._learnt != before[: len(self._learnt)]:
            raise LearnerViolated(f"training again from version {self.checkpoint} on leads elsewhere")
        return len(orders)
