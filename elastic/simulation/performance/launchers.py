"""Providers on virtual time: the markets of live providers, and modelled workers that boot on their leases."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import traces
from elastic.compose.checked_markets import check_market, provider_plug_in
from elastic.core import events as e
from elastic.core.ids import worker_id
from elastic.core.types import NS_PER_S, EndCause, LeaseId, Nanoseconds, WorkerId
from elastic.simulation.performance.lending import LentHostModel, LentShareModel
from elastic.simulation.performance.profile import Device
from providers.base import Provider, ProviderSettings
from providers.markets import (
    CapacityUnavailable,
    LeaseEnding,
    Market,
    ReservedMarket,
    ServerlessMarket,
    ServingMarket,
    SpotMarket,
    SpotSettings,
    TakenBack,
    TrainerMarket,
)
from providers.serving_messages import ServingSettings
from traces.serving import read_serving_trace, replay_requests
from traces.spot import read_spot_trace

if TYPE_CHECKING:
    from elastic.simulation.performance.run import SimulatedRun

QUEUE_KEYS: dict[type[Market[Any]], str] = {
    ReservedMarket: "reserved_queue_s",
    ServerlessMarket: "serverless_queue_s",
    SpotMarket: "spot_queue_s",
}
BOOT_KEYS: dict[type[Market[Any]], str] = {TrainerMarket: "trainer_boot_s", ServingMarket: "serving_boot_s"}
"""The profile's keys of two times: from a request to its grant, and from a worker's start to its first message."""


@dataclass(slots=True)
class ModelledLease:
    """A lease as its provider knows it. `noticed` is the ending of which notice was given.

    `workers` are the workers whose processes live.
    """

    id: LeaseId
    place: str
    workers: list[WorkerId]
    granted: bool = False
    noticed: LeaseEnding | None = None


@dataclass(slots=True)
class BilledSpan:
    """An entry of a provider's bill: the devices of a lease from grant to end. None before the grant."""

    lease: LeaseId
    workers: int
    began_ns: Nanoseconds
    ended_ns: Nanoseconds | None = None


class Launcher:
    """Drives a market, and boots workers on its leases as fast as their device's profile says."""

    def __init__(self, market: Market[Any], device: Device, world: "SimulatedRun") -> None:
        self.market = market
        self.device = device
        self.queue_key = QUEUE_KEYS.get(type(market), "")
        self.boot_key = BOOT_KEYS.get(type(market), "boot_s")
        self._world = world
        self.spans: dict[LeaseId, BilledSpan] = {}
        """The billed time of every lease that was ever granted."""
        self._held: dict[LeaseId, ModelledLease] = {}

    def share(self, place: str) -> LentShareModel | None:
        """Return the share of a borrowed device."""
        return None

    @property
    def resident_version(self) -> int | None:
        """Return the weights with which its workers begin; None if they begin without weights."""
        return None

    def queue_s(self) -> float:
        """Return the time from a request to its grant."""
        return float(getattr(self.device.profile, self.queue_key)) if self.queue_key else 0.0

    def boot_s(self) -> float:
        """Return the time from the start of a worker's process to its first message."""
        return float(getattr(self.device.profile, self.boot_key))

    # What the core asks for

    def start(self) -> None:
        self.announce()
        self._await_change()

    def acquire(self, lease: LeaseId) -> None:
        loop = self._world.loop
        try:
            place = self.market.take(lease)
        except CapacityUnavailable as refusal:
            refused = e.LeaseRefused(lease=lease, reason=str(refusal))
            loop.after(0, lambda: self._world.feed(refused))
            loop.after(0, self.announce)
            return
        workers = [worker_id(lease, number) for number in range(self.market.workers_per_lease)]
        held = self._held[lease] = ModelledLease(lease, place, workers)
        loop.after(round(self.queue_s() * NS_PER_S), lambda: self._grant(held))

    def release(self, lease: LeaseId) -> None:
        if lease in self._held:
            self._world.loop.after(0, lambda: self.end(lease, LeaseEnding(EndCause.RELEASED)))

    def worker_left(self, lease: LeaseId, worker: WorkerId) -> None:
        """Note that a process of the lease has ended by itself. The lease ends with its last process."""
        held = self._held.get(lease)
        if held is not None and worker in held.workers:
            held.workers.remove(worker)
            if not held.workers:
                self.end(lease, LeaseEnding(EndCause.RELEASED, "the worker ended"))

    def end(self, lease: LeaseId, ending: LeaseEnding) -> None:
        held = self._held.pop(lease, None)
        if held is None:
            return
        for worker in held.workers:
            self._world.kill_worker(worker)
        self.market.forget(lease)
        if held.granted:
            self.spans[lease].ended_ns = self._world.loop.now_ns
            cause = (held.noticed or ending).cause
            self._world.feed(e.LeaseEnded(lease=lease, cause=cause, detail=ending.detail))
        else:
            reason = ending.detail or f"{ending.cause} while it waited to be granted"
            self._world.feed(e.LeaseRefused(lease=lease, reason=reason))
        self.announce()

    def announce(self, *, again: bool = False) -> None:
        if (offer := self.market.news(again=again)) is not None:
            self._world.feed(e.OfferChanged(offer=offer))

    def _grant(self, held: ModelledLease) -> None:
        if held.id not in self._held:
            return
        held.granted = True
        self.spans[held.id] = BilledSpan(held.id, len(held.workers), self._world.loop.now_ns)
        loop, life_s = self._world.loop, self.market.life_s()
        expires_at_ns = None if life_s is None else loop.now_ns + round(life_s * NS_PER_S)
        if expires_at_ns is not None:
            loop.at(expires_at_ns, lambda: self.end(held.id, self.market.expiry()))
        self._world.feed(e.LeaseGranted(lease=held.id, workers=tuple(held.workers), expires_at_ns=expires_at_ns))
        self.announce(again=True)
        loop.after(round(self.market.boot_s() * NS_PER_S), lambda: self._boot(held))

    def _boot(self, held: ModelledLease) -> None:
        boot_ns, share = round(self.boot_s() * NS_PER_S), self.share(held.place)
        for worker in held.workers if held.id in self._held else ():
            self._world.boot_worker(worker, held.id, self.market.role, boot_ns, share)

    def _await_change(self) -> None:
        if (next_ns := self.market.next_ns) is not None:
            self._world.loop.at(next_ns, lambda: self._follow(next_ns))

    def _follow(self, now_ns: Nanoseconds) -> None:
        for taken in self.market.advance(now_ns):
            self._give_notice(taken)
        self.announce()
        self._await_change()

    def _give_notice(self, taken: TakenBack) -> None:
        held = self._held[taken.lease]
        held.noticed = taken.ending
        if taken.deadline_ns <= self._world.loop.now_ns or not held.granted:
            self.end(held.id, taken.ending)
            return
        notice = e.LeaseNotice(lease=held.id, deadline_ns=taken.deadline_ns, reason=taken.ending.detail)
        self._world.feed(notice)
        self._world.loop.at(taken.deadline_ns, lambda: self.end(held.id, taken.ending))


class ServingCluster(Launcher):
    """Hosts with a modelled load. A host serves its load before it lends itself."""

    def __init__(self, name: str, settings: ServingSettings, device: Device, world: "SimulatedRun") -> None:
        load, trace = settings.load, read_serving_trace(traces.find(settings.load.trace))
        self._warm_ns = world.loop.now_ns + round(device.profile.serving_start_s * NS_PER_S)
        self._poll_ns = round(settings.poll_s * NS_PER_S)
        self._hosts = {
            str(number): LentHostModel(
                world.loop,
                replay_requests(trace, start_s=load.start_s, speed=load.speed, share=load.share, phase=number),
                settings.device,
                settings.lending,
                self._warm_ns,
            )
            for number in range(settings.hosts)
        }
        super().__init__(ServingMarket(name, settings, self._hosts), device, world)

    def start(self) -> None:
        super().start()
        self._world.loop.at(self._warm_ns, self._look)

    def share(self, place: str) -> LentShareModel:
        return LentShareModel(self._world.loop, self._hosts[place])

    def _look(self) -> None:
        self.announce()
        self._world.loop.after(self._poll_ns, self._look)


def launcher_of(
    name: str, kind: type[Provider], settings: ProviderSettings, device: Device, world: "SimulatedRun"
) -> Launcher:
    """Return the model of a provider: its own market, if its kind names one, else one that is always there. Raises
    `ValueError` for what cannot be modelled, and `PolicyFault` for a market of another package that cannot be made."""
    if isinstance(settings, ServingSettings):
        if settings.urls:
            raise ValueError(f"providers.{name}.urls: hosts that exist cannot be simulated; set hosts instead")
        return ServingCluster(name, settings, device, world)
    if kind.trainer_of_turns is not None:
        raise ValueError(f"providers.{name}: its devices are a pool's; allowed: `elastic jobs simulate`")
    market_type, plug_in = market_of(kind) or Market, provider_plug_in(name, settings)
    if plug_in is None:
        return Launcher(market_type(name, settings), device, world)
    market = plug_in.ask("its market", lambda: market_type(name, settings))
    check_market(market, plug_in)
    return Launcher(market, device, world)


def market_of(kind: type[Provider]) -> type[Market[Any]] | None:
    """The market that a kind of provider names, by which it is also simulated."""
    found = getattr(kind, "market_type", None)
    return found if isinstance(found, type) and issubclass(found, Market) else None


def doubts(name: str, kind: type[Provider], settings: ProviderSettings) -> list[str]:
    """Return why a simulated provider would give nothing, or other than expected."""
    if market_of(kind) is None and not isinstance(settings, ServingSettings):
        return [
            f"providers.{name}: {kind.__name__} names no market (market_type) by which to simulate it: its "
            f"max_workers = {settings.max_workers} are taken to be there whenever they are asked for, for "
            f"${settings.usd_per_gpu_hour:g} a GPU-hour, and to stay"
        ]
    if settings.max_workers == 0:
        return [f"providers.{name}.max_workers is 0: no worker comes from it"]
    if isinstance(settings, ServingSettings) and settings.hosts == 0:
        return [f"providers.{name}.hosts is 0: no worker comes from it"]
    if isinstance(settings, ServingSettings) and settings.executor is not None:
        return [f"providers.{name}.executor is not modelled: hosts lend as those with a modelled device do"]
    return _market_doubts(name, settings) if isinstance(settings, SpotSettings) else []


def _market_doubts(name: str, settings: SpotSettings) -> list[str]:
    path = traces.find(settings.trace)
    trace, start_s = read_spot_trace(path), settings.start_s
    end_s = trace.end_s if settings.end_s is None else settings.end_s
    window = f"providers.{name}: from {start_s:g} s to {end_s:g} s of {path}"
    inside = [event for event in trace.events if start_s < event.time_s <= end_s]
    if not inside and not trace.available(start_s):
        return [f"{window} no instance is there: no worker comes from it"]
    if not inside:
        return [f"{window} nothing changes: {trace.hole(path, start_s)}"]
    if end_s > trace.end_s:
        return [f"{window} the market stays as it is at {trace.end_s:g} s, where the trace ends"]
    return []
