"""The ports of a live run: orders become frames to workers and calls of providers."""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from typing import Any

import msgspec
import structlog

from elastic.config import Config
from elastic.core import commands as c
from elastic.core import events as e
from elastic.core.ids import worker_id
from elastic.core.scheduler import Scheduler
from elastic.core.types import EndCause, LeaseId, Nanoseconds, WeightMode, WorkerId, WorkerState
from elastic.protocol import wire
from elastic.protocol.run_secrets import RunSecrets
from elastic.runtime.episodes import OpenTurn
from elastic.runtime.gateway import Door
from elastic.runtime.ports import Feed, WorkerOrder
from elastic.runtime.refusals import TURN
from elastic.runtime.tasks import Spawn
from elastic.system.boot_clock import ClockTimer, Suspensions, boottime_ns, suspended_ns
from elastic.weights.rights import RelayRights
from providers.base import KnownLease, LeaseRequest, Provider, WorkerTicket

log = structlog.get_logger(__name__)


class LoopClock:
    """Nanoseconds since the run began, `begun_ns` ago, and timers by that time."""

    def __init__(
        self,
        clock_ns: Callable[[], int] = boottime_ns,
        suspended_ns: Callable[[], int] = suspended_ns,
        begun_ns: Nanoseconds = 0,
    ) -> None:
        self._clock_ns = clock_ns
        self._start_ns = clock_ns() - begun_ns
        self.slept_ns = Suspensions(suspended_ns).slept_ns

    def now_ns(self) -> Nanoseconds:
        return self._clock_ns() - self._start_ns

    def at(self, when_ns: Nanoseconds, action: Callable[[], None]) -> None:
        ClockTimer(self.now_ns, when_ns, action)


class GatewayWorkers:
    """Orders to workers, as frames. `publisher` is the public key of the trainer that is there now."""

    def __init__(self, door: Door, config: Config, relay_rights: RelayRights | None) -> None:
        mode = WeightMode(config.weights.mode)
        self.publisher = ""
        self._door = door
        self._relay_rights = relay_rights
        self._frames: dict[type[c.Command], Callable[[Any], wire.FromOrchestrator]] = {
            c.AbortTurn: lambda k: wire.Abort(k.turn, k.attempt),
            c.LoadWeights: lambda k: wire.PullWeights(k.version, mode, self.publisher),
            c.SleepWorker: lambda _: wire.Sleep(),
            c.WakeWorker: lambda _: wire.Wake(),
            c.DrainWorker: lambda k: wire.Drain(k.reason),
        }

    def start_turn(self, order: c.StartTurn, prompt: OpenTurn) -> None:
        assert prompt.sampling is not None
        self._door.send(
            order.worker,
            order.epoch,
            wire.Generate(
                turn=order.turn,
                attempt=order.attempt,
                slot=order.slot,
                start=order.start,
                token_ids=prompt.prompt + prompt.token_ids,
                sampling=prompt.sampling,
                recompute=order.recompute,
            ),
        )

    def order(self, order: WorkerOrder) -> None:
        self._door.send(order.worker, order.epoch, self._frames[type(order)](order))

    def fence(self, worker: WorkerId, reason: str) -> None:
        self._door.fence(worker, reason)
        if self._relay_rights is not None:
            self._relay_rights.revoke(worker)

    def blame(self, worker: WorkerId, reason: str) -> None:
        self._door.blame(worker, reason, TURN)


class ProviderLeases:
    """The leases of `providers`; the gateway is told which workers to expect.

    Orders for a provider wait until it is `ready`. `engines` and `relays` have the engine settings and the relay of
    providers whose workers do not get those of the welcome. `relay_rights` grants access to the relay of weights, if it
    distinguishes workers. Workers of `resident` providers are processes that outlive their leases, and follow the
    weights in between: they read with their provider's token, which is never revoked.
    """

    def __init__(
        self,
        door: Door,
        config: Config,
        scheduler: Scheduler,
        secrets: RunSecrets,
        engines: Mapping[str, dict[str, Any]],
        relays: Mapping[str, str],
        relay_rights: RelayRights | None,
        resident: Collection[str],
        feed: Feed,
        spawn: Spawn,
    ) -> None:
        self.providers: Mapping[str, Provider] = {}
        self._ready: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self._door = door
        self._limits = config.scheduler
        self._scheduler = scheduler
        self._secrets = secrets
        self._engines = engines
        self._relays = relays
        self._relay_rights = relay_rights
        self._resident = dict.fromkeys(resident, False)
        """The residents, and whether each has its tokens."""
        self._feed = feed
        self._spawn = spawn

    def known(self) -> dict[str, list[KnownLease]]:
        """The leases that the core takes to be asked for or granted, by provider. Their workers are expected."""
        core = self._scheduler
        known: dict[str, list[KnownLease]] = {}
        for lease in core.leases.leases.values():
            names = lease.workers or [worker_id(lease.id, n) for n in range(lease.offer.workers_per_lease)]
            tickets = tuple(WorkerTicket(name, self._secrets.join_token(name)) for name in names)
            for name in names:
                worker = core.fleet.workers.get(name)
                if worker is None or worker.state is not WorkerState.GONE:
                    self._expect(lease.provider, name, 0 if worker is None else worker.epoch)
            request = LeaseRequest(lease=lease.id, tickets=tickets)
            opened_ns = [core.ledger.books[name].opened_ns for name in lease.workers]
            known.setdefault(lease.provider, []).append(
                KnownLease(
                    request=request,
                    granted=lease.live,
                    granted_at_ns=min(opened_ns, default=None),
                    expires_at_ns=lease.expires_at_ns,
                )
            )
        return known

    def ready(self, provider: str) -> None:
        """Set once the provider has adopted existing leases and has begun."""
        self._ready[provider].set()

    def forsake(self) -> None:
        """Tell the core of providers that it knows and that are not used any more: their leases have been ended."""
        core = self._scheduler
        for name in [name for name in core.leases.offers if name not in self.providers]:
            self.ready(name)
            offer = msgspec.structs.replace(core.leases.offers[name], available=0, replacements=0)
            self._feed(e.OfferChanged(offer=offer))
            for lease in [lease for lease in core.leases.leases.values() if lease.provider == name]:
                detail = f"{name} is not used any more"
                if lease.live:
                    self._feed(e.LeaseEnded(lease=lease.id, cause=EndCause.RELEASED, detail=detail))
                else:
                    self._feed(e.LeaseRefused(lease=lease.id, reason=detail))

    def hear(self, event: e.Event) -> None:
        """Feed a provider's event to the core. The worker of a refused lease is not expected any more."""
        if isinstance(event, e.LeaseRefused):
            number = 0
            while self._door.expects(worker := worker_id(event.lease, number)):
                self._door.forget(worker)
                if self._relay_rights is not None:
                    self._relay_rights.revoke(worker)
                number += 1
        self._feed(event)

    def acquire(self, lease: LeaseId, provider: str, workers: int) -> None:
        tickets: list[WorkerTicket] = []
        for worker in (worker_id(lease, n) for n in range(workers)):
            self._expect(provider, worker)
            tickets.append(WorkerTicket(worker, self._secrets.join_token(worker)))
        self._spawn(self._acquire(provider, LeaseRequest(lease=lease, tickets=tuple(tickets))), f"acquire {lease}")

    def release(self, lease: LeaseId, provider: str, reason: str) -> None:
        self._spawn(self._release(provider, lease, reason), f"release {lease}")

    def bar(self, lease: LeaseId, provider: str) -> None:
        self.providers[provider].bar(lease)

    def _expect(self, provider: str, worker: WorkerId, epoch: int = 0) -> None:
        if self._door.expects(worker):
            return
        secrets, trains = self._secrets, provider == self._scheduler.plan.trainer_provider
        relay_token = None
        if self._relay_rights is not None:
            reader = provider if provider in self._resident else worker
            relay_token = secrets.relay_owner() if trains else secrets.relay_token(reader)
            if not trains and not self._resident.get(provider, False):
                self._relay_rights.issue(reader, relay_token)
            if provider in self._resident:
                self._resident[provider] = True
        self._door.expect(
            worker,
            secrets.join_token(worker),
            secrets.session_key(worker),
            self._engines.get(provider),
            relay_token,
            self._relays.get(provider),
            trains=trains,
            epoch=epoch,
            served_bytes=self._served_bytes(provider),
        )

    def _served_bytes(self, provider: str) -> Callable[[], int] | None:
        """How much the relay has served, where it serves everything that the provider's workers pull."""
        rights = self._relay_rights
        return None if rights is None or provider in self._relays else lambda: rights.served_bytes

    async def _acquire(self, provider: str, request: LeaseRequest) -> None:
        try:
            async with asyncio.timeout(self._limits.acquire_timeout_s):
                await self._ready[provider].wait()
                await self.providers[provider].acquire(request)
        except Exception as error:
            self.hear(e.LeaseRefused(lease=request.lease, reason=f"{type(error).__name__}: {error}"))

    async def _release(self, provider: str, lease: LeaseId, reason: str) -> None:
        try:
            async with asyncio.timeout(self._limits.release_timeout_s):
                await self._ready[provider].wait()
                if provider in self.providers:
                    await self.providers[provider].release(lease, reason)
        except Exception as error:
            log.warning("release failed; it will be repeated", provider=provider, lease=lease, error=repr(error))
