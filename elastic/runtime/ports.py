"""A run's surroundings, as `elastic.runtime.run.Run` sees them.

Each world brings its own: the live one has asyncio, sockets and processes behind these ports, the simulated ones have
models. All are synchronous: a call orders something and returns, and what comes of it is fed to the run as an event.
Payloads (`Any`) are a world's own, such as token ids; a run only hands them from one port to another.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from elastic.core import commands as c
from elastic.core import events as e
from elastic.core.types import LeaseId, Nanoseconds, TrajectoryId, TurnId, WorkerId


class Feed(Protocol):
    """Takes an event to a run's core, with what else has come along for the run's ports."""

    def __call__(self, event: e.Event, payload: Any = None) -> None: ...


class Clock(Protocol):
    def now_ns(self) -> Nanoseconds: ...

    def slept_ns(self) -> Nanoseconds:
        """Return for how long of this time the machine was suspended."""
        ...

    def at(self, when_ns: Nanoseconds, action: Callable[[], None]) -> None:
        """Call `action` at that time, or at once if it has passed; later where the clock is held up."""
        ...


class Stateful(Protocol):
    """A port with a state, which a later incarnation's port takes over."""

    def saved(self) -> Any:
        """Returns the state, made of plain values and this program's data types."""
        ...

    def restore(self, saved: Any) -> None: ...


class Journal(Stateful, Protocol):
    """Remembers what happens. What is recorded of one event becomes durable together."""

    def record(self, now_ns: Nanoseconds, event: e.Event, payload: Any, commands: Sequence[c.Command]) -> None:
        """The core has been told, and these commands are about to be carried out; none if it broke off."""
        ...

    def recalled(self, now_ns: Nanoseconds, event: e.Event, commands: Sequence[c.Command]) -> None:
        """An event of a former incarnation that is recorded already, and what its core answered."""
        ...

    def durable(self, then: Callable[[], None]) -> None:
        """Calls `then` once everything recorded so far would survive the process, and never if it will not.

        Calls are made in the order in which they were asked for.
        """
        ...


WorkerOrder: TypeAlias = c.StartTurn | c.AbortTurn | c.LoadWeights | c.SleepWorker | c.WakeWorker | c.DrainWorker


class Workers(Protocol):
    """Orders reach a worker whose epoch is connected; others are lost, as on any network."""

    def start_turn(self, order: c.StartTurn, prompt: Any) -> None: ...

    def order(self, order: WorkerOrder) -> None: ...

    def fence(self, worker: WorkerId, reason: str) -> None: ...

    def blame(self, worker: WorkerId, reason: str) -> None:
        """Show that the worker has failed a turn."""
        ...


class Leases(Protocol):
    def acquire(self, lease: LeaseId, provider: str, workers: int) -> None: ...

    def release(self, lease: LeaseId, provider: str, reason: str) -> None: ...

    def bar(self, lease: LeaseId, provider: str) -> None:
        """Never leases this lease's place again."""
        ...


class Trajectories(Stateful, Protocol):
    """The environment loops, and what their trajectories have come to."""

    def start(self, group: c.StartGroup) -> None: ...

    def refill(self, member: c.RefillMember) -> None: ...

    def recalled(self, event: e.Event, command: c.Command | None) -> None:
        """Takes an event of a former incarnation, with each command that it caused except `AcceptTokens`; None for
        no command. Acts on nothing before `resume`."""
        ...

    def resume(self) -> None:
        """Go on with the trajectories that were recalled and are not over: environments go through their finished
        turns once more, and `Run.prompted` is called when one has come to a turn that was in progress."""
        ...

    def cancel(self, trajectory: TrajectoryId) -> None: ...

    def prompt(self, turn: TurnId) -> Any:
        """Returns what a worker needs to generate the turn; None if no trajectory waits for it, or not yet."""
        ...

    def accept(self, event: e.TokensReceived, accepted: c.AcceptTokens, payload: Any) -> None:
        """Take over those chunks of the frame that were `accepted`."""
        ...

    def finish_turn(self, turn: TurnId) -> None: ...

    def fail_turn(self, turn: TurnId, cause: str) -> None: ...

    def finished(self, trajectory: TrajectoryId) -> Any:
        """Returns what a function needs to score the trajectory."""
        ...

    def record_reward(self, trajectory: TrajectoryId, reward: float | None, cause: str) -> None: ...

    def take(self, trajectories: Sequence[TrajectoryId]) -> Any:
        """Returns what the trainer needs to learn from these trajectories. A repeated order asks for them again."""
        ...

    def drop(self, trajectories: Sequence[TrajectoryId]) -> Any:
        """Returns what the trainer needs to know of dropped trajectories. They are not asked for again."""
        ...


class Rewards(Protocol):
    def score(self, order: c.ScoreTrajectory, finished: Any) -> None: ...


class TrainerPort(Stateful, Protocol):
    """The trainer's process; orders are carried out one after the other, and asked for once more they are no-ops."""

    def remember(self, order: c.TrainGroup | c.DropGroup | c.UpdateWeights) -> None:
        """Notes an order that is about to be given, or that a former incarnation gave. Of dropped groups, only those
        count that leave a slot empty."""
        ...

    def train(self, order: c.TrainGroup, batch: Any) -> None: ...

    def skip(self, order: c.DropGroup, dropped: Any) -> None:
        """The group's slot in its step's batch stays empty."""
        ...

    def update(self, order: c.UpdateWeights) -> None: ...


class Offers(Protocol):
    """Those who have offered versions that they have trained."""

    def answered(self, answer: c.AnswerOffer) -> None: ...


class NoOffers:
    """The run trains itself."""

    def answered(self, answer: c.AnswerOffer) -> None:
        """Does nothing: the offer was refused already."""


class Pool(Protocol):
    """The pool whose devices the run's trainer and rollouts share with other jobs."""

    def ask_permit(self) -> None:
        """Have the trainer compute on its device in its turn: `PermitGranted` follows. Asked twice is asked once."""
        ...

    def yield_permit(self, permit: int | None, *, finished: bool) -> None:
        """Carries out `elastic.core.commands.YieldPermit`. Does nothing for a permit that is over."""
        ...

    def report_progress(self, step: int, done: int, of: int) -> None: ...

    def take_up(self, permit: int | None, *, asked: bool, last: int) -> None:
        """Another process of the run goes on: it takes itself to have this permit, or to have asked for one.

        What is otherwise is told as events; what the run does not know to have is taken from it. It listens to what is
        said of permits beyond the `last` that it has heard of.
        """
        ...


class UnsharedDevice:
    """The trainer's device belongs to the run alone: no permit is requested or granted."""

    def ask_permit(self) -> None:
        raise AssertionError("nobody gives permits where nothing is shared")

    def yield_permit(self, permit: int | None, *, finished: bool) -> None:
        raise AssertionError("there is no permit where nothing is shared")

    def report_progress(self, step: int, done: int, of: int) -> None:
        """Does nothing: no other job waits for the rollouts' end."""

    def take_up(self, permit: int | None, *, asked: bool, last: int) -> None:
        """Does nothing: no other job has used the device meanwhile."""


class Owner(Protocol):
    """The process that started the run."""

    def ended(self) -> None:
        """The run is over: its last command has been carried out, or it was killed."""
        ...

    def keep(self, version: int) -> None:
        """Have the trainer's checkpoint of this version kept, in place of one that was kept before."""
        ...

    def broken(self, event: e.Event | None, error: Exception) -> None:
        """The core or a port has raised. Nothing more is carried out unless this raises, too."""
        ...


@dataclass(slots=True)
class Ports:
    clock: Clock
    journal: Journal
    workers: Workers
    leases: Leases
    trajectories: Trajectories
    rewards: Rewards
    trainer: TrainerPort
    owner: Owner
    pool: Pool = field(default_factory=UnsharedDevice)
    offers: Offers = field(default_factory=NoOffers)


class OneIncarnation:
    """State handling of a port whose run is never continued by another process."""

    def recalled(self, *_: Any, **__: Any) -> None:
        raise AssertionError("a run of one incarnation has nothing to recall")

    def remember(self, *_: Any, **__: Any) -> None:
        pass

    def resume(self) -> None:
        raise AssertionError("a run of one incarnation does not resume")

    def saved(self) -> Any:
        return None

    def restore(self, saved: Any) -> None:
        pass
