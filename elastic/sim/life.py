"""One life of a run's orchestrator: the core, and everything around it that dies when its process does.

Commands are carried out at once; what comes of them takes its time. A life that has crashed hears nothing more, and
nothing that it had decided and not yet done is done. The next one begins with what the journal has: a fresh core that
is told the committed events is where the former one was; then it is told what a new process finds.
"""

from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any, Protocol

import msgspec

from elastic.core import commands as c
from elastic.core import events as e
from elastic.core.digest import digest
from elastic.core.fleet import Worker
from elastic.core.invariants import check
from elastic.core.leases import Lease
from elastic.core.policy import Policies, SeedingPolicy
from elastic.core.reward_desk import Scoring
from elastic.core.scheduler import Phase, Scheduler, TrainerMode
from elastic.core.types import (
    Account,
    EndCause,
    GroupState,
    LeaseId,
    Nanoseconds,
    ScoringState,
    TrajectoryId,
    TurnId,
    WorkerId,
    WorkerRole,
    WorkerState,
)
from elastic.sim.alarm import Alarm
from elastic.sim.faults import Mishaps, Tally
from elastic.sim.learner import Learner
from elastic.sim.loop import EventLoop
from elastic.sim.provider import SimulatedProvider
from elastic.sim.record import Record
from elastic.sim.rollouts import SimulatedRollouts
from elastic.sim.settings import MS, WorldSettings
from elastic.sim.worker import Attempt, SimulatedWorker
from policies.balancing import ContinuousBalancing
from policies.departure import UseNotice
from policies.provisioning import MarginalValue, TakeWhatIsOffered
from policies.routing import AffinityRouting
from policies.sampling import DynamicSampling, FixedBatch
from policies.seeding import AdaptiveWindow, FixedWindow
from policies.selection import NonZeroVariance
from policies.succession import EarlySuccessor

REPLY_NS = 50 * MS
"""The longest that it takes from a checkpoint to the orchestrator's hearing of its version."""
RESERVED_ENGINES = 3
"""So many workers may help in a first step."""
FINAL = (c.UpdateWeights, c.ReleaseLease)
"""What cannot be taken back is done once the journal is durable: no checkpoint is ahead of it, nor a lease's end."""
BLAMES = (EndCause.FENCED, EndCause.LOST, EndCause.BOOT_TIMEOUT, "no token in time", "hand-over took too long")
"""What the core says of those that it takes to be hung or gone."""
_encode = msgspec.msgpack.Encoder().encode

Log = Sequence[tuple[Nanoseconds, e.Event]]


def policies(settings: WorldSettings) -> Policies:
    return Policies(
        routing=AffinityRouting(),
        balancing=ContinuousBalancing() if settings.balancing else None,
        seeding=_seeding(settings),
        provisioning=MarginalValue() if settings.marginal_provisioning else TakeWhatIsOffered(),
        selection=NonZeroVariance(),
        succession=EarlySuccessor(),
        departure=UseNotice(),
        sampling=DynamicSampling(settings.dynamic_most) if settings.dynamic_most else FixedBatch(),
    )


def _seeding(settings: WorldSettings) -> SeedingPolicy:
    if not settings.adaptive_seeding:
        return FixedWindow(settings.seeding_ns)
    return AdaptiveWindow(settings.seeding_ns, reserved_engines=RESERVED_ENGINES)


def replayed(settings: WorldSettings, log: Log) -> list[str]:
    """The digest after each recorded event, of a fresh scheduler that is told nothing else (invariant 13)."""
    scheduler = fresh_core(settings)
    found: list[str] = []
    for now_ns, event in log:
        scheduler.handle(event, now_ns)
        found.append(digest(scheduler))
    return found


def fresh_core(settings: WorldSettings) -> Scheduler:
    limits = msgspec.structs.replace(settings.limits, trainer_restarts_max=0)
    return Scheduler(settings.plan, limits, policies(settings), 0)


class Outside(Protocol):
    """What outlives an orchestrator: time and chance, the providers and their workers, the trainer's checkpoint."""

    seed: int
    settings: WorldSettings
    loop: EventLoop
    rng: Random
    tally: Tally
    learner: Learner
    digesting: bool
    workers: dict[WorkerId, SimulatedWorker]
    providers: dict[str, SimulatedProvider]
    verified: dict[WorkerId, set[int]]
    last_crash_ns: Nanoseconds

    @property
    def mishaps(self) -> Mishaps: ...

    @property
    def faultless(self) -> bool:
        """Whether nothing ever goes wrong here."""
        ...

    def rewards_down(self) -> bool: ...

    def next_epoch(self, worker: WorkerId) -> int: ...

    def trainer(self) -> SimulatedWorker | None: ...

    def start_trainer(self, worker: WorkerId, lease: LeaseId) -> SimulatedWorker:
        """A new process on the trainer's device, with the weights that the learner has."""
        ...

    def turn_length(self, turn: TurnId) -> int: ...

    def note(self, happened: bytes) -> None:
        """Goes into the world's history."""
        ...


class Life:
    """Begins with what the journal has of the `former` ones, or, without one, at the trainer's checkpoint."""

    def __init__(self, outside: Outside, former: "Life | None" = None) -> None:
        self.seed = outside.seed
        self.settings = outside.settings
        self.loop = outside.loop
        self.tally = outside.tally
        self.up = False
        self.scheduler = fresh_core(self.settings)
        self.first_version = outside.learner.checkpoint if former is None else former.first_version
        trained = outside.learner.trajectories
        self.record = Record(
            self.settings.plan.staleness_bound,
            self.first_version,
            {t: step for t, step in trained.items() if step < self.first_version},
            self.settings.limits.retry_base_ns,
        )
        self.rollouts = SimulatedRollouts(self, self.record.finished)
        self.log: list[tuple[Nanoseconds, e.Event]] = []
        self.digests: list[str] = []
        self.recalled = self.committed = 0
        """How many events of the log the journal had, and how many it has for good."""
        self.orders: list[c.TrainGroup | c.UpdateWeights] = []
        """What the trainer was told to learn and to publish."""
        self._outside = outside
        self._committed_digest = ""
        self._refused: set[WorkerId] = set()
        self._alarm = Alarm(self.loop, self.scheduler.next_wakeup_ns, lambda: self._handle(e.Tick()))
        self._execute: dict[type[c.Command], Callable[[Any], None]] = {
            c.AcquireLease: lambda k: outside.providers[k.provider].acquire(k.lease),
            c.ReleaseLease: lambda k: outside.providers[k.provider].release(k.lease),
            c.AcceptTokens: lambda _: None,
            c.FinishTurn: self._finish_turn,
            c.FailTurn: lambda k: self.rollouts.fail(k.turn.partition("#")[0], k.cause),
            c.FenceWorker: lambda _: None,
            c.BarLease: lambda _: None,
            c.StartGroup: self._start_group,
            c.CancelTrajectory: lambda k: self.rollouts.cancel(k.trajectory),
            c.ScoreTrajectory: lambda k: self.rollouts.score(k.trajectory, k.attempt),
            c.RecordReward: lambda _: None,
            c.TrainGroup: self._train_group,
            c.DropGroup: lambda k: self.rollouts.drop(k.trajectories),
            c.UpdateWeights: self._update_weights,
            c.EndRun: lambda _: None,
        }
        if former is not None:
            self._recall(former)

    @property
    def mishaps(self) -> Mishaps:
        return self._outside.mishaps

    def rewards_down(self) -> bool:
        return self._outside.rewards_down()

    @property
    def ended(self) -> bool:
        return self.scheduler.phase is Phase.ENDED and self.up

    # From one life to the next

    def begin(self) -> None:
        self.up = True
        for provider in self._outside.providers.values():
            provider.offer()
        self._commit_on()

    def crash(self) -> None:
        """The process is gone, and with it its environments and every connection."""
        self.up = False
        self.rollouts.die()

    def _recall(self, former: "Life") -> None:
        """Be where the journal leads, which is where the former life was when it was last made durable."""
        self.record.recall(former.record)
        for now_ns, event in former.log[: former.committed]:
            for command in self._tell(event, now_ns):
                if isinstance(command, c.DropGroup):
                    self.rollouts.drop(command.trajectories)
        self.record.settle()
        self.recalled = len(self.log)
        self._commit()
        same = self._committed_digest == former._committed_digest or not self.committed
        self.record.require(same, "the journal leads to another state")

    def resume(self) -> None:
        """Go on from there: what was under way in the process that is gone is taken up or begun again.

        The trainer stands where the journal says before anybody else is heard. Other workers are disconnected until
        they dial; a lease is what its provider says it is.
        """
        self.up = True
        core = self.scheduler
        known = {lease.id: (lease.provider, lease.live) for lease in core.leases.leases.values()}
        unheard_of = [lease for lease in core.leases.leases.values() if not lease.live and not self._heard_of(lease)]
        self._begin_again()
        trainer = self._restore_trainer(core.fleet.trainer)
        self._handle(e.Resumed())
        for worker in list(core.fleet.workers.values()):
            if worker.connected and worker is not trainer:
                self._handle(e.WorkerDisconnected(worker=worker.id, epoch=worker.epoch))
        for lease in unheard_of:
            self._ask_again(lease)
        for name, provider in self._outside.providers.items():
            its_own = {lease: granted for lease, (issuer, granted) in known.items() if issuer == name}
            for event in provider.take_stock(its_own):
                self._handle(event)
            provider.offer()
        self._boot_trainer(core.fleet.trainer)
        self._commit_on()

    def carried_out(self) -> list[c.TrainGroup | c.UpdateWeights]:
        """What the trainer has done of its orders: all, but for the one that it is at."""
        step = self.scheduler.step
        at_work = self.scheduler.training is not None or (step is not None and step.updating)
        return self.orders[:-1] if at_work else self.orders

    def _begin_again(self) -> None:
        """Environments go through their finished turns once more; scoring and training are asked for once more."""
        step = self.scheduler.step
        if step is None:
            return
        for group in step.in_state(GroupState.RUNNING):
            for trajectory in group.unfinished:
                self._go_on_with(trajectory, self.scheduler.scorings.get(trajectory))
        for order in self.orders[len(self.carried_out()) :]:
            self._carry_out(order)

    def _go_on_with(self, trajectory: TrajectoryId, scoring: Scoring | None) -> None:
        if scoring is None:
            self.rollouts.start(trajectory)
        elif scoring.state is ScoringState.RUNNING:
            self.rollouts.score(trajectory, scoring.attempt)
        if trajectory in self.record.failed:
            self.rollouts.fail(trajectory, self.record.failed[trajectory])

    def _heard_of(self, lease: Lease) -> bool:
        return lease.id in self._outside.providers[lease.provider].held

    def _ask_again(self, lease: Lease) -> None:
        """The provider knows of no such request: it never arrived, or the answer has not."""
        if lease.release_reason:
            self._handle(e.LeaseRefused(lease=lease.id, reason="it was withdrawn"))
        else:
            self._carry_out(c.AcquireLease(lease=lease.id, provider=lease.provider))

    def _restore_trainer(self, trainer: Worker | None) -> Worker | None:
        """The new process of a trainer that has joined goes on under the same connection."""
        if trainer is None or trainer.state not in (WorkerState.READY, WorkerState.ASLEEP):
            return None
        self._stand_in(trainer, self._outside.start_trainer(trainer.id, trainer.lease))
        return trainer

    def _boot_trainer(self, trainer: Worker | None) -> None:
        """One that has not joined yet, and whose process is gone, is started anew."""
        if trainer is not None and trainer.state is WorkerState.BOOTING and self._outside.trainer() is None:
            self._outside.start_trainer(trainer.id, trainer.lease).boot()

    def _stand_in(self, trainer: Worker, process: SimulatedWorker) -> None:
        core, mode = self.scheduler, self.scheduler.trainer_mode
        book = core.ledger.books[trainer.id]
        accounts_ns = dict(book.credited_ns)
        away_ns = self.loop.now_ns - book.cursor_ns
        accounts_ns[Account.BOOTING] = accounts_ns.get(Account.BOOTING, 0) + away_ns
        turns = {t: Attempt(core.turns.live[t].attempt, core.turns.live[t].accepted) for t in trainer.turns}
        process.version, process.asleep = trainer.version, mode in (TrainerMode.ASLEEP, TrainerMode.WAKING)
        process.stand_in(self, trainer.epoch, turns, accounts_ns, book.decoded_tokens)
        if mode is TrainerMode.RESTING:
            process.hear(c.SleepWorker(worker=trainer.id, epoch=trainer.epoch))
        elif mode is TrainerMode.WAKING:
            process.hear(c.WakeWorker(worker=trainer.id, epoch=trainer.epoch))

    def _commit_on(self) -> None:
        """The journal is made durable, now and then, until the last crash is over."""
        if self.up and self.loop.now_ns < self._outside.last_crash_ns:
            self._commit()
            self.loop.after(self.settings.commit_ns, self._commit_on)

    def _commit(self) -> None:
        self.committed, self._committed_digest = len(self.log), digest(self.scheduler)

    # To and from the core

    def feed(self, event: e.Event) -> None:
        """One event to the core; its commands are carried out, its state is checked."""
        if not self.up:
            return
        self._handle(event)
        if not isinstance(event, e.Tick) and self.tally.befalls(self._outside.rng, self.mishaps.event_repeated):
            self._handle(event)

    def _handle(self, event: e.Event) -> None:
        if not self.up:
            return
        now_ns = self.loop.now_ns
        commands = self._tell(event, now_ns)
        self._outside.note(_encode((now_ns, event, commands)))
        check(self.scheduler)
        self.record.check_weights(dict(self._serving()), self._outside.verified)
        if any(isinstance(command, FINAL) for command in commands):
            self._commit()
        for command in commands:
            self._carry_out(command)
        self._alarm.arm()
        if self.ended:
            self.loop.stop()

    def _tell(self, event: e.Event, now_ns: Nanoseconds) -> list[c.Command]:
        """What the process knows by itself follows from what the core is told, now or by the journal."""
        self.log.append((now_ns, event))
        commands = self.scheduler.handle(event, now_ns)
        if self._outside.digesting:
            self.digests.append(digest(self.scheduler))
        self.record.note_event(event)
        for command in commands:
            self.record.note_command(command, event, now_ns)
            self._remember(command)
        return commands

    def _remember(self, command: c.Command) -> None:
        match command:
            case c.StartTurn():
                self.record.check_credits(command, self.scheduler.fleet.workers[command.worker].outstanding)
                self._check_need(command.turn, str(self.scheduler.turns.live[command.turn].story))
            case c.FenceWorker():
                self._check_need(command.worker, command.reason)
                self._refused.add(command.worker)
            case c.TrainGroup() | c.UpdateWeights():
                self.orders.append(command)
            case _:
                pass

    def _check_need(self, thing: str, cause: str) -> None:
        """Where nothing goes wrong, nobody is given up, and no turn is sent again for its silence (invariant 15)."""
        needless = self._outside.faultless and any(blame in cause for blame in BLAMES)
        self.record.require(not needless, f"{thing}: without need: {cause}")

    def _serving(self) -> Iterator[tuple[WorkerId, int]]:
        """Which versions the core takes workers to serve."""
        for worker in self.scheduler.fleet.workers.values():
            if worker.version is not None and worker.role is not WorkerRole.TRAINER:
                yield worker.id, worker.version

    def _carry_out(self, command: c.Command) -> None:
        execute = self._execute.get(type(command))
        if execute is not None:
            self.loop.after(0, lambda: execute(command) if self.up else None)
            return
        worker = self._outside.workers.get(getattr(command, "worker", ""))
        if worker is not None:
            worker.hear(command)

    # What workers see

    def next_epoch(self, worker: WorkerId) -> int | None:
        return None if worker in self._refused else self._outside.next_epoch(worker)

    def note_generated(self, worker: WorkerId, turn: TurnId, attempt: int, start: int, count: int) -> None:
        self.record.note_generated(worker, turn, attempt, start, count)

    # Carrying out commands

    def _finish_turn(self, command: c.FinishTurn) -> None:
        accepted, length = self.record.accepted.get(command.turn, 0), self._outside.turn_length(command.turn)
        self.record.require(accepted == length, f"{command.turn} finished with {accepted} of {length} tokens")
        self.rollouts.finish_turn(command.turn)

    def _start_group(self, command: c.StartGroup) -> None:
        for trajectory in command.trajectories:
            self.rollouts.start(trajectory)

    def _train_group(self, command: c.TrainGroup) -> None:
        def learn(trainer: SimulatedWorker) -> None:
            self._outside.learner.learn(command)
            self.feed(e.GroupTrained(worker=trainer.id, epoch=trainer.epoch, group=command.group))

        self._on_trainer(learn)

    def _update_weights(self, command: c.UpdateWeights) -> None:
        """The checkpoint is written before anybody hears of the version that it has."""

        def step(trainer: SimulatedWorker) -> None:
            version = command.version
            trainer.version = version
            last = version == self.settings.plan.steps
            self._outside.learner.publish(version, save=last or version % self.settings.checkpoint_every_steps == 0)
            published = e.WeightsPublished(worker=trainer.id, epoch=trainer.epoch, version=version)
            reply_ns = self._outside.rng.randrange(REPLY_NS)
            self.loop.after(reply_ns, lambda: self.feed(published) if trainer.alive else None)

        self._on_trainer(step)

    def _on_trainer(self, then: Callable[[SimulatedWorker], None]) -> None:
        """Training takes the device: it must be asleep from the order to the answer, and alive."""

        def done() -> None:
            trainer = self._outside.trainer() if self.up else None
            if trainer is not None:
                self.record.require(trainer.asleep, "the trainer's device generates while it trains")
                then(trainer)

        self.loop.after(self._outside.rng.randint(1, self.settings.train_ns), done)
