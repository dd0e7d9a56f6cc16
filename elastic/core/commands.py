"""What the core asks of its shell. A command is carried out once; what comes of it returns as an event."""

from collections.abc import Sequence
from typing import TypeAlias, dataclass_transform

import msgspec

from elastic.core.evaluation import EvaluationRecord
from elastic.core.types import InfrastructureCause, LeaseId, TrajectoryId, TurnId, WorkerId


@dataclass_transform(frozen_default=True, field_specifiers=(msgspec.field,))
class _Command(msgspec.Struct, frozen=True, tag=True, kw_only=True, gc=False):
    pass


class AcquireLease(_Command):
    lease: LeaseId
    provider: str


class ReleaseLease(_Command):
    lease: LeaseId
    provider: str
    reason: str


class StartTurn(_Command):
    """Send the turn to the worker: prompt plus the `start` tokens accepted so far.

    `slot` is the worker's number for it in this epoch. Numbers only grow, so one that was taken back is never given
    again.
    `recompute`: an attempt before has been prefilled, so that what this one computes is paid again.
    """

    worker: WorkerId
    epoch: int
    turn: TurnId
    attempt: int
    slot: int
    start: int
    recompute: bool = False


class AbortTurn(_Command):
    """Ask the worker to stop this attempt and flush what it has."""

    worker: WorkerId
    epoch: int
    turn: TurnId
    attempt: int


class AcceptTokens(_Command):
    """Accept these chunks (by position) of the frame just handled, each of the turn at its place in `turns`. The other
    chunks are rejected."""

    chunks: tuple[int, ...]
    turns: tuple[TurnId, ...]

    def names(self, chunks: int) -> Sequence[TurnId]:
        """The turn of each of the frame's `chunks`; empty for those that are rejected."""
        if len(self.turns) == chunks:
            return self.turns
        known = dict(zip(self.chunks, self.turns, strict=True))
        return [known.get(place, "") for place in range(chunks)]


class FinishTurn(_Command):
    """The turn's tokens are complete. Give them to the turn's requester."""

    turn: TurnId


class FailTurn(_Command):
    turn: TurnId
    cause: str


class LoadWeights(_Command):
    worker: WorkerId
    epoch: int
    version: int


class SleepWorker(_Command):
    worker: WorkerId
    epoch: int


class WakeWorker(_Command):
    worker: WorkerId
    epoch: int


class DrainWorker(_Command):
    """No more turns will come; say goodbye once idle."""

    worker: WorkerId
    epoch: int
    reason: str


class FenceWorker(_Command):
    """Close the worker's connection and refuse its session: nothing it says counts any more."""

    worker: WorkerId
    reason: str


class BlameWorker(_Command):
    """The worker has failed a turn, for this reason: show it."""

    worker: WorkerId
    reason: str


class BarLease(_Command):
    """Lease nothing again in this run of what `lease` stands on: a worker of it said what cannot be true."""

    lease: LeaseId
    provider: str


class StartGroup(_Command):
    """Start trajectories from one initial state, under ids `trajectories`. The group is the one with this index in its
    step, and with this number in the whole run.

    It is of this `environment`, of which `place` groups came before it. `row` is what its curriculum has chosen; None
    where the row follows from the place.
    """

    step: int
    group: str
    index: int
    trajectories: tuple[TrajectoryId, ...]
    number: int = 0
    environment: str = ""
    place: int = 0
    row: int | None = None


class RefillMember(_Command):
    """Start `trajectory` as a further member of its group, from the group's initial state, in the place of the member
    that it `replaces`. That one has failed for `cause`."""

    trajectory: TrajectoryId
    replaces: TrajectoryId
    cause: InfrastructureCause


class CancelTrajectory(_Command):
    trajectory: TrajectoryId
    cause: str


class ScoreTrajectory(_Command):
    """Have a function score the trajectory; the answer names the attempt."""

    trajectory: TrajectoryId
    attempt: int


class RecordReward(_Command):
    """Record the result of scoring a trajectory: its reward, or the `cause` for having none."""

    trajectory: TrajectoryId
    reward: float | None
    cause: str = ""


class TrainGroup(_Command, omit_defaults=True):
    """Train step `step` on these members of the group, as its batch's `slot`.

    `bounds` says how far workers' log-probabilities may be from the trainer's, where that is not the run's bound: None
    for a worker of whose tokens none is to be trained on. No token of a version before `oldest_version` is trained on.
    """

    group: str
    trajectories: tuple[TrajectoryId, ...]
    step: int
    slot: int
    bounds: tuple[tuple[WorkerId, float | None], ...] = ()
    oldest_version: int = 0


class DropGroup(_Command):
    """The group is not trained on. Where `slot` is given, that place in the batch of `step` stays empty."""

    group: str
    trajectories: tuple[TrajectoryId, ...]
    step: int
    slot: int | None
    reason: str


class EndEvaluation(_Command):
    """An evaluation is over: keep what it came to. `best`: its version is the best so far, whose checkpoint is to be
    kept. `ends` is why the run ends with it, before its last step; empty where it goes on."""

    record: EvaluationRecord
    best: bool = False
    ends: str = ""


class UpdateWeights(_Command):
    """The step has its batch, but for `empty_slots`: finish it and publish `version`.

    Workers are still loading the versions `pulled`. `source` is set where others have trained the version.
    """

    step: int
    version: int
    empty_slots: tuple[int, ...] = ()
    pulled: tuple[int, ...] = ()
    source: str | msgspec.UnsetType = msgspec.UNSET


class AnswerOffer(_Command):
    """What was offered with this `look` is served as `version`: every turn that is requested from now on has it, or a
    later one. Where it is `refused`, for that cause, `version` is what goes on being served; `again`: later it may be
    served."""

    look: str
    version: int
    refused: str = ""
    again: bool = False


class AskPermit(_Command):
    """Ask for a turn on the trainer's device, which other jobs share; `PermitGranted` begins it."""


class YieldPermit(_Command):
    """The trainer has left its device. `finished`: it needs no further turn in this step.

    Without a `permit` what was asked for is not needed any more.
    """

    permit: int | None
    finished: bool


class TellProgress(_Command):
    """Report that `done` of the step's trajectories need no more turns, to a pool that others share."""

    step: int
    done: int
    of: int


class ExhaustBudget(_Command):
    """The budget ends here: answer with `BudgetExhausted`, so that the journal says where the run was stopped."""

    cause: str


class EndRun(_Command):
    """Everything is given back; the shell may exit. `failed` names the cause where there is one."""

    failed: str = ""


Command: TypeAlias = (
    AcquireLease
    | ReleaseLease
    | StartTurn
    | AbortTurn
    | AcceptTokens
    | FinishTurn
    | FailTurn
    | LoadWeights
    | SleepWorker
    | WakeWorker
    | DrainWorker
    | FenceWorker
    | BlameWorker
    | BarLease
    | StartGroup
    | RefillMember
    | CancelTrajectory
    | ScoreTrajectory
    | RecordReward
    | TrainGroup
    | DropGroup
    | EndEvaluation
    | UpdateWeights
    | AnswerOffer
    | AskPermit
    | YieldPermit
    | TellProgress
    | ExhaustBudget
    | EndRun
)
