"""A run's recorder: turns what happens into rows of the journal, and counts what the run's status shows."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from elastic.core import commands as c
from elastic.core import events as e
from elastic.core.ids import group_of, is_evaluated, lease_of, parse_trajectory, provider_of
from elastic.core.scheduler import Scheduler
from elastic.core.steps import CUT_OFF
from elastic.core.types import DEATHS, EndCause, LeaseId, Nanoseconds, TrajectoryId, TurnId, TurnState, WorkerId
from elastic.protocol.sampled import Packed, Sampled, SampledBranch
from elastic.runtime.agents.notes import begun_again
from elastic.runtime.engine_meters import EngineMeters
from elastic.runtime.journal import (
    NOT_SCORED,
    BookRow,
    CallRow,
    EvaluatedRow,
    EvaluationRow,
    GroupRow,
    JournalRecord,
    JournalWriter,
    MoveRow,
    PullRow,
    StepRow,
    StepWeights,
    TrajectoryRow,
    TurnRow,
    event_row,
    frame_row,
)
from elastic.runtime.status import EnvironmentStep, ProviderStatus, mean_reward, success_rate
from functions.base import Call

REMEMBERED = (
    *("counts", "rewards", "last_success_rate", "last_mean_reward", "function_usd", "events"),
    *(
        "_trajectories",
        "_turns",
        "_unscored",
        "cut_tokens",
        "_granted",
        "_members",
        "_environments",
        "_step_of",
        "_steps",
        "_trained",
        "_unpublished",
        "_paced",
    ),
)
"""Attributes of a recorder that the next incarnation's goes on with."""


class Ended(Protocol):
    """A trajectory that is over, as it comes with the event that says so."""

    @property
    def started_ns(self) -> Nanoseconds: ...

    @property
    def turns(self) -> int: ...

    @property
    def policy_tokens(self) -> int: ...

    @property
    def token_ids(self) -> Packed: ...

    @property
    def truncated(self) -> bool: ...

    @property
    def sampled(self) -> Sampled | None:
        """None if tokens are only counted."""
        ...

    @property
    def branches(self) -> Sequence[SampledBranch]: ...

    @property
    def task(self) -> bytes: ...

    @property
    def metrics(self) -> Mapping[str, float]: ...


@dataclass(slots=True)
class _Trajectory:
    """What was accepted for a trajectory, by weights version, and its turn in progress."""

    accepted: Counter[int] = field(default_factory=Counter[int])
    turn: TurnId | None = None


@dataclass(slots=True)
class _TurnProgress:
    """A turn in progress. Of its `tokens`, `counted` are in the trajectory's count; the others are of `version`."""

    id: TurnId
    trajectory: TrajectoryId
    accepted: Counter[int]
    """The trajectory's."""
    requested_ns: Nanoseconds
    prompt_tokens: int
    tokens: int = 0
    counted: int = 0
    version: int | None = None
    first_token_ns: Nanoseconds | None = None
    attempts: int = 0
    cached_tokens: int = 0
    worker: WorkerId = ""
    max_tokens: int = 0
    sent_ns: Nanoseconds | None = None
    """When it was first sent to a worker."""

    def count(self, until: int) -> None:
        if self.version is not None and until > self.counted:
            self.accepted[self.version] += until - self.counted
            self.counted = until


@dataclass(slots=True)
class _StepCounts:
    """What a step came to in one environment."""

    rewards: list[float] = field(default_factory=list[float])
    failed: int = 0
    groups_trained: int = 0
    groups_dropped: int = 0

    def step(self) -> EnvironmentStep:
        return EnvironmentStep(
            trajectories=len(self.rewards),
            failed=self.failed,
            success_rate=success_rate(self.rewards),
            mean_reward=mean_reward(self.rewards),
            groups_trained=self.groups_trained,
            groups_dropped=self.groups_dropped,
        )


def at_once(_: "Future[None]", then: Callable[[], None]) -> None:
    """A run on virtual time does not wait for the disk."""
    then()


class JournalRecorder:
    """The journal of a live or a simulated run (`elastic.runtime.ports.Journal`).

    `when` calls its second argument on the run's thread once its first is done, in order. `stored` reads the row of a
    trajectory that an earlier incarnation has written. Payloads: the frame of `TokensReceived` (None where
    nobody knows token ids), the `WeightsReport` of `WeightsApplied` and `WeightsFailed`, the trainer's metrics of
    `WeightsPublished`, and the trajectory (`Ended`) of the events that end one. Of a run without a journal
    (`NullJournal`) tokens and leases are counted, and no rewards.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        journal: JournalWriter,
        when: "Callable[[Future[None], Callable[[], None]], None]" = at_once,
        stored: Callable[[TrajectoryId], TrajectoryRow] | None = None,
    ) -> None:
        self.counts: dict[str, ProviderStatus] = {}
        self.rewards: list[float] = []
        """The rewards of the trajectories that have ended in this step."""
        self.last_success_rate: float | None = None
        self.last_mean_reward: float | None = None
        self.function_usd = 0.0
        self.events = 0
        """How many events the core has handled."""
        self.cut_tokens = Counter[str]()
        """The tokens of members that were cut off, by environment."""
        self.meters: EngineMeters | None = None
        """Told of turns and workers, where somebody asks for their metrics."""
        self._scheduler = scheduler
        self._journal = journal
        self._keeps = journal.keeps
        self._when = when
        self._stored = stored
        self._rows: list[JournalRecord] = []
        """The rows of the event that is being recorded."""
        self._recalling = False
        self._trajectories: dict[TrajectoryId, _Trajectory] = {}
        self._turns: dict[TurnId, _TurnProgress] = {}
        self._unscored: dict[TrajectoryId, TrajectoryRow | None] = {}
        """As they were written when they ended; None for those that are in the journal alone."""
        self._granted: set[LeaseId] = set()
        self._paced: dict[WorkerId, tuple[int, int]] = {}
        """How many of a worker's iterations were paced, and how many of these were late, when it reported last."""
        self._members: dict[str, tuple[TrajectoryId, ...]] = {}
        self._environments: dict[str, str] = {}
        """By group."""
        self._step_of: dict[str, _StepCounts] = {}
        """What this step came to so far, by environment; of runs that have several."""
        self._steps = len(scheduler.history)
        self._trained: dict[str, GroupRow] = {}
        """The groups that the trainer was told to train on, since the step before this one, as they were journaled."""
        self._unpublished: dict[int, StepRow] = {}
        """By version: the step that is done but for putting that on the relay, as it was journaled."""
        self._on_event: dict[type[e.Event], Callable[[Nanoseconds, Any, Any], None]] = {
            e.LeaseGranted: self._lease_granted,
            e.LeaseEnded: self._lease_ended,
            e.WorkerReported: self._worker_reported,
            e.TurnRequested: self._turn_requested,
            e.WeightsApplied: self._weights_reported,
            e.WeightsFailed: self._weights_reported,
            e.RewardRequested: self._reward_requested,
            e.AgentNoted: self._noted,
            e.TrajectoryFinished: lambda t, k, ended: self._trajectory_ended(t, k.trajectory, ended, k.reward),
            e.TrajectoryFailed: lambda t, k, ended: self._trajectory_ended(t, k.trajectory, ended, None, k.cause),
        }
        self._on_command: dict[type[c.Command], Callable[[Nanoseconds, Any], object]] = {
            c.StartTurn: self._start_turn,
            c.FinishTurn: self._finish_turn,
            c.FailTurn: lambda _, k: self._forget_turn(k.turn),
            c.StartGroup: self._start_group,
            c.RefillMember: self._refill,
            c.CancelTrajectory: self._cancel,
            c.RecordReward: self._record_reward,
            c.TrainGroup: lambda t, k: self._group_over(t, k, ""),
            c.DropGroup: lambda t, k: self._group_over(t, k, k.reason),
            c.EndEvaluation: lambda t, k: self._rows.append(
                EvaluationRow(version=k.record.version, t_ns=t, record=k.record, best=k.best, ends=k.ends)
            ),
        }
        if not self._keeps:  # Nobody reads rows: only what the status shows is kept.
            shown = (e.LeaseGranted, e.LeaseEnded, e.WorkerReported)
            self._on_event = {kind: note for kind, note in self._on_event.items() if kind in shown}
            self._on_command = {}

    def record(self, now_ns: Nanoseconds, event: e.Event, payload: Any, commands: Sequence[c.Command]) -> None:
        if self._keeps:
            self._rows.append(self._row_of(now_ns, event, payload, commands))
        self._follow(now_ns, event, payload, commands)
        if self._keeps:
            self._journal.append(*self._rows)
            self._rows.clear()

    def recalled(self, now_ns: Nanoseconds, event: e.Event, commands: Sequence[c.Command]) -> None:
        self._recalling = True
        self._follow(now_ns, event, None, commands)
        self._recalling = False
        self._rows.clear()

    def saved(self) -> object:
        return {name: getattr(self, name) for name in REMEMBERED}

    def restore(self, saved: dict[str, Any]) -> None:
        for name in REMEMBERED:
            setattr(self, name, saved[name])

    def durable(self, then: Callable[[], None]) -> None:
        self._when(self._journal.durable(), then)

    def _row_of(
        self, now_ns: Nanoseconds, event: e.Event, payload: Any, commands: Sequence[c.Command]
    ) -> JournalRecord:
        if type(event) is e.TokensReceived and payload is not None:
            accepted = next((command for command in commands if type(command) is c.AcceptTokens), None)
            return frame_row(event, payload, accepted, now_ns)
        return event_row(event, now_ns)

    def _follow(self, now_ns: Nanoseconds, event: e.Event, payload: Any, commands: Sequence[c.Command]) -> None:
        """Turn the event and its commands into rows and status."""
        self.events += 1
        note = self._on_event.get(type(event))
        if note is not None:
            note(now_ns, event, payload)
        for command in commands:
            if type(command) is c.AcceptTokens:
                assert isinstance(event, e.TokensReceived)
                self._accept(now_ns, event, command)
            elif (note := self._on_command.get(type(command))) is not None:
                note(now_ns, command)
        if type(event) is e.WeightsPublished:
            self._stepped(now_ns, event.version, payload or {})

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

    def _lease_granted(self, _: Nanoseconds, event: e.LeaseGranted, __: Any) -> None:
        self._granted.add(event.lease)
        count = self._count(provider_of(event.lease))
        count.replaced += count.replaced < count.deaths

    def _lease_ended(self, _: Nanoseconds, event: e.LeaseEnded, __: Any) -> None:
        if self._keeps:  # The core may have folded these books before anybody looks at them again.
            self._rows += [BookRow(worker=b.worker, book=b) for b in self._scheduler.ledger.just_closed(event.lease)]
        if event.lease in self._granted:
            self._granted.discard(event.lease)
            count = self._count(provider_of(event.lease))
            count.leases_ended += 1
            count.preemptions += event.cause is EndCause.PREEMPTED
            count.deaths += event.cause in DEATHS
        if self.meters is not None:
            self.meters.forget(event.lease)
        self._paced = {worker: paced for worker, paced in self._paced.items() if lease_of(worker) != event.lease}

    def _worker_reported(self, _: Nanoseconds, event: e.WorkerReported, __: Any) -> None:
        if self.meters is not None:
            self.meters.reported(event)
        if not event.paced_iterations:
            return
        paced, late = self._paced.get(event.worker, (0, 0))
        self._paced[event.worker] = event.paced_iterations, event.late_iterations
        count = self._count(provider_of(event.worker))
        count.paced_iterations += max(0, event.paced_iterations - paced)
        count.late_iterations += max(0, event.late_iterations - late)

    def _turn_requested(self, now_ns: Nanoseconds, event: e.TurnRequested, _: Any) -> None:
        trajectory = self._trajectories.get(event.trajectory)
        if trajectory is not None:
            trajectory.turn = event.turn
            self._turns[event.turn] = _TurnProgress(
                event.turn,
                event.trajectory,
                trajectory.accepted,
                now_ns,
                event.prompt_tokens,
                max_tokens=event.max_new_tokens,
            )

    def _weights_reported(self, now_ns: Nanoseconds, event: e.WeightsApplied | e.WeightsFailed, report: Any) -> None:
        if report is not None:
            self._rows.append(
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

    def _noted(self, _: Nanoseconds, event: e.AgentNoted, __: Any) -> None:
        """What a trajectory that begins again had sampled is none of what it comes to."""
        if (name := begun_again(event.note)) is not None and (trajectory := self._trajectories.get(name)) is not None:
            self._turns.pop(trajectory.turn or "", None)
            self._trajectories[name] = _Trajectory()

    def _reward_requested(self, now_ns: Nanoseconds, event: e.RewardRequested, ended: Ended | None) -> None:
        """Keep the trajectory before it is scored, so that a later incarnation can have it scored."""
        if event.trajectory not in self._trajectories:
            return
        row = None if ended is None else self._row(event.trajectory, now_ns, ended, None, NOT_SCORED)
        self._unscored[event.trajectory] = row
        if row is not None:
            self._rows.append(row)

    def _trajectory_ended(
        self, now_ns: Nanoseconds, trajectory: TrajectoryId, ended: Ended | None, reward: float | None, cause: str = ""
    ) -> None:
        self._count_end(trajectory, reward)
        if ended is not None:
            self._rows.append(self._row(trajectory, now_ns, ended, reward, cause))

    def _stepped(self, now_ns: Nanoseconds, version: int, metrics: dict[str, float]) -> None:
        history = self._scheduler.history
        if len(history) == self._steps:
            return
        self._steps = len(history)
        self.last_success_rate = success_rate(self.rewards)
        self.last_mean_reward = mean_reward(self.rewards)
        record = history[-1]
        row = StepRow(
            step=record.step,
            t_ns=now_ns,
            record=record,
            success_rate=self.last_success_rate,
            trainer=dict(metrics),
            environments={name: counts.step() for name, counts in self._step_of.items()},
        )
        self._step_of = {}
        if not self._recalling:  # What the trainer said of the step then is in its row, and not known here.
            self._unpublished[version] = row
        self._trained = {name: group for name, group in self._trained.items() if group.step >= record.step}
        self._rows.append(row)
        self.rewards = []

    # Commands

    def _start_turn(self, now_ns: Nanoseconds, command: c.StartTurn) -> None:
        turn = self._turns.get(command.turn)
        if turn is None:
            return
        if turn.attempts and (left_ns := self._left_ns(turn.id)) is not None:
            self._rows.append(
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
            if self.meters is not None:
                self.meters.moved(turn.worker)
        if turn.sent_ns is None:
            turn.sent_ns = now_ns
        turn.attempts, turn.worker = command.attempt, command.worker

    def _left_ns(self, turn: TurnId) -> Nanoseconds | None:
        """When a turn that starts again was last taken off a worker."""
        record = self._scheduler.turns.live.get(turn)
        return record.story.last_ns(TurnState.QUEUED) if record is not None else None

    def _accept(self, now_ns: Nanoseconds, event: e.TokensReceived, command: c.AcceptTokens) -> None:
        chunks, tokens = event.chunks, 0
        names = command.names(len(chunks))
        for name, (_, start, count, version) in zip(names, chunks.plain, strict=True):
            if not count or not name:
                continue
            tokens += count
            turn = self._turns.get(name)
            if turn is not None:
                turn.tokens = start + count
                if version != turn.version:
                    turn.count(start)
                    turn.version = version
                    if turn.first_token_ns is None:
                        turn.first_token_ns = now_ns
        for prompt in chunks.prompts:
            if (turn := self._turns.get(names[prompt.place])) is not None:
                most = turn.attempts * (turn.prompt_tokens + turn.tokens)
                turn.cached_tokens = min(turn.cached_tokens + prompt.cached, most)
        worker = self._scheduler.fleet.workers.get(event.worker)
        if worker is not None:
            self._count(worker.provider).tokens += tokens

    def _finish_turn(self, now_ns: Nanoseconds, command: c.FinishTurn) -> None:
        turn = self._forget_turn(command.turn)
        if turn is not None:
            row = TurnRow(
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
            self._rows.append(row)
            if self.meters is not None and not self._recalling:
                self.meters.finished(row, turn.sent_ns, turn.max_tokens)

    def _forget_turn(self, name: TurnId) -> _TurnProgress | None:
        turn = self._turns.pop(name, None)
        if turn is not None:
            turn.count(turn.tokens)
        return turn

    def _start_group(self, _: Nanoseconds, command: c.StartGroup) -> None:
        self._members[command.group] = command.trajectories
        self._environments[command.group] = command.environment
        for trajectory in command.trajectories:
            self._trajectories[trajectory] = _Trajectory()

    def _refill(self, _: Nanoseconds, command: c.RefillMember) -> None:
        """The replaced member is its group's no more, whose lengths are those of as many as it was launched with."""
        group = group_of(command.trajectory)
        stayed = (trajectory for trajectory in self._members[group] if trajectory != command.replaces)
        self._members[group] = (*stayed, command.trajectory)
        self._forget_member(command.replaces)
        self._trajectories[command.trajectory] = _Trajectory()

    def _forget_member(self, trajectory: TrajectoryId) -> None:
        self._unscored.pop(trajectory, None)
        self._turns.pop(self._trajectories.pop(trajectory).turn or "", None)

    def _cancel(self, now_ns: Nanoseconds, command: c.CancelTrajectory) -> None:
        trajectory = self._trajectories.get(command.trajectory)
        if trajectory is None:
            return
        if trajectory.turn is not None:
            self._forget_turn(trajectory.turn)
        if command.cause == CUT_OFF:
            self.cut_tokens[self._environments.get(group_of(command.trajectory), "")] += trajectory.accepted.total()
            row = self._take_unscored(command.trajectory) if command.trajectory in self._unscored else None
            if row is not None:
                self._rows.append(msgspec.structs.replace(row, ended_ns=now_ns, cause=command.cause))

    def _record_reward(self, now_ns: Nanoseconds, command: c.RecordReward) -> None:
        self._count_end(command.trajectory, command.reward)
        if (row := self._take_unscored(command.trajectory)) is not None:
            self._rows.append(msgspec.structs.replace(row, ended_ns=now_ns, reward=command.reward, cause=command.cause))

    def _take_unscored(self, trajectory: TrajectoryId) -> TrajectoryRow | None:
        """The row of a trajectory that waits for its score no more."""
        row = self._unscored.pop(trajectory, None)
        if row is None and self._stored is not None and not self._recalling:
            return self._stored(trajectory)
        return row

    def _group_over(self, now_ns: Nanoseconds, command: c.TrainGroup | c.DropGroup, dropped: str) -> None:
        """Record the end of a group, with the length of each member so far and the age of its tokens."""
        if is_evaluated(command.group):
            self._forget_members(command.group)
            return
        version = self._scheduler.version or 0
        known = [self._trajectories[t] for t in command.trajectories if t in self._trajectories]
        for trajectory in known:
            if (turn := self._turns.get(trajectory.turn or "")) is not None:
                turn.count(turn.tokens)
        members = [trajectory.accepted for trajectory in known]
        oldest = command.oldest_version if isinstance(command, c.TrainGroup) else 0
        ages, masked = Counter[int](), 0
        for tokens in members:
            for of_version, count in tokens.items():
                if of_version < oldest:
                    masked += count
                else:
                    ages[version - of_version] += count
        row = GroupRow(
            group=command.group,
            t_ns=now_ns,
            step=command.step,
            version=version,
            dropped=dropped,
            lengths=[tokens.total() for tokens in members],
            tokens_by_age=dict(ages),
            masked_tokens=masked,
            environment=self._environments.pop(command.group, ""),
        )
        if (counts := self._counts_of(row.environment)) is not None:
            counts.groups_dropped += bool(dropped)
            counts.groups_trained += not dropped
        self._rows.append(row)
        if not dropped:
            self._trained[row.group] = row
        self._forget_members(command.group)

    def _forget_members(self, group: str) -> None:
        self._environments.pop(group, None)
        for trajectory in self._members.pop(group, ()):
            self._forget_member(trajectory)

    def _count_end(self, trajectory: TrajectoryId, reward: float | None) -> None:
        """Count it among those of the step; what is evaluated is none of them."""
        if is_evaluated(trajectory):
            return
        if reward is not None:
            self.rewards.append(reward)
        if (counts := self._counts_of(self._environments.get(group_of(trajectory), ""))) is not None:
            if reward is None:
                counts.failed += 1
            else:
                counts.rewards.append(reward)

    def _counts_of(self, environment: str) -> "_StepCounts | None":
        several = len(self._scheduler.plan.environments) > 1
        return self._step_of.setdefault(environment, _StepCounts()) if several and environment else None

    def _row(
        self, trajectory: TrajectoryId, now_ns: Nanoseconds, ended: Ended, reward: float | None, cause: str
    ) -> TrajectoryRow:
        sampled, group = ended.sampled, group_of(trajectory)
        kind = EvaluatedRow if is_evaluated(trajectory) else TrajectoryRow
        return kind(
            trajectory=trajectory,
            step=parse_trajectory(trajectory).step,
            group=group,
            started_ns=ended.started_ns,
            ended_ns=now_ns,
            reward=reward,
            cause=cause,
            turns=ended.turns,
            policy_tokens=ended.policy_tokens,
            token_ids=bytes(ended.token_ids),
            truncated=ended.truncated,
            sampled=b"" if sampled is None else msgspec.msgpack.encode(sampled),
            branches=msgspec.msgpack.encode(ended.branches) if ended.branches else b"",
            task=ended.task,
            metrics=msgspec.msgpack.encode(ended.metrics) if ended.metrics else b"",
            environment=self._environments.get(group, ""),
        )

    def _count(self, provider: str) -> ProviderStatus:
        return self.counts.setdefault(provider, ProviderStatus())
