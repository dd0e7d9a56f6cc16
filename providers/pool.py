"""The provider of a pool's job: a lease is a turn on one of the pool's rollout nodes; the trainer's lease lasts as long
as the job.

A lease of a rollout node is granted when the turn begins. It ends by notice when the turn is over, or when the run
gives it back. All leases of a turn belong to one permit, which is yielded with the last of them. The nodes' residents
work as workers (`elastic.pool.messages`); this provider starts no process. If the run's process dies and comes back,
borrowed nodes stay borrowed.

The trainer's process lives as long as the job, on its training node. It computes by permit only, which the run requests
itself (`elastic.runtime.ports.Pool`).
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import msgspec
import structlog
from pydantic import Field

from elastic.core.cluster.types import PhaseKind
from elastic.core.types import NS_PER_S, EndCause, LeaseId, Offer, WorkerId, WorkerRole
from elastic.pool import messages as w
from elastic.pool.client import NOT_A_JOB, News, PoolClient, PoolUnavailable
from providers.base import (
    Emit,
    KnownLease,
    LeaseRequest,
    Provider,
    ProviderContext,
    ProviderSettings,
    ProviderUnavailable,
    WorkerTicket,
)
from providers.base_provider import BaseProvider, Found
from providers.markets import CapacityUnavailable, LeaseEnding, Market, TakenBack, TrainerMarket

log = structlog.get_logger(__name__)

PARKING_S = 2.0
"""Time of a recall that is left to the residents for parking, at most a quarter of it."""
TAIL_NOTICE_S = 5.0
"""Time for the tail of a rollout to move."""
ASKED_AGAIN_S = 5.0
"""How long a turn that began while the run's process was dead waits for repeated requests."""
LIED, WITHDRAWN = "its worker has lied", "it was withdrawn"


class PoolSettings(ProviderSettings):
    """Settings of the pool's provider. Prices and GPUs are the pool's own."""

    max_workers: int = Field(10_000, ge=0, le=10_000, description="most of the job's rollout nodes to use at once")


def at_pool_prices(offer: Offer, welcome: w.JobWelcome | None) -> Offer:
    """Return a market's offer with what the pool has said of its nodes, once it has."""
    if welcome is None:
        return offer
    trains = offer.role is WorkerRole.TRAINER
    gpus = welcome.gpus_per_train_node * len(welcome.train_nodes) if trains else welcome.gpus_per_rollout_node
    return msgspec.structs.replace(
        offer,
        usd_per_gpu_hour=welcome.train_usd_per_gpu_hour if trains else welcome.rollout_usd_per_gpu_hour,
        gpus_per_worker=max(1, gpus),
        grant_within_s=welcome.grant_within_s,
        by_permit=trains,
    )


class PoolMarket(Market[PoolSettings]):
    """The rollout nodes of the job's place in the pool."""

    role = WorkerRole.DEDICATED
    bars_last = False
    welcome: w.JobWelcome | None = None

    def free(self) -> int:
        nodes = 0 if self.welcome is None else len(self.welcome.rollout_nodes)
        return min(nodes, self.settings.max_workers) - len(self._held)

    def offer(self) -> Offer:
        return at_pool_prices(super().offer(), self.welcome)


class PoolTrainerMarket(TrainerMarket):
    """The job's training nodes, which are one worker's."""

    welcome: w.JobWelcome | None = None

    def offer(self) -> Offer:
        return at_pool_prices(super().offer(), self.welcome)


class JobContext(ProviderContext, frozen=True, kw_only=True):
    """The surroundings of providers of a run that is a pool's job."""

    pool: PoolClient


def ticket_frame(context: ProviderContext, client: PoolClient, ticket: WorkerTicket) -> w.WorkerTicketFrame:
    endpoint = context.endpoint.here() if client.on_this_machine else context.endpoint
    return w.WorkerTicketFrame(
        run=context.run,
        worker=ticket.worker,
        token=ticket.token,
        join=endpoint.address,
        fingerprint=endpoint.fingerprint,
        orchestrator_timeout_s=context.orchestrator_timeout_s,
    )


@dataclass(slots=True)
class _Resident:
    """A lease's `LeaseHandle`: a resident as one of the run's workers. `end` makes the pool end that worker."""

    lease: LeaseId
    worker: str
    end: Callable[[], None]
    granted: bool = False
    noticed: str = ""
    """Why notice was given to the lease."""
    over: asyncio.Event = field(default_factory=asyncio.Event)
    cause: str = ""

    async def keep(self) -> LeaseEnding:
        await self.over.wait()
        return LeaseEnding(EndCause.LOST if self.cause else EndCause.RELEASED, self.cause)

    async def give_back(self) -> None:
        if not self.over.is_set():
            self.end()
            await self.over.wait()

    def ended(self, cause: str) -> None:
        self.cause = cause
        self.over.set()


class PoolNodeProvider(BaseProvider[Any]):
    """The common part of a job's providers: each joins its pool before it does anything else."""

    def __init__(self, market: PoolMarket | PoolTrainerMarket, context: ProviderContext) -> None:
        if not isinstance(context, JobContext):
            raise ProviderUnavailable(f"{market.name}: {NOT_A_JOB}")
        super().__init__(market, context)
        self._client = context.pool
        self._pool_market = market

    async def adopt(self, known: Sequence[KnownLease], emit: Emit) -> list[LeaseId]:
        await self._have_pool()
        return await super().adopt(known, emit)

    async def start(self, emit: Emit) -> None:
        await self._have_pool()
        await super().start(emit)

    def follow_pool(self) -> None:
        """Called once the pool is joined: hear what it says from now on. Raises `PoolUnavailable`."""
        raise NotImplementedError

    async def _have_pool(self) -> None:
        if self._pool_market.welcome is not None:
            return
        try:
            welcome = await self._client.open(self.context.acquire_timeout_s)
            self.follow_pool()
        except PoolUnavailable as error:
            raise ProviderUnavailable(f"{self.name}: {error}") from error
        self._pool_market.welcome = welcome


class PoolTrainerProvider(PoolNodeProvider):
    """Leases the trainer's process on the job's training node, for as long as the job runs."""

    Settings: ClassVar[type[ProviderSettings]] = ProviderSettings

    def __init__(self, name: str, settings: ProviderSettings, context: ProviderContext) -> None:
        super().__init__(PoolTrainerMarket(name, settings), context)
        self._resident: _Resident | None = None

    async def launch(self, request: LeaseRequest, place: str) -> _Resident:
        (ticket,) = request.tickets
        if self._client.part.trainer is not None:
            raise CapacityUnavailable(f"{self.name}: the former trainer's process has not ended yet")
        self._client.part.start_trainer(ticket_frame(self.context, self._client, ticket))
        return self._runs_as(request.lease, ticket.worker)

    async def find(self, known: Mapping[LeaseId, KnownLease]) -> Mapping[LeaseId, Found]:
        trainer = self._client.part.trainer
        if trainer is None:
            return {}
        for lease_id, lease in known.items():
            if any(ticket.worker == trainer.worker for ticket in lease.request.tickets):
                return {lease_id: Found(self._runs_as(lease_id, trainer.worker))}
        await _end_left_over([self._runs_as("", trainer.worker)], self.context.release_timeout_s)
        return {}

    def follow_pool(self) -> None:
        self._client.on_trainer(self._hear)

    def _runs_as(self, lease: LeaseId, worker: WorkerId) -> _Resident:
        self._resident = _Resident(lease, worker, self._client.part.end_trainer)
        return self._resident

    def _hear(self, news: News) -> None:
        if isinstance(news, w.WorkerEnded) and self._resident is not None and self._resident.worker == news.worker:
            self._resident.ended(news.cause)


class PoolProvider(PoolNodeProvider):
    """Leases rollout slices, with one worker on each node."""

    Settings: ClassVar[type[PoolSettings]] = PoolSettings
    trainer_of_turns: ClassVar[type[Provider] | None] = PoolTrainerProvider

    def __init__(self, name: str, settings: PoolSettings, context: ProviderContext) -> None:
        super().__init__(PoolMarket(name, settings), context)
        self._waiting: dict[WorkerId, tuple[LeaseId, asyncio.Future[_Resident]]] = {}
        self._residents: dict[WorkerId, _Resident] = {}
        self._asked_again: set[LeaseId] = set()
        """Requests of the run's earlier process that are about to be made again."""
        self._begun = False

    @property
    def answer_timeout_s(self) -> None:
        """Return None: the run withdraws its request if the turn comes too late."""

    async def adopt(self, known: Sequence[KnownLease], emit: Emit) -> list[LeaseId]:
        unheard = await super().adopt(known, emit)
        self._asked_again = set(unheard)
        return unheard

    async def start(self, emit: Emit) -> None:
        await super().start(emit)
        self._begun = True
        for resident in self._residents.values():
            self._yield(resident)
        if self._asked_again:
            asyncio.get_running_loop().call_later(ASKED_AGAIN_S, self._wait_no_longer)
        self._follow()

    async def launch(self, request: LeaseRequest, place: str) -> _Resident:
        (ticket,) = request.tickets
        self._asked_again.discard(request.lease)
        if not self.wants(request.lease):
            raise CapacityUnavailable(WITHDRAWN)
        placed: asyncio.Future[_Resident] = asyncio.get_running_loop().create_future()
        self._waiting[ticket.worker] = (request.lease, placed)
        self._client.part.offer(ticket_frame(self.context, self._client, ticket))
        self._follow()
        return await placed

    async def find(self, known: Mapping[LeaseId, KnownLease]) -> Mapping[LeaseId, Found]:
        """Keep slices whose workers the pool still has, and give back slices that the run does not know."""
        leases = {ticket.worker: lease for lease in known.values() for ticket in lease.request.tickets}
        found: dict[LeaseId, Found] = {}
        left: list[_Resident] = []
        for worker in list(self._client.part.workers):
            lease = leases.get(worker)
            resident = self._resident("" if lease is None else lease.request.lease, worker)
            if lease is None:
                left.append(resident)
            else:
                resident.granted = lease.granted
                found[resident.lease] = Found(resident)
        await _end_left_over(left, self.context.release_timeout_s)
        return found

    def granted(self, lease: LeaseId) -> None:
        for resident in self._residents.values():
            if resident.lease == lease:
                resident.granted = True
                self._yield(resident)

    def withdrawn(self, lease: LeaseId) -> None:
        for worker in [worker for worker, (waits, _) in self._waiting.items() if waits == lease]:
            _, placed = self._waiting.pop(worker)
            self._client.part.give_back(worker)
            if not placed.done():
                placed.set_exception(CapacityUnavailable(WITHDRAWN))
            self._follow()

    def bar(self, lease: LeaseId) -> None:
        """End the resident with the lease. Its node gets another process."""
        super().bar(lease)
        for resident in self._residents.values():
            worker = self._client.part.workers.get(resident.worker)
            if resident.lease == lease and worker is not None and worker.ending:
                resident.end()

    async def aclose(self) -> str:
        left = await super().aclose()
        if self._begun:
            self._asked_again.clear()
            self._follow()
        return left

    def follow_pool(self) -> None:
        self._client.on_slices(self._hear)

    def _hear(self, news: News) -> None:
        match news:
            case w.WorkerEnded(worker=worker, cause=cause):
                _, placed = self._waiting.pop(worker, ("", None))
                if placed is not None and not placed.done():
                    placed.set_exception(CapacityUnavailable(cause))
                if (resident := self._residents.pop(worker, None)) is not None:
                    resident.ended(cause)
            case w.Granted():
                for resident in self._residents.values():
                    self._yield(resident)
            case w.PermitOver():
                pass
        self._follow()

    def _follow(self) -> None:
        """Grant requests whose workers have a node, yield permits without leases, and request the next turn."""
        if not self._begun:
            return
        client, part = self._client, self._client.part
        for worker in [worker for worker in self._waiting if worker in part.workers and part.workers[worker].permit]:
            lease, placed = self._waiting.pop(worker)
            if not placed.done():
                placed.set_result(self._resident(lease, worker))
        for held in list(part.permits.values()):
            used = {worker.node for worker in part.working(held.number)}
            if held.phase is not PhaseKind.ROLLOUT:
                continue
            if not used and not ((self._waiting or self._asked_again) and held.usable):
                done, of = part.progress or (0, 1)
                client.part.leave(held.number, finished=done >= of)
            elif used and held.tail_nodes and not held.tail_moved and used <= {*held.tail_nodes}:
                client.part.leave_for_tail(held.number)
        if self._waiting:
            client.part.ask(PhaseKind.ROLLOUT)
        else:
            client.part.withdraw(PhaseKind.ROLLOUT)

    def _resident(self, lease: LeaseId, worker: WorkerId) -> _Resident:
        def end() -> None:
            self._client.part.give_back(worker, LIED if lease in self._bars else "")

        resident = self._residents[worker] = _Resident(lease, worker, end)
        return resident

    def _yield(self, resident: _Resident) -> None:
        """Give notice to a lease whose turn is over, or goes on without its node."""
        part = self._client.part
        worker = part.workers.get(resident.worker)
        held = None if worker is None else part.permits.get(worker.permit)
        if worker is None or held is None or worker.node in held.usable:
            return
        if not resident.granted or not self.holds(resident.lease):
            return
        left_s = self._client.left_s(held.number)
        if held.recalled:
            left_s, why = left_s - min(PARKING_S, left_s / 4), "its turn on the pool is over"
        else:
            left_s, why = min(left_s, TAIL_NOTICE_S), "the last responses move to fewer nodes"
        if resident.noticed == why:
            return
        resident.noticed = why
        deadline_ns = self.context.now_ns() + round(left_s * NS_PER_S)
        self.give_notice(TakenBack(resident.lease, deadline_ns, LeaseEnding(EndCause.PREEMPTED, why)))

    def _wait_no_longer(self) -> None:
        self._asked_again.clear()
        self._follow()


async def _end_left_over(left: Sequence[_Resident], timeout_s: float) -> None:
    """End workers that the run does not know. Raises `TimeoutError`."""
    for resident in left:
        log.warning("left over from an earlier process", what=resident.worker)
        resident.end()
    async with asyncio.timeout(timeout_s):
        for resident in left:
            await resident.over.wait()
