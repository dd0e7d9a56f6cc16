"""A run's scribe: turns what happens into rows of the journal, and counts what the run's status shows."""

import contextlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from elastic.core import commands as c
from elastic.core import events as e
from elastic.core.ids import group_of, parse_trajectory
from elastic.core.scheduler import Scheduler
from elastic.core.types import EndCause, Nanoseconds, TrajectoryId, TurnId, TurnState, WorkerId
from elastic.runtime.journal import (
    CallRow,
    GroupRow,
    JournalError,
    JournalWriter,
    MoveRow,
    NullJournal,
    PullRow,
    StepRow,
    StepWeights,
    TrajectoryRow,
    TurnRow,
)
from elastic.runtime.status import ProviderStatus, success_rate
from functions.base import Call


class Ended(Protocol):
    """A trajectory that is over, as it comes with the event that says so."""

    @property
    def started_ns(self) -> Nanoseconds: ...

    @property
    def turns(self) -> int: ...

    @property
    def policy_tokens(self) -> int: ...

    @property
    def token_ids(self) -> list[int]: ...

    @property
    def truncated(self) -> bool: ...


@dataclass(slots=True)
class _Trajectory:
    """What has been accepted for it, by weights version, and its turn in progress."""

    accepted: Counter[int] = field(default_factory=Counter[int])
    turn: TurnId | None = None
    ended: Ended | None = None


@dataclass(slots=True)
class _Turn:
    id: TurnId
    of: _Trajectory
    trajectory: TrajectoryId
    requested_ns: Nanoseconds
    prompt_tokens: int
    tokens: int = 0
    first_token_ns: Nanoseconds | None = None
    attempts: int = 0
    cached_tokens: int = 0
    worker: WorkerId = ""


class Scribe:
    """The journal of a live or a simulated run (`elastic.runtime.ports.Journal`).

    Payloads: the `TokenFrame` of `TokensReceived` (None where nobody knows token ids), the `WeightsReport` of
    `WeightsApplied` and `WeightsFailed`, the trainer's metrics of `WeightsPublished`, and the trajectory (`Ended`)
    of the events that end one. Of a run without a journal (`NullJournal`) tokens and leases are counted, and no
    rewards.
    """

    def __init__(self, scheduler: Scheduler, journal: JournalWriter) -> None:
        self.counts: dict[str, ProviderStatus] = {}
        self.rewards: list[float] = []
        """Of the trajectories that have ended in this step."""
        self.last_success_rate: float | None = None
        self.function_usd = 0.0
        self.events = 0
        """That the core has been told."""
        self._scheduler = scheduler
        self._journal = journal
        self._trajectories: dict[TrajectoryId, _Trajectory] = {}
        self._turns: dict[TurnId, _Turn] = {}
        self._members: dict[str, tuple[TrajectoryId, ...]] = {}
        self._steps = len(scheduler.history)
        self._trained: dict[str, GroupRow] = {}
        """The groups that the trainer was told to train on, since the step before this one, as they were journaled."""
        self._unpublished: dict[int, StepRow] = {}
        """By version: the step that is done but for putting that on the relay, as it was journaled."""
        self._on_event: dict[type[e.Event], Callable[[Nanoseconds, Any, Any], None]] = {
            e.LeaseEnded: self._lease_ended,
            e.TurnRequested: self._turn_requested,
            e.WeightsApplied: self._weights_reported,
            e.WeightsFailed: self._weights_reported,
            e.RewardRequested: self._reward_requested,
            e.TrajectoryFinished: lambda t, k, ended: self._trajectory_ended(t, k.trajectory, ended, k.reward),
            e.TrajectoryFailed: lambda t, k, ended: self._trajectory_ended(t, k.trajectory, ended, None, k.cause),
        }
        self._on_command: dict[type[c.Command], Callable[[Nanoseconds, Any], object]] = {
            c.StartTurn: self._start_turn,
            c.FinishTurn: self._finish_turn,
            c.FailTurn: lambda _, k: self._turns.pop(k.turn, None),
            c.StartGroup: self._start_group,
            c.CancelTrajectory: self._cancel,
            c.RecordReward: self._record_reward,
            c.TrainGroup: lambda t, k: self._group_over(t, k, ""),
            c.DropGroup: lambda t, k: self._group_over(t, k, k.reason),
        }
        if isinstance(journal, NullJournal):  # Nobody reads rows: only what the status shows is kept.
            self._on_event = {e.LeaseEnded: self._lease_ended}
            self._on_command = {}

    def append(self, now_ns: Nanoseconds, event: e.Event, payload: Any) -> None:
        self.events += 1
        if type(event) is e.TokensReceived and payload is not None:
            return  # What of the frame is worth keeping the core decides.
        self._journal.event(event, now_ns)
        note = self._on_event.get(type(event))
        if note is not None:
            note(now_ns, event, payload)

    def decided(self, now_ns: Nanoseconds, event: e.Event, payload: Any, commands: Sequence[c.Command]) -> None:
        if type(event) is e.TokensReceived and payload is not None:
            accepted = next((k.chunks for k in commands if type(k) is c.AcceptTokens), ())
            self._journal.frame(event, payload.body, accepted, now_ns)
        for command in commands:
            if type(command) is c.AcceptTokens:
                assert isinstance(event, e.TokensReceived)
                self._accept(now_ns, event, command)
            elif (note := self._on_command.get(type(command))) is not None:
                note(now_ns, command)
        if type(event) is e.WeightsPublished:
            self._stepped(now_ns, event.version, payload or {})

    def durable(self) -> None:
        with contextlib.suppress(JournalError):  # a run whose journal has failed ends, and gives everything back
            self._journal.durable().result()

    def called(self, now_ns: Nanoseconds, call: Call) -> None:
        """A function has been called."""
        self.function_usd += call.usd
        self._journal.append(CallRow.of(call, now_ns))

    def published(self, version: int, changed: dict[str, float], metrics: dict[str, float]) -> None:
        """Complete the account of the step that the version is of."""
        if (step := self._unpublished.pop(version, None)) is not None:
            weights = StepWeights(version=version, changed=changed)
            self._journal.append(msgspec.structs.replace(step, trainer=step.trainer | metrics, weights=weights))

    def unusable(self, group: str, reason: str) -> None:
        """The trainer got no usable gradient from a group that it was told to train on."""
        if (trained := self._trained.get(group)) is not None:
            self._journal.append(msgspec.structs.replace(trained, dropped=f"unusable: {reason}"))

    # Events

    def _lease_ended(self, _: Nanoseconds, event: e.LeaseEnded, __: Any) -> None:
        lease = self._scheduler.leases.leases.get(event.lease)
        if lease is not None:
            count = self._count(lease.provider)
            count.leases_ended += 1
            count.preemptions += event.cause is EndCause.PREEMPTED

    def _turn_requested(self, now_ns: Nanoseconds, event: e.TurnRequested, _: Any) -> None:
        trajectory = self._trajectories.get(event.trajectory)
        if trajectory is not None:
            trajectory.turn = event.turn
            self._turns[event.turn] = _Turn(event.turn, trajectory, event.trajectory, now_ns, event.prompt_tokens)

    def _weights_reported(self, now_ns: Nanoseconds, event: e.WeightsApplied | e.WeightsFailed, report: Any) -> None:
        if report is not None:
            self._journal.append(
                PullRow(
                    t_ns=now_ns,
                    worker=event.worker,
                    version=report.version,
                    bytes=report.pulled_bytes,
                    pull_s=report.pull_s,
                    apply_s=report.apply_s,
                    error=report.error,
                    full_bytes=report.full_bytes,
                    split_s=report.split_s,
                    refused=report.refused,
                )
            )

    def _reward_requested(self, _: Nanoseconds, event: e.RewardRequested, ended: Ended) -> None:
        trajectory = self._trajectories.get(event.trajectory)
        if trajectory is not None:
            trajectory.ended = ended

    def _trajectory_ended(
        self, now_ns: Nanoseconds, trajectory: TrajectoryId, ended: Ended, reward: float | None, cause: str = ""
    ) -> None:
        if reward is not None:
            self.rewards.append(reward)
        self._journal.append(
            TrajectoryRow(
                trajectory=trajectory,
                step=parse_trajectory(trajectory).step,
                group=group_of(trajectory),
                started_ns=ended.started_ns,
                ended_ns=now_ns,
                reward=reward,
                cause=cause,
                turns=ended.turns,
                policy_tokens=ended.policy_tokens,
                token_ids=msgspec.msgpack.encode(ended.token_ids),
                truncated=ended.truncated,
            )
        )

    def _stepped(self, now_ns: Nanoseconds, version: int, metrics: dict[str, float]) -> None:
        history = self._scheduler.history
        if len(history) == self._steps:
            return
        self._steps = len(history)
        self.last_success_rate = success_rate(self.rewards)
        record = history[-1]
        row = StepRow(
            step=record.step,
            t_ns=now_ns,
            record=record,
            success_rate=self.last_success_rate,
            trainer=dict(metrics),
        )
        self._unpublished[version] = row
        self._trained = {name: group for name, group in self._trained.items() if group.step >= record.step}
        self._journal.append(row)
        self.rewards = []

    # Commands

    def _start_turn(self, now_ns: Nanoseconds, command: c.StartTurn) -> None:
        turn = self._turns.get(command.turn)
        if turn is None:
            return
        if turn.attempts and (left_ns := self._left_ns(turn.id)) is not None:
            self._journal.append(
                MoveRow(
                    turn=turn.id,
                    attempt=command.attempt,
                    from_worker=turn.worker,
                    to_worker=command.worker,
                    left_ns=left_ns,
                    started_ns=now_ns,
                    accepted_tokens=command.start,
                )
            )
        turn.attempts, turn.worker = command.attempt, command.worker

    def _left_ns(self, turn: TurnId) -> Nanoseconds | None:
        """When a turn that starts again was last taken off a worker."""
        record = self._scheduler.turns.live.get(turn)
        return record.story.last_ns(TurnState.QUEUED) if record is not None else None

    def _accept(self, now_ns: Nanoseconds, event: e.TokensReceived, command: c.AcceptTokens) -> None:
        tokens = 0
        for position in command.chunks:
            chunk = event.chunks[position]
            tokens += chunk.count
            turn = self._turns.get(chunk.turn)
            if turn is None:
                continue
            turn.cached_tokens += chunk.cached
            if chunk.count:
                turn.first_token_ns = turn.first_token_ns or now_ns
                turn.tokens += chunk.count
                turn.of.accepted[chunk.version] += chunk.count
        worker = self._scheduler.fleet.workers.get(event.worker)
        if worker is not None:
            self._count(worker.provider).tokens += tokens

    def _finish_turn(self, now_ns: Nanoseconds, command: c.FinishTurn) -> None:
        turn = self._turns.pop(command.turn, None)
        if turn is not None:
            self._journal.append(
                TurnRow(
                    turn=turn.id,
                    trajectory=turn.trajectory,
                    requested_ns=turn.requested_ns,
                    first_token_ns=turn.first_token_ns,
                    finished_ns=now_ns,
                    prompt_tokens=turn.prompt_tokens,
                    tokens=turn.tokens,
                    attempts=turn.attempts,
                    cached_tokens=turn.cached_tokens,
                    worker=turn.worker,
                )
            )

    def _start_group(self, _: Nanoseconds, command: c.StartGroup) -> None:
        self._members[command.group] = command.trajectories
        for trajectory in command.trajectories:
            self._trajectories[trajectory] = _Trajectory()

    def _cancel(self, _: Nanoseconds, command: c.CancelTrajectory) -> None:
        trajectory = self._trajectories.get(command.trajectory)
        if trajectory is not None and trajectory.turn is not None:
            self._turns.pop(trajectory.turn, None)

    def _record_reward(self, now_ns: Nanoseconds, command: c.RecordReward) -> None:
        trajectory = self._trajectories.get(command.trajectory)
        if trajectory is not None and trajectory.ended is not None:
            self._trajectory_ended(now_ns, command.trajectory, trajectory.ended, command.reward, command.cause)

    def _group_over(self, now_ns: Nanoseconds, command: c.TrainGroup | c.DropGroup, dropped: str) -> None:
        """What became of a group, with the length of each member so far and the age of its tokens."""
        version = self._scheduler.version or 0
        members = [self._trajectories[t].accepted for t in command.trajectories if t in self._trajectories]
        ages = Counter[int]()
        for tokens in members:
            for of_version, count in tokens.items():
                ages[version - of_version] += count
        row = GroupRow(
            group=command.group,
            t_ns=now_ns,
            step=command.step,
            version=version,
            dropped=dropped,
            lengths=[tokens.total() for tokens in members],
            tokens_by_age=dict(ages),
        )
        self._journal.append(row)
        if not dropped:
            self._trained[row.group] = row
        for trajectory in self._members.pop(command.group, ()):
            self._turns.pop(self._trajectories.pop(trajectory).turn or "", None)

    def _count(self, provider: str) -> ProviderStatus:
        return self.counts.setdefault(provider, ProviderStatus())
