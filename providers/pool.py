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
from typing import ClassVar

import msgspec
import structlog
from pydantic import Field

from elastic.core.cluster.types import PhaseKind
from elastic.core.types import NS_PER_S, EndCause, LeaseId, Offer, WorkerId, WorkerRole
from elastic.pool import messages as w
from elastic.pool.client import NOT_A_JOB, HeldTurn, LentSlice, News, PoolClient, PoolUnavailable
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


class PoolMarket(Market[PoolSettings]):
    """The rollout nodes of the job's place in the pool."""

    role = WorkerRole.DEDICATED
    bars_last = False
    welcome: w.JobWelcome | None = None

    def free(self) -> int:
        nodes = 0 if self.welcome is None else len(self.welcome.rollout_nodes)
        return min(nodes, self.settings.max_workers) - len(self._held)

    def offer(self) -> Offer:
        offer, welcome = super().offer(), self.welcome
        if welcome is None:
            return offer
        return msgspec.structs.replace(
            offer,
            usd_per_gpu_hour=welcome.rollout_usd_per_gpu_hour,
            gpus_per_worker=max(1, welcome.gpus_per_rollout_node),
            grant_within_s=welcome.grant_within_s,
        )


class PoolTrainerMarket(TrainerMarket):
    """The job's training node."""

    welcome: w.JobWelcome | None = None

    def offer(self) -> Offer:
        offer, welcome = super().offer(), self.welcome
        if welcome is None:
            return offer
        return msgspec.structs.replace(
            offer,
            usd_per_gpu_hour=welcome.train_usd_per_gpu_hour,
            gpus_per_worker=max(1, welcome.gpus_per_train_node),
            grant_within_s=welcome.grant_within_s,
            by_permit=True,
        )


class JobContext(ProviderContext, frozen=True, kw_only=True):
    """The surroundings of providers of a run that is a pool's job."""

    pool: PoolClient


def client_of(name: str, context: ProviderContext) -> PoolClient:
    """Return the run's pool client. Raises `ProviderUnavailable` if the run is no pool's job."""
    if not isinstance(context, JobContext):
        raise ProviderUnavailable(f"{name}: {NOT_A_JOB}")
    return context.pool


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
    """A lease's `LeaseHandle`: a resident as one of the run's workers. `end` makes the pool end that worker.

    `permit` and `node` are those of a rollout slice.
    """

    lease: LeaseId
    worker: str
    end: Callable[[], None]
    permit: int = 0
    node: str = ""
    granted: bool = False
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


class PoolTrainerProvider(BaseProvider[ProviderSettings]):
    """Leases the trainer's process on the job's training node, for as long as the job runs."""

    Settings: ClassVar[type[ProviderSettings]] = ProviderSettings

    def __init__(self, name: str, settings: ProviderSettings, context: ProviderContext) -> None:
        self._client = client_of(name, context)
        self._pool_market = PoolTrainerMarket(name, settings)
        super().__init__(self._pool_market, context)
        self._resident: _Resident | None = None
        self._open = False

    async def adopt(self, known: Sequence[KnownLease], emit: Emit) -> list[LeaseId]:
        await self._have_pool()
        return await super().adopt(known, emit)

    async def start(self, emit: Emit) -> None:
        await self._have_pool()
        await super().start(emit)

    async def launch(self, request: LeaseRequest, place: str) -> _Resident:
        (ticket,) = request.tickets
        if self._client.part.trainer is not None:
            raise CapacityUnavailable(f"{self.name}: the former trainer's process has not ended yet")
        self._client.start_trainer(ticket_frame(self.context, self._client, ticket))
        return self._runs_as(request.lease, ticket.worker)

    async def find(self, known: Mapping[LeaseId, KnownLease]) -> Mapping[LeaseId, Found]:
        trainer = self._client.part.trainer
        if trainer is None:
            return {}
        for lease_id, lease in known.items():
            if any(ticket.worker == trainer.worker for ticket in lease.request.tickets):
                return {lease_id: Found(self._runs_as(lease_id, trainer.worker))}
        await _end_strangers([self._runs_as("", trainer.worker)], self.context.release_timeout_s)
        return {}

    async def _have_pool(self) -> None:
        if self._open:
            return
        try:
            self._pool_market.welcome = await self._client.open(self.context.acquire_timeout_s)
        except PoolUnavailable as error:
            raise ProviderUnavailable(f"{self.name}: {error}") from error
        self._client.hear_trainer(self._hear)
        self._open = True

    def _runs_as(self, lease: LeaseId, worker: WorkerId) -> _Resident:
        self._resident = _Resident(lease, worker, self._client.end_trainer)
        return self._resident

    def _hear(self, news: News) -> None:
        if isinstance(news, w.TrainerEnded) and self._resident is not None and self._resident.worker == news.worker:
            self._resident.ended(news.cause)


class PoolProvider(BaseProvider[PoolSettings]):
    """Leases rollout slices, with one worker on each node."""

    Settings: ClassVar[type[PoolSettings]] = PoolSettings
    trainer_of_turns: ClassVar[type[Provider] | None] = PoolTrainerProvider

    def __init__(self, name: str, settings: PoolSettings, context: ProviderContext) -> None:
        self._client = client_of(name, context)
        self._pool_market = PoolMarket(name, settings)
        super().__init__(self._pool_market, context)
        self._waiting: dict[LeaseId, tuple[WorkerTicket, asyncio.Future[_Resident]]] = {}
        self._residents: dict[WorkerId, _Resident] = {}
        self._asked_again: set[LeaseId] = set()
        """Requests of the run's earlier process that are about to be made again."""
        self._open = self._begun = False

    @property
    def answer_timeout_s(self) -> None:
        """Return None: the run withdraws its request if the turn comes too late."""

    async def adopt(self, known: Sequence[KnownLease], emit: Emit) -> list[LeaseId]:
        await self._have_pool()
        unheard = await super().adopt(known, emit)
        self._asked_again = set(unheard)
        return unheard

    async def start(self, emit: Emit) -> None:
        await self._have_pool()
        await super().start(emit)
        self._begun = True
        for resident in self._residents.values():
            self._give_way(resident)
        if self._asked_again:
            asyncio.get_running_loop().call_later(ASKED_AGAIN_S, self._wait_no_longer)
        self._follow()

    async def launch(self, request: LeaseRequest, place: str) -> _Resident:
        (ticket,) = request.tickets
        self._asked_again.discard(request.lease)
        if not self.wants(request.lease):
            raise CapacityUnavailable(WITHDRAWN)
        lent: asyncio.Future[_Resident] = asyncio.get_running_loop().create_future()
        self._waiting[request.lease] = (ticket, lent)
        self._follow()
        return await lent

    async def find(self, known: Mapping[LeaseId, KnownLease]) -> Mapping[LeaseId, Found]:
        """Keep slices whose workers the pool still has, and give back slices that the run does not know."""
        leases = {ticket.worker: lease for lease in known.values() for ticket in lease.request.tickets}
        found: dict[LeaseId, Found] = {}
        left: list[_Resident] = []
        for lent in list(self._client.part.slices.values()):
            lease = leases.get(lent.worker)
            resident = self._resident("" if lease is None else lease.request.lease, lent)
            if lease is None:
                left.append(resident)
            else:
                resident.granted = lease.granted
                found[resident.lease] = Found(resident)
        await _end_strangers(left, self.context.release_timeout_s)
        return found

    def granted(self, lease: LeaseId) -> None:
        for resident in self._residents.values():
            if resident.lease == lease:
                resident.granted = True
                self._give_way(resident)

    def withdrawn(self, lease: LeaseId) -> None:
        if lease in self._waiting:
            _, lent = self._waiting.pop(lease)
            if not lent.done():
                lent.set_exception(CapacityUnavailable(WITHDRAWN))
            self._follow()

    def bar(self, lease: LeaseId) -> None:
        """End the resident with the lease. Its node gets another process."""
        super().bar(lease)
        for resident in self._residents.values():
            lent = self._client.part.slices.get(resident.node)
            if resident.lease == lease and lent is not None and lent.returning:
                resident.end()

    async def aclose(self) -> str:
        left = await super().aclose()
        if self._begun:
            self._asked_again.clear()
            self._follow()
        return left

    async def _have_pool(self) -> None:
        if self._open:
            return
        try:
            welcome = await self._client.open(self.context.acquire_timeout_s)
            self._client.hear_slices(self._hear)
        except PoolUnavailable as error:
            raise ProviderUnavailable(f"{self.name}: {error}") from error
        self._pool_market.welcome = welcome
        self._open = True

    def _hear(self, news: News) -> None:
        match news:
            case w.SliceParked():
                resident = self._residents.pop(news.worker, None)
                if resident is not None:
                    resident.ended(news.cause)
            case w.Recalled() | w.TailMove():
                for resident in self._residents.values():
                    if resident.permit == news.permit:
                        self._give_way(resident)
            case _:
                pass
        self._follow()

    def _follow(self) -> None:
        """Assign free nodes to waiting requests, yield permits without leases, and request the next turn."""
        if not self._begun:
            return
        client, part = self._client, self._client.part
        for held in self._turns():
            for node in held.usable:
                if self._waiting and node not in part.slices:
                    self._lend(held.permit, node)
        for held in self._turns():
            used = [node for node in held.nodes if node in part.slices]
            if not used and not (self._asked_again and held.usable):
                done, of = part.progress or (0, 1)
                client.leave(held.permit, finished=done >= of)
            elif used and held.tail and not held.tail_left and set(used) <= set(held.tail):
                client.leave_for_tail(held.permit)
        if self._waiting:
            client.ask(PhaseKind.ROLLOUT)
        else:
            client.withdraw(PhaseKind.ROLLOUT)

    def _turns(self) -> list[HeldTurn]:
        return [held for held in self._client.part.permits.values() if held.phase is PhaseKind.ROLLOUT]

    def _lend(self, permit: int, node: str) -> None:
        lease = next(iter(self._waiting))
        ticket, lent = self._waiting.pop(lease)
        self._client.lend(permit, node, ticket_frame(self.context, self._client, ticket))
        lent.set_result(self._resident(lease, self._client.part.slices[node]))

    def _resident(self, lease: LeaseId, lent: LentSlice) -> _Resident:
        def end() -> None:
            self._client.give_back(lent.node, LIED if lease in self._bars else "")

        resident = _Resident(lease, lent.worker, end, lent.permit, lent.node)
        self._residents[lent.worker] = resident
        return resident

    def _give_way(self, resident: _Resident) -> None:
        """Give notice to a lease whose turn is over, or goes on without its node."""
        held = self._client.part.permits.get(resident.permit)
        if held is None or resident.node in held.usable or not resident.granted or not self.holds(resident.lease):
            return
        left_s = self._client.left_s(held.permit)
        if held.recalled:
            left_s, why = left_s - min(PARKING_S, left_s / 4), "its turn on the pool is over"
        else:
            left_s, why = min(left_s, TAIL_NOTICE_S), "the last responses move to fewer nodes"
        deadline_ns = self.context.now_ns() + round(left_s * NS_PER_S)
        self.give_notice(TakenBack(resident.lease, deadline_ns, LeaseEnding(EndCause.PREEMPTED, why)))

    def _wait_no_longer(self) -> None:
        self._asked_again.clear()
        self._follow()


async def _end_strangers(left: Sequence[_Resident], timeout_s: float) -> None:
    """End workers that the run does not know. Raises `TimeoutError`."""
    for resident in left:
        log.warning("left over from an earlier process", what=resident.worker, node=resident.node)
        resident.end()
    async with asyncio.timeout(timeout_s):
        for resident in left:
            await resident.over.wait()
