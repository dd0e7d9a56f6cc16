"""A run's scribe: turns what happens into rows of the journal, and counts what the run's status shows."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from elastic.core import commands as c
from elastic.core import events as e
from elastic.core.scheduler import Scheduler
from elastic.core.types import EndCause, Nanoseconds, TrajectoryId, TurnId, TurnState, WorkerId
from elastic.runtime.journal import Journal
from elastic.runtime.status import ProviderStatus, success_rate
from functions.base import Call


class NullJournal:
    """Keeps nothing. Of a run without a journal the scribe counts tokens and leases, and no rewards."""

    def _forget(self, *_: Any, **__: Any) -> None:
        return None

    event = frame = turn = move = trajectory = group = unusable = step = pull = call = _forget


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

    Payloads: the chunks of `TokensReceived` (None where nobody knows token ids), the `WeightsReport` of
    `WeightsApplied` and `WeightsFailed`, the trainer's metrics of `WeightsPublished`, and the trajectory (`Ended`)
    of the events that end one.
    """

    def __init__(self, scheduler: Scheduler, journal: Journal | NullJournal) -> None:
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
        self._unpublished: dict[int, tuple[int, Nanoseconds, dict[str, Any]]] = {}
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
        if isinstance(event, e.TokensReceived) and payload is not None:
            self._journal.frame(event.worker, event.epoch, payload, now_ns)
            return
        self._journal.event(event, now_ns)
        note = self._on_event.get(type(event))
        if note is not None:
            note(now_ns, event, payload)

    def decided(self, now_ns: Nanoseconds, event: e.Event, payload: Any, commands: Sequence[c.Command]) -> None:
        for command in commands:
            if type(command) is c.AcceptTokens:
                assert isinstance(event, e.TokensReceived)
                self._accept(now_ns, event, command)
            elif (note := self._on_command.get(type(command))) is not None:
                note(now_ns, command)
        if type(event) is e.WeightsPublished:
            self._stepped(now_ns, event.version, payload or {})

    def durable(self) -> None:
        pass

    def called(self, now_ns: Nanoseconds, call: Call) -> None:
        """A function has been called."""
        self.function_usd += call.usd
        self._journal.call(now_ns, *msgspec.structs.astuple(call))

    def published(self, version: int, changed: dict[str, float], metrics: dict[str, float]) -> None:
        """Complete the account of the step that the version is of."""
        if (step := self._unpublished.pop(version, None)) is not None:
            number, t_ns, body = step
            weights = {"version": version, "changed": changed}
            self._journal.step(number, t_ns, body | {"trainer": body["trainer"] | metrics, "weights": weights})

    def unusable(self, group: str, reason: str) -> None:
        """The trainer got no usable gradient from a group that it was told to train on."""
        self._journal.unusable(group, reason)

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
            self._journal.pull(
                now_ns,
                event.worker,
                report.version,
                report.pulled_bytes,
                report.pull_s,
                report.apply_s,
                report.error,
                full_bytes=report.full_bytes,
                split_s=report.split_s,
                refused=report.refused,
            )

    def _reward_requested(self, _: Nanoseconds, event: e.RewardRequested, ended: Ended) -> None:
        trajectory = self._trajectories.get(event.trajectory)
        if trajectory is not None:
            trajectory.ended = ended

    def _trajectory_ended(
        self, now_ns: Nanoseconds, trajectory: TrajectoryId, ended: Ended, reward: float | None, cause: str = ""
    ) -> None:
        group = trajectory.rpartition("/")[0]
        if reward is not None:
            self.rewards.append(reward)
        self._journal.trajectory(
            trajectory,
            int(group.partition("/")[0]),
            group,
            ended.started_ns,
            now_ns,
            reward,
            cause,
            ended.turns,
            ended.policy_tokens,
            msgspec.msgpack.encode(ended.token_ids),
            truncated=ended.truncated,
        )

    def _stepped(self, now_ns: Nanoseconds, version: int, metrics: dict[str, float]) -> None:
        history = self._scheduler.history
        if len(history) == self._steps:
            return
        self._steps = len(history)
        self.last_success_rate = success_rate(self.rewards)
        body = {key: getattr(history[-1], key) for key in history[-1].__struct_fields__}
        body |= {"success_rate": self.last_success_rate, "trainer": metrics}
        self._unpublished[version] = history[-1].step, now_ns, body
        self._journal.step(*self._unpublished[version])
        self.rewards = []

    # Commands

    def _start_turn(self, now_ns: Nanoseconds, command: c.StartTurn) -> None:
        turn = self._turns.get(command.turn)
        if turn is None:
            return
        if turn.attempts and (left_ns := self._left_ns(turn.id)) is not None:
            self._journal.move(turn.id, command.attempt, turn.worker, command.worker, left_ns, now_ns, command.start)
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
            self._journal.turn(
                turn.id,
                turn.trajectory,
                turn.requested_ns,
                turn.first_token_ns,
                now_ns,
                turn.prompt_tokens,
                turn.tokens,
                turn.attempts,
                turn.cached_tokens,
                turn.worker,
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
        lengths = [tokens.total() for tokens in members]
        ages = Counter[int]()
        for tokens in members:
            for of_version, count in tokens.items():
                ages[version - of_version] += count
        body = {"lengths": lengths, "tokens_by_age": ages}
        self._journal.group(now_ns, command.group, command.step, version, dropped, body)
        for trajectory in self._members.pop(command.group, ()):
            self._turns.pop(self._trajectories.pop(trajectory).turn or "", None)

    def _count(self, provider: str) -> ProviderStatus:
        return self.counts.setdefault(provider, ProviderStatus())
