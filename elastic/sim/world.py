"""A small seeded world on virtual time that drives the real core through everything that can go wrong.

Phases: safety, in which the plan's faults strike, and liveness, in which nothing fails any more and the run must
reach its end. After every event the core's whole state is checked, and the world's record of what has happened
is held against what the core does. The same seed gives the same history, hash for hash.
"""

import hashlib
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import msgspec

from elastic.core import commands as c
from elastic.core import events as e
from elastic.core.digest import digest
from elastic.core.invariants import check
from elastic.core.policy import Policies
from elastic.core.scheduler import Phase, Scheduler
from elastic.core.types import EndCause, LeaseId, Nanoseconds, TurnId, WorkerId, WorkerRole
from elastic.sim.faults import NO_FAULTS, Ending, Fault, FaultKind, FaultPlan, Mishaps, Tally, draw_faults
from elastic.sim.loop import EventLoop, Priority
from elastic.sim.provider import SimulatedProvider
from elastic.sim.record import Record
from elastic.sim.rollouts import SimulatedRollouts
from elastic.sim.settings import MS, ProviderSettings, WorldSettings, draw_settings
from elastic.sim.worker import SimulatedWorker
from policies.balancing import ContinuousBalancing
from policies.provisioning import MarginalValue, TakeWhatIsOffered
from policies.routing import AffinityRouting
from policies.sampling import DynamicSampling, FixedBatch
from policies.seeding import AdaptiveWindow, FixedWindow
from policies.selection import NonZeroVariance
from policies.succession import EarlySuccessor

TRAINER = ProviderSettings(name="trainer", role=WorkerRole.TRAINER, leases=1, boot_ns=400 * MS, usd_per_gpu_hour=10.0)
SLOWNESS = 8


class WorldFailed(AssertionError):
    """A world went wrong; `seed` is all that is needed to see it again."""

    def __init__(self, seed: int, found: str) -> None:
        self.seed = seed
        super().__init__(f"seed {seed}: {found}")


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """`history` hashes every event and command with its time; `digests` the core's state after each event."""

    seed: int
    failed: str
    ended_ns: Nanoseconds
    history: str
    state: str
    digests: tuple[str, ...]
    log: tuple[tuple[Nanoseconds, e.Event], ...]
    settings: WorldSettings
    ending: Ending
    leases: int
    turns_finished: int
    redispatched: int
    trajectories_trained: int
    imbalance_ns: int
    faults: int
    """Single faults that struck, and mishaps that befell messages, requests, loads and turns."""


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


def simulate(
    seed: int,
    settings: WorldSettings | None = None,
    faults: FaultPlan | None = None,
    *,
    digests: bool = False,
) -> Outcome:
    """Live through one world. What is not given is drawn from the seed. Raises `WorldFailed`."""
    rng = Random(seed)
    settings = settings or draw_settings(rng)
    world = World(seed, settings, faults or draw_faults(rng, settings.fault_span_ns), digests=digests)
    try:
        return world.live()
    except Exception as error:
        raise WorldFailed(seed, f"at {world.loop.now_ns / 1e9:.3f} s: {type(error).__name__}: {error}") from error


def replay(settings: WorldSettings, log: Sequence[tuple[Nanoseconds, e.Event]]) -> list[str]:
    """The digest after each recorded event, of a fresh scheduler that is told nothing else (invariant 13)."""
    scheduler = Scheduler(settings.plan, settings.limits, policies(settings), 0)
    found: list[str] = []
    for now_ns, event in log:
        scheduler.handle(event, now_ns)
        found.append(digest(scheduler))
    return found


class World:
    """Everything around one scheduler. Commands are carried out at once; what comes of them takes its time."""

    def __init__(self, seed: int, settings: WorldSettings, faults: FaultPlan, *, digests: bool = False) -> None:
        self.seed = seed
        self.settings = settings
        self.faults = faults
        self.loop = EventLoop()
        self.rng = Random(f"{seed}/world")
        self.scheduler = Scheduler(settings.plan, settings.limits, policies(settings), 0)
        self.record = Record(settings.plan.staleness_bound)
        self.tally = Tally()
        self.rollouts = SimulatedRollouts(self)
        self.workers: dict[WorkerId, SimulatedWorker] = {}
        self.providers = {p.name: SimulatedProvider(self, p) for p in (TRAINER, *settings.providers)}
        self.log: list[tuple[Nanoseconds, e.Event]] = []
        self._digests: list[str] | None = [] if digests else None
        self._history = hashlib.blake2b(digest_size=16)
        self._encoder = msgspec.msgpack.Encoder()
        self._epochs: dict[WorkerId, int] = {}
        self._refused: set[WorkerId] = set()
        self._wake_up_ns: Nanoseconds | None = None
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
            c.DropGroup: lambda _: None,
            c.UpdateWeights: self._update_weights,
            c.EndRun: lambda _: None,
        }

    @property
    def mishaps(self) -> Mishaps:
        return self.faults.mishaps if self.loop.now_ns < self.faults.end_ns else NO_FAULTS.mishaps

    def live(self) -> Outcome:
        for provider in self.providers.values():
            self.loop.after(0, provider.offer)
        for fault in self.faults.faults:
            self.loop.at(fault.at_ns, lambda fault=fault: self._strike(fault))
        if self.faults.ending is not Ending.COMPLETE:
            self.loop.at(self.faults.ending_at_ns, self._end_early)
        ended = lambda: self.scheduler.phase is Phase.ENDED  # noqa: E731
        self.loop.run(self.faults.end_ns + self.settings.liveness_ns, ended)
        self._check_end()
        return self._outcome()

    # To and from the core

    def feed(self, event: e.Event) -> None:
        """One event to the core; its commands are carried out, its state is checked."""
        self._handle(event)
        if not isinstance(event, e.Tick) and self.tally.befalls(self.rng, self.mishaps.event_repeated):
            self._handle(event)

    def _handle(self, event: e.Event) -> None:
        now_ns = self.loop.now_ns
        self.log.append((now_ns, event))
        commands = self.scheduler.handle(event, now_ns)
        self._history.update(self._encoder.encode((now_ns, event, commands)))
        if self._digests is not None:
            self._digests.append(digest(self.scheduler))
        check(self.scheduler)
        self.record.note_event(event)
        for command in commands:
            self.record.note_command(command, event, now_ns)
        for command in commands:
            self._carry_out(command)
        self._arm()

    def _carry_out(self, command: c.Command) -> None:
        execute = self._execute.get(type(command))
        if execute is not None:
            self.loop.after(0, lambda: execute(command))
            return
        worker = self.workers.get(getattr(command, "worker", ""))
        if worker is not None:
            worker.hear(command)

    def _arm(self) -> None:
        """Wake the core when it asked to be; a wake-up that has become too early is harmless."""
        at_ns = self.scheduler.next_wakeup_ns()
        if at_ns is not None and (self._wake_up_ns is None or at_ns < self._wake_up_ns):
            self._wake_up_ns = at_ns
            self.loop.at(at_ns, lambda: self._wake(at_ns), Priority.WAKE_UP)

    def _wake(self, at_ns: Nanoseconds) -> None:
        if self._wake_up_ns == at_ns:
            self._wake_up_ns = None
            self._handle(e.Tick())

    # What workers and providers see

    def next_epoch(self, worker: WorkerId) -> int | None:
        if worker in self._refused:
            return None
        self._epochs[worker] = self._epochs.get(worker, 0) + 1
        return self._epochs[worker]

    def turn_length(self, turn: TurnId) -> int:
        return self.rollouts.turn_length(turn)

    def note_generated(self, worker: WorkerId, turn: TurnId, attempt: int, start: int, count: int) -> None:
        self.record.note_generated(worker, turn, attempt, start, count)

    def boot_worker(self, worker: WorkerId, lease: LeaseId, role: WorkerRole, after_ns: Nanoseconds) -> None:
        version = 0 if role is WorkerRole.TRAINER else None
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

    def _trainer(self) -> SimulatedWorker | None:
        return next((w for w in self.workers.values() if w.role is WorkerRole.TRAINER and w.alive), None)

    def _train_group(self, command: c.TrainGroup) -> None:
        self._on_trainer(lambda trainer: self.feed(e.GroupTrained(group=command.group)))

    def _update_weights(self, command: c.UpdateWeights) -> None:
        def publish(trainer: SimulatedWorker) -> None:
            trainer.version = command.version
            self.feed(e.WeightsPublished(version=command.version))

        self._on_trainer(publish)

    def _on_trainer(self, then: Callable[[SimulatedWorker], None]) -> None:
        """Training takes the device: it must be asleep from the order to the answer, and alive."""

        def done() -> None:
            trainer = self._trainer()
            if trainer is not None:
                self.record.require(trainer.asleep, "the trainer's device generates while it trains")
                then(trainer)

        self.loop.after(self.rng.randint(1, self.settings.train_ns), done)

    # Faults

    def _strike(self, fault: Fault) -> None:
        if fault.kind is FaultKind.BLACKOUT:
            for provider in self.providers.values():
                if not provider.reliable:
                    provider.close(fault.duration_ns)
            self.tally.struck += 1
            return
        alive = [w for w in self.workers.values() if w.alive and w.role is not WorkerRole.TRAINER]
        if alive:
            self.tally.struck += 1
            self._strike_worker(fault, alive[int(fault.target * len(alive))])

    def _strike_worker(self, fault: Fault, worker: SimulatedWorker) -> None:
        provider = self.providers[worker.lease.rpartition("-")[0]]
        match fault.kind:
            case FaultKind.KILL:
                worker.die(noticed=True)
            case FaultKind.VANISH:
                worker.die(noticed=False)
            case FaultKind.PREEMPT:
                provider.end(worker.lease, EndCause.PREEMPTED, noticed=fault.target < 1 / 2)
            case FaultKind.NOTICE:
                provider.notice(worker.lease)
            case FaultKind.FREEZE:
                worker.freeze(fault.duration_ns)
            case FaultKind.HANG:
                worker.hang(fault.duration_ns)
            case FaultKind.SLOW:
                worker.slow_down(SLOWNESS, fault.duration_ns)
            case FaultKind.DISCONNECT:
                worker.disconnect()
            case FaultKind.CUT_UP:
                worker.link.cut_up(fault.duration_ns)
            case FaultKind.CUT_DOWN:
                worker.link.cut_down(fault.duration_ns)
            case FaultKind.PRESSURE:
                worker.press(fault.duration_ns)
            case FaultKind.BLACKOUT:
                raise AssertionError("befalls providers")

    def _end_early(self) -> None:
        trainer = self._trainer()
        if self.faults.ending is Ending.STOP:
            self.feed(e.StopRequested(reason="asked to"))
        elif trainer is not None:
            trainer.die(noticed=self.rng.random() < 1 / 2)

    # The end

    def _check_end(self) -> None:
        scheduler, record = self.scheduler, self.record
        waits = [f"{w.what} of {w.key} since {w.since_ns / 1e9:.3f} s" for w in scheduler.timers.waits()]
        record.require(scheduler.phase is Phase.ENDED, f"{scheduler.phase} for ever; waits for {waits}")
        if self.faults.ending is Ending.COMPLETE:
            record.require(not scheduler.failed, f"the run failed: {scheduler.failed}")
            steps = self.settings.plan.steps
            record.require(len(scheduler.history) == steps, f"{len(scheduler.history)} of {steps} steps done")
        record.require(scheduler.ledger.imbalance_ns() == 0, f"out by {scheduler.ledger.imbalance_ns()} ns")
        record.check_end()

    def _outcome(self) -> Outcome:
        return Outcome(
            seed=self.seed,
            failed=self.scheduler.failed,
            ended_ns=self.loop.now_ns,
            history=self._history.hexdigest(),
            state=digest(self.scheduler),
            digests=tuple(self._digests or ()),
            log=tuple(self.log),
            settings=self.settings,
            ending=self.faults.ending,
            leases=len(self.record.granted),
            turns_finished=len(self.record.finished),
            redispatched=self.record.redispatched,
            trajectories_trained=len(self.record.trained),
            imbalance_ns=self.scheduler.ledger.imbalance_ns(),
            faults=self.tally.struck,
        )
