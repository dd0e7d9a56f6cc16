"""A live run's orchestrator in this process, behind a real socket, whose workers are coroutines of the benchmark's own.

It is the whole of it: gateway, core, environments' loops, journal. Only what stands beside a real worker's engine, its
process, is missing.
"""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeAlias, cast

from elastic.compose import scheduling
from elastic.compose.checkpoints import discard_checkpoint
from elastic.compose.plan import TRAINER_PROVIDER, resolve
from elastic.compose.scheduling import policies, run_plan
from elastic.config import Config
from elastic.core.events import LeaseEnded, LeaseGranted, OfferChanged
from elastic.core.scheduler import Scheduler
from elastic.core.types import EndCause, LeaseId, Offer, WorkerRole
from elastic.environments.base import Environment
from elastic.protocol import wire
from elastic.protocol.endpoint import Endpoint
from elastic.protocol.run_secrets import RunSecrets
from elastic.protocol.tls import run_certificate
from elastic.runtime.agents import AgentsWiring
from elastic.runtime.journal import RunDirectory, SqliteJournal
from elastic.runtime.orchestrator import Orchestrator, Wiring
from elastic.runtime.run import Decided
from elastic.worker.connection import Ticket
from providers.base import Emit, KnownLease, LeaseRequest, Provider, ProviderSettings

RUN = "benchmark"
VOCABULARY = 64

Work: TypeAlias = Callable[[Ticket], Coroutine[Any, Any, object]]
"""A worker's life, from dialling in to its end."""


class OwnWorkers:
    """A provider of at most `places` workers at a time, each a task that `work` makes; its end ends the lease."""

    Settings: ClassVar[type[ProviderSettings]] = ProviderSettings
    on_this_machine: ClassVar[bool] = True

    def __init__(self, name: str, places: int, work: Work, *, loses_barred: bool = False) -> None:
        """With `loses_barred` the place of a barred lease is not leased again."""
        self.name = name
        self._loses_barred = loses_barred
        self.endpoint = Endpoint("")
        self._places = places
        self._work = work
        self._workers: dict[LeaseId, asyncio.Task[object]] = {}

    async def start(self, emit: Emit) -> None:
        self._emit = emit
        self._offer()

    def _offer(self) -> None:
        role = WorkerRole.TRAINER if self.name == TRAINER_PROVIDER else WorkerRole.ELASTIC
        available = self._places - len(self._workers)
        self._emit(OfferChanged(offer=Offer(provider=self.name, role=role, available=available, usd_per_gpu_hour=1.0)))

    async def acquire(self, request: LeaseRequest) -> None:
        (ticket,) = request.tickets
        self._emit(LeaseGranted(lease=request.lease, workers=(ticket.worker,)))
        dialling = Ticket(endpoint=self.endpoint, run=RUN, worker=ticket.worker, token=ticket.token)
        task = self._workers[request.lease] = asyncio.create_task(self._work(dialling))
        task.add_done_callback(lambda _: self._ended(request.lease))

    def _ended(self, lease: LeaseId) -> None:
        del self._workers[lease]
        self._emit(LeaseEnded(lease=lease, cause=EndCause.LOST))
        self._offer()

    async def release(self, lease: LeaseId, reason: str = "") -> None:
        if (task := self._workers.get(lease)) is not None:
            task.cancel()

    def bar(self, lease: LeaseId) -> None:
        self._places -= self._loses_barred

    async def adopt(self, known: Sequence[KnownLease], emit: Emit) -> list[LeaseId]:
        return [lease.request.lease for lease in known if not lease.granted]

    closing_s: ClassVar[float] = 10.0
    waits_for: ClassVar[str] = ""

    async def aclose(self) -> str:
        self._places = 0
        tasks = list(self._workers.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return ""


class OrchestratedRun(NamedTuple):
    """A run, and where its journal is."""

    orchestrator: Orchestrator
    kept: RunDirectory
    journal: SqliteJournal


@contextlib.contextmanager
def orchestrated(
    config: Config,
    directory: Path,
    providers: Iterable[OwnWorkers],
    make_environment: Callable[[], object],
    *,
    encrypted: bool = False,
    relay: str = "",
    decided: Decided = lambda event, commands: None,
    make_scheduler: Callable[..., Scheduler] = Scheduler,
    make_agents: Callable[[RunDirectory], AgentsWiring | None] = lambda kept: None,
) -> Iterator[OrchestratedRun]:
    """A run in this directory which has not begun, with a journal on the disk, until the block's end; over TLS if
    `encrypted`. One of the `providers` is the trainer's. `decided` as of `Orchestrator`.

    `make_agents` says how agents drive it, if they do in place of the environment.
    """
    directory.mkdir(exist_ok=True)
    kept = RunDirectory(directory)
    agents, environment = make_agents(kept), cast(Callable[[], Environment], make_environment)

    def make_providers(endpoint: Endpoint, _: object) -> Mapping[str, Provider]:
        for provider in providers:
            provider.endpoint = endpoint
        return {provider.name: cast(Provider, provider) for provider in providers}

    limits = config.scheduler
    plan = run_plan(resolve(config, [], RUN))
    wiring = Wiring(
        make_providers=make_providers,
        token_level={} if agents else {one.name: environment for one in config.mixture},
        welcome=wire.Welcome(
            session_key="",
            epoch=0,
            heartbeat_interval_s=limits.heartbeat_interval_s,
            flush_interval_s=limits.flush_interval_s,
            silence_timeout_s=limits.heartbeat_timeout_s,
            engine=config.engine.model_dump(mode="json"),
            model={"vocab_size": VOCABULARY if agents is None else agents.limits.vocab_size},
            relay=relay,
            run=RUN,
        ),
        secrets=RunSecrets.of(directory),
        kept=kept,
        discard=partial(discard_checkpoint, directory),
        certificate=run_certificate(directory, ["localhost"]) if encrypted else None,
        agents=agents,
    )
    scheduler = make_scheduler(plan, scheduling.limits(config), policies(config), 0)
    with contextlib.closing(kept.begin_journal(config.journal)) as journal:
        yield OrchestratedRun(Orchestrator(config, scheduler, journal, wiring, decided=decided), kept, journal)
