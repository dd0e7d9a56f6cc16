"""What adapters have in common: each lease is one task, from `acquire` or its adoption to its refusal or its end."""

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

import structlog

from elastic.core.events import LeaseEnded, LeaseGranted, LeaseNotice, LeaseRefused, OfferChanged
from elastic.core.types import NS_PER_S, EndCause, LeaseId, Nanoseconds, Offer, WorkerRole
from providers.base import Emit, KnownLease, LeaseRequest, ProviderContext, ProviderEvent, ProviderSettings

log = structlog.get_logger(__name__)

SettingsT = TypeVar("SettingsT", bound=ProviderSettings)

RETRY_S = 1.0
"""Between two attempts to give something back: often enough for a person, rarely enough for a log."""


class Refusal(Exception):
    """What was asked for is not to be had now; the message says why."""


class Ending(NamedTuple):
    cause: EndCause
    detail: str = ""


class Holding(Protocol):
    """What a granted lease stands on, such as processes or a lent host."""

    async def keep(self) -> Ending:
        """Return when it is over by itself. Cancelled when the lease is to end before that."""
        ...

    async def give_back(self) -> None:
        """Once this has returned, none of its processes is alive. What it raises is logged, and it is called again."""
        ...


@dataclass(slots=True)
class _Lease:
    request: LeaseRequest
    ending: asyncio.Future[Ending]
    counted: bool = False
    expires_at_ns: int | None = None
    foretold: Ending | None = None
    deadline: asyncio.TimerHandle | None = None


class LeaseKeeper(Generic[SettingsT]):
    """The part of a `Provider` that is the same for all; adapters say what a lease stands on and what is free."""

    role: ClassVar[WorkerRole] = WorkerRole.ELASTIC

    def __init__(self, name: str, settings: SettingsT, context: ProviderContext) -> None:
        self.name = name
        self.settings = settings
        self.context = context
        self._leases: dict[LeaseId, _Lease] = {}
        self._lives: set[asyncio.Task[None]] = set()
        self._background: set[asyncio.Task[None]] = set()
        self._barred: set[LeaseId] = set()
        self._offered: Offer | None = None
        self._sink: Emit | None = None
        self._opened = False
        self._closing = False

    # What an adapter says

    async def take(self, request: LeaseRequest) -> Holding:
        """Secure what the lease stands on; whatever this raises refuses the lease. Must not leave anything then."""
        raise NotImplementedError

    async def find(self, known: Mapping[LeaseId, KnownLease]) -> Mapping[LeaseId, Holding]:
        """What is left of these leases, over or not, secured again; what is left besides is ended."""
        return {}

    def free(self) -> int:
        """How many more leases could be had, were it not for `max_workers`."""
        raise NotImplementedError

    def resumed(self, lease: LeaseId, holding: Holding) -> None:
        """A lease goes on that an earlier process of the run began, and was found."""

    def forget(self, lease: LeaseId, *, barred: bool) -> None:
        """The lease is over, and what it stood on has been given back; if it is `barred`, not to be leased again."""

    def overlap(self) -> int:
        """How many leases may be held beyond `max_workers`, each in place of one that ends soon."""
        return 0

    def life_s(self) -> float | None:
        """How long after its grant a lease ends, whatever happens; None where there is no such limit."""
        return None

    def boot_s(self) -> float:
        return 0.0

    def expected_life_s(self) -> float | None:
        return None

    # What the contract asks for

    async def adopt(self, known: Sequence[KnownLease], emit: Emit) -> list[LeaseId]:
        self._sink = emit
        found = await self.find({lease.request.lease: lease for lease in known})
        unheard: list[LeaseId] = []
        for lease in known:
            lease_id = lease.request.lease
            if (holding := found.get(lease_id)) is not None:
                self._resume(lease, holding)
            elif lease.granted:
                late = lease.expires_at_ns is not None and self.context.now_ns() >= lease.expires_at_ns
                cause = EndCause.EXPIRED if late else EndCause.LOST
                self._emit(LeaseEnded(lease=lease_id, cause=cause, detail="nothing of it was left as the run went on"))
            else:
                unheard.append(lease_id)
        return unheard

    async def start(self, emit: Emit) -> None:
        self._sink = emit
        self._opened = True
        self.announce()

    async def acquire(self, request: LeaseRequest) -> None:
        if request.lease in self._leases:
            raise ValueError(f"lease {request.lease} is already held")
        lease = _Lease(request, asyncio.get_running_loop().create_future())
        self._leases[request.lease] = lease
        self._own(self._lives, self._begin(lease), f"{self.name}: lease {request.lease}")

    async def release(self, lease: LeaseId) -> None:
        held = self._leases.get(lease)
        late = held is not None and held.expires_at_ns is not None and self.context.now_ns() >= held.expires_at_ns
        self.end(lease, Ending(EndCause.EXPIRED if late else EndCause.RELEASED))

    def bar(self, lease: LeaseId) -> None:
        if lease in self._leases:
            self._barred.add(lease)

    async def aclose(self) -> None:
        self._closing = True
        for task in self._background:
            task.cancel()
        for lease in self._leases:
            self.end(lease, Ending(EndCause.RELEASED, "the provider is closing"))
        if tasks := self._background | self._lives:
            await asyncio.wait(tasks)
        self._sink = None

    # What an adapter can use

    def announce(self, *, again: bool = False) -> None:
        """Emit the offer if it is another than the last, or `again`."""
        offer = Offer(
            provider=self.name,
            role=self.role,
            available=max(0, min(self.free(), self.settings.max_workers - self._held)),
            successors=max(0, self.overlap() - max(0, self._held - self.settings.max_workers)),
            usd_per_gpu_hour=self.settings.usd_per_gpu_hour,
            gpus_per_worker=self.settings.gpus_per_worker,
            boot_s=self.boot_s(),
            expected_life_s=self.expected_life_s(),
        )
        if (again or offer != self._offered) and self._opened and not self._closing:
            self._offered = offer
            self._emit(OfferChanged(offer=offer))

    def holds(self, lease: LeaseId) -> bool:
        """Whether the lease is asked for or granted, and not over."""
        return lease in self._leases

    def end(self, lease_id: LeaseId, ending: Ending) -> None:
        """End a lease for this reason, unless it is unknown or its end has begun."""
        lease = self._leases.get(lease_id)
        if lease is not None and not lease.ending.done():
            lease.ending.set_result(ending)

    def foretell(self, lease_id: LeaseId, ending: Ending, deadline_ns: Nanoseconds) -> None:
        """Give notice, and end the lease when it has run out; however it ends before that, it is for this reason."""
        lease = self._leases[lease_id]
        lease.foretold = ending
        if deadline_ns > self.context.now_ns():
            self._emit(LeaseNotice(lease=lease_id, deadline_ns=deadline_ns, reason=ending.detail))
        self._end_at(lease, deadline_ns, ending)

    def run_in_background(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Run `work` until the provider closes."""
        self._own(self._background, work, f"{self.name}: {name}")

    # The life of a lease

    async def _begin(self, lease: _Lease) -> None:
        lease_id = lease.request.lease
        try:
            holding = await self._take(lease)
        except Exception as error:
            del self._leases[lease_id]
            self._emit(LeaseRefused(lease=lease_id, reason=str(error) or type(error).__name__))
            self.announce()
            return
        self._grant(lease)
        await self._live(lease, holding)

    def _resume(self, known: KnownLease, holding: Holding) -> None:
        """Go on with a lease that an earlier process began."""
        lease_id, loop = known.request.lease, asyncio.get_running_loop()
        lease = self._leases[lease_id] = _Lease(known.request, loop.create_future(), True, known.expires_at_ns)
        if not known.granted:
            self._grant(lease)
        elif lease.expires_at_ns is not None:
            self._end_at(lease, lease.expires_at_ns, self._expiry())
        self.resumed(lease_id, holding)
        self._own(self._lives, self._live(lease, holding), f"{self.name}: lease {lease_id}")

    def _grant(self, lease: _Lease) -> None:
        life_s = self.life_s()
        if life_s is not None:
            lease.expires_at_ns = self.context.now_ns() + round(life_s * NS_PER_S)
            self._end_at(lease, lease.expires_at_ns, self._expiry())
        workers = tuple(ticket.worker for ticket in lease.request.tickets)
        self._emit(LeaseGranted(lease=lease.request.lease, workers=workers, expires_at_ns=lease.expires_at_ns))
        # Whoever asks counts what is asked for against the offer, and may now ask for the rest.
        self.announce(again=True)

    async def _live(self, lease: _Lease, holding: Holding) -> None:
        lease_id = lease.request.lease
        ending = await _over(lease, holding)
        await self._give_back(lease_id, holding)
        if lease.deadline is not None:
            lease.deadline.cancel()
        del self._leases[lease_id]
        self.forget(lease_id, barred=lease_id in self._barred)
        self._barred.discard(lease_id)
        self._emit(LeaseEnded(lease=lease_id, cause=ending.cause, detail=ending.detail))
        self.announce()

    def _expiry(self) -> Ending:
        return Ending(EndCause.EXPIRED, f"its {self.life_s():g} s are over")

    def _end_at(self, lease: _Lease, deadline_ns: Nanoseconds, ending: Ending) -> None:
        left_s = (deadline_ns - self.context.now_ns()) / NS_PER_S
        if left_s <= 0:
            self.end(lease.request.lease, ending)
            return
        if lease.deadline is not None:
            lease.deadline.cancel()
        lease.deadline = asyncio.get_running_loop().call_later(left_s, self.end, lease.request.lease, ending)

    @property
    def _held(self) -> int:
        return sum(lease.counted for lease in self._leases.values())

    async def _take(self, lease: _Lease) -> Holding:
        if self._closing:
            raise Refusal(f"{self.name} is closing")
        if self._held >= self.settings.max_workers + self.overlap():
            besides = f" and {self.overlap()} besides" if self.overlap() else ""
            raise Refusal(f"{self.name} holds max_workers = {self.settings.max_workers} workers{besides} already")
        lease.counted = True
        timeout_s = self.context.acquire_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                return await self.take(lease.request)
        except TimeoutError:
            raise Refusal(f"{self.name} gave nothing within {timeout_s:g} s") from None

    async def _give_back(self, lease_id: LeaseId, holding: Holding) -> None:
        while True:
            try:
                await holding.give_back()
                return
            except Exception as error:
                log.warning("not given back yet", provider=self.name, lease=lease_id, error=repr(error))
            await asyncio.sleep(RETRY_S)

    def _emit(self, event: ProviderEvent) -> None:
        if self._sink is not None:
            self._sink(event)

    def _own(self, owner: set[asyncio.Task[None]], work: Coroutine[Any, Any, None], name: str) -> None:
        def finished(task: asyncio.Task[None]) -> None:
            owner.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None:
                log.error("a provider's task failed", task=name, exc_info=error)

        task = asyncio.create_task(work, name=name)
        owner.add(task)
        task.add_done_callback(finished)


async def _over(lease: _Lease, holding: Holding) -> Ending:
    """Wait until the lease is to end, or what it stands on is over by itself."""
    keep = asyncio.create_task(holding.keep(), name=f"keep {lease.request.lease}")
    try:
        await asyncio.wait({keep, lease.ending}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        keep.cancel()
        await asyncio.wait({keep})
    if lease.ending.done():
        ending = lease.ending.result()
    elif error := keep.exception():
        ending = Ending(EndCause.LOST, repr(error))
    else:
        ending = keep.result()
    return lease.foretold or ending
