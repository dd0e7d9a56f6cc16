"""Providers as models, built from the same settings as the live ones: what they have, give, and take back."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import traces
from elastic.core import events as e
from elastic.core.ids import worker_id
from elastic.core.types import NS_PER_S, EndCause, LeaseId, Nanoseconds, Offer, WorkerId, WorkerRole
from elastic.sim.loop import EventLoop
from elastic.sim.performance.lending import LentShare, ServingHost
from elastic.sim.performance.profile import Device
from providers.base import ProviderSettings
from providers.serverless import ServerlessSettings
from providers.serving import ServingSettings
from providers.spot import SpotSettings
from traces.serving import read_serving_trace, replay_requests
from traces.spot import Change, SpotEvent, read_spot_trace, replay


class MarketWorld(Protocol):
    """What a provider sees of its world."""

    loop: EventLoop

    def feed(self, event: e.Event) -> None: ...

    def boot_worker(
        self, worker: WorkerId, lease: LeaseId, role: WorkerRole, boot_ns: Nanoseconds, share: LentShare | None
    ) -> None: ...

    def kill_worker(self, worker: WorkerId) -> None: ...


@dataclass(slots=True)
class Held:
    """A lease as its provider knows it; `foretold` is why it will end, from notice on.

    `workers` are those of its processes that have not ended.
    """

    id: LeaseId
    workers: list[WorkerId]
    granted: bool = False
    foretold: EndCause | None = None


class Market:
    """The part that is the same for all: leases of up to `max_workers` workers in all.

    `queue_key` and `boot_key` are what the profile calls the times from a request to its grant and from a worker's
    start to its first words; `delay_key` is what the provider's settings call the time in between.
    """

    role = WorkerRole.ELASTIC
    workers_per_lease = 1
    queue_key = ""
    boot_key = "boot_s"
    delay_key = ""

    def __init__(self, name: str, settings: ProviderSettings, device: Device, world: MarketWorld) -> None:
        self.name = name
        self.settings = settings
        self.device = device
        self._world = world
        self._held: dict[LeaseId, Held] = {}
        self._offered: Offer | None = None

    # What a model says

    def free(self) -> int:
        return self.settings.max_workers

    def take(self, lease: LeaseId) -> LentShare | None:
        """Secure what the lease stands on; raises `LookupError` if it is not to be had."""
        return None

    def forget(self, lease: LeaseId) -> None: ...

    def queue_s(self) -> float:
        """From the request to the grant."""
        return float(getattr(self.device.profile, self.queue_key)) if self.queue_key else 0.0

    def delay_s(self) -> float:
        """From the grant to the worker's process."""
        return float(getattr(self.settings, self.delay_key)) if self.delay_key else 0.0

    def boot_s(self) -> float:
        """From there to its first words."""
        return float(getattr(self.device.profile, self.boot_key))

    def expected_life_s(self) -> float | None:
        return None

    def life_s(self) -> float | None:
        """How long after its grant a lease ends, whatever happens; None where there is no such limit."""
        return None

    def overlap(self) -> int:
        """How many leases may be held beyond those, each in place of one that ends soon."""
        return 0

    # What the core asks for

    def start(self) -> None:
        self.announce()

    def acquire(self, lease: LeaseId) -> None:
        loop = self._world.loop
        try:
            if len(self._held) >= self._most_leases + self.overlap():
                raise LookupError(f"{self.name} holds max_workers = {self.settings.max_workers} workers already")
            share = self.take(lease)
        except LookupError as refusal:
            refused = e.LeaseRefused(lease=lease, reason=str(refusal.args[0]))
            loop.after(0, lambda: self._world.feed(refused))
            loop.after(0, self.announce)
            return
        workers = [worker_id(lease, number) for number in range(self.workers_per_lease)]
        held = self._held[lease] = Held(lease, workers)
        loop.after(round(self.queue_s() * NS_PER_S), lambda: self._grant(held, share))

    def release(self, lease: LeaseId) -> None:
        if lease in self._held:
            self._world.loop.after(0, lambda: self.end(lease, EndCause.RELEASED))

    def worker_left(self, lease: LeaseId, worker: WorkerId) -> None:
        """One of the lease's processes has ended by itself; with the last one the lease does."""
        held = self._held.get(lease)
        if held is not None and worker in held.workers:
            held.workers.remove(worker)
            if not held.workers:
                self.end(lease, EndCause.RELEASED, "the worker ended")

    def end(self, lease: LeaseId, cause: EndCause, detail: str = "") -> None:
        held = self._held.pop(lease, None)
        if held is None:
            return
        for worker in held.workers:
            self._world.kill_worker(worker)
        self.forget(lease)
        if held.granted:
            self._world.feed(e.LeaseEnded(lease=lease, cause=held.foretold or cause, detail=detail))
        else:
            self._world.feed(e.LeaseRefused(lease=lease, reason=detail or f"{cause} while it waited to be granted"))
        self.announce()

    def announce(self, *, again: bool = False) -> None:
        offer = Offer(
            provider=self.name,
            role=self.role,
            available=max(0, min(self.free(), self._most_leases - len(self._held))),
            successors=max(0, self.overlap() - max(0, len(self._held) - self._most_leases)),
            usd_per_gpu_hour=self.settings.usd_per_gpu_hour,
            gpus_per_worker=self.settings.gpus_per_worker,
            workers_per_lease=self.workers_per_lease,
            boot_s=self.delay_s(),
            expected_life_s=self.expected_life_s(),
        )
        if again or offer != self._offered:
            self._offered = offer
            self._world.feed(e.OfferChanged(offer=offer))

    @property
    def _most_leases(self) -> int:
        return self.settings.max_workers // self.workers_per_lease

    def _grant(self, held: Held, share: LentShare | None) -> None:
        if held.id not in self._held:
            return
        held.granted = True
        boot_s, delay_ns = self.boot_s(), round(self.delay_s() * NS_PER_S)
        expires_at_ns = self._limit(held)
        self._world.feed(e.LeaseGranted(lease=held.id, workers=tuple(held.workers), expires_at_ns=expires_at_ns))
        self.announce(again=True)

        def begin() -> None:
            for worker in held.workers if held.id in self._held else ():
                self._world.boot_worker(worker, held.id, self.role, round(boot_s * NS_PER_S), share)

        self._world.loop.after(delay_ns, begin)

    def _limit(self, held: Held) -> Nanoseconds | None:
        """Have the lease end by time, where it must."""
        life_s = self.life_s()
        if life_s is None:
            return None
        expires_at_ns = self._world.loop.now_ns + round(life_s * NS_PER_S)
        self._world.loop.at(expires_at_ns, lambda: self.end(held.id, EndCause.EXPIRED, f"its {life_s:g} s are over"))
        return expires_at_ns


class ReservedMarket(Market):
    role = WorkerRole.DEDICATED
    queue_key = "reserved_queue_s"


class TrainerMarket(Market):
    role = WorkerRole.TRAINER
    boot_key = "trainer_boot_s"


class ServerlessMarket(Market):
    """Calls that start cold and end by time, with successors beside those that end soon."""

    settings: ServerlessSettings
    queue_key = "serverless_queue_s"
    delay_key = "cold_start_s"

    def free(self) -> int:
        return self.settings.max_workers + self.overlap() - len(self._held)

    def overlap(self) -> int:
        return self.settings.max_workers if self.settings.overlap is None else self.settings.overlap

    def life_s(self) -> float:
        return self.settings.lease_s

    def expected_life_s(self) -> float:
        return self.settings.lease_s


class SpotMarket(Market):
    """Instances come and go as in the trace, exactly as `providers.spot` has them."""

    settings: SpotSettings
    queue_key = "spot_queue_s"
    delay_key = "boot_delay_s"

    def __init__(self, name: str, settings: SpotSettings, device: Device, world: MarketWorld) -> None:
        super().__init__(name, settings, device, world)
        self._trace = read_spot_trace(traces.find(settings.trace))
        self._instances: dict[str, LeaseId | None] = {}
        self._now_s = settings.start_s
        s = settings
        changes = replay(self._trace, start_s=s.start_s, end_s=s.end_s, speed=s.speed, repeat=s.repeat)
        self._changes = itertools.groupby(changes, key=lambda change: change.time_s)
        self._opened_ns: Nanoseconds = 0

    def start(self) -> None:
        self._opened_ns = self._world.loop.now_ns
        super().start()
        self._await_change()

    def free(self) -> int:
        return sum(lease is None for lease in self._instances.values())

    def expected_life_s(self) -> float | None:
        life_s = self._trace.mean_life_s(self._now_s)
        return None if life_s is None else life_s / self.settings.speed

    def take(self, lease: LeaseId) -> LentShare | None:
        instance = next((i for i, holder in self._instances.items() if holder is None), None)
        if instance is None:
            raise LookupError(f"no instance of {self.name} is available")
        self._instances[instance] = lease
        return None

    def forget(self, lease: LeaseId) -> None:
        for instance, holder in self._instances.items():
            if holder == lease:
                self._instances[instance] = None

    def _await_change(self) -> None:
        found = next(self._changes, None)
        if found is None:
            return
        time_s, together = found
        changes = list(together)
        self._world.loop.at(self._opened_ns + round(time_s * NS_PER_S), lambda: self._follow(time_s, changes))

    def _follow(self, time_s: float, changes: list[SpotEvent]) -> None:
        s = self.settings
        self._now_s = min(s.start_s + time_s * s.speed, s.end_s or self._trace.end_s)
        for change in changes:
            if change.change is Change.ADD:
                self._instances[change.instance] = None
            else:
                self._take_back(change.instance)
        self.announce()
        self._await_change()

    def _take_back(self, instance: str) -> None:
        lease = self._instances.pop(instance)
        held = self._held.get(lease) if lease is not None else None
        if held is None:
            return
        detail = f"the market took instance {instance} back"
        held.foretold = EndCause.PREEMPTED
        notice_ns = round(self.settings.notice_s * NS_PER_S)
        if notice_ns <= 0 or not held.granted:
            self.end(held.id, EndCause.PREEMPTED, detail)
            return
        deadline_ns = self._world.loop.now_ns + notice_ns
        self._world.feed(e.LeaseNotice(lease=held.id, deadline_ns=deadline_ns, reason=detail))
        self._world.loop.at(deadline_ns, lambda: self.end(held.id, EndCause.PREEMPTED, detail))


class ServingCluster(Market):
    """Hosts with a load of their own, which they serve first; a lease is one host's loan."""

    settings: ServingSettings
    boot_key = "serving_boot_s"

    def __init__(self, name: str, settings: ServingSettings, device: Device, world: MarketWorld) -> None:
        super().__init__(name, settings, device, world)
        load = settings.load
        self._warm_ns = world.loop.now_ns + round(device.profile.serving_start_s * NS_PER_S)
        trace = read_serving_trace(traces.find(load.trace))
        self._hosts = [
            ServingHost(
                world.loop,
                replay_requests(trace, start_s=load.start_s, speed=load.speed, share=load.share, phase=number),
                settings.device,
                settings.lending,
                self._warm_ns,
            )
            for number in range(settings.hosts)
        ]

    def start(self) -> None:
        super().start()
        self._world.loop.at(self._warm_ns, self._look)

    def free(self) -> int:
        return len(self._offered_hosts())

    def take(self, lease: LeaseId) -> LentShare | None:
        free = self._offered_hosts()
        if not free:
            raise LookupError(f"no host of {self.name} is free")
        host = min(free, key=lambda host: host.kv_share)
        host.lease = lease
        return LentShare(self._world.loop, host)

    def forget(self, lease: LeaseId) -> None:
        for host in self._hosts:
            if host.lease == lease:
                host.lease = None

    def _offered_hosts(self) -> list[ServingHost]:
        if self._world.loop.now_ns < self._warm_ns:
            return []
        for host in self._hosts:
            if host.lease is None:
                host.update()
        return [host for host in self._hosts if host.lease is None and not host.pressed]

    def _look(self) -> None:
        self.announce()
        self._world.loop.after(round(self.settings.poll_s * NS_PER_S), self._look)


def market_of(name: str, settings: ProviderSettings, device: Device, world: MarketWorld) -> Market:
    """The model that stands for a provider of these settings. Raises `ValueError` where there is none."""
    kinds: dict[type[ProviderSettings], Callable[..., Market]] = {
        SpotSettings: SpotMarket,
        ServingSettings: ServingCluster,
        ServerlessSettings: ServerlessMarket,
        ProviderSettings: ReservedMarket,
    }
    if type(settings) not in kinds:
        known = "spot, serving, serverless, reserved"
        raise ValueError(f"providers.{name}: no model of this provider to simulate it with; there are: {known}")
    if isinstance(settings, ServingSettings) and settings.urls:
        raise ValueError(f"providers.{name}.urls: hosts that exist cannot be simulated; set hosts instead")
    return kinds[type(settings)](name, settings, device, world)


def doubts(name: str, settings: ProviderSettings) -> list[str]:
    """Why nothing, or less than one might think, would come of a provider with these settings."""
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
