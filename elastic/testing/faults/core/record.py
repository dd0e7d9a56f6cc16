"""The world's own record of what happened. It shows what the core's state alone cannot (invariants 1–3, 5, 7, 8)."""

import math
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace

from elastic.core import commands as c
from elastic.core import events as e
from elastic.core.fleet import Worker
from elastic.core.ids import group_of, is_evaluated, parse_trajectory, parse_turn
from elastic.core.types import FinishReason, LeaseId, Nanoseconds, Plan, TrajectoryId, TurnId, WorkerId, WorkerRole


class RecordViolated(AssertionError):
    """A command of the core contradicts the world's own record of what has happened."""


@dataclass(slots=True)
class Generated:
    """What a worker generated under one attempt: positions `start` to `end`."""

    worker: WorkerId
    start: int
    end: int


class RunRecord:
    """What happened in a run: accepted positions by turn, attempts ordered and generated, leases, rewards and
    trainings.

    It covers all incarnations of the orchestrator, as far as their journals go. It begins at `version`; `trained` maps
    the trajectories behind that version to their steps.
    """

    def __init__(
        self, plan: Plan, version: int, trained: Mapping[TrajectoryId, int], back_off_ns: Nanoseconds = 0
    ) -> None:
        """`back_off_ns`: how long a worker is at least left alone with a turn that it has given back."""
        self.plan = plan
        self.back_off_ns = back_off_ns
        self.version = version
        self._order: c.TrainGroup | c.UpdateWeights | None = None
        self.oldest: dict[TrajectoryId, int] = {}
        self.newest: dict[TrajectoryId, int] = {}
        self.masked: set[TrajectoryId] = set()
        """Trajectories that were trained without their oldest tokens."""
        self.accepted: dict[TurnId, int] = {}
        self.finished: set[TurnId] = set()
        self.failed: dict[TrajectoryId, str] = {}
        """Trajectories of which a turn has failed for good, and why."""
        self.unscored: dict[TrajectoryId, str] = {}
        """Trajectories that no function could score, and why."""
        self.replaced: dict[TrajectoryId, TrajectoryId] = {}
        """Trajectories in whose place another one came, with that one."""
        self._times_refilled: dict[TrajectoryId, int] = {}
        """By member, how often its place has been refilled."""
        self._sizes: dict[str, int] = {}
        """With how many members each group was launched."""
        self._members: set[TrajectoryId] = set()
        """All that were ever started."""
        self.granted: dict[LeaseId, Nanoseconds | None] = {}
        self.ended: set[LeaseId] = set()
        self.refused: set[WorkerId] = set()
        """Workers that were fenced."""
        self.lease_of: dict[WorkerId, LeaseId] = {}
        self.trained = dict(trained)
        self.rewards: dict[TrajectoryId, float] = {}
        self.evaluated: dict[int, c.EndEvaluation] = {}
        """By version."""
        self.run_ended: str | None = None
        self._commands: set[str] = set()
        self._caps: dict[str, int | None] = {}
        self._asked: dict[LeaseId, str] = {}
        """Leases that are asked for or held, by what the run was told of them, with their providers."""
        self._ordered: dict[tuple[TurnId, int], tuple[WorkerId, int]] = {}
        self._attempts: dict[TurnId, int] = {}
        self._slots: dict[tuple[WorkerId, int, int], tuple[TurnId, int]] = {}
        """The turns and attempts that workers were sent, by worker, epoch and slot."""
        self._generated: dict[tuple[TurnId, int], Generated] = {}
        self._called_back: set[tuple[TurnId, int]] = set()
        self._given_back: dict[tuple[TurnId, WorkerId], Nanoseconds] = {}
        """When a worker gave up a turn that it had not been asked to give up."""
        self._credits: dict[WorkerId, tuple[int, int]] = {}
        """Each worker's epoch, and how many turns it last said that it can hold."""

    def recall(self, former: "RunRecord") -> None:
        """Take over what workers generated before a crash, from the former record. Called before the journal is
        replayed."""
        self._generated = {attempt: replace(span) for attempt, span in former._generated.items()}

    def restore(self, former: "RunRecord") -> None:
        """Be as the former record was when the run's state was saved."""
        vars(self).update(vars(deepcopy(former)))

    def settle(self) -> None:
        """The journal has been told: attempts that it does not know never were, nor have they left tokens."""
        self._generated = {attempt: span for attempt, span in self._generated.items() if attempt in self._ordered}
        for turn, attempt in self._attempts.items():
            worker, start = self._ordered[turn, attempt]
            self._generated[turn, attempt] = Generated(worker, start, self.accepted.get(turn, 0))

    def require(self, holds: bool, found: str) -> None:
        if not holds:
            raise RecordViolated(found)

    def note_generated(self, worker: WorkerId, turn: TurnId, attempt: int, start: int, count: int) -> None:
        span = self._generated.setdefault((turn, attempt), Generated(worker, start, start))
        self.require(span.worker == worker and span.end == start, f"{worker} generates {turn} out of order")
        span.end += count

    def note_event(self, event: e.Event) -> None:
        if isinstance(event, e.LeaseGranted):
            self.granted.setdefault(event.lease, event.expires_at_ns)
            self.lease_of |= dict.fromkeys(event.workers, event.lease)
        elif isinstance(event, e.LeaseEnded):
            self.ended.add(event.lease)
            self._asked.pop(event.lease, None)
        elif isinstance(event, e.LeaseRefused) and event.lease not in self.granted:
            self._asked.pop(event.lease, None)
        elif isinstance(event, e.CapSet) and event.command not in self._commands:
            self._commands.add(event.command)
            self._caps[event.provider] = event.gpus
        elif isinstance(event, e.TrajectoryFinished | e.RewardScored):
            if math.isfinite(event.reward):  # Another may come late, of an attempt that was given up.
                self.rewards.setdefault(event.trajectory, event.reward)
        elif isinstance(event, e.WorkerJoined) and event.epoch > self._credits.get(event.worker, (0, 0))[0]:
            self._credits[event.worker] = (event.epoch, 0)
        elif isinstance(event, e.WorkerReported) and event.epoch == self._credits.get(event.worker, (0, 0))[0]:
            self._credits[event.worker] = (event.epoch, event.capacity_turns)

    def check_cap(self, provider: str, gpus_per_lease: int) -> None:
        """Another lease was asked for: with it, no more GPUs are held than the cap that is known (invariant 16)."""
        cap = self._caps.get(provider)
        gpus = gpus_per_lease * sum(of == provider for of in self._asked.values())
        self.require(cap is None or gpus <= cap, f"{gpus} GPUs of {provider} with what was asked for, capped at {cap}")

    def check_credits(self, command: c.StartTurn, holding: int) -> None:
        """A worker that holds so many turns is given no more than it has said that it can take (invariant 8)."""
        epoch, credit = self._credits[command.worker]
        self.require(command.epoch == epoch and holding <= credit, f"{command}: it holds {holding}, can hold {credit}")

    def check_weights(self, workers: Iterable[Worker], verified: Mapping[WorkerId, set[int]]) -> None:
        """The core takes workers to serve versions only that they have held against the manifest (invariant 10)."""
        for worker in workers:
            checked = worker.role is WorkerRole.TRAINER or worker.version in (None, *verified.get(worker.id, ()))
            self.require(checked, f"not checked against the manifest: {worker.id} version {worker.version}")

    def note_command(self, command: c.Command, event: e.Event, now_ns: Nanoseconds) -> None:
        self.require(self.run_ended is None, f"{command} after the end of the run")
        match command:
            case c.AcquireLease():
                self._asked[command.lease] = command.provider
            case c.StartTurn():
                self._started(command, now_ns)
            case c.AcceptTokens():
                assert isinstance(event, e.TokensReceived)
                self._accepted(command, event, now_ns)
            case c.AbortTurn():
                self._called_back.add((command.turn, command.attempt))
            case c.FinishTurn():
                self.require(command.turn not in self.finished, f"{command.turn} finished twice")
                self.finished.add(command.turn)
            case c.FailTurn():
                self.failed[parse_turn(command.turn)[0]] = command.cause
            case c.RecordReward() if command.reward is None:
                self.unscored[command.trajectory] = command.cause
            case c.StartGroup():
                self._sizes[command.group] = len(command.trajectories)
                self._members.update(command.trajectories)
            case c.RefillMember():
                self._refilled(command)
            case c.TrainGroup() | c.UpdateWeights():
                self._to_the_trainer(command, again=isinstance(event, e.WorkerSlept | e.PermitGranted))
            case c.EndEvaluation():
                self._evaluated(command)
            case c.FenceWorker():
                self.refused.add(command.worker)
            case c.EndRun():
                self.run_ended = command.failed
            case _:
                pass

    def check_end(self) -> None:
        """Everything that was acquired has been given back (invariant 7)."""
        left = set(self.granted) - self.ended
        self.require(not left, f"leases never ended: {sorted(left)}")

    def _live(self, worker: WorkerId, now_ns: Nanoseconds) -> bool:
        lease = self.lease_of[worker]
        expires_at_ns = self.granted[lease]
        return lease not in self.ended and (expires_at_ns is None or now_ns <= expires_at_ns)

    def _started(self, command: c.StartTurn, now_ns: Nanoseconds) -> None:
        turn, before = command.turn, self._attempts.get(command.turn, 0)
        self.require(command.attempt == before + 1, f"attempt {command.attempt} of {turn} after {before}")
        self.require(command.start == self.accepted.get(turn, 0), f"{turn} starts at {command.start}")
        self.require(self._live(command.worker, now_ns), f"{turn} goes to {command.worker}, whose lease has ended")
        self.require(turn not in self.finished, f"{turn} is finished and starts again")
        back_ns = self._given_back.get((turn, command.worker))
        rested = back_ns is None or now_ns - back_ns >= self.back_off_ns
        self.require(rested, f"{turn} goes back to {command.worker}, which gave it up at {back_ns}")
        self._attempts[turn] = command.attempt
        place = (command.worker, command.epoch, command.slot)
        self.require(place not in self._slots, f"{turn} is sent into slot {command.slot}, which was given before")
        self._slots[place] = turn, command.attempt
        self._ordered[turn, command.attempt] = (command.worker, command.start)

    def _accepted(self, command: c.AcceptTokens, event: e.TokensReceived, now_ns: Nanoseconds) -> None:
        self.require(self._live(event.worker, now_ns), f"accepted from {event.worker}, whose lease has ended")
        chunks = list(event.chunks)
        for turn, position in zip(command.turns, command.chunks, strict=True):
            chunk = chunks[position]
            attempt = self._slots.get((event.worker, event.epoch, chunk.slot), ("", 0))
            self.require(attempt in self._ordered and attempt in self._generated, f"{chunk} is not of this run")
            self.require(attempt[0] == turn, f"{chunk} is taken to be of {turn}, and is of {attempt[0]}")
            (worker, start), span = self._ordered[attempt], self._generated[attempt]
            self.require(worker == event.worker == span.worker, f"{chunk} is not {event.worker}'s")
            self.require(attempt[1] == self._attempts[turn], f"{chunk} is of a fenced attempt")
            self.require(turn not in self.finished, f"{chunk} of a finished turn")
            self.require(start <= chunk.start and chunk.start + chunk.count <= span.end, f"{chunk} was not generated")
            self.require(chunk.start == self.accepted.get(turn, 0), f"{chunk} leaves a gap or repeats")
            self.accepted[turn] = chunk.start + chunk.count
            if chunk.finish is FinishReason.STALLED and attempt not in self._called_back:
                self._given_back[turn, worker] = now_ns
            if chunk.count:
                trajectory = parse_turn(turn)[0]
                self.oldest[trajectory] = min(chunk.version, self.oldest.get(trajectory, chunk.version))
                self.newest[trajectory] = max(chunk.version, self.newest.get(trajectory, chunk.version))

    def _refilled(self, command: c.RefillMember) -> None:
        """A member is replaced once, by a new one of its group, and only if what is said to have failed it has."""
        failed, further = command.replaces, command.trajectory
        self.require(failed in self._members and group_of(failed) == group_of(further), f"{further} is no {failed}")
        self.require(further not in self._members, f"{further} is started twice")
        self.require(failed not in self.replaced, f"{failed} is replaced twice")
        told = self.failed.get(failed, ""), self.unscored.get(failed, "")
        self.require(any(cause.startswith(command.cause) for cause in told), f"{failed}: {command.cause}, not {told}")
        times = self._times_refilled[further] = 1 + self._times_refilled.get(failed, 0)
        self.require(times <= self.plan.refill_most, f"{further} comes into its place at time {times}")
        self.replaced[failed] = further
        self._members.add(further)

    def _evaluated(self, command: c.EndEvaluation) -> None:
        """A version is evaluated once, on its own tokens alone, and what is told of it is what its episodes came to."""
        found, version = command.record, command.record.version
        self.require(version == self.version, f"version {version} is evaluated at version {self.version}")
        self.require(version not in self.evaluated, f"version {version} is evaluated twice")
        self.evaluated[version] = command
        episodes = [name for name in self._members if is_evaluated(name) and parse_trajectory(name).step == version]
        others = {name for name in episodes if {self.oldest.get(name), self.newest.get(name)} - {None, version}}
        self.require(not others, f"{others} are evaluated with tokens of other versions than {version}")
        told = [reward for one in found.sets.values() for task in one.rewards for reward in task]
        assert self.plan.evaluation
        planned, begun = self.plan.evaluation.episodes, len(episodes)
        self.require(len(told) == planned, f"{len(told)} of {planned} episodes are told of")
        self.require(found.timed_out or begun == planned, f"{begun} of {planned} episodes have begun")
        known = sorted(self.rewards[name] for name in episodes if name in self.rewards)
        scored = sorted(reward for reward in told if reward is not None)
        self.require(found.timed_out or scored == known, f"scored {scored}, told {known}")
        cut_off = sum(one.cut_off for one in found.sets.values())
        self.require(found.timed_out is (cut_off > 0), f"{cut_off} episodes are cut off, in time: {found.timed_out}")

    def _to_the_trainer(self, command: c.TrainGroup | c.UpdateWeights, *, again: bool) -> None:
        """Checks orders to the trainer. One that has come back, or has its device again, gets its last order again."""
        if again and command == self._order:
            return
        self._order = command
        if isinstance(command, c.TrainGroup):
            self._trained(command)
        else:
            self.require(command.version == self.version + 1, f"version {command.version} after {self.version}")
            self.version = command.version

    def _trained(self, command: c.TrainGroup) -> None:
        self.require(command.step == self.version, f"{command.group} is trained in step {command.step}")
        allowed = {0, self.version - self.plan.staleness_bound} if self.plan.staleness_drop == "token" else {0}
        self.require(command.oldest_version in allowed, f"{command.group} without {command.oldest_version}")
        newest = [self.newest.get(trajectory, self.version) for trajectory in command.trajectories]
        self.require(max(newest) >= command.oldest_version, f"nothing is left of {command.group}")
        members = len(command.trajectories)
        self.require(members <= self._sizes[command.group], f"{command.group} is trained with {members} members")
        for trajectory in command.trajectories:
            self.require(not is_evaluated(trajectory), f"{trajectory} is evaluated, and trained on")
            self.require(trajectory in self._members, f"{trajectory} was never started")
            self.require(trajectory not in self.replaced, f"{trajectory} is trained, and so is who replaces it")
            self.require(trajectory not in self.trained, f"{trajectory} is trained twice")
            oldest = self.oldest.get(trajectory, self.version)
            if oldest < command.oldest_version:
                self.masked.add(trajectory)
            late = self.version - max(oldest, command.oldest_version)
            self.require(late <= self.plan.staleness_bound, f"{trajectory} is trained {late} versions late")
            self.require(math.isfinite(self.rewards.get(trajectory, math.nan)), f"{trajectory} has no reward")
            self.trained[trajectory] = command.step
