"""One incarnation of a run's orchestrator in a world of faults: the production `Run` between light ports, and a
checker.

- Orders take time to have effects, and the journal takes time to be durable.
- A crashed incarnation hears nothing more; commands that it had decided but not carried out are lost.
- The next incarnation replays the journal and must reach the crashed one's last durable state. Then its providers tell
  it what it has missed.
"""

from collections import deque
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from elastic.core import commands as c
from elastic.core import events as e
from elastic.core.digest import digest
from elastic.core.invariants import check
from elastic.core.policy import Policies
from elastic.core.scheduler import Scheduler
from elastic.core.types import EndCause, LeaseId, Nanoseconds, TurnId, WorkerId
from elastic.runtime.ports import Ports, UnsharedDevice, WorkerOrder
from elastic.runtime.run import Run
from elastic.simulation.loop import VirtualClock
from elastic.testing.faults.core.learner import Order
from elastic.testing.faults.core.record import RunRecord
from elastic.testing.faults.core.rollouts import SimulatedRollouts
from elastic.testing.faults.core.settings import MS, WorldSettings
from elastic.testing.faults.core.trainer import SimulatedTrainer
from policies.balancing import ContinuousBalancing
from policies.departure import UseNotice
from policies.provisioning import HoldForRollouts, MarginalValue, TakeWhatIsOffered
from policies.replacement import EarlyReplacement
from policies.routing import AffinityRouting
from policies.sampling import DynamicSampling, FixedBatch
from policies.seeding import AdaptiveWindow, FixedWindow
from policies.selection import NonZeroVariance

if TYPE_CHECKING:
    from elastic.testing.faults.core.world import SimulatedWorld

DURABLE_NS = 100 * MS
"""The longest time until a write is durable, unless the journal is busy with an earlier one."""
RESERVED_ENGINES = 3
"""Number of workers that may help in a first step."""
SAVED = 1 / 4
"""The share of the journal's flushes at which the state is saved, too."""
BLAMES = (EndCause.FENCED, EndCause.LOST, EndCause.BOOT_TIMEOUT, "no token in time", "hand-over took too long")
"""Causes that the core gives for workers that it takes to be hung or gone."""
_encode = msgspec.msgpack.Encoder().encode


def policies(settings: WorldSettings) -> Policies:
    window_ns, adaptive = settings.seeding_ns, settings.adaptive_seeding
    ours = Policies(
        routing=AffinityRouting(),
        balancing=ContinuousBalancing() if settings.balancing else None,
        seeding=AdaptiveWindow(window_ns, reserved_engines=RESERVED_ENGINES) if adaptive else FixedWindow(window_ns),
        provisioning=MarginalValue() if settings.marginal_provisioning else TakeWhatIsOffered(),
        holding=HoldForRollouts(settings.foreseen) if settings.holding else None,
        selection=NonZeroVariance(),
        replacement=EarlyReplacement(),
        departure=UseNotice(),
        sampling=DynamicSampling(settings.dynamic_most) if settings.dynamic_most else FixedBatch(),
    )
    return msgspec.structs.replace(ours, **settings.policies)


def replayed(settings: WorldSettings, log: Sequence[tuple[Nanoseconds, e.Event]]) -> list[str]:
    """The digest after each recorded event, of a fresh scheduler that is told nothing else (invariant 13)."""
    scheduler = fresh_core(settings)
    found: list[str] = []
    for now_ns, event in log:
        scheduler.handle(event, now_ns)
        found.append(digest(scheduler))
    return found


def fresh_core(settings: WorldSettings) -> Scheduler:
    return Scheduler(settings.plan, settings.limits, policies(settings), 0)


class SimulatedJournal:
    """What an incarnation has heard (`elastic.runtime.ports.Journal`); `check_event` is told before anything comes of
    it.

    `committed` events are durable, and led to `committed_digest`, which is of use until the last crash. `save` is
    called now and then between two events.
    """

    def __init__(
        self,
        outside: "SimulatedWorld",
        scheduler: Scheduler,
        check_event: Callable[[Nanoseconds, e.Event, Sequence[c.Command]], None],
        save: Callable[[], None],
    ) -> None:
        self.events: list[tuple[Nanoseconds, e.Event]] = []
        self.digests: list[str] = []
        self.recalled_events = self.committed = 0
        self.committed_digest = digest(scheduler)
        self.up = True
        self._outside = outside
        self._scheduler = scheduler
        self._check_event = check_event
        self._save = save
        self._decided: dict[object, int] = {}
        """With which event each command was decided first; of a release only the lease is known."""
        self._awaited: deque[tuple[int, Callable[[], None]]] = deque()
        self._committing = False

    def record(self, now_ns: Nanoseconds, event: e.Event, payload: None, commands: Sequence[c.Command]) -> None:
        self._add(now_ns, event, commands)
        self._outside.note(_encode((now_ns, event, commands)))
        check(self._scheduler)

    def recalled(self, now_ns: Nanoseconds, event: e.Event, commands: Sequence[c.Command]) -> None:
        self._add(now_ns, event, commands)
        self.recalled_events = self.committed = len(self.events)

    def _add(self, now_ns: Nanoseconds, event: e.Event, commands: Sequence[c.Command]) -> None:
        self.events.append((now_ns, event))
        if self._outside.digesting:
            self.digests.append(digest(self._scheduler))
        for command in commands:
            if isinstance(command, c.EndEvaluation):
                continue  # It is kept, and nothing else comes of it.
            what = command.lease if isinstance(command, c.ReleaseLease) else command
            self._decided.setdefault(what, len(self.events))
        self._check_event(now_ns, event, commands)

    def saved(self) -> dict[object, int]:
        return self._decided

    def restore(self, saved: dict[object, int]) -> None:
        self._decided = saved

    def is_durable(self, decided: object) -> bool:
        """Whether an order, or the release of a lease, is durable."""
        return self._decided[decided] <= self.committed

    def durable(self, then: Callable[[], None]) -> None:
        self._awaited.append((len(self.events), then))
        self._commit()

    def commit_on(self) -> None:
        """It becomes durable now and then even if nobody waits for it, until the last crash is over."""
        if self.up and self._outside.loop.now_ns < self._outside.faults.last_crash_ns:
            if self._outside.rng.random() < SAVED:
                self._save()
            self._commit()
            self._outside.loop.after(self._outside.settings.commit_ns, self.commit_on)

    def _commit(self) -> None:
        if not self._committing:
            self._committing = True
            crashes = self._outside.loop.now_ns < self._outside.faults.last_crash_ns
            count, state = len(self.events), digest(self._scheduler) if crashes else ""
            takes_ns = self._outside.rng.randrange(DURABLE_NS)
            self._outside.loop.after(takes_ns, lambda: self._written(count, state))

    def _written(self, count: int, state: str) -> None:
        if not self.up:
            return
        self.committed, self.committed_digest = count, state
        while self._awaited and self._awaited[0][0] <= count:
            self._awaited.popleft()[1]()
        self._committing = False
        if self._awaited:
            self._commit()


class TrainerOrders:
    """All orders for the trainer of which the journal knows (`elastic.runtime.ports.TrainerPort`)."""

    def __init__(self, tell: Callable[[Order], None]) -> None:
        self.given: list[Order] = []
        self._tell = tell

    def remember(self, order: c.TrainGroup | c.DropGroup | c.UpdateWeights) -> None:
        if not isinstance(order, c.DropGroup) and order not in self.given[-1:]:
            self.given.append(order)

    def train(self, order: Order, batch: None = None) -> None:
        self._tell(order)

    update = train

    def skip(self, order: c.DropGroup, dropped: None) -> None:
        """Slots are not modelled."""

    def saved(self) -> list[Order]:
        return self.given

    def restore(self, saved: list[Order]) -> None:
        self.given = saved


class SavedRunState(NamedTuple):
    """A run's state after a number of events, and its record at that time."""

    events: int
    state: bytes
    record: RunRecord


class Incarnation:
    """A process of the run's orchestrator. It begins with the journal of the `former` one, or without one at the
    trainer's checkpoint.
    """

    def __init__(self, outside: "SimulatedWorld", former: "Incarnation | None" = None) -> None:
        settings = outside.settings
        self.up = self.over = False
        self.checkpoint = outside.learner.checkpoint
        self.first_version = self.checkpoint if former is None else former.first_version
        trained = outside.learner.saved_trajectories
        self.record = RunRecord(
            settings.plan,
            self.first_version,
            {t: step for t, step in trained.items() if step < self.first_version},
            settings.limits.retry_base_ns,
        )
        self.scheduler = fresh_core(settings)
        self.journal = SimulatedJournal(outside, self.scheduler, self._check_event, self._save)
        self.saved: SavedRunState | None = None
        self.orders = TrainerOrders(self._tell_trainer)
        self._outside = outside
        self._run = Run(self.scheduler, self._connect)
        if former is not None:
            self._recall(former)

    def _connect(self, run: Run) -> Ports:
        self.rollouts = SimulatedRollouts(self._outside, self.record, self.feed, run.prompted)
        return Ports(
            clock=VirtualClock(self._outside.loop),
            journal=self.journal,
            workers=self,
            leases=self,
            trajectories=self.rollouts,
            rewards=self,
            trainer=self.orders,
            owner=self,
            pool=self._outside.pool or UnsharedDevice(),
        )

    # From one incarnation to the next

    def begin(self) -> None:
        self.up = True
        for provider in self._outside.providers.values():
            provider.offer()
        self.journal.commit_on()

    def crash(self) -> None:
        """The process is gone, and with it its environments and every connection."""
        self.up = self.journal.up = False
        self._run.close()
        self.rollouts.die()

    def _save(self) -> None:
        self.saved = SavedRunState(len(self.journal.events), self._run.saved(), deepcopy(self.record))

    def _recall(self, former: "Incarnation") -> None:
        """Be where the journal leads, which is where the former one was when it was last made durable.

        It is told all of the journal, or what came after the state that was saved.
        """
        journal, saved, begin = former.journal, former.saved, 0
        if saved is not None and saved.events <= journal.committed:
            self._run.restore(saved.state)
            self.record.restore(saved.record)
            self.saved, begin = saved, saved.events
            self.journal.events, self.journal.digests = journal.events[:begin], journal.digests[:begin]
            self.journal.recalled_events = self.journal.committed = begin
        self.record.recall(former.record)
        for now_ns, event in journal.events[begin : journal.committed]:
            self._run.recall(now_ns, event)
        self.record.settle()
        found = self.journal.committed_digest = digest(self.scheduler)
        self.record.require(found == journal.committed_digest, "the journal leads to another state")

    def resume(self) -> None:
        """Goes on: workers count as disconnected until they dial, and leases are as their providers say."""
        self.up = True
        leases, providers = list(self.scheduler.leases.leases.values()), self._outside.providers
        missed: list[e.Event] = []
        for name, provider in providers.items():
            missed += provider.take_stock({lease.id: lease.live for lease in leases if lease.provider == name})
        unheard_of = [x.id for x in leases if not x.live and x.id not in providers[x.provider].held]
        self._run.resume()
        for lease in unheard_of:
            self._run.ask_again(lease)
        for event in missed:
            self.feed(event)
        self.begin()

    # To the run

    def feed(self, event: e.Event) -> None:
        if not self.up:
            return
        self._run.feed(event)
        if self._outside.injector.injects(self._outside.rng, self._outside.fault_rates.event_repeated):
            self._run.feed(event)

    def durable(self, then: Callable[[], None]) -> None:
        """Call back once all that was fed is durable, never if it will not be."""
        self.journal.durable(then)

    # The checks

    def _check_event(self, now_ns: Nanoseconds, event: e.Event, commands: Sequence[c.Command]) -> None:
        record = self.record
        record.note_event(event)
        for command in commands:
            record.note_command(command, event, now_ns)
            match command:
                case c.StartTurn():
                    record.check_credits(command, self.scheduler.fleet.workers[command.worker].outstanding)
                    self._check_need(command.turn, str(self.scheduler.turns.live[command.turn].story))
                case c.AcquireLease(provider=provider):
                    offer = self.scheduler.leases.offers[provider]
                    record.check_cap(provider, offer.gpus_per_worker * offer.workers_per_lease)
                case c.FenceWorker():
                    self._check_need(command.worker, command.reason)
                case c.FinishTurn():
                    accepted, length = record.accepted.get(command.turn, 0), self._outside.turn_length(command.turn)
                    record.require(accepted == length, f"{command.turn} finished with {accepted} of {length} tokens")
                case _:
                    pass
        if self.up:
            record.check_weights(self.scheduler.fleet.workers.values(), self._outside.verified)

    def _check_need(self, thing: str, cause: str) -> None:
        """Without faults, no worker is given up, and no turn is sent again for its silence (invariant 15)."""
        needless = self._outside.faults.end_ns == 0 and any(blame in cause for blame in BLAMES)
        self.record.require(not needless, f"{thing}: without need: {cause}")

    # What the run sees: its workers, its leases, its owner

    def start_turn(self, order: c.StartTurn, prompt: TurnId) -> None:
        self.order(order)

    def order(self, order: WorkerOrder) -> None:
        worker = self._outside.workers.get(order.worker)
        if worker is not None:
            worker.hear(order)

    def fence(self, worker: WorkerId, reason: str) -> None:
        """Refuse the worker when it next dials."""

    def blame(self, worker: WorkerId, reason: str) -> None:
        """Nobody is shown it."""

    def acquire(self, lease: LeaseId, provider: str, workers: int) -> None:
        self._outside.providers[provider].acquire(lease)

    def release(self, lease: LeaseId, provider: str, reason: str) -> None:
        self._require_durable(lease)
        self._outside.providers[provider].release(lease)

    def bar(self, lease: LeaseId, provider: str) -> None:
        """Providers here have no memory."""

    def score(self, order: c.ScoreTrajectory, finished: None) -> None:
        self._require_durable(order)
        self.rollouts.score(order)

    def _require_durable(self, decided: object) -> None:
        self.record.require(self.journal.is_durable(decided), f"done before it is durable: {decided}")

    def _tell_trainer(self, order: Order) -> None:
        self._require_durable(order)
        trainer = self.scheduler.trainer()
        process = self._outside.workers.get(trainer.id) if trainer is not None else None
        if trainer is not None and isinstance(process, SimulatedTrainer):
            process.be_told(trainer.epoch, order)

    def ended(self) -> None:
        self.over = True
        self._outside.loop.stop()

    def keep(self, version: int) -> None:
        self.record.require(version == self.scheduler.best_version, f"version {version} is kept, and is not the best")

    def broken(self, event: e.Event | None, error: Exception) -> None:
        raise error

    # What workers see

    def next_epoch(self, worker: WorkerId) -> int | None:
        return None if worker in self.record.refused else self._outside.next_epoch(worker)

    def trainer_orders(self) -> Sequence[Order]:
        return self.orders.given

    def note_generated(self, worker: WorkerId, turn: TurnId, attempt: int, start: int, count: int) -> None:
        self.record.note_generated(worker, turn, attempt, start, count)
