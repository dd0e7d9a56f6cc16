"""A small seeded world on virtual time that drives the real core through everything that can go wrong.

Phases: safety, in which the plan's faults strike, and liveness, in which nothing fails any more and the run must
reach its end. After every event the core's whole state is checked, and the world's record of what has happened
is held against what the core does. The same seed gives the same history, hash for hash.

A crash ends the orchestrator's life. The run is resumed as a live one is: from the trainer's newest checkpoint, in a
new life with a new core; leases that are left are ended first, and what was in flight is done again.
"""

import hashlib
from random import Random

import msgspec

from elastic.core import events as e
from elastic.core.digest import digest
from elastic.core.types import EndCause, Nanoseconds, TrajectoryId, WorkerRole
from elastic.sim.faults import Crash, Ending, Fault, FaultKind, FaultPlan, Tally, draw_faults
from elastic.sim.life import Life
from elastic.sim.loop import EventLoop
from elastic.sim.settings import WorldSettings, draw_settings
from elastic.sim.worker import SimulatedWorker

SLOWNESS = 8


class WorldFailed(AssertionError):
    """A world went wrong; `seed` is all that is needed to see it again."""

    def __init__(self, seed: int, found: str) -> None:
        self.seed = seed
        super().__init__(f"seed {seed}: {found}")


class LifeLog(msgspec.Struct, frozen=True, kw_only=True):
    """What one life's core was told and when, of which the journal had `committed`; `digests` after each event."""

    events: tuple[tuple[Nanoseconds, e.Event], ...]
    digests: tuple[str, ...]
    committed: int
    first_version: int


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """`history` hashes every event and command with its time. `leases` and turns are those of all lives."""

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
        return sum(len(life.events) for life in self.lives)


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
        self.checkpoint = 0
        self._history = hashlib.blake2b(digest_size=16)
        self.life = Life(self, {})
        self.lives = [self.life]

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

    # Faults

    def _crash(self, crash: Crash) -> None:
        if not self.life.crashed:
            self.tally.struck += 1
            self.life.crash()
            self.loop.after(crash.down_ns, self._resume)

    def _resume(self) -> None:
        """The trainer has forgotten what it learnt after its checkpoint: those trajectories are not trained on."""
        self.life.reconcile()
        self.life = Life(self, self._trained())
        self.lives.append(self.life)
        self.life.begin()

    def _trained(self) -> dict[TrajectoryId, int]:
        return {t: step for t, step in self.life.record.trained.items() if step < self.checkpoint}

    def _strike(self, fault: Fault) -> None:
        life = self.life
        match fault.kind:
            case FaultKind.REWARDS_DOWN:
                life.rewards_down_until_ns = self.loop.now_ns + fault.duration_ns
            case FaultKind.BLACKOUT | FaultKind.SILENT_PROVIDER:
                self._strike_providers(fault)
            case _:
                alive = [w for w in life.workers.values() if w.alive and w.role is not WorkerRole.TRAINER]
                if not alive:
                    return
                self._strike_worker(fault, alive[int(fault.target * len(alive))])
        self.tally.struck += 1

    def _strike_providers(self, fault: Fault) -> None:
        elastic = [provider for provider in self.life.providers.values() if not provider.reliable]
        if fault.kind is FaultKind.BLACKOUT:
            for provider in elastic:
                provider.close(fault.duration_ns)
        elif elastic:
            elastic[int(fault.target * len(elastic))].fall_silent(fault.duration_ns)

    def _strike_worker(self, fault: Fault, worker: SimulatedWorker) -> None:
        provider = self.life.providers[worker.lease.rpartition("-")[0]]
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
            case _:
                raise AssertionError(f"{fault.kind} befalls no worker")

    def _end_early(self) -> None:
        trainer = self.life.trainer()
        if self.faults.ending is Ending.STOP:
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
            record.require(done == steps == self.checkpoint, f"{done} of {steps} steps done")
        record.require(scheduler.ledger.imbalance_ns() == 0, f"out by {scheduler.ledger.imbalance_ns()} ns")
        record.check_end()

    def _outcome(self) -> Outcome:
        scheduler, records = self.life.scheduler, [life.record for life in self.lives]
        return Outcome(
            seed=self.seed,
            failed=scheduler.failed,
            ended_ns=self.loop.now_ns,
            history=self._history.hexdigest(),
            state=digest(scheduler),
            lives=tuple(_log(life) for life in self.lives),
            settings=self.settings,
            ending=self.faults.ending,
            leases=sum(len(record.granted) for record in records),
            turns_finished=sum(len(record.finished) for record in records),
            redispatched=sum(record.redispatched for record in records),
            trajectories_trained=len(self.life.record.trained),
            imbalance_ns=scheduler.ledger.imbalance_ns(),
            faults=self.tally.struck,
        )


def _log(life: Life) -> LifeLog:
    return LifeLog(
        events=tuple(life.log),
        digests=tuple(life.digests),
        committed=life.committed,
        first_version=life.first_version,
    )
