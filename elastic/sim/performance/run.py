"""One run on virtual time: the real core, with everything around it modelled.

Commands are carried out by models of workers, providers, environments and the trainer; what comes of them returns
as events when its time has passed. Nothing here decides anything that the core decides live.
"""

import contextlib
import gc
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from elastic.core import commands as c
from elastic.core import events as e
from elastic.core.scheduler import Scheduler
from elastic.core.types import (
    NS_PER_S,
    EndCause,
    FinishReason,
    LeaseId,
    Nanoseconds,
    TrajectoryId,
    TurnId,
    WeightMode,
    WorkerId,
    WorkerRole,
)
from elastic.sim.alarm import Alarm
from elastic.sim.loop import EventLoop
from elastic.sim.performance.engine import Job
from elastic.sim.performance.episodes import Episode, Episodes
from elastic.sim.performance.lending import LentShare
from elastic.sim.performance.markets import Market, TrainerMarket, market_of
from elastic.sim.performance.profile import Device
from elastic.sim.performance.relay import Relay
from elastic.sim.performance.truth import Acts
from elastic.sim.performance.worker import WorkerModel
from providers.base import ProviderSettings

_DEPARTURES = (e.LeaseEnded, e.WorkerDisconnected)
PATIENCE = 4
"""Times the longest that the core waits for anything: if nothing has come of the run by then, nothing will."""
WAITS_NAMED = 8
COLLECTED_AFTER = 100_000
"""Objects made before the collector looks for cycles among them: there are next to none, so looking is a waste."""
_GIVEN_UP = (FinishReason.ABORTED, FinishReason.STALLED, FinishReason.ERROR)


class SimulationError(Exception):
    """The simulated run cannot come to its end; the message says what it waits for."""


class Chronicle(Protocol):
    """Who writes down what happens; the live journal has these methods."""

    def event(self, event: e.Event, t_ns: Nanoseconds) -> None: ...

    def turn(self, *row: Any) -> None: ...

    def move(self, *row: Any) -> None: ...

    def trajectory(self, *row: Any) -> None: ...

    def step(self, step: int, t_ns: Nanoseconds, body: dict[str, Any]) -> None: ...

    def pull(self, *row: Any) -> None: ...

    def call(self, *row: Any) -> None: ...


class Silence:
    """A chronicle that keeps nothing."""

    def _forget(self, *_: Any, **__: Any) -> None:
        return None

    event = turn = move = trajectory = step = pull = call = _forget


@dataclass(slots=True)
class Spending:
    """What one provider's workers have done so far."""

    tokens: int = 0
    leases_ended: int = 0
    preemptions: int = 0


@dataclass(slots=True)
class _Running:
    """A trajectory under way: how far it has come in its episode."""

    episode: Episode
    group: str
    started_ns: Nanoseconds
    turns: int = 0
    context: int = 0
    policy_tokens: int = 0


@dataclass(slots=True)
class _OpenTurn:
    id: TurnId
    trajectory: TrajectoryId
    running: _Running
    prompt: int
    length: int
    requested_ns: Nanoseconds
    tokens: int = 0
    first_token_ns: Nanoseconds | None = None
    attempts: int = 0
    cached_tokens: int = 0
    job: Job | None = None
    worker: WorkerId = ""
    left_ns: Nanoseconds | None = None


@dataclass(frozen=True, slots=True)
class RunSettings:
    """What a live run takes from its configuration outside of the core; times in nanoseconds."""

    heartbeat_ns: Nanoseconds
    flush_ns: Nanoseconds
    max_tokens_per_turn: int
    horizon_ns: Nanoseconds
    weight_mode: WeightMode = WeightMode.FINISH
    scored_by_function: bool = False
    reward_s: float = 0.0
    reward_usd: float = 0.0
    environments_take_time: bool = True
    """Besides the latencies of their turns."""


class SimulatedRun:
    """`live` runs to the end. `providers` are the live ones' settings by name; `trainer` those of its device.

    `devices` has what the workers of each are, the trainer's among them: its profile is also that of what there is once
    in a run, such as environments and the relay.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        settings: RunSettings,
        devices: Mapping[str, Device],
        trainer: ProviderSettings,
        providers: Mapping[str, ProviderSettings],
        episodes: Episodes,
        chronicle: Chronicle,
    ) -> None:
        self._trainer_provider = scheduler.plan.trainer_provider
        profile = devices[self._trainer_provider].profile
        self.loop = EventLoop()
        self.scheduler = scheduler
        self.relay = Relay(self.loop, profile)
        self.heartbeat_ns = settings.heartbeat_ns
        self.flush_ns = settings.flush_ns
        self.weight_mode = settings.weight_mode
        self.message_ns = round(profile.message_s * NS_PER_S)
        self.spending: dict[str, Spending] = {}
        self.rewards: list[float] = []
        self.last_success: float | None = None
        self.events = 0
        self.function_usd = 0.0
        self.failed = ""
        self.acts = Acts()
        self._settings = settings
        self.episodes = episodes
        self._chronicle = chronicle
        self._profile = profile
        own = settings.environments_take_time
        self._reset_s, self._step_s = (profile.reset_s, profile.step_s) if own else (0.0, 0.0)
        self._train_tokens_per_s = profile.train_tokens_per_s * trainer.gpus_per_worker
        name = self._trainer_provider
        self.markets: dict[str, Market] = {name: TrainerMarket(name, trainer, devices[name], self)}
        self.markets |= {name: market_of(name, s, devices[name], self) for name, s in providers.items()}
        self._workers: dict[WorkerId, WorkerModel] = {}
        self._market_of: dict[LeaseId, Market] = {}
        self._epochs: dict[WorkerId, int] = {}
        self._refused: set[WorkerId] = set()
        self._turns: dict[TurnId, _OpenTurn] = {}
        self._running: dict[TrajectoryId, _Running] = {}
        self._finished: dict[TrajectoryId, _Running] = {}
        self._environment_free_ns: Nanoseconds = 0
        self._trained_version = 0
        self._inbox: deque[e.Event] = deque()
        self._handling = False
        self._alarm = Alarm(self.loop, scheduler.next_wakeup_ns, lambda: self.feed(e.Tick()))
        self._over = False
        self._busy_until_ns: Nanoseconds = 0
        """Until when something is known to go on: the trainer, an environment; or the last token's time."""
        self._patience_ns = PATIENCE * max(
            getattr(scheduler.limits, limit) for limit in scheduler.limits.__struct_fields__ if limit.endswith("_ns")
        )
        self._execute: dict[type[c.Command], Callable[[Any], None]] = {
            c.AcquireLease: self._acquire_lease,
            c.ReleaseLease: lambda k: self.markets[k.provider].release(k.lease),
            c.StartTurn: self._start_turn,
            c.FinishTurn: self._finish_turn,
            c.FailTurn: self._fail_turn,
            c.FenceWorker: lambda k: self._refused.add(k.worker),
            c.BarLease: lambda _: None,
            c.StartGroup: self._start_group,
            c.CancelTrajectory: self._cancel,
            c.ScoreTrajectory: self._score,
            c.RecordReward: self._record_reward,
            c.TrainGroup: self._train_group,
            c.DropGroup: self._drop_group,
            c.UpdateWeights: self._update_weights,
            c.EndRun: self._end_run,
        }

    # The whole

    def live(self, *, sample: Callable[[], None] = lambda: None, sample_ns: Nanoseconds = NS_PER_S // 2) -> str:
        """Run to the end; returns the cause of failure, empty if there is none. Raises `SimulationError`."""
        for market in self.markets.values():
            self.loop.after(0, market.start)
        self._sample_every(sample, sample_ns, 0)
        with _rare_collections():
            self.loop.run(self._settings.horizon_ns)
        if not self._over:
            self._give_up(f"no end within {self._settings.horizon_ns / NS_PER_S:g} s of virtual time")
        return self.failed

    def _give_up(self, found: str) -> None:
        waits = sorted(self.scheduler.timers.waits(), key=lambda wait: wait.since_ns)
        named = [f"{wait.what} of {wait.key} since {wait.since_ns / NS_PER_S:.1f} s" for wait in waits[:WAITS_NAMED]]
        more = f", and {len(waits) - WAITS_NAMED} more" if len(waits) > WAITS_NAMED else ""
        raise SimulationError(f"{found}; the run waits for: {', '.join(named) or 'nothing'}{more}")

    def _check_progress(self) -> None:
        """A run that only repeats itself would go on like that for ever."""
        if self.loop.now_ns - self._busy_until_ns > self._patience_ns:
            since_s = self._busy_until_ns / NS_PER_S
            self._give_up(f"nothing has come of the run since {since_s:.1f} s: no token, and nothing trained")

    def _busy(self, until_ns: Nanoseconds) -> None:
        if until_ns > self._busy_until_ns:
            self._busy_until_ns = until_ns

    def stop(self, reason: str) -> None:
        """From within `sample`: give everything back and end."""
        self.feed(e.StopRequested(reason=reason))

    def _sample_every(self, sample: Callable[[], None], interval_ns: Nanoseconds, taken: int) -> None:
        """Half as often after each thousand, so that long runs do not drown in samples."""

        def take() -> None:
            sample()
            self._check_progress()
            self._sample_every(sample, interval_ns * (1 + ((taken + 1) % 1000 == 0)), taken + 1)

        self.loop.after(interval_ns, take)

    # To and from the core

    def tell(self, event: e.Event) -> None:
        self.loop.after(self.message_ns, partial(self.feed, event))

    def feed(self, event: e.Event) -> None:
        """The event reaches the core now, or after the one that is being handled."""
        if self._handling:
            self._inbox.append(event)
            return
        self._handling = True
        try:
            self._handle(event)
            while self._inbox:
                self._handle(self._inbox.popleft())
        finally:
            self._handling = False
        self._alarm.arm()

    def _handle(self, event: e.Event) -> None:
        now_ns = self.loop.now_ns
        self.events += 1
        self._chronicle.event(event, now_ns)
        if isinstance(event, _DEPARTURES):
            self._note_departure(event)
        for command in self.scheduler.handle(event, now_ns):
            self.acts.note(command, self._workers, self.scheduler)
            execute = self._execute.get(type(command))
            if execute is not None:
                execute(command)
            elif isinstance(command, c.AcceptTokens):
                assert isinstance(event, e.TokensReceived)
                self._accept(event, command)
            else:
                worker = self._workers.get(getattr(command, "worker", ""))
                if worker is not None:
                    worker.hear(command)

    # What workers and providers see

    def worker(self, worker: WorkerId) -> WorkerModel:
        return self._workers[worker]

    def next_epoch(self, worker: WorkerId) -> int | None:
        if worker in self._refused:
            return None
        self._epochs[worker] = self._epochs.get(worker, 0) + 1
        return self._epochs[worker]

    def job(self, command: c.StartTurn) -> Job | None:
        turn = self._turns.get(command.turn)
        if turn is None:
            return None
        turn.job = Job(
            turn.id,
            command.attempt,
            turn.trajectory,
            turn.running.group,
            turn.prompt,
            command.start,
            turn.length,
            self._settings.max_tokens_per_turn,
            turn.running.episode.turns[0].observation_tokens,
            command.recompute,
        )
        return turn.job

    def note_pull(self, worker: WorkerId, version: int, size_bytes: int, pull_ns: int, apply_ns: int) -> None:
        self._chronicle.pull(self.loop.now_ns, worker, version, size_bytes, pull_ns / NS_PER_S, apply_ns / NS_PER_S, "")

    def boot_worker(
        self, worker: WorkerId, lease: LeaseId, role: WorkerRole, boot_ns: Nanoseconds, share: LentShare | None
    ) -> None:
        device = self._market_of[lease].device
        born = self._workers[worker] = WorkerModel(self, worker, lease, role, device, share)
        version = self._trained_version if role is WorkerRole.TRAINER else None
        self.loop.after(boot_ns, lambda: born.join(version))

    def kill_worker(self, worker: WorkerId) -> None:
        killed = self._workers.pop(worker, None)
        if killed is not None:
            killed.die()

    def worker_left(self, worker: WorkerId) -> None:
        left = self._workers.pop(worker, None)
        if left is not None:
            self._market_of[left.lease].worker_left(left.lease, worker)

    def _acquire_lease(self, command: c.AcquireLease) -> None:
        market = self._market_of[command.lease] = self.markets[command.provider]
        market.acquire(command.lease)

    # Turns

    def _start_turn(self, command: c.StartTurn) -> None:
        turn = self._turns.get(command.turn)
        if turn is None:
            return
        if turn.left_ns is not None:
            self._chronicle.move(
                turn.id, command.attempt, turn.worker, command.worker, turn.left_ns, self.loop.now_ns, command.start
            )
            turn.left_ns = None
        turn.attempts, turn.worker = command.attempt, command.worker
        worker = self._workers.get(command.worker)
        if worker is not None:
            worker.hear(command)

    def _accept(self, event: e.TokensReceived, command: c.AcceptTokens) -> None:
        tokens = 0
        for position in command.chunks:
            chunk = event.chunks[position]
            turn = self._turns.get(chunk.turn)
            if turn is None:
                continue
            tokens += chunk.count
            turn.tokens += chunk.count
            if turn.first_token_ns is None and chunk.count:
                turn.first_token_ns = self.loop.now_ns
            if chunk.prefilled and turn.job is not None:
                turn.cached_tokens += turn.job.cached
            if chunk.finish is not None and chunk.finish in _GIVEN_UP:
                turn.left_ns = self.loop.now_ns
        worker = self.scheduler.fleet.workers.get(event.worker)
        if worker is not None:
            self.spent(worker.provider).tokens += tokens
        if tokens:
            self._busy(self.loop.now_ns)

    def spent(self, provider: str) -> Spending:
        return self.spending.setdefault(provider, Spending())

    def _note_departure(self, event: e.LeaseEnded | e.WorkerDisconnected) -> None:
        if isinstance(event, e.LeaseEnded):
            lease = self.scheduler.leases.leases.get(event.lease)
            if lease is None:
                return
            spent = self.spent(lease.provider)
            spent.leases_ended += 1
            spent.preemptions += event.cause is EndCause.PREEMPTED
            workers = tuple(lease.workers)
        else:
            workers = (event.worker,)
        for worker in workers:
            record = self.scheduler.fleet.workers.get(worker)
            for turn_id in record.turns if record is not None else ():
                if turn_id in self._turns:
                    self._turns[turn_id].left_ns = self.loop.now_ns

    # Environments

    def _start_group(self, command: c.StartGroup) -> None:
        for trajectory in command.trajectories:
            self._running[trajectory] = _Running(self.episodes.episode(trajectory), command.group, self.loop.now_ns)
            self._environment(self._reset_s, trajectory)

    def _environment(self, work_s: float, trajectory: TrajectoryId) -> None:
        """The environment works, and the turn's own latency passes; then the next turn is asked for."""
        begin_ns = self.loop.now_ns
        work_ns = round(work_s * NS_PER_S)
        if self._profile.environment_serial:
            begin_ns = max(begin_ns, self._environment_free_ns)
            self._environment_free_ns = begin_ns + work_ns
        running = self._running[trajectory]
        turns = running.episode.turns
        latency_s = turns[running.turns].latency_s if running.turns < len(turns) else 0.0
        at_ns = begin_ns + work_ns + round(latency_s * NS_PER_S)
        self._busy(at_ns)
        self.loop.at(at_ns, partial(self._go_on, trajectory))

    def _go_on(self, trajectory: TrajectoryId) -> None:
        running = self._running.get(trajectory)
        if running is None:
            return
        turns = running.episode.turns
        if running.turns >= len(turns):
            self._ends(trajectory, running)
            return
        shape = turns[running.turns]
        running.context += shape.observation_tokens
        turn_id = f"{trajectory}/{running.turns}"
        self._turns[turn_id] = _OpenTurn(turn_id, trajectory, running, running.context, shape.tokens, self.loop.now_ns)
        self.feed(
            e.TurnRequested(
                turn=turn_id,
                trajectory=trajectory,
                prompt_tokens=running.context,
                max_new_tokens=self._settings.max_tokens_per_turn,
                tag=running.episode.tag,
            )
        )

    def _finish_turn(self, command: c.FinishTurn) -> None:
        turn = self._turns.pop(command.turn, None)
        if turn is None:
            return
        self._chronicle.turn(
            turn.id,
            turn.trajectory,
            turn.requested_ns,
            turn.first_token_ns,
            self.loop.now_ns,
            turn.prompt,
            turn.tokens,
            turn.attempts,
            turn.cached_tokens,
            turn.worker,
        )
        running = self._running.get(turn.trajectory)
        if running is not None:
            running.turns += 1
            running.context += turn.tokens
            running.policy_tokens += turn.tokens
            self._environment(self._step_s, turn.trajectory)

    def _fail_turn(self, command: c.FailTurn) -> None:
        turn = self._turns.pop(command.turn, None)
        running = self._running.pop(turn.trajectory, None) if turn is not None else None
        if turn is not None and running is not None:
            self._ended(turn.trajectory, running, command.cause)
            self.feed(e.TrajectoryFailed(trajectory=turn.trajectory, cause=command.cause))

    def _cancel(self, command: c.CancelTrajectory) -> None:
        running = self._running.pop(command.trajectory, None)
        if running is not None:
            self._turns.pop(f"{command.trajectory}/{running.turns}", None)

    def _ends(self, trajectory: TrajectoryId, running: _Running) -> None:
        del self._running[trajectory]
        self._finished[trajectory] = running
        if self._settings.scored_by_function:
            self.feed(e.RewardRequested(trajectory=trajectory, tokens=running.policy_tokens))
        else:
            reward = running.episode.reward
            self._ended(trajectory, running, "")
            self.feed(e.TrajectoryFinished(trajectory=trajectory, reward=reward, tokens=running.policy_tokens))

    def _score(self, command: c.ScoreTrajectory) -> None:
        running = self._finished[command.trajectory]
        answer = e.RewardScored(trajectory=command.trajectory, attempt=command.attempt, reward=running.episode.reward)
        took_s = self._settings.reward_s
        self.function_usd += self._settings.reward_usd

        def answered() -> None:
            row = ("reward", command.trajectory, "ok", 0.0, 0.0, took_s, self._settings.reward_usd)
            self._chronicle.call(self.loop.now_ns, *row)
            self.feed(answer)

        self.loop.after(round(took_s * NS_PER_S), answered)

    def _record_reward(self, command: c.RecordReward) -> None:
        running = self._finished.get(command.trajectory)
        if running is not None:
            self._ended(command.trajectory, running, command.cause)

    def _ended(self, trajectory: TrajectoryId, running: _Running, cause: str) -> None:
        step, group, _ = trajectory.split("/")
        if not cause:
            self.rewards.append(running.episode.reward)
        self._chronicle.trajectory(
            trajectory,
            int(step),
            f"{step}/{group}",
            running.started_ns,
            self.loop.now_ns,
            None if cause else running.episode.reward,
            cause,
            running.turns,
            running.policy_tokens,
            b"\x90",
        )

    # The trainer

    def _on_trainer(self, work_s: float, then: Callable[[WorkerModel], None]) -> None:
        record = self.scheduler.trainer()
        trainer = self._workers.get(record.id) if record is not None else None
        if trainer is not None:
            work_ns = round(work_s * NS_PER_S)
            self._busy(self.loop.now_ns + work_ns)
            trainer.train(work_ns, lambda: then(trainer))

    def _train_group(self, command: c.TrainGroup) -> None:
        members = [self._finished.pop(trajectory) for trajectory in command.trajectories]
        tokens = sum(member.context for member in members)
        work_s = self._profile.train_group_s + tokens / self._train_tokens_per_s
        self._on_trainer(work_s, lambda t: self.tell(e.GroupTrained(worker=t.id, epoch=t.epoch, group=command.group)))

    def _drop_group(self, command: c.DropGroup) -> None:
        step = self.scheduler.step
        for trajectory in step.groups[command.group].members if step is not None else ():
            self._finished.pop(trajectory, None)

    def _update_weights(self, command: c.UpdateWeights) -> None:
        def publish(trainer: WorkerModel) -> None:
            self._trained_version = command.version
            assert trainer.engine is not None
            trainer.engine.use_version(command.version)
            self.loop.after(self.message_ns, lambda: self._published(trainer, command))

        self._on_trainer(self._profile.update_s, publish)

    def _published(self, trainer: WorkerModel, command: c.UpdateWeights) -> None:
        self.feed(e.WeightsPublished(worker=trainer.id, epoch=trainer.epoch, version=command.version))
        if self.scheduler.history:
            self.last_success = sum(self.rewards) / len(self.rewards) if self.rewards else None
            record = self.scheduler.history[-1]
            body = {field: getattr(record, field) for field in record.__struct_fields__}
            body |= {"success_rate": self.last_success, "trainer": {}}
            self._chronicle.step(command.step, self.loop.now_ns, body)
            self.rewards = []

    def _end_run(self, command: c.EndRun) -> None:
        self.failed = command.failed
        self._over = True
        self.loop.stop()


@contextlib.contextmanager
def _rare_collections() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(COLLECTED_AFTER, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
