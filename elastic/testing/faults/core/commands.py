"""Commands to a run in a world of faults, and what must be true of them.

A client gives each command to whatever process is at the run, and repeats it under its id until it is acknowledged. An
acknowledged command is known to every later process. What providers bill stays within the budget; not counted is what
no run can help: time in which no process of it is up or its provider is silent, and time after a release that is not
confirmed within its limit.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from random import Random
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from elastic.core import events as e
from elastic.core.ledger import NANO_USD_PER_USD, NS_PER_HOUR
from elastic.core.types import LeaseId, Nanoseconds
from elastic.simulation.loop import EventLoop
from elastic.testing.faults.core.settings import MS, SimulatedProviderSettings, WorldSettings

if TYPE_CHECKING:
    from elastic.testing.faults.core.incarnation import Incarnation

REPEAT_NS = 1000 * MS
"""How long a client waits for an acknowledgement."""
BUDGET_USD = (0.04, 0.2)
"""From some ten seconds of everything on."""
MOST_CAPS = 6

Interval: TypeAlias = tuple[Nanoseconds, Nanoseconds]


class TimedCommand(NamedTuple):
    at_ns: Nanoseconds
    event: e.ControlEvent


class LeaseTime(NamedTuple):
    """For so long a provider bills a lease; `workers` devices of it."""

    lease: LeaseId
    workers: int
    began_ns: Nanoseconds
    ended_ns: Nanoseconds


def draw_commands(seed: int, settings: WorldSettings, end_ns: Nanoseconds) -> tuple[TimedCommand, ...]:
    """Caps that come and go, and mostly a budget that is known from the beginning and may be raised."""
    rng = Random(f"{seed}/commands")
    found: list[TimedCommand] = []
    names = [provider.name for provider in settings.providers]
    for number in range(rng.randint(0, MOST_CAPS) if names else 0):
        gpus = rng.choice((None, 0, 1, 2, 3, 4))
        cap = e.CapSet(command=f"cap {number}", provider=rng.choice(names), gpus=gpus)
        found.append(TimedCommand(rng.randrange(end_ns), cap))
    if rng.random() < 2 / 3:
        usd = rng.uniform(*BUDGET_USD)
        found.append(TimedCommand(0, e.BudgetSet(command="budget", usd=usd)))
        if rng.random() < 1 / 3:
            raised = e.BudgetSet(command="more", usd=usd * rng.uniform(1, 2))
            found.append(TimedCommand(rng.randrange(end_ns), raised))
    return tuple(found)


class Commander:
    """Gives commands to the process that is at the run, `at_run`, until each is acknowledged."""

    def __init__(self, loop: EventLoop, at_run: Callable[[], "Incarnation"], commands: Sequence[TimedCommand]) -> None:
        self._loop = loop
        self._at_run = at_run
        self._commands = commands
        self.acknowledged: dict[str, e.ControlEvent] = {}

    def begin(self) -> None:
        for command in self._commands:
            self._loop.at(command.at_ns, lambda event=command.event: self._give(event))

    def _give(self, event: e.ControlEvent) -> None:
        run = self._at_run()
        if event.command in self.acknowledged or run.over:
            return
        if run.up:
            run.feed(event)
            run.durable(lambda: self._acknowledge(event))
        self._loop.after(REPEAT_NS, lambda: self._give(event))

    def _acknowledge(self, event: e.ControlEvent) -> None:
        self.acknowledged.setdefault(event.command, event)

    def forgotten(self) -> list[str]:
        """Acknowledged commands that the run does not know."""
        return [command for command in self.acknowledged if command not in self._at_run().scheduler.controls.commands]

    @property
    def budget_usd(self) -> float | None:
        """The largest that the run was ever given; they only grow."""
        budgets = [event.usd for event in self.acknowledged.values() if isinstance(event, e.BudgetSet)]
        return max((usd for usd in budgets if usd is not None), default=None)


def billed_usd(
    provider: SimulatedProviderSettings,
    times: Iterable[LeaseTime],
    asked_back_ns: Mapping[LeaseId, Nanoseconds],
    release_timeout_ns: Nanoseconds,
    excused: Sequence[Interval],
) -> float:
    """The provider's bill, without `excused` time and without the time after a release's limit."""
    usd_per_ns = provider.usd_per_gpu_hour * provider.gpus_per_worker / NS_PER_HOUR
    counted_ns = 0
    for time in times:
        ended_ns = min(time.ended_ns, asked_back_ns.get(time.lease, time.ended_ns) + release_timeout_ns)
        counted_ns += time.workers * _without((time.began_ns, ended_ns), excused)
    return round(counted_ns * usd_per_ns * NANO_USD_PER_USD) / NANO_USD_PER_USD


def _without(whole: Interval, excused: Sequence[Interval]) -> Nanoseconds:
    """How much of an interval lies in none of the others."""
    begin_ns, end_ns = whole
    left_ns, at_ns = 0, begin_ns
    for first_ns, last_ns in sorted(excused):
        left_ns += max(0, min(first_ns, end_ns) - at_ns)
        at_ns = max(at_ns, min(last_ns, end_ns))
    return left_ns + max(0, end_ns - at_ns)
