"""The ports of a live run: orders become frames to workers and calls of providers."""

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any

import structlog

from elastic import wire
from elastic.config import Config
from elastic.core import commands as c
from elastic.core import events as e
from elastic.core.ids import worker_id
from elastic.core.scheduler import Scheduler
from elastic.core.types import LeaseId, Nanoseconds, WeightMode, WorkerId
from elastic.runtime.gateway import Door
from elastic.runtime.ports import Feed, WorkerOrder
from elastic.runtime.rollout import Episode, OpenTurn
from elastic.runtime.tasks import Spawn
from elastic.weights.rights import RelayRights
from providers.base import LeaseRequest, Provider, WorkerTicket

log = structlog.get_logger(__name__)


class LoopClock:
    """Nanoseconds since the run began, and the timers of the running event loop."""

    def __init__(self, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._clock_ns = clock_ns
        self._start_ns = clock_ns()

    def now_ns(self) -> Nanoseconds:
        return self._clock_ns() - self._start_ns

    def at(self, when_ns: Nanoseconds, action: Callable[[], None]) -> None:
        asyncio.get_running_loop().call_later(max(0.0, (when_ns - self.now_ns()) / 1e9), action)


class GatewayWorkers:
    """Orders to workers, as frames. `publisher` is the public key of the trainer that is there now."""

    def __init__(
        self, door: Door, config: Config, stop_token_ids: tuple[int, ...], relay_rights: RelayRights | None
    ) -> None:
        mode = WeightMode(config.weights.mode)
        self.publisher = ""
        self._door = door
        self._relay_rights = relay_rights
        self._rollout = config.rollout
        self._stop_token_ids = stop_token_ids
        self._frames: dict[type[c.Command], Callable[[Any], wire.FromOrchestrator]] = {
            c.AbortTurn: lambda k: wire.Abort(k.turn, k.attempt),
            c.LoadWeights: lambda k: wire.PullWeights(k.version, mode, self.publisher),
            c.SleepWorker: lambda _: wire.Sleep(),
            c.WakeWorker: lambda _: wire.Wake(),
            c.DrainWorker: lambda k: wire.Drain(k.reason),
        }

    def start_turn(self, order: c.StartTurn, prompt: OpenTurn) -> None:
        self._door.send(
            order.worker,
            order.epoch,
            wire.Generate(
                turn=order.turn,
                attempt=order.attempt,
                token_ids=prompt.prompt + prompt.token_ids,
                start=order.start,
                max_new_tokens=self._rollout.max_tokens_per_turn,
                stop_token_ids=self._stop_token_ids,
                temperature=self._rollout.temperature,
                noise_seed=prompt.noise_seed,
                recompute=order.recompute,
            ),
        )

    def order(self, order: WorkerOrder) -> None:
        self._door.send(order.worker, order.epoch, self._frames[type(order)](order))

    def fence(self, worker: WorkerId, reason: str) -> None:
        self._door.fence(worker, reason)
        if self._relay_rights is not None:
            self._relay_rights.revoke(worker)


class GatewayTrainer:
    """Orders to the trainer's process, which is a worker, too."""

    def __init__(self, door: Door, scheduler: Scheduler) -> None:
        self._door = door
        self._scheduler = scheduler

    def recalled(self, order: c.TrainGroup | c.DropGroup | c.UpdateWeights) -> None:
        pass

    def train(self, order: c.TrainGroup, batch: list[Episode]) -> None:
        self._send(wire.TrainGroup(order.step, order.group, order.slot, [episode.data() for episode in batch]))

    def skip(self, order: c.DropGroup, dropped: int) -> None:
        assert order.slot is not None
        self._send(wire.SkipGroup(order.step, order.group, order.slot, order.reason, dropped))

    def update(self, order: c.UpdateWeights) -> None:
        for slot in order.empty_slots:
            self._send(wire.SkipGroup(order.step, "", slot, "no group of use was left for it"))
        self._send(wire.Update(order.step, order.version, list(order.pulled)))

    def _send(self, message: wire.FromOrchestrator) -> None:
        trainer = self._scheduler.trainer()
        if trainer is not None:
            self._door.send(trainer.id, trainer.epoch, message)


class ProviderLeases:
    """Leases of `providers`, whose workers are expected at the run's door.

    `engines` has the engine settings of those providers whose workers do not get the welcome's, and `relay_rights`
    whom the weights' relay lets do what, where it can tell them apart.
    """

    def __init__(
        self,
        door: Door,
        config: Config,
        trainer_provider: str,
        engines: Mapping[str, dict[str, Any]],
        relay_rights: RelayRights | None,
        feed: Feed,
        spawn: Spawn,
    ) -> None:
        self.providers: Mapping[str, Provider] = {}
        self._door = door
        self._limits = config.scheduler
        self._trainer_provider = trainer_provider
        self._engines = engines
        self._relay_rights = relay_rights
        self._feed = feed
        self._spawn = spawn

    def acquire(self, lease: LeaseId, provider: str, workers: int) -> None:
        tickets = tuple(WorkerTicket(worker_id(lease, n), secrets.token_urlsafe(32)) for n in range(workers))
        trains = provider == self._trainer_provider
        for ticket in tickets:
            relay_token = self._relay_token(ticket.worker, trains)
            key, engine = secrets.token_urlsafe(32), self._engines.get(provider)
            self._door.expect(ticket.worker, ticket.token, key, engine, relay_token, trains=trains)
        self._spawn(self._acquire(provider, LeaseRequest(lease=lease, tickets=tickets)), f"acquire {lease}")

    def release(self, lease: LeaseId, provider: str) -> None:
        self._spawn(self._release(provider, lease), f"release {lease}")

    def bar(self, lease: LeaseId, provider: str) -> None:
        self.providers[provider].bar(lease)

    def _relay_token(self, worker: WorkerId, trains: bool) -> str | None:
        """What a worker may do on the relay; the trainer's is the relay's owner."""
        if self._relay_rights is None:
            return None
        return self._relay_rights.owner if trains else self._relay_rights.issue(worker)

    async def _acquire(self, provider: str, request: LeaseRequest) -> None:
        try:
            async with asyncio.timeout(self._limits.acquire_timeout_s):
                await self.providers[provider].acquire(request)
        except Exception as error:
            self._feed(e.LeaseRefused(lease=request.lease, reason=f"{type(error).__name__}: {error}"))

    async def _release(self, provider: str, lease: LeaseId) -> None:
        try:
            async with asyncio.timeout(self._limits.release_timeout_s):
                await self.providers[provider].release(lease)
        except Exception as error:
            log.warning("release failed; it will be repeated", lease=lease, error=repr(error))
