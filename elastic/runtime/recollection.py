"""A run rebuilt from its journals, without carrying anything out: the state where the next incarnation begins."""

from collections.abc import Collection, Iterable, Iterator
from typing import Any, TypeAlias

import msgspec

from elastic.core import events as e
from elastic.core.scheduler import Scheduler
from elastic.core.types import Nanoseconds
from elastic.protocol import wire
from elastic.runtime.agents import AgentLimits, AgentRollouts, RequestRollouts
from elastic.runtime.mixture import MixedRollouts, played_by
from elastic.runtime.ports import Ports
from elastic.runtime.recorder import JournalRecorder
from elastic.runtime.rollout import Rollouts
from elastic.runtime.run import Run
from elastic.runtime.trainer import GatewayTrainer

Entry: TypeAlias = tuple[Nanoseconds, e.Event, wire.Tokens | None]

_AFTER_A_STOP = (
    *(e.CapSet, e.BudgetSet, e.StopCommanded, e.FunctionsBilled),
    *(
        e.LeaseGranted,
        e.LeaseRefused,
        e.LeaseEnded,
        e.LeaseRepriced,
        e.StraysBilled,
        e.WorkerReported,
        e.WorkerDisconnected,
    ),
)


def gone_on(entries: Iterable[Entry]) -> Iterator[Entry]:
    """The entries of a journal that still hold for the incarnation that continues it.

    A stop, for whatever reason, becomes a resumption, for somebody has resumed the run since; of a command to stop its
    id is kept, and commands that came after it still hold.
    After it only what became of leases, and what workers reported of themselves, still counts: stopping has given back
    everything else.
    """
    stopped = False
    for entry in entries:
        if isinstance(entry[1], e.StopRequested | e.StopCommanded | e.BudgetExhausted):
            stopped = True
            yield entry[0], e.Resumed(), None
            if isinstance(entry[1], e.StopCommanded):
                yield entry[0], msgspec.structs.replace(entry[1], undone=True), None
        elif stopped and isinstance(entry[1], e.LeaseRefused):
            yield entry[0], msgspec.structs.replace(entry[1], withdrawn=True), None
        elif not stopped or isinstance(entry[1], _AFTER_A_STOP):
            yield entry


class Recollection:
    """`keep_steps` as in `GatewayTrainer`. It begins with a `state`, or as a run does. Raises `StateError`.

    `agents` are set where agents drive any of the run's trajectories: what they may ask for. They drive those of all
    environments that are not `token_level`.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        keep_steps: int,
        state: bytes | None = None,
        agents: AgentLimits | None = None,
        token_level: Collection[str] = (),
    ) -> None:
        self.scheduler = scheduler
        self._keep_steps = keep_steps
        self._agents = agents
        self._token_level = token_level
        self._run = Run(scheduler, self._connect)
        if state is not None:
            self._run.restore(state)

    def hear(self, entries: Iterable[Entry]) -> None:
        """Replay a journal's entries that still hold."""
        for t_ns, event, tokens in gone_on(entries):
            self._run.recall(t_ns, event, tokens)

    def saved(self) -> bytes:
        return self._run.saved()

    def leads_from(self, version: int) -> bool:
        """Whether a trainer that begins at this version can be brought to where the run is."""
        return self._trainer.reaches(version)

    def _connect(self, _: Run) -> Ports:
        nobody: Any = _Nobody()
        self._trainer = GatewayTrainer(nobody, self.scheduler, nobody, nobody, self._keep_steps, nobody)
        return Ports(
            clock=nobody,
            journal=JournalRecorder(self.scheduler, nobody),
            workers=nobody,
            leases=nobody,
            trajectories=self._played(nobody),
            rewards=nobody,
            trainer=self._trainer,
            owner=nobody,
        )

    def _played(self, nobody: Any) -> Rollouts | AgentRollouts | MixedRollouts:
        driven = None
        if self._agents is not None and self.scheduler.plan.serves_requests:
            driven = RequestRollouts(0, self._agents, self.scheduler, nobody, nobody)
        elif self._agents is not None:
            driven = AgentRollouts(0, self._agents, nobody, nobody)
        return played_by(
            {
                one.name: Rollouts(0, nobody, nobody, nobody, nobody, nobody)
                if driven is None or one.name in self._token_level
                else driven
                for one in self.scheduler.plan.environments
            }
        )


class _Nobody:
    """Stands where nothing is asked for while a run is only recalled."""

    keeps = True

    def __getattr__(self, name: str) -> Any:
        def ask(*_: Any) -> None:
            raise AssertionError(f"{name} is asked of a run that is only recalled")

        return ask
