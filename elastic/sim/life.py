"""One life of a run's orchestrator: the core, and everything around it that dies when its process does.

Commands are carried out at once; what comes of them takes its time. A life that has crashed hears nothing more, and
nothing that it had decided and not yet done is done.
"""

from collections.abc import Callable, Sequence
from random import Random
from typing import Any, Protocol

import msgspec

from elastic.core import commands as c
from elastic.core import events as e
from elastic.core.digest import digest
from elastic.core.invariants import check
from elastic.core.policy import Policies
from elastic.core.scheduler import Phase, Scheduler
from elastic.core.types import LeaseId, Nanoseconds, TrajectoryId, TurnId, WorkerId, WorkerRole
from elastic.sim.alarm import Alarm
from elastic.sim.faults import NO_FAULTS, FaultPlan, Mishaps, Tally
from elastic.sim.loop import EventLoop
from elastic.sim.provider import SimulatedProvider
from elastic.sim.record import Record
from elastic.sim.rollouts import SimulatedRollouts
from elastic.sim.settings import MS, ProviderSettings, WorldSettings
from elastic.sim.worker import SimulatedWorker
from policies.balancing import ContinuousBalancing
from policies.provisioning import MarginalValue, TakeWhatIsOffered
from policies.routing import AffinityRouting
from policies.sampling import DynamicSampling, FixedBatch
from policies.seeding import AdaptiveWindow, FixedWindow
from policies.selection import NonZeroVariance
from policies.succession import EarlySuccessor

TRAINER = ProviderSettings(name="trainer", role=WorkerRole.TRAINER, leases=1, boot_ns=400 * MS, usd_per_gpu_hour=10.0)
REPLY_NS = 50 * MS
"""The longest that it takes from a checkpoint to the orchestrator's hearing of its version."""
_encode = msgspec.msgpack.Encoder().encode


def policies(settings: WorldSettings) -> Policies:
    return Policies(
        routing=AffinityRouting(),
        balancing=ContinuousBalancing() if settings.balancing else None,
        seeding=AdaptiveWindow(settings.seeding_ns) if settings.adaptive_seeding else FixedWindow(settings.seeding_ns),
        provisioning=MarginalValue() if settings.marginal_provisioning else TakeWhatIsOffered(),
        selection=NonZeroVariance(),
        succession=EarlySuccessor(),
        sampling=DynamicSampling(settings.dynamic_most) if settings.dynamic_most else FixedBatch(),
    )


def replayed(settings: WorldSettings, log: Sequence[tuple[Nanoseconds, e.Event]]) -> list[str]:
    """The digest after each recorded event, of a fresh scheduler that is told nothing else (invariant 13)."""
    scheduler = Scheduler(settings.plan, settings.limits, policies(settings), 0)
    found: list[str] = []
    for now_ns, event in log:
        scheduler.handle(event, now_ns)
        found.append(digest(scheduler))
    return found


class Outside(Protocol):
    """What outlives an orchestrator: time and chance, the plan of faults, and the trainer's checkpoint."""

    seed: int
    settings: WorldSettings
    faults: FaultPlan
    loop: EventLoop
    rng: Random
    tally: Tally
    checkpoint: int
    digesting: bool

    def note(self, happened: bytes) -> None:
        """Goes into the world's history."""
        ...


class Life:
    """The core's time begins with the life. `trained` are the trajectories that the checkpoint has learnt from."""

    def __init__(self, outside: Outside, trained: dict[TrajectoryId, int]) -> None:
        self.seed = outside.seed
        self.settings = outside.settings
        self.loop = outside.loop
        self.rng = outside.rng
        self.tally = outside.tally
        self.began_ns = outside.loop.now_ns
        self.first_version = outside.checkpoint
        self.crashed = False
        self.rewards_down_until_ns: Nanoseconds = 0
        self.scheduler = Scheduler(self.settings.plan, self.settings.limits, policies(self.settings), 0)
        self.record = Record(self.settings.plan.staleness_bound, self.first_version, trained)
        self.rollouts = SimulatedRollouts(self)
        self.workers: dict[WorkerId, SimulatedWorker] = {}
        self.providers = {p.name: SimulatedProvider(self, p) for p in (TRAINER, *self.settings.providers)}
        self.log: list[tuple[Nanoseconds, e.Event]] = []
        self.digests: list[str] = []
        self.committed = 0
        """How many events of the log the journal has for good."""
        self._outside = outside
        self._committed_digest = ""
        self._epochs: dict[WorkerId, int] = {}
        self._refused: set[WorkerId] = set()
        self._alarm = Alarm(
            self.loop, self.scheduler.next_wakeup_ns, lambda: self._handle(e.Tick()), began_ns=self.began_ns
        )
        self._execute: dict[type[c.Command], Callable[[Any], None]] = {
            c.AcquireLease: lambda k: self.providers[k.provider].acquire(k.lease),
            c.ReleaseLease: lambda k: self.providers[k.provider].release(k.lease),
            c.AcceptTokens: lambda _: None,
            c.FinishTurn: self._finish_turn,
            c.FailTurn: lambda k: self.rollouts.fail(k.turn.partition("#")[0], k.cause),
            c.FenceWorker: lambda k: self._refused.add(k.worker),
            c.StartGroup: self._start_group,
            c.CancelTrajectory: lambda k: self.rollouts.cancel(k.trajectory),
            c.ScoreTrajectory: lambda k: self.rollouts.score(k.trajectory, k.attempt),
            c.RecordReward: lambda _: None,
            c.TrainGroup: self._train_group,
            c.DropGroup: lambda k: self.rollouts.drop(k.trajectories),
            c.UpdateWeights: self._update_weights,
            c.EndRun: lambda _: None,
        }

    @property
    def mishaps(self) -> Mishaps:
        return self._outside.faults.mishaps if self.loop.now_ns < self._outside.faults.end_ns else NO_FAULTS.mishaps

    @property
    def ended(self) -> bool:
        return self.scheduler.phase is Phase.ENDED and not self.crashed

    def begin(self) -> None:
        for provider in self.providers.values():
            provider.offer()
        if self._outside.faults.crashes:
            self._commit()

    def crash(self) -> None:
        """The process is gone, and with it every connection. What its journal has leads to the state it had."""
        self.crashed = True
        digests = replayed(self.settings, self.log[: self.committed])
        self.record.require(digests[-1:] == [self._committed_digest], "the journal leads to another state")

    def reconcile(self) -> None:
        """The next life ends whatever this one has left with its providers (invariant 7)."""
        for provider in self.providers.values():
            provider.end_all()
        alive = [worker.id for worker in self.workers.values() if worker.alive]
        self.record.require(not alive, f"still alive after reconciliation: {alive}")

    def run_ns(self, at_ns: Nanoseconds) -> Nanoseconds:
        """A time of the world on the run's own clock."""
        return at_ns - self.began_ns

    def _commit(self) -> None:
        """The journal is made durable, now and then, until the last crash is over."""
        if self.crashed:
            return
        self.committed, self._committed_digest = len(self.log), digest(self.scheduler)
        if self.loop.now_ns < self._outside.faults.crashes[-1].at_ns:
            self.loop.after(self.settings.commit_ns, self._commit)

    # To and from the core

    def feed(self, event: e.Event) -> None:
        """One event to the core; its commands are carried out, its state is checked."""
        self._handle(event)
        if not isinstance(event, e.Tick) and self.tally.befalls(self.rng, self.mishaps.event_repeated):
            self._handle(event)

    def _handle(self, event: e.Event) -> None:
        if self.crashed:
            return
        now_ns = self.run_ns(self.loop.now_ns)
        self.log.append((now_ns, event))
        commands = self.scheduler.handle(event, now_ns)
        self._outside.note(_encode((now_ns, event, commands)))
        if self._outside.digesting:
            self.digests.append(digest(self.scheduler))
        check(self.scheduler)
        self.record.note_event(event)
        for command in commands:
            self.record.note_command(command, event, now_ns)
        for command in commands:
            self._carry_out(command)
        self._alarm.arm()
        if self.ended:
            self.loop.stop()

    def _carry_out(self, command: c.Command) -> None:
        execute = self._execute.get(type(command))
        if execute is not None:
            self.loop.after(0, lambda: None if self.crashed else execute(command))
            return
        worker = self.workers.get(getattr(command, "worker", ""))
        if worker is not None:
            worker.hear(command)

    # What workers and providers see

    def next_epoch(self, worker: WorkerId) -> int | None:
        if worker in self._refused or self.crashed:
            return None
        self._epochs[worker] = self._epochs.get(worker, 0) + 1
        return self._epochs[worker]

    def turn_length(self, turn: TurnId) -> int:
        return self.rollouts.turn_length(turn)

    def note_generated(self, worker: WorkerId, turn: TurnId, attempt: int, start: int, count: int) -> None:
        self.record.note_generated(worker, turn, attempt, start, count)

    def boot_worker(self, worker: WorkerId, lease: LeaseId, role: WorkerRole, after_ns: Nanoseconds) -> None:
        version = self._outside.checkpoint if role is WorkerRole.TRAINER else None
        born = self.workers[worker] = SimulatedWorker(self, worker, lease, role, version)
        self.loop.after(after_ns, lambda: born.boot() if born.alive else None)

    def end_worker(self, worker: WorkerId, *, noticed: bool) -> None:
        if worker in self.workers:
            self.workers[worker].die(noticed=noticed)

    # Carrying out commands

    def _finish_turn(self, command: c.FinishTurn) -> None:
        accepted, length = self.record.accepted.get(command.turn, 0), self.turn_length(command.turn)
        self.record.require(accepted == length, f"{command.turn} finished with {accepted} of {length} tokens")
        self.rollouts.finish_turn(command.turn)

    def _start_group(self, command: c.StartGroup) -> None:
        for trajectory in command.trajectories:
            self.rollouts.start(trajectory)

    def trainer(self) -> SimulatedWorker | None:
        return next((w for w in self.workers.values() if w.role is WorkerRole.TRAINER and w.alive), None)

    def _train_group(self, command: c.TrainGroup) -> None:
        self._on_trainer(lambda trainer: self.feed(e.GroupTrained(group=command.group)))

    def _update_weights(self, command: c.UpdateWeights) -> None:
        """The checkpoint is written before anybody hears of the version that it has."""

        def step(trainer: SimulatedWorker) -> None:
            trainer.version = command.version
            last = command.version == self.settings.plan.steps
            if last or command.version % self.settings.checkpoint_every_steps == 0:
                self._outside.checkpoint = command.version
            published = e.WeightsPublished(version=command.version)
            self.loop.after(self.rng.randrange(REPLY_NS), lambda: self.feed(published) if trainer.alive else None)

        self._on_trainer(step)

    def _on_trainer(self, then: Callable[[SimulatedWorker], None]) -> None:
        """Training takes the device: it must be asleep from the order to the answer, and alive."""

        def done() -> None:
            trainer = self.trainer()
            if trainer is not None:
                self.record.require(trainer.asleep, "the trainer's device generates while it trains")
                then(trainer)

        self.loop.after(self.rng.randint(1, self.settings.train_ns), done)
