"""A small seeded world on virtual time that drives the real core through everything that can go wrong.

Phases: safety, in which the plan's faults strike, and liveness, in which nothing fails any more and the run must
reach its end. After every event the core's whole state is checked, and the world's record of what has happened
is held against what the core does. The same seed gives the same history, hash for hash.

A crash ends the orchestrator's process; providers, workers and, mostly, the trainer's process go on. The run is resumed
from what its journal has made durable, in a new incarnation that must be where the journal leads; or, with the journal
lost, from the trainer's checkpoint, with nothing else left.
"""

import hashlib
from collections.abc import Callable, Sequence
from random import Random

import msgspec

from elastic.core import events as e
from elastic.core.digest import digest
from elastic.core.ids import provider_of
from elastic.core.ledger import NS_PER_HOUR
from elastic.core.trainer_permit import PermitState
from elastic.core.types import NS_PER_S, EndCause, LeaseId, Nanoseconds, TurnId, WorkerId, WorkerRole
from elastic.simulation.loop import EventLoop
from elastic.testing.faults.core.commands import Commander, Interval, TimedCommand, billed_usd, draw_commands
from elastic.testing.faults.core.faults import (
    NO_FAULTS,
    FaultInjector,
    FaultPlan,
    FaultRates,
    RunEnding,
    draw_faults,
)
from elastic.testing.faults.core.incarnation import Incarnation, SimulatedJournal, replayed
from elastic.testing.faults.core.learner import Learner
from elastic.testing.faults.core.pool import ModelledPool
from elastic.testing.faults.core.provider import SimulatedProvider
from elastic.testing.faults.core.record import RunRecord
from elastic.testing.faults.core.rollouts import turn_length
from elastic.testing.faults.core.serving import SimulatedServingLoad
from elastic.testing.faults.core.settings import (
    MS,
    SimulatedProviderSettings,
    WorldSettings,
    draw_evaluation,
    draw_groups,
    draw_large_settings,
    draw_settings,
    draw_sharing,
)
from elastic.testing.faults.core.trainer import SimulatedTrainer
from elastic.testing.faults.core.worker import SLOWNESS, SimulatedWorker
from elastic.testing.faults.kinds import Fault, FaultKind
from elastic.testing.faults.outcome import WorldFailed

TRAINER_DIES = 1 / 3
"""Share of lost journals with which the trainer's process goes, too."""
TRAINER = SimulatedProviderSettings(
    name="trainer", role=WorkerRole.TRAINER, leases=1, boot_ns=400 * MS, usd_per_gpu_hour=10.0
)
LARGE_EVERY = 100
"""The last of so many seeds in a row draws a large world."""
REPLAYED_EVERY = 25
"""One in this many seeds has its whole journal replayed and compared after every event."""
EVALUATED_EVERY = 8
"""One in this many seeds has its policy evaluated."""


class SimulatedOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """`history` hashes every event and command with its time. The last one's `record` is of the whole run."""

    failed: str
    ended_ns: Nanoseconds
    history: str
    state: str
    incarnations: tuple[Incarnation, ...]
    settings: WorldSettings
    faults: int
    """Faults that struck: single faults, crashes, and faults of messages, requests, loads and turns."""

    @property
    def events(self) -> int:
        return sum(len(journal.events) - journal.recalled_events for journal in self.journals)

    @property
    def journals(self) -> list[SimulatedJournal]:
        return [one.journal for one in self.incarnations]

    @property
    def record(self) -> RunRecord:
        return self.incarnations[-1].record


def simulate(
    seed: int,
    settings: WorldSettings | None = None,
    faults: FaultPlan | None = None,
    *,
    digests: bool = False,
    commanded: bool = False,
) -> SimulatedOutcome:
    """Live through one world. What is not given is drawn from the seed; if it is `commanded`, the run is given caps and
    a budget, and no crash loses its journal. Raises `WorldFailed`."""
    rng = Random(seed)
    draw = draw_large_settings if seed % LARGE_EVERY == LARGE_EVERY - 1 else draw_settings
    digests = digests or (settings is None and seed % REPLAYED_EVERY == REPLAYED_EVERY // 2)
    if settings is None:
        settings = draw_sharing(Random(f"{seed}/sharing"), draw(rng))
        settings = draw_groups(Random(f"{seed}/groups"), settings)
        if seed % EVALUATED_EVERY == EVALUATED_EVERY - 1:
            settings = draw_evaluation(Random(f"{seed}/evaluation"), settings)
    faults = faults or draw_faults(rng, settings.fault_span_ns)
    commands: Sequence[TimedCommand] = ()
    if commanded:
        kept = tuple(fault for fault in faults.faults if fault.kind is not FaultKind.LOSE_JOURNAL)
        faults = msgspec.structs.replace(faults, faults=kept)
        commands = draw_commands(seed, settings, settings.fault_span_ns)
    world = SimulatedWorld(seed, settings, faults, commands, digests=digests)
    try:
        return world.live()
    except Exception as error:
        found = f"at {world.loop.now_ns / 1e9:.3f} s: {type(error).__name__}: {error}"
        raise WorldFailed("core", seed, found) from error


class SimulatedWorld:
    """Everything that outlives the orchestrator (providers, workers, the trainer), and the faults that strike it."""

    def __init__(
        self,
        seed: int,
        settings: WorldSettings,
        faults: FaultPlan,
        commands: Sequence[TimedCommand] = (),
        *,
        digests: bool = False,
    ) -> None:
        self.seed = seed
        self.settings = settings
        self.faults = faults
        self.digesting = digests
        self.loop = EventLoop()
        self.rng = Random(f"{seed}/world")
        self.injector = FaultInjector()
        self.learner = Learner()
        self.workers: dict[WorkerId, SimulatedWorker] = {}
        trainer, within_ns = TRAINER, settings.permit_within_ns
        self.pool = ModelledPool(self, within_ns) if within_ns else None
        if within_ns:
            trainer = msgspec.structs.replace(TRAINER, by_permit=True, grant_within_ns=within_ns)
        self.providers = {p.name: SimulatedProvider(self, p) for p in (trainer, *settings.providers)}
        self.verified: dict[WorkerId, set[int]] = {}
        """Versions that a worker has held against their manifest."""
        self._processes: list[SimulatedWorker] = []
        """All that there ever were."""
        self._epochs: dict[WorkerId, int] = {}
        self._rewards_down_until_ns: Nanoseconds = 0
        self._history = hashlib.blake2b(digest_size=16)
        self._trainers_left = settings.limits.trainer_restarts_max
        """How many of the trainer's processes may yet be killed."""
        self._doomed = False
        """Whether every one of them dies."""
        self.run = Incarnation(self)
        self.runs = [self.run]
        self._commander = Commander(self.loop, lambda: self.run, commands)
        self._downtimes: list[Interval] = []

    def live(self) -> SimulatedOutcome:
        self.loop.after(0, self.run.begin)
        self._commander.begin()
        for fault in self.faults.faults:
            self.loop.at(round(fault.at_s * NS_PER_S), lambda fault=fault: self._inject(fault))
        if self.faults.ending is not RunEnding.COMPLETE:
            self.loop.at(self.faults.ending_at_ns, self._end_early)
        self.loop.run(self.faults.end_ns + self.settings.liveness_ns)
        self._check_end()
        return self._outcome()

    def note(self, happened: bytes) -> None:
        self._history.update(happened)

    @property
    def fault_rates(self) -> FaultRates:
        return self.faults.fault_rates if self.loop.now_ns < self.faults.end_ns else NO_FAULTS.fault_rates

    def rewards_down(self) -> bool:
        return self.loop.now_ns < self._rewards_down_until_ns

    def turn_length(self, turn: TurnId) -> int:
        return turn_length(self.seed, turn, self.settings.max_new_tokens)

    # Between workers, providers and the orchestrator

    def answering(self) -> Incarnation | None:
        return self.run if self.run.up else None

    def listener(self) -> Callable[[e.Event], None]:
        """Where a provider's events go. Without an orchestrator they are lost: the next one asks providers for their
        state."""
        return self.run.feed

    def next_epoch(self, worker: WorkerId) -> int:
        """Returns an epoch that this worker never had, even where a lost journal knows fewer."""
        self._epochs[worker] = self._epochs.get(worker, 0) + 1
        return self._epochs[worker]

    def note_weights(self, worker: WorkerId, version: int, *, genuine: bool) -> None:
        self.run.record.require(genuine, f"{worker} serves weights that are not those of version {version}")
        self.verified.setdefault(worker, set()).add(version)

    def trainer(self) -> SimulatedTrainer | None:
        """The trainer's process that lives now."""
        return next((w for w in self.workers.values() if isinstance(w, SimulatedTrainer) and w.alive), None)

    def striking(self) -> bool:
        return self.loop.now_ns < self.faults.end_ns

    def permits(self) -> bool:
        return self.pool is None or self.pool.held is not None

    def boot_worker(self, worker: WorkerId, lease: LeaseId, role: WorkerRole, after_ns: Nanoseconds) -> None:
        if role is WorkerRole.TRAINER:
            born = SimulatedTrainer(self, worker, lease)
        else:
            self.verified.pop(worker, None)
            born = SimulatedWorker(self, worker, lease, role, None)
        self.workers[worker] = born
        self._processes.append(born)
        self.loop.after(after_ns, lambda: self._boot(born) if born.alive else None)

    def _boot(self, worker: SimulatedWorker) -> None:
        worker.boot()
        if self._doomed and worker.role is WorkerRole.TRAINER:
            self._provider_of(worker).end(worker.lease, EndCause.LOST)
        gap_ns = self._provider_of(worker).settings.serving_gap_ns
        if gap_ns is not None:
            SimulatedServingLoad(self, worker, gap_ns).begin()

    def end_worker(self, worker: WorkerId, *, noticed: bool) -> None:
        if worker in self.workers:
            self.workers[worker].die(noticed=noticed)

    def _provider_of(self, worker: SimulatedWorker) -> SimulatedProvider:
        return self.providers[provider_of(worker.lease)]

    # Crashes

    def _crash(self, fault: Fault) -> bool:
        """Workers lose their connection; the trainer's process may go down with the orchestrator's."""
        if not self.run.up:
            return False
        self._crashed_ns = self.loop.now_ns
        self.run.crash()
        lost = fault.kind is FaultKind.LOSE_JOURNAL
        if fault.kind is FaultKind.KILL_BOTH or (lost and fault.chance < TRAINER_DIES):
            self._kill_trainer(silently=False)
        for worker in self.workers.values():
            worker.disconnect()
        self.loop.after(round(fault.duration_s * NS_PER_S), lambda: self._resume(None if lost else self.run))
        return True

    def _resume(self, former: Incarnation | None) -> None:
        """Ask the providers for their leases before the run goes on, however long they take to answer."""
        silent_until_ns = max(provider.silent_until_ns for provider in self.providers.values())
        if self.loop.now_ns < silent_until_ns:
            self.loop.at(silent_until_ns, lambda: self._resume(former))
            return
        if former is None:
            self.learner.begin_anew()
            if self.pool is not None:
                self.pool.take_up(None, asked=False, last=0)
        self._downtimes.append((self._crashed_ns, self.loop.now_ns))
        self.run = Incarnation(self, former)
        self.runs.append(self.run)
        self.run.record.require(not self._commander.forgotten(), f"commands forgotten: {self._commander.forgotten()}")
        self.run.resume()

    # Faults

    def _inject(self, fault: Fault) -> None:
        """A fault counts if it did something."""
        self.injector.struck += self._struck(fault, round(fault.duration_s * NS_PER_S))

    def _struck(self, fault: Fault, duration_ns: Nanoseconds) -> bool:
        elastic = [provider for provider in self.providers.values() if not provider.reliable]
        match fault.kind:
            case FaultKind.KILL_ORCHESTRATOR | FaultKind.KILL_BOTH | FaultKind.LOSE_JOURNAL:
                return self._crash(fault)
            case FaultKind.FUNCTIONS:
                self._rewards_down_until_ns = self.loop.now_ns + duration_ns
                return self.settings.rewards_on_functions
            case FaultKind.BLACKOUT:
                for provider in elastic:
                    provider.close(duration_ns)
                return bool(elastic)
            case FaultKind.SILENT_PROVIDER:
                return bool(elastic) and elastic[int(fault.target * len(elastic))].fall_silent(duration_ns)
            case FaultKind.KILL_TRAINER:
                return self._kill_trainer(silently=fault.chance < 1 / 2)
            case _:
                alive = [w for w in self.workers.values() if w.alive and self._may_inject(fault.kind, w)]
                return bool(alive) and self._inject_worker(fault, alive[int(fault.target * len(alive))], duration_ns)

    def _may_inject(self, kind: FaultKind, worker: SimulatedWorker) -> bool:
        """The trainer's device is the run's own: its connection may break, once it has one."""
        return worker.role is not WorkerRole.TRAINER or (kind is FaultKind.CUT and worker.epoch > 0)

    def _kill_trainer(self, *, silently: bool) -> bool:
        trainer = self.trainer()
        if trainer is None or not self._trainers_left:
            return False
        self._trainers_left -= 1
        if silently:
            trainer.die(noticed=False)
        else:
            self._provider_of(trainer).end(trainer.lease, EndCause.LOST)
        return True

    def _inject_worker(self, fault: Fault, worker: SimulatedWorker, duration_ns: Nanoseconds) -> bool:
        provider, mild = self._provider_of(worker), fault.chance < 1 / 2
        match fault.kind:
            case FaultKind.KILL_WORKER:
                worker.die(noticed=mild)
            case FaultKind.TAKE:
                return provider.end(worker.lease, EndCause.PREEMPTED, noticed=mild)
            case FaultKind.PREEMPT:
                return provider.notice(worker.lease)
            case FaultKind.FREEZE:
                worker.freeze(duration_ns)
            case FaultKind.HANG:
                worker.hang(duration_ns)
            case FaultKind.SLOW:
                worker.slow_down(SLOWNESS, duration_ns)
            case FaultKind.CUT:
                return worker.disconnect()
            case FaultKind.STALL:
                worker.link.stall(duration_ns, upwards=mild)
            case FaultKind.DECLINE:
                worker.press(duration_ns, told=mild)
            case FaultKind.LIE:
                return worker.lie()
            case _:
                raise AssertionError(f"{fault.kind} strikes no worker")
        return True

    def _end_early(self) -> None:
        trainer = self.trainer()
        if not self.run.up:
            self.loop.after(self.settings.heartbeat_ns, self._end_early)
        elif self.faults.ending is RunEnding.STOP:
            self.run.feed(e.StopRequested(reason="asked to"))
        else:
            self._doomed = True
            if trainer is not None:
                trainer.die(noticed=self.rng.random() < 1 / 2)

    # The end

    def _check_end(self) -> None:
        scheduler, record = self.run.scheduler, self.run.record
        waits = [f"{w.what} of {w.key} since {w.since_ns / 1e9:.3f} s" for w in scheduler.timers.waits()]
        record.require(self.run.over, f"{scheduler.phase} for ever; waits for {waits}")
        self._check_commands()
        if self.faults.ending is RunEnding.COMPLETE and not scheduler.stopped:
            record.require(not scheduler.failed, f"the run failed: {scheduler.failed}")
            steps, done = self.settings.plan.steps, self.run.first_version + len(scheduler.history)
            record.require(done == steps == self.learner.checkpoint, f"{done} of {steps} steps done")
            record.require(record.trained == self.learner.trajectories, "the trainer has not learnt what it was told")
        record.require(scheduler.ledger.imbalance_ns() == 0, f"out by {scheduler.ledger.imbalance_ns()} ns")
        record.check_end()
        held = [lease for provider in self.providers.values() for lease in provider.granted()]
        record.require(not held, f"nobody has given back {held}")
        record.require(scheduler.permit.state is PermitState.NONE, f"permit {scheduler.permit.number} is kept")
        alive = [process.id for process in self._processes if process.alive]
        record.require(not alive, f"still alive: {alive}")
        if self.digesting:
            same = replayed(self.settings, self.run.journal.events) == self.run.journal.digests
            record.require(same, "the journal does not lead to the same states")

    def _check_commands(self) -> None:
        record, forgotten = self.run.record, self._commander.forgotten()
        record.require(not forgotten, f"commands forgotten: {forgotten}")
        budget_usd, usd = self._commander.budget_usd, 0.0
        if budget_usd is None:
            return
        for provider in self.providers.values():
            known = [time for time in provider.billed if time.lease in record.granted]
            excused = [*self._downtimes, *provider.silences]
            limit_ns = self.settings.limits.release_timeout_ns
            usd += billed_usd(provider.settings, known, provider.asked_back_ns, limit_ns, excused)
        trainers = [process for process in self._processes if isinstance(process, SimulatedTrainer)]
        parked_ns = sum(trainer.parked_ns for trainer in trainers)  # Others have paid for that.
        usd -= TRAINER.usd_per_gpu_hour * parked_ns / NS_PER_HOUR
        record.require(usd <= budget_usd, f"${usd:.4f} are billed, the budget was ${budget_usd:.4f}")

    def _outcome(self) -> SimulatedOutcome:
        return SimulatedOutcome(
            failed=self.run.scheduler.failed,
            ended_ns=self.loop.now_ns,
            history=self._history.hexdigest(),
            state=digest(self.run.scheduler),
            incarnations=tuple(self.runs),
            settings=self.settings,
            faults=self.injector.struck,
        )
