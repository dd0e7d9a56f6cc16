"""What the parts of the scheduler share: the tables, the time, and the commands on their way out.

The parts form a ladder, from the bottom: turn manager; worker manager; balancer, lease manager, reward manager and
trainer device; group manager; step controller; scheduler. A part calls only parts below it. For parts above it, it
leaves word here (`vacated`, `struck_out`, `over`, the tables), and they look before `handle` returns.
"""

from collections.abc import Callable, Mapping
from enum import Enum, StrEnum, auto
from typing import Any, Protocol, TypeAlias

from msgspec import UNSET

from elastic.core.agreement import Agreement
from elastic.core.commands import Command
from elastic.core.controls import Controls
from elastic.core.evaluation import Evaluation
from elastic.core.events import Event, Resumed, Suspended
from elastic.core.fleet import Fleet, Worker
from elastic.core.leases import LeaseTable
from elastic.core.ledger import Ledger
from elastic.core.outcomes import Outcomes
from elastic.core.patience import Patience
from elastic.core.policy import Policies, StepRecord
from elastic.core.profiles import BatchProfile
from elastic.core.rows import RowProgress
from elastic.core.serving import Serving
from elastic.core.steps import Step
from elastic.core.timers import Timers
from elastic.core.turns import Turns
from elastic.core.types import (
    EndCause,
    LeaseId,
    LeaseState,
    Limits,
    Nanoseconds,
    Plan,
    RunWarning,
    StalenessDrop,
    TurnState,
    WorkerId,
    WorkerKind,
    WorkerRole,
    WorkerState,
)

_SPEAKING = (WorkerState.READY, WorkerState.ASLEEP, WorkerState.DRAINING, WorkerState.LOADING)
TRAINER_AT_HAND = (WorkerState.READY, WorkerState.ASLEEP)


TRAINER_PATIENCE = 10
"""Times as long as another worker the trainer may be silent, or its engine stand still: another one has to do again
what its checkpoint does not have. The trainer is as patient with the orchestrator."""


MAX_DOUBLINGS = 16
_AT_THEIR_TIME = ("expiry", "early replacement", "departure", "budget", "lull", "permit over", "idle")
"""Waits for a time instead of a peer."""


WARNINGS_MAX = 32


class Phase(StrEnum):
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    ENDED = "ended"


_ACTIVE = (Phase.RUNNING, Phase.STARTING)


class Changed(Enum):
    """What an event that comes often has changed at most; of most events nothing is said."""

    PROGRESS = auto()
    """How far turns are, from which nothing follows."""
    ROOM = auto()
    """Which turns wait, and what room workers have."""


Handlers: TypeAlias = Mapping[type[Event], Callable[[Any], Changed | None]]
"""What a part of the scheduler does at each of its events."""
Deadlines: TypeAlias = Mapping[str, Callable[[str], None]]
"""What it does at each of its deadlines, by what waits; called with the key."""


def most(one: Changed | None, other: Changed | None) -> Changed | None:
    """What two events have changed at most, one after the other."""
    return other if one is Changed.PROGRESS else one if other is not None else None


class SchedulerPart(Protocol):
    """A part of the scheduler: the events that it handles, and the callbacks of its waits. One that returns None may
    have changed anything."""

    handlers: Handlers

    @property
    def due(self) -> Mapping[str, Callable[[str], Changed | None]]: ...


class RunState:
    """One run as its parts see it. `over` asks for the run's end, `failed` says why if it is a failure."""

    def __init__(self, plan: Plan, limits: Limits, policies: Policies, now_ns: Nanoseconds) -> None:
        self.plan = plan
        self.limits = limits
        self.policies = policies
        self.now_ns = now_ns
        self.phase = Phase.STARTING
        self.over = False
        self.failed = ""
        self.version: int | None = None
        self.step: Step | None = None
        self.history: list[StepRecord] = []
        self.evaluation: Evaluation | None = None
        """The one that is under way."""
        self.serving = Serving() if plan.serves_requests else None
        """Set where others train, and ask for turns."""
        self.evaluated: dict[int, dict[str, float]] = {}
        """By version, what the metrics came to that decide something; those without a task are left out."""
        self.groups_launched = 0
        """In the whole run, dropped ones included: the number of the next group."""
        self.launched_of = [0] * len(plan.environments)
        """The same by environment: the place of its next group among its own."""
        self.rows: dict[str, RowProgress] = {}
        """By environment, of those whose rows a curriculum orders."""
        self.leases = LeaseTable()
        self.fleet = Fleet(limits.max_pending)
        self.turns = Turns()
        self.profiles: dict[WorkerKind, BatchProfile] = {}
        self.patience = Patience(limits)
        self.ledger = Ledger()
        self.timers = Timers()
        self.vacated: dict[LeaseId, EndCause] = {}
        self.struck_out: dict[WorkerId, None] = {}
        """Workers whose turns bring nothing while others' do."""
        self.trainers_lost = 0
        self.controls = Controls()
        self.agreement = Agreement()
        self.outcomes = Outcomes()
        self.warnings: list[RunWarning] = []
        """The last `WARNINGS_MAX` of all that were `warned` of."""
        self.warned = 0
        self.out: list[Command] = []

    @property
    def oldest_version(self) -> int:
        """The oldest weights version that new tokens may come from (invariant 4)."""
        return (self.version or 0) - self.plan.staleness_bound

    @property
    def drops_tokens(self) -> bool:
        """Whether of a group with tokens that are too old these are left out, and not the group."""
        return self.plan.staleness_drop is StalenessDrop.TOKEN

    @property
    def between_steps(self) -> bool:
        """Whether an evaluation is under way that the next step waits for: no group is launched meanwhile."""
        return self.evaluation is not None and self.evaluation.next_step is not None

    @property
    def active(self) -> bool:
        """Whether the run still wants capacity and results."""
        return not self.over and self.phase in _ACTIVE

    def fail(self, cause: str) -> None:
        """End the run for this cause, unless it is ending already."""
        if self.active:
            self.over = True
            self.failed = cause

    def warn(self, kind: str, message: str) -> None:
        """Have the run's owner told."""
        self.warned += 1
        self.warnings = [*self.warnings, RunWarning(kind=kind, message=message)][-WARNINGS_MAX:]

    def stop(self, why: str) -> None:
        """End the run in good order, to be resumed some time, unless it is ending already."""
        if self.active:
            self.over = True
            self.controls.stopped = why

    @property
    def trainer_away(self) -> bool:
        """Whether the trainer's device is not there: it has not come, its connection is lost, or it is gone."""
        trainer = self.fleet.trainer
        return trainer is None or trainer.state not in TRAINER_AT_HAND

    @property
    def permit_ns(self) -> Nanoseconds:
        """How long the trainer may wait for a permit to compute on its device; 0 where it needs none."""
        offer = self.leases.offers.get(self.plan.trainer_provider)
        if offer is None or not offer.by_permit:
            return 0
        return max(offer.grant_within_ns, self.limits.acquire_timeout_ns)

    def wait(self, what: str, key: str, after_ns: Nanoseconds) -> None:
        self.timers.set(what, key, self.now_ns, after_ns)

    def wait_for_start(self) -> None:
        """Start the wait for the trainer's first words."""
        awaited_ns = self.limits.acquire_timeout_ns + self.limits.boot_timeout_ns
        self.wait("start", "run", awaited_ns + self.leases.grant_within_ns + self.permit_ns)

    def back_off_ns(self, failures: int) -> Nanoseconds:
        """Return the pause after this many failures in a row. It doubles with each failure."""
        return min(self.limits.retry_base_ns << min(failures - 1, MAX_DOUBLINGS), self.limits.retry_max_ns)

    def expect(self, what: str, key: str) -> None:
        """Wait as long as the run has the patience to."""
        self.wait(what, key, self.patience.limit_ns(what, self.now_ns))

    def came(self, what: str, key: str) -> None:
        """End a wait successfully, and remember how long it took."""
        since_ns = self.timers.since_ns(what, key)
        if since_ns is not None:
            self.patience.note(what, self.now_ns - since_ns, self.now_ns)
            self.timers.clear(what, key)

    def goes_on(self, what: str, key: str) -> None:
        """As `came`, for a wait that continues."""
        self.came(what, key)
        self.expect(what, key)

    def count_budget(self) -> None:
        """Compute how long the budget lasts, after a change of the run's leases or debts."""
        if self.controls.budget_usd is not None and self.active:
            self.wait("budget", "run", 0)

    def take_up(self, event: Resumed) -> None:
        """Restart every deadline and the trainer's count of restarts: while the orchestrator was down, no peer could
        be heard. What kept workers from starting may have been mended."""
        self.trainers_lost = 0
        self.leases.early.clear()
        for provider in (*self.leases.failed_starts,):
            self.leases.offer_again(provider)
        if event.budget_usd is not UNSET:
            self.controls.budget_usd = event.budget_usd
        if self.controls.budget_usd is not None:
            for lease in self.leases.leases.values():
                asked_ns = self.timers.since_ns("slice" if lease.id in self.leases.slices else "grant", lease.id)
                if lease.state is LeaseState.REQUESTED and asked_ns is not None:
                    self.controls.unheard_since_ns.setdefault(lease.id, asked_ns)
            self.count_budget()
        for wait in self.timers.waits():
            if wait.what not in _AT_THEIR_TIME:
                self.wait(wait.what, wait.key, wait.until_ns - wait.since_ns)
        for turn in self.turns.live.values():
            turn.heard_ns, turn.due_ns = self.now_ns, self.now_ns + turn.due_ns - turn.heard_ns
        for worker in self.fleet.workers.values():
            self.watch_turns(worker)

    def sleep_through(self, event: Suspended) -> None:
        """Put off every deadline by the time in which no peer could be heard."""
        self.timers.put_off(event.for_ns, _AT_THEIR_TIME)
        for turn in self.turns.live.values():
            turn.started_ns += event.for_ns
            turn.ends_ns += event.for_ns
            turn.heard_ns += event.for_ns
            turn.due_ns += event.for_ns

    def watch_turns(self, worker: Worker) -> None:
        """Wait for the token that is due first of the worker's running turns."""
        running = (turn for turn in map(self.turns.live.__getitem__, worker.turns) if turn.state is TurnState.RUNNING)
        due_ns = min((turn.due_ns for turn in running), default=None)
        if due_ns is None:
            self.timers.clear("token", worker.id)
        else:
            self.wait("token", worker.id, max(0, due_ns - self.now_ns))

    def heard_from(self, worker_id: WorkerId, epoch: int) -> Worker | None:
        """The worker, if it may be believed, and then it is alive: its epoch is current and its lease is live."""
        worker = self.fleet.workers.get(worker_id)
        if worker is None or worker.epoch != epoch or worker.state not in _SPEAKING:
            return None
        self.expect_heartbeat(worker)
        return worker

    def heard_from_trainer(self, worker_id: WorkerId, epoch: int) -> Worker | None:
        """The trainer's worker, if it is this one under its current epoch and may be believed."""
        trainer = self.fleet.trainer
        return trainer if trainer is not None and self.heard_from(worker_id, epoch) is trainer else None

    def expect_heartbeat(self, worker: Worker) -> None:
        """Start the wait for a worker's next words."""
        self.timers.set("heartbeat", worker.id, self.now_ns, patience(worker) * self.limits.heartbeat_timeout_ns)

    def expect_progress(self, worker: Worker) -> None:
        """Start the wait for a worker's engine to get on with its turns."""
        least_ns = patience(worker) * self.limits.stall_timeout_ns
        self.wait("stall", worker.id, max(least_ns, self.patience.limit_ns("stall", self.now_ns)))


def patience(worker: Worker) -> int:
    """The trainer has most to lose, so it is given up later than others."""
    return TRAINER_PATIENCE if worker.role is WorkerRole.TRAINER else 1
