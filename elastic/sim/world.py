"""A small seeded world on virtual time that drives the real core through everything that can go wrong.

Phases: safety, in which the plan's faults strike, and liveness, in which nothing fails any more and the run must
reach its end. After every event the core's whole state is checked, and the world's record of what has happened
is held against what the core does. The same seed gives the same history, hash for hash.

A crash ends the orchestrator's process, and the trainer's with it; providers and workers go on. The run is resumed
from what its journal has made durable, in a new life that must be where the journal leads; or, with the journal lost,
from the trainer's checkpoint, with nothing else left.
"""

import hashlib
from collections.abc import Callable
from random import Random

import msgspec

from elastic.core import events as e
from elastic.core.digest import digest
from elastic.core.ids import provider_of
from elastic.core.types import EndCause, LeaseId, Nanoseconds, TurnId, WorkerId, WorkerRole
from elastic.sim.faults import NO_FAULTS, Crash, Ending, Fault, FaultKind, FaultPlan, Mishaps, Tally, draw_faults
from elastic.sim.learner import Learner
from elastic.sim.life import Life, replayed
from elastic.sim.loop import EventLoop
from elastic.sim.provider import SimulatedProvider
from elastic.sim.rollouts import turn_length
from elastic.sim.serving import ServingLoad
from elastic.sim.settings import MS, ProviderSettings, WorldSettings, draw_large_settings, draw_settings
from elastic.sim.worker import SLOWNESS, Session, SimulatedWorker

TRAINER = ProviderSettings(name="trainer", role=WorkerRole.TRAINER, leases=1, boot_ns=400 * MS, usd_per_gpu_hour=10.0)
LARGE_EVERY = 100
"""The last of so many seeds in a row draws a large world."""
REPLAYED_EVERY = 25
"""Of one in so many seeds the whole journal is replayed, and compared after every event."""


class WorldFailed(AssertionError):
    """A world went wrong; `seed` is all that is needed to see it again."""

    def __init__(self, seed: int, found: str) -> None:
        self.seed = seed
        super().__init__(f"seed {seed}: {found}")


class LifeLog(msgspec.Struct, frozen=True, kw_only=True):
    """What one life's core was told and when: the first `recalled` by the journal, which had `committed` in the end.

    `digests` are those after each event.
    """

    events: tuple[tuple[Nanoseconds, e.Event], ...]
    digests: tuple[str, ...]
    recalled: int
    committed: int
    checkpoint: int
    """The version of the checkpoint that the trainer began with."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """`history` hashes every event and command with its time. `leases` and turns are those that the journal knows."""

    seed: int
    failed: str
    ended_ns: Nanoseconds
    history: str
    state: str
    lives: tuple[LifeLog, ...]
    settings: WorldSettings
    ending: Ending
    leases: int
    turns_finished: int
    redispatched: int
    trajectories_trained: int
    imbalance_ns: int
    faults: int
    """Single faults that struck, crashes, and mishaps that befell messages, requests, loads and turns."""

    @property
    def events(self) -> int:
        return sum(len(life.events) - life.recalled for life in self.lives)


def simulate(
    seed: int,
    settings: WorldSettings | None = None,
    faults: FaultPlan | None = None,
    *,
    digests: bool = False,
) -> Outcome:
    """Live through one world. What is not given is drawn from the seed. Raises `WorldFailed`."""
    rng = Random(seed)
    draw = draw_large_settings if seed % LARGE_EVERY == LARGE_EVERY - 1 else draw_settings
    digests = digests or (settings is None and seed % REPLAYED_EVERY == REPLAYED_EVERY // 2)
    settings = settings or draw(rng)
    world = World(seed, settings, faults or draw_faults(rng, settings.fault_span_ns), digests=digests)
    try:
        return world.live()
    except Exception as error:
        raise WorldFailed(seed, f"at {world.loop.now_ns / 1e9:.3f} s: {type(error).__name__}: {error}") from error


class World:
    """What outlives the orchestrator, and what goes wrong with it."""

    def __init__(self, seed: int, settings: WorldSettings, faults: FaultPlan, *, digests: bool = False) -> None:
        self.seed = seed
        self.settings = settings
        self.faults = faults
        self.digesting = digests
        self.loop = EventLoop()
        self.rng = Random(f"{seed}/world")
        self.tally = Tally()
        self.learner = Learner()
        self.workers: dict[WorkerId, SimulatedWorker] = {}
        self.providers = {p.name: SimulatedProvider(self, p) for p in (TRAINER, *settings.providers)}
        self.verified: dict[WorkerId, set[int]] = {}
        """Versions that a worker has held against their manifest."""
        self.last_crash_ns = faults.crashes[-1].at_ns if faults.crashes else 0
        self._processes: list[SimulatedWorker] = []
        """All that there ever were."""
        self._epochs: dict[WorkerId, int] = {}
        self._rewards_down_until_ns: Nanoseconds = 0
        self._history = hashlib.blake2b(digest_size=16)
        self.life = Life(self)
        self.lives = [self.life]
        self._checkpoints = [0]

    def live(self) -> Outcome:
        self.loop.after(0, self.life.begin)
        for fault in self.faults.faults:
            self.loop.at(fault.at_ns, lambda fault=fault: self._strike(fault))
        for crash in self.faults.crashes:
            self.loop.at(crash.at_ns, lambda crash=crash: self._crash(crash))
        if self.faults.ending is not Ending.COMPLETE:
            self.loop.at(self.faults.ending_at_ns, self._end_early)
        self.loop.run(self.faults.end_ns + self.settings.liveness_ns)
        self._check_end()
        return self._outcome()

    def note(self, happened: bytes) -> None:
        self._history.update(happened)

    @property
    def mishaps(self) -> Mishaps:
        return self.faults.mishaps if self.loop.now_ns < self.faults.end_ns else NO_FAULTS.mishaps

    @property
    def faultless(self) -> bool:
        return self.faults.end_ns == 0

    def rewards_down(self) -> bool:
        return self.loop.now_ns < self._rewards_down_until_ns

    def turn_length(self, turn: TurnId) -> int:
        return turn_length(self.seed, turn, self.settings.max_new_tokens)

    # Between workers, providers and the orchestrator

    def answering(self) -> Session | None:
        return self.life if self.life.up else None

    def listener(self) -> Callable[[e.Event], None]:
        """Nobody, while no process is up: the next one asks providers for what they have."""
        return self.life.feed if self.life.up else lambda _: None

    def next_epoch(self, worker: WorkerId) -> int:
        """Epochs are never used twice, whatever a journal has of them."""
        self._epochs[worker] = self._epochs.get(worker, 0) + 1
        return self._epochs[worker]

    def note_weights(self, worker: WorkerId, version: int, *, genuine: bool) -> None:
        self.life.record.require(genuine, f"{worker} serves weights that are not those of version {version}")
        self.verified.setdefault(worker, set()).add(version)

    def trainer(self) -> SimulatedWorker | None:
        return next((w for w in self.workers.values() if w.role is WorkerRole.TRAINER and w.alive), None)

    def start_trainer(self, worker: WorkerId, lease: LeaseId) -> SimulatedWorker:
        return self._process(SimulatedWorker(self, worker, lease, WorkerRole.TRAINER, self.learner.checkpoint))

    def boot_worker(self, worker: WorkerId, lease: LeaseId, role: WorkerRole, after_ns: Nanoseconds) -> None:
        if role is WorkerRole.TRAINER:
            born = self.start_trainer(worker, lease)
        else:
            self.verified.pop(worker, None)
            born = self._process(SimulatedWorker(self, worker, lease, role, None))
        self.loop.after(after_ns, lambda: self._boot(born) if born.alive else None)

    def _process(self, worker: SimulatedWorker) -> SimulatedWorker:
        self.workers[worker.id] = worker
        self._processes.append(worker)
        return worker

    def _boot(self, worker: SimulatedWorker) -> None:
        worker.boot()
        gap_ns = self._provider_of(worker).settings.serving_gap_ns
        if gap_ns is not None:
            ServingLoad(self, worker, gap_ns).begin()

    def end_worker(self, worker: WorkerId, *, noticed: bool) -> None:
        if worker in self.workers:
            self.workers[worker].die(noticed=noticed)

    def _provider_of(self, worker: SimulatedWorker) -> SimulatedProvider:
        return self.providers[provider_of(worker.lease)]

    # Crashes

    def _crash(self, crash: Crash) -> None:
        """Workers lose their connection; the trainer's process goes down with the orchestrator's."""
        if not self.life.up:
            return
        self.tally.struck += 1
        self.life.crash()
        for worker in self.workers.values():
            if worker.role is WorkerRole.TRAINER:
                worker.die(noticed=False)
            else:
                worker.disconnect()
        self.loop.after(crash.down_ns, lambda: self._restart(None if crash.journal_lost else self.life))

    def _restart(self, former: Life | None) -> None:
        """A new process reads the journal, and has the trainer learn again what its checkpoint does not have."""
        self.life = Life(self, former)
        self.lives.append(self.life)
        self._checkpoints.append(self.learner.checkpoint)
        orders = self.learner.restart(self.life.carried_out())
        boot_ns = self.rng.randint(TRAINER.boot_ns // 2, 2 * TRAINER.boot_ns)
        training_ns = sum(self.rng.randint(1, self.settings.train_ns) for _ in range(orders))
        self.loop.after(boot_ns + training_ns, self._resume)

    def _resume(self) -> None:
        """What a provider has is asked of it before the run goes on, however long it takes to answer."""
        silent_until_ns = max(provider.silent_until_ns for provider in self.providers.values())
        if self.loop.now_ns < silent_until_ns:
            self.loop.at(silent_until_ns, self._resume)
        else:
            self.life.resume()

    # Faults

    def _strike(self, fault: Fault) -> None:
        """A fault counts if it did something."""
        match fault.kind:
            case FaultKind.REWARDS_DOWN:
                self._rewards_down_until_ns = self.loop.now_ns + fault.duration_ns
                struck = self.settings.rewards_on_functions
            case FaultKind.BLACKOUT | FaultKind.SILENT_PROVIDER:
                struck = self._strike_providers(fault)
            case _:
                alive = [w for w in self.workers.values() if w.alive and w.role is not WorkerRole.TRAINER]
                struck = bool(alive) and self._strike_worker(fault, alive[int(fault.target * len(alive))])
        self.tally.struck += struck

    def _strike_providers(self, fault: Fault) -> bool:
        elastic = [provider for provider in self.providers.values() if not provider.reliable]
        if fault.kind is FaultKind.BLACKOUT:
            for provider in elastic:
                provider.close(fault.duration_ns)
            return bool(elastic)
        return bool(elastic) and elastic[int(fault.target * len(elastic))].fall_silent(fault.duration_ns)

    def _strike_worker(self, fault: Fault, worker: SimulatedWorker) -> bool:
        provider = self._provider_of(worker)
        match fault.kind:
            case FaultKind.KILL:
                worker.die(noticed=True)
            case FaultKind.VANISH:
                worker.die(noticed=False)
            case FaultKind.PREEMPT:
                return provider.end(worker.lease, EndCause.PREEMPTED, noticed=fault.target < 1 / 2)
            case FaultKind.NOTICE:
                return provider.notice(worker.lease)
            case FaultKind.FREEZE:
                worker.freeze(fault.duration_ns)
            case FaultKind.HANG:
                worker.hang(fault.duration_ns)
            case FaultKind.SLOW:
                worker.slow_down(SLOWNESS, fault.duration_ns)
            case FaultKind.DISCONNECT:
                return worker.disconnect()
            case FaultKind.CUT_UP:
                worker.link.cut_up(fault.duration_ns)
            case FaultKind.CUT_DOWN:
                worker.link.cut_down(fault.duration_ns)
            case FaultKind.PRESSURE:
                worker.press(fault.duration_ns, told=fault.target < 1 / 2)
            case FaultKind.LIE:
                return worker.lie()
            case _:
                raise AssertionError(f"{fault.kind} befalls no worker")
        return True

    def _end_early(self) -> None:
        trainer = self.trainer()
        if not self.life.up:
            self.loop.after(self.settings.heartbeat_ns, self._end_early)
        elif self.faults.ending is Ending.STOP:
            self.life.feed(e.StopRequested(reason="asked to"))
        elif trainer is not None:
            trainer.die(noticed=self.rng.random() < 1 / 2)

    # The end

    def _check_end(self) -> None:
        scheduler, record = self.life.scheduler, self.life.record
        waits = [f"{w.what} of {w.key} since {w.since_ns / 1e9:.3f} s" for w in scheduler.timers.waits()]
        record.require(self.life.ended, f"{scheduler.phase} for ever; waits for {waits}")
        if self.faults.ending is Ending.COMPLETE:
            record.require(not scheduler.failed, f"the run failed: {scheduler.failed}")
            steps, done = self.settings.plan.steps, self.life.first_version + len(scheduler.history)
            record.require(done == steps == self.learner.checkpoint, f"{done} of {steps} steps done")
            record.require(record.trained == self.learner.trajectories, "the trainer has not learnt what it was told")
        record.require(scheduler.ledger.imbalance_ns() == 0, f"out by {scheduler.ledger.imbalance_ns()} ns")
        record.check_end()
        held = [lease for provider in self.providers.values() for lease in provider.granted()]
        record.require(not held, f"nobody has given back {held}")
        alive = [process.id for process in self._processes if process.alive]
        record.require(not alive, f"still alive: {alive}")
        if self.digesting:
            same = replayed(self.settings, self.life.log) == self.life.digests
            record.require(same, "the journal does not lead to the same states")

    def _outcome(self) -> Outcome:
        scheduler, record = self.life.scheduler, self.life.record
        return Outcome(
            seed=self.seed,
            failed=scheduler.failed,
            ended_ns=self.loop.now_ns,
            history=self._history.hexdigest(),
            state=digest(scheduler),
            lives=tuple(_log(life, checkpoint) for life, checkpoint in zip(self.lives, self._checkpoints, strict=True)),
            settings=self.settings,
            ending=self.faults.ending,
            leases=len(record.granted),
            turns_finished=len(record.finished),
            redispatched=record.redispatched,
            trajectories_trained=len(record.trained),
            imbalance_ns=scheduler.ledger.imbalance_ns(),
            faults=self.tally.struck,
        )


def _log(life: Life, checkpoint: int) -> LifeLog:
    return LifeLog(
        events=tuple(life.log),
        digests=tuple(life.digests),
        recalled=life.recalled,
        committed=life.committed,
        checkpoint=checkpoint,
    )
