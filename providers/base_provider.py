"""The common part of all adapters. Each lease is one task, from its request or adoption until it is refused or has
ended."""

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, NamedTuple, Protocol

import msgspec
import structlog

from elastic.core.events import LeaseEnded, LeaseGranted, LeaseNotice, LeaseRefused, OfferChanged
from elastic.core.types import NS_PER_S, EndCause, LeaseId, Nanoseconds
from elastic.system.boot_clock import ClockTimer, sleep_until
from elastic.system.files import write_whole
from elastic.system.supervision import records
from providers.base import Emit, KnownLease, LeaseRequest, Provider, ProviderContext, ProviderEvent, ProviderSettings
from providers.markets import CapacityUnavailable, LeaseEnding, Market, SettingsT, TakenBack

log = structlog.get_logger(__name__)

RETRY_S = 1.0
"""Pause between two attempts to give something back."""


class LeaseHandle(Protocol):
    """The resources behind a granted lease, such as processes or a lent host."""

    async def keep(self) -> LeaseEnding:
        """Return when the resources end by themselves. Cancelled if the lease ends before that."""
        ...

    async def give_back(self) -> Nanoseconds | None:
        """End the resources. No process of the lease is alive once this has returned. An error is logged, and the call
        repeated.

        Returns how long the provider charges by its own account, if it tells.
        """
        ...


@dataclass(slots=True)
class _LeaseTask:
    request: LeaseRequest
    ending: asyncio.Future[LeaseEnding]
    place: str = ""
    at_ns: Nanoseconds = 0
    expires_at_ns: int | None = None
    noticed: LeaseEnding | None = None
    deadline: ClockTimer | None = None


class _Bar(msgspec.Struct, frozen=True):
    """The place of a Byzantine worker's lease, and the time of the bar."""

    place: str
    at_ns: Nanoseconds


class Found(NamedTuple):
    """The remains of a lease from an earlier process: its handle, its place in the market, and since when it exists."""

    handle: LeaseHandle
    place: str = ""
    at_ns: Nanoseconds = 0


class BaseProvider(Generic[SettingsT]):
    """The common part of `Provider`: it drives a market. Adapters start workers on the market's places."""

    on_this_machine: ClassVar[bool] = False
    trainer_of_turns: ClassVar[type[Provider] | None] = None
    retry_s: ClassVar[float] = RETRY_S
    """Between two attempts to give a lease back."""

    @classmethod
    def elsewhere(cls, settings: ProviderSettings) -> bool:
        return False

    def __init__(self, market: Market[SettingsT], context: ProviderContext) -> None:
        self.name = market.name
        self.settings = market.settings
        self.context = context
        self.market = market
        self._leases: dict[LeaseId, _LeaseTask] = {}
        self._lease_tasks: set[asyncio.Task[None]] = set()
        self._background: set[asyncio.Task[None]] = set()
        self._bars: dict[LeaseId, _Bar] = {}
        self._sink: Emit | None = None
        self._opened = False
        self._closing = False

    # What an adapter says

    async def launch(self, request: LeaseRequest, place: str) -> LeaseHandle:
        """Start workers on this place. An error refuses the lease; nothing may be left then."""
        raise NotImplementedError

    async def find(self, known: Mapping[LeaseId, KnownLease]) -> Mapping[LeaseId, Found]:
        """Find the remains of these leases, ended or not, and end everything else that was left."""
        return {}

    def never_joined(self, lease: LeaseId) -> str:
        """Called when a lease ends because no worker joined in time; returns where to look for the cause."""
        return ""

    def granted(self, lease: LeaseId) -> None:
        """Called when the run was told that it has the lease."""

    def withdrawn(self, lease: LeaseId) -> None:
        """Called when the lease is to end, also before it is granted: a long `launch` can break off."""

    async def end_left_over(self) -> str:
        """Called as the provider closes, once all leases are over: end everything else that is there, and return what
        is not proven to be gone."""
        return ""

    @property
    def waits_for(self) -> str:
        return f"the end of {', '.join(sorted(self._leases))}" if self._leases else "its search for what is left"

    @property
    def closing_s(self) -> float:
        return self.context.release_timeout_s

    @property
    def answer_timeout_s(self) -> float | None:
        """Return the limit of a launch; None if the run itself limits the wait."""
        return self.context.acquire_timeout_s

    # What the contract asks for

    async def adopt(self, known: Sequence[KnownLease], emit: Emit) -> list[LeaseId]:
        self._sink = emit
        found = await self.find({lease.request.lease: lease for lease in known})
        if self._bars_path.exists():
            self._bars = msgspec.json.decode(self._bars_path.read_bytes(), type=dict[LeaseId, _Bar])
        taken: list[TakenBack] = []
        for lease_id, one in sorted({**self._bars, **found}.items(), key=lambda item: item[1].at_ns):
            taken += self.market.advance(one.at_ns)
            self.market.restore(lease_id, one.place)
            if lease_id not in found:
                self.market.forget(lease_id, barred=True)
        taken += self.market.advance(self.context.now_ns())
        unheard: list[LeaseId] = []
        for lease in known:
            lease_id = lease.request.lease
            if (one := found.get(lease_id)) is not None:
                self._resume(lease, one)
            elif lease.granted:
                late = lease.expires_at_ns is not None and self.context.now_ns() >= lease.expires_at_ns
                cause = EndCause.EXPIRED if late else EndCause.LOST
                self._emit(LeaseEnded(lease=lease_id, cause=cause, detail="nothing of it was left as the run went on"))
            else:
                unheard.append(lease_id)
        for one in taken:
            self.give_notice(
                one._replace(ending=LeaseEnding(one.ending.cause, f"{one.ending.detail} while nobody listened"))
            )
        return unheard

    async def start(self, emit: Emit) -> None:
        self._sink = emit
        self._opened = True
        self.announce()
        if self.market.next_ns is not None:
            self.run_in_background(self._follow_market(), "market")

    async def acquire(self, request: LeaseRequest) -> None:
        if request.lease in self._leases:
            raise ValueError(f"lease {request.lease} is already held")
        lease = _LeaseTask(request, asyncio.get_running_loop().create_future())
        self._leases[request.lease] = lease
        self._own(self._lease_tasks, self._begin(lease), f"{self.name}: lease {request.lease}")

    async def release(self, lease: LeaseId, reason: str = "") -> None:
        held = self._leases.get(lease)
        if held is None or held.ending.done():
            return
        if held.expires_at_ns is not None and self.context.now_ns() >= held.expires_at_ns:
            ending = LeaseEnding(EndCause.EXPIRED)
        elif reason == EndCause.BOOT_TIMEOUT:
            fault = f"no worker of it dials {self.context.endpoint.address}" if self.elsewhere(self.settings) else ""
            ending = LeaseEnding(EndCause.BOOT_TIMEOUT, self.never_joined(lease), fault)
        else:
            ending = LeaseEnding(EndCause.RELEASED)
        self.end(lease, ending)

    def bar(self, lease: LeaseId) -> None:
        held = self._leases.get(lease)
        if held is None or lease in self._bars:
            return
        self._bars[lease] = _Bar(held.place, held.at_ns)
        try:
            if self.market.bars_last:
                write_whole(self._bars_path, msgspec.json.encode(self._bars), durable=False)
        except OSError as error:
            log.error("a bar is not known to the run's next process", lease=lease, error=str(error))

    async def aclose(self) -> str:
        self._closing = True
        for task in self._background:
            task.cancel()
        for lease in self._leases:
            self.end(lease, LeaseEnding(EndCause.RELEASED, "the provider is closing"))
        if tasks := self.tasks:
            await asyncio.wait(tasks)
        try:
            if left := await self.end_left_over():
                log.error("not everything is proven to be gone", provider=self.name, left=left)
            return left
        finally:
            self._sink = None

    @property
    def tasks(self) -> set[asyncio.Task[None]]:
        """All that is under way. If somebody cancels them, what the provider holds stays, as when its process dies."""
        return self._background | self._lease_tasks

    # What an adapter can use

    def announce(self, *, again: bool = False) -> None:
        """Emit the offer if it has changed, or if `again`."""
        if self._opened and not self._closing and (offer := self.market.news(again=again)) is not None:
            self._emit(OfferChanged(offer=offer))

    def holds(self, lease: LeaseId) -> bool:
        """Return whether the lease is requested or granted, and not over."""
        return lease in self._leases

    def end(self, lease_id: LeaseId, ending: LeaseEnding) -> None:
        """End a lease for this reason, unless it is unknown or already ending."""
        lease = self._leases.get(lease_id)
        if lease is not None and not lease.ending.done():
            lease.ending.set_result(ending)
            self.withdrawn(lease_id)

    def wants(self, lease: LeaseId) -> bool:
        """Return whether the lease is requested or granted, and not ending."""
        held = self._leases.get(lease)
        return held is not None and not held.ending.done()

    def give_notice(self, taken: TakenBack) -> None:
        """Give notice, and end the lease at its deadline. If it ends before, the noticed ending is its cause."""
        lease = self._leases[taken.lease]
        lease.noticed = taken.ending
        if taken.deadline_ns > self.context.now_ns():
            notice = LeaseNotice(lease=taken.lease, deadline_ns=taken.deadline_ns, reason=taken.ending.detail)
            self._emit(notice)
        self._end_at(lease, taken.deadline_ns, taken.ending)

    def run_in_background(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Run `work` until the provider closes."""
        self._own(self._background, work, f"{self.name}: {name}")

    async def _follow_market(self) -> None:
        while (next_ns := self.market.next_ns) is not None:
            await sleep_until(self.context.now_ns, next_ns)
            for taken in self.market.advance(next_ns):
                self.give_notice(taken)
            self.announce()

    @property
    def _bars_path(self) -> Path:
        return records(self.context.run_dir) / f"{self.name}.barred"

    # The life of a lease

    async def _begin(self, lease: _LeaseTask) -> None:
        lease_id = lease.request.lease
        try:
            handle = await self._take(lease)
        except Exception as error:
            del self._leases[lease_id]
            self.market.forget(lease_id)
            self._emit(LeaseRefused(lease=lease_id, reason=str(error) or type(error).__name__))
            self.announce()
            return
        self._grant(lease)
        await self._keep(lease, handle)

    def _resume(self, known: KnownLease, found: Found) -> None:
        """Continue a lease that an earlier process began."""
        lease_id, loop = known.request.lease, asyncio.get_running_loop()
        lease = self._leases[lease_id] = _LeaseTask(
            known.request, loop.create_future(), found.place, found.at_ns, known.expires_at_ns
        )
        if not known.granted:
            self._grant(lease)
        elif lease.expires_at_ns is not None:
            self._end_at(lease, lease.expires_at_ns, self.market.expiry())
        self._own(self._lease_tasks, self._keep(lease, found.handle), f"{self.name}: lease {lease_id}")

    def _grant(self, lease: _LeaseTask) -> None:
        life_s = self.market.life_s()
        if life_s is not None:
            lease.expires_at_ns = self.context.now_ns() + round(life_s * NS_PER_S)
            self._end_at(lease, lease.expires_at_ns, self.market.expiry())
        workers = tuple(ticket.worker for ticket in lease.request.tickets)
        self._emit(LeaseGranted(lease=lease.request.lease, workers=workers, expires_at_ns=lease.expires_at_ns))
        # The core counts what is asked for against the offer, and may now ask for the rest.
        self.announce(again=True)
        self.granted(lease.request.lease)

    async def _keep(self, lease: _LeaseTask, handle: LeaseHandle) -> None:
        lease_id = lease.request.lease
        ending = await _over(lease, handle)
        billed_ns = await self._give_back(lease_id, handle)
        ending = lease.noticed or ending
        if lease.deadline is not None:
            lease.deadline.cancel()
        del self._leases[lease_id]
        self.market.forget(lease_id, barred=lease_id in self._bars)
        billed = msgspec.UNSET if billed_ns is None else billed_ns
        self._emit(
            LeaseEnded(lease=lease_id, cause=ending.cause, detail=ending.detail, fault=ending.fault, billed_ns=billed)
        )
        self.announce()

    def _end_at(self, lease: _LeaseTask, deadline_ns: Nanoseconds, ending: LeaseEnding) -> None:
        lease_id = lease.request.lease
        if deadline_ns <= self.context.now_ns():
            self.end(lease_id, ending)
            return
        if lease.deadline is not None:
            lease.deadline.cancel()
        lease.deadline = ClockTimer(self.context.now_ns, deadline_ns, lambda: self.end(lease_id, ending))

    async def _take(self, lease: _LeaseTask) -> LeaseHandle:
        if self._closing:
            raise CapacityUnavailable(f"{self.name} is closing")
        lease.place, lease.at_ns = self.market.take(lease.request.lease), self.market.at_ns
        timeout_s = self.answer_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                return await self.launch(lease.request, lease.place)
        except TimeoutError:
            raise CapacityUnavailable(f"{self.name} gave nothing within {timeout_s:g} s") from None

    async def _give_back(self, lease_id: LeaseId, handle: LeaseHandle) -> Nanoseconds | None:
        while True:
            try:
                return await handle.give_back()
            except Exception as error:
                log.warning("not given back yet", provider=self.name, lease=lease_id, error=repr(error))
            await asyncio.sleep(self.retry_s)

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


async def _over(lease: _LeaseTask, handle: LeaseHandle) -> LeaseEnding:
    """Wait until the lease is to end, or its resources end by themselves."""
    keep = asyncio.create_task(handle.keep(), name=f"keep {lease.request.lease}")
    try:
        await asyncio.wait({keep, lease.ending}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        keep.cancel()
        await asyncio.wait({keep})
    if lease.ending.done():
        ending = lease.ending.result()
    elif error := keep.exception():
        ending = LeaseEnding(EndCause.LOST, repr(error))
    else:
        ending = keep.result()
    return lease.noticed or ending
