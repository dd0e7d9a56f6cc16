"""The trainer's weights, as that from which they have learnt: in its process, and in its newest checkpoint."""

from typing import TypeAlias

from elastic.core import commands as c
from elastic.core.types import TrajectoryId

Order: TypeAlias = c.TrainGroup | c.UpdateWeights


class LearnerViolated(AssertionError):
    """The trainer was ordered to train a group that it must not train."""


class Learner:
    """Weights are `version` and, in order, the groups that they have learnt from. The same order gives the same bits.

    A checkpoint outlives the trainer's process. What was trained after it is trained again by the next process, and
    must lead where the process that is gone has been. What it was told already is done.
    """

    def __init__(self) -> None:
        self.version = 0
        self.checkpoint = 0
        self._learnt: list[c.TrainGroup] = []
        self._saved: list[c.TrainGroup] = []
        self._ever: list[c.TrainGroup] = []
        """Groups that any incarnation of this run has trained."""

    @property
    def trajectories(self) -> dict[TrajectoryId, int]:
        """The trajectories that the weights have learnt from, with the step of each."""
        return _trajectories(self._learnt)

    @property
    def saved_trajectories(self) -> dict[TrajectoryId, int]:
        """As `trajectories`, of the checkpoint."""
        return _trajectories(self._saved)

    def has(self, order: Order) -> bool:
        return order in self._learnt if isinstance(order, c.TrainGroup) else order.version <= self.version

    def carry_out(self, order: Order, *, save: bool) -> None:
        """Learn from a group, or publish a version, which may be saved. Asked for a second time it is a no-op."""
        if self.has(order):
            return
        if isinstance(order, c.TrainGroup):
            self._learn(order)
            return
        self.version = order.version
        if save:
            self.checkpoint, self._saved = order.version, list(self._learnt)

    def _learn(self, order: c.TrainGroup) -> None:
        known = self.trajectories
        again = [trajectory for trajectory in order.trajectories if trajectory in known]
        if again or order.step != self.version:
            raise LearnerViolated(f"{order} at version {self.version}, which has learnt from {again} already")
        self._learnt.append(order)
        self._ever += self._learnt[len(self._ever) :]
        if self._learnt != self._ever[: len(self._learnt)]:
            raise LearnerViolated(f"training again from version {self.checkpoint} on leads elsewhere")

    def restart(self) -> None:
        """A new process begins with the checkpoint."""
        self.version, self._learnt = self.checkpoint, list(self._saved)

    def begin_anew(self) -> None:
        """Forgets what was learnt after the last checkpoint, as a trainer does that starts from it."""
        self._ever = list(self._saved)


def _trajectories(learnt: list[c.TrainGroup]) -> dict[TrajectoryId, int]:
    return {trajectory: order.step for order in learnt for trajectory in order.trajectories}
