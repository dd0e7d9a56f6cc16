"""A cloud that outlives the processes that use it, and the provider through which a process uses it."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import ClassVar

from elastic.core.events import LeaseEnded, LeaseGranted, LeaseNotice, LeaseRefused, OfferChanged
from elastic.core.types import NS_PER_S, EndCause, LeaseId, Nanoseconds, Offer, WorkerId, WorkerRole
from elastic.protocol.endpoint import Endpoint
from elastic.system.boot_clock import ClockTimer
from providers.base import (
    Emit,
    KnownLease,
    LeaseRequest,
    ProviderContext,
    ProviderEvent,
    ProviderSettings,
    WorkerTicket,
)

Boot = Callable[[Endpoint, WorkerTicket, bool], None]
"""Starts a worker's process: where it dials, its ticket, and whether it is the trainer's."""


@dataclass
class _Lease:
    request: LeaseRequest
    endpoint: Endpoint
    granted: bool = False
    alive: dict[WorkerId, None] = field(default_factory=dict[WorkerId, None])
    notice: LeaseNotice | None = None
    expires_at_ns: Nanoseconds | None = None

    def grant(self) -> LeaseGranted:
        workers = tuple(ticket.worker for ticket in self.request.tickets)
        return LeaseGranted(lease=self.request.lease, workers=workers, expires_at_ns=self.expires_at_ns)


class Cloud:
    """The GPUs of one provider. `after` schedules a call, `end` kills a worker's process."""

    def __init__(
        self,
        name: str,
        role: WorkerRole,
        places: int,
        chance: Random,
        after: Callable[[float, Callable[[], None]], None],
        boot: Boot,
        end: Callable[[WorkerId], None],
        life_s: float | None = None,
    ) -> None:
        self.name = name
        self.role = role
        self.places = places
        self.leases: dict[LeaseId, _Lease] = {}
        self.listener: Callable[[ProviderEvent], object] | None = None
        self.run_now_ns: Callable[[], Nanoseconds] = lambda: 0
        """The clock of the run that asks."""
        self.stillborn: Callable[[], bool] = lambda: False
        """Whether workers cannot start now."""
        self._barred = 0
        self._begun = 0
        self._ended: dict[LeaseId, EndCause] = {}
        self._chance = chance
        self._after = after
        self._boot = boot
        self._end_process = end
        self._life_s = life_s

    def tell(self, event: ProviderEvent) -> None:
        if self.listener is not None:
            self.listener(event)

    def offer(self) -> None:
        offer = Offer(
            provider=self.name,
            role=self.role,
            available=max(0, self.places - self._barred - len(self.leases)),
            usd_per_gpu_hour=1.0,
        )
        self.tell(OfferChanged(offer=offer))

    def ask(self, request: LeaseRequest, endpoint: Endpoint) -> None:
        lease = self.leases[request.lease] = _Lease(request, endpoint)
        self._after(self._chance.uniform(0.001, 0.2), lambda: self._answer(lease))

    def _answer(self, lease: _Lease) -> None:
        name = lease.request.lease
        if self.leases.get(name) is not lease:
            return
        if len(self.leases) > self.places - self._barred:
            del self.leases[name]
            self.tell(LeaseRefused(lease=name, reason="no capacity"))
            return
        lease.granted = True
        for ticket in lease.request.tickets:
            lease.alive[ticket.worker] = None
            boot_s = self._chance.uniform(0.05, 0.5)
            self._after(boot_s, lambda ticket=ticket: self._begin(lease, ticket))
        if self._life_s is not None:
            lease.expires_at_ns = self.run_now_ns() + round(self._life_s * NS_PER_S)
        self.tell(lease.grant())
        self.offer()

    def _begin(self, lease: _Lease, ticket: WorkerTicket) -> None:
        if self.leases.get(lease.request.lease) is not lease:
            return
        self._begun += 1
        if self.stillborn():
            self.end(lease.request.lease, EndCause.LOST, f"its process {self._begun} could not load its libraries")
        else:
            self._boot(lease.endpoint, ticket, self.role is WorkerRole.TRAINER)

    def give_back(self, name: LeaseId) -> None:
        def act() -> None:
            lease = self.leases.get(name)
            if lease is not None and not lease.granted:
                del self.leases[name]
                self.tell(LeaseRefused(lease=name, reason="withdrawn"))
            else:
                self.end(name, EndCause.RELEASED)

        self._after(self._chance.uniform(0.001, 0.1), act)

    def end(self, name: LeaseId, cause: EndCause, fault: str = "") -> None:
        """End a lease and kill its workers. `fault` says why they could not start."""
        lease = self.leases.get(name)
        if lease is None or not lease.granted:
            return
        self.drop(name, cause)
        self.tell(LeaseEnded(lease=name, cause=cause, fault=fault))
        self.offer()

    def drop(self, name: LeaseId, cause: EndCause = EndCause.RELEASED) -> None:
        """End a lease, granted or not, of which no process is told."""
        for worker in self.leases.pop(name).alive:
            self._end_process(worker)
        self._ended[name] = cause

    def bar(self, name: LeaseId) -> None:
        """Never lease this lease's place again, unless it is the last place: a run without any place may never end."""
        if name in self.leases or name in self._ended:
            self._barred = min(self._barred + 1, self.places - 1)

    def lease_of(self, worker: WorkerId) -> LeaseId | None:
        return next((name for name, lease in self.leases.items() if worker in lease.alive), None)

    def warn(self, name: LeaseId, notice_s: float) -> None:
        """Give notice that the lease will end."""
        lease = self.leases.get(name)
        if lease is not None and lease.granted and lease.notice is None:
            deadline_ns = self.run_now_ns() + round(notice_s * NS_PER_S)
            lease.notice = LeaseNotice(lease=name, deadline_ns=deadline_ns, reason="preemption")
            self.tell(lease.notice)
            self._after(notice_s, lambda: self.end(name, EndCause.PREEMPTED))

    def exited(self, worker: WorkerId) -> None:
        """Note that a worker's process has ended by itself, or was killed."""
        for name, lease in list(self.leases.items()):
            if worker in lease.alive:
                del lease.alive[worker]
                if not lease.alive:
                    self._after(self._chance.uniform(0.001, 0.05), lambda name=name: self.end(name, EndCause.LOST))

    def take_over(self, known: Sequence[KnownLease]) -> list[LeaseId]:
        """Connect another process of the run and tell it what it missed; returns the requests that never arrived."""
        names = {lease.request.lease for lease in known}
        for name in [name for name in self.leases if name not in names]:
            self.drop(name)
        unheard: list[LeaseId] = []
        for wanted in known:
            name = wanted.request.lease
            lease = self.leases.get(name)
            if lease is None and wanted.granted:
                self.tell(LeaseEnded(lease=name, cause=self._ended.get(name, EndCause.LOST)))
            elif lease is None:
                unheard.append(name)
            elif lease.granted and not wanted.granted:
                self.tell(lease.grant())
            if lease is not None and lease.notice is not None:
                self.tell(lease.notice)
        return unheard


class CloudProvider:
    """`providers.base.Provider` of one process, over a cloud that other processes use too."""

    Settings: ClassVar[type[ProviderSettings]] = ProviderSettings

    def __init__(self, cloud: Cloud, context: ProviderContext) -> None:
        self.name = cloud.name
        self._cloud = cloud
        self._context = context

    async def adopt(self, known: Sequence[KnownLease], emit: Emit) -> list[LeaseId]:
        self._cloud.listener = partial(asyncio.get_running_loop().call_soon, partial(self._hear, emit))
        self._cloud.run_now_ns = self._context.now_ns
        for lease in known:
            self._end_at(lease.request.lease, lease.expires_at_ns)
        return self._cloud.take_over(known)

    def _hear(self, emit: Emit, event: ProviderEvent) -> None:
        if isinstance(event, LeaseGranted):
            self._end_at(event.lease, event.expires_at_ns)
        emit(event)

    def _end_at(self, lease: LeaseId, at_ns: Nanoseconds | None) -> None:
        """End the lease then, as `providers.base_provider` does: no process of the run, no end."""
        if at_ns is not None:
            ClockTimer(self._context.now_ns, at_ns, partial(self._cloud.end, lease, EndCause.EXPIRED))

    async def start(self, emit: Emit) -> None:
        self._cloud.offer()

    async def acquire(self, request: LeaseRequest) -> None:
        self._cloud.ask(request, self._context.endpoint)

    async def release(self, lease: LeaseId, reason: str = "") -> None:
        self._cloud.give_back(lease)

    def bar(self, lease: LeaseId) -> None:
        self._cloud.bar(lease)

    @property
    def closing_s(self) -> float:
        return self._context.release_timeout_s

    @property
    def waits_for(self) -> str:
        return ""

    async def aclose(self) -> str:
        for lease in list(self._cloud.leases):
            self._cloud.drop(lease)
        self._cloud.listener = None
        return ""
