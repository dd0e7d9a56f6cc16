"""Workers as actors of a Ray cluster that is there already, placed by the resources that they need.

- The cluster is reached by the Ray Client (`ray://`). When its head is lost, calls fail or run out of time, nothing is
  offered, and workers go on by their own connections.
- Actors are detached and have names: they outlive the run's process, and its next one finds them. An actor ends with
  its worker's process, and that process with its actor.
- One look at the cluster, every `poll_s`, tells what is free and how each actor is, and ends actors of this run that
  belong to no lease, however they came to be left.
- Ray takes some fifteen seconds to see that a node is gone. A worker's connection tells it within three, so turns go
  on elsewhere before that; whether an actor still stands is asked for the sake of its lease alone.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, ClassVar, NamedTuple, TypeVar
from urllib.parse import urlsplit

import structlog

from elastic.core.types import EndCause, LeaseId
from elastic.protocol.endpoint import is_loopback
from elastic.system.plain_values import told
from providers.base import (
    Emit,
    KnownLease,
    LeaseRequest,
    ProviderContext,
    ProviderSettings,
    ProviderSilent,
    ProviderUnavailable,
    WorkerTicket,
    worker_environment,
)
from providers.base_provider import Found, LeaseHandle
from providers.markets import CapacityUnavailable, LeaseEnding, Market
from providers.ray_actors import (
    ActorQuestions,
    ActorsSaid,
    RayClusterSettings,
    WorkerActor,
    end_actor,
    named_actors,
    node_resources,
    places,
    told_resources,
)
from providers.ray_connection import RayConnection, RayUnusable, ray
from providers.vendor_calls import call
from providers.vendor_provider import VendorProvider

log = structlog.get_logger(__name__)

T = TypeVar("T")

CLOSING_SHARE = 0.5
"""The share of a provider's closing time for ending actors. The rest is for the connection."""


class RaySettings(RayClusterSettings, ProviderSettings):
    """A worker has `gpus_per_worker` GPUs."""

    def asked(self) -> dict[str, float]:
        """The resources of one worker, in Ray's names."""
        return self.asked_with(self.gpus_per_worker)


class RayMarket(Market[RaySettings]):
    """A market with as many workers as the cluster now has `places` for."""

    def __init__(self, name: str, settings: RaySettings) -> None:
        super().__init__(name, settings)
        self.places = 0

    def free(self) -> int:
        return self.places


class RayStatus(NamedTuple):
    """What the cluster says: resources that are free, actors that have a name, and how those asked for are."""

    free: Mapping[str, float]
    named: frozenset[str]
    actors: ActorsSaid


class _Actors:
    """The `LeaseHandle` of a lease, which has the actors of these names."""

    def __init__(self, provider: "RayProvider", names: Sequence[str]) -> None:
        self._provider = provider
        self._ends = {name: provider.watch_for_end(name) for name in names}

    async def keep(self) -> LeaseEnding:
        """Wait for an actor's end. While the cluster does not answer, workers' connections show their state."""
        done, _ = await asyncio.wait(self._ends.values(), return_when=asyncio.FIRST_COMPLETED)
        return done.pop().result()

    async def give_back(self) -> None:
        for name in self._ends:
            await self._provider.end_actor(name)


class RayProvider(VendorProvider[RaySettings]):
    """A provider whose leases have one worker each, on any node with room for it."""

    Settings: ClassVar[type[RaySettings]] = RaySettings
    mend = "start its head again, or open its client port to this machine"

    @classmethod
    def elsewhere(cls, settings: ProviderSettings) -> bool:
        """A cluster whose head is this machine may be this machine."""
        assert isinstance(settings, RaySettings)
        return not is_loopback(urlsplit(settings.address).hostname or "")

    def __init__(self, name: str, settings: RaySettings, context: ProviderContext) -> None:
        self._ray_market = RayMarket(name, settings)
        super().__init__(self._ray_market, context)
        self.vendor, self.answer_s = f"the Ray cluster at {settings.address}", settings.answer_timeout_s
        self._connection = RayConnection(settings.address)
        self._prefix = f"elastic/{context.tag(f'ray {name}')}/{name}/"
        self._ends: dict[str, asyncio.Future[LeaseEnding]] = {}
        """All actors that this run holds or starts, by name."""
        self._started: set[str] = set()
        """The names of the actors that have been started."""
        self._unanswered: set[str] = set()
        """The names of actors that a call is starting, also one that nobody waits for any more."""
        self._questions = ActorQuestions(self.settings.namespace)

    async def start(self, emit: Emit) -> None:
        await self._connect()
        asked = self.settings.asked()
        nodes = await self.ask(node_resources)
        if not any(places(node, asked) for node in nodes):
            there = "; ".join(sorted({told_resources(node) for node in nodes})) or "no node"
            raise ProviderUnavailable(
                f"{self.name}: no node of {self.vendor} has what a worker asks for "
                f"({told_resources(asked)}); its nodes have {there}: set num_cpus, num_gpus or resources, or add nodes"
            )
        await self._read()
        await super().start(emit)
        self.run_in_background(self.watch(self.settings.poll_s), "watch")

    async def launch(self, request: LeaseRequest, place: str) -> LeaseHandle:
        names = [self._actor(request.lease, ticket) for ticket in request.tickets]
        handle = _Actors(self, names)
        command, timeout_s = self.context.worker_command[1:], self.context.acquire_timeout_s
        try:
            for name, ticket in zip(names, request.tickets, strict=True):
                environment = dict(worker_environment(self.context, ticket))
                self._unanswered.add(name)
                await self._connection.ask(timeout_s, self._start, name, command, environment, timeout_s)
        except BaseException as error:
            with contextlib.suppress(Exception):
                await handle.give_back()
            for name in names:  # What could not be ended belongs to no lease now: the next look ends it.
                self._ends.pop(name, None)
            if isinstance(error, TimeoutError):
                asked = told_resources(self.settings.asked())
                raise CapacityUnavailable(
                    f"the Ray cluster had no room for a worker within {timeout_s:g} s ({asked})"
                ) from error
            raise
        self._started.update(names)
        return handle

    async def find(self, known: Mapping[LeaseId, KnownLease]) -> Mapping[LeaseId, Found]:
        await self._connect()
        there = await self.ask(named_actors, self.settings.namespace, self._prefix)
        names = {
            lease_id: [self._actor(lease_id, ticket) for ticket in one.request.tickets]
            for lease_id, one in known.items()
        }
        found = {lease_id: Found(_Actors(self, own)) for lease_id, own in names.items() if there.issuperset(own)}
        self._started.update(self._ends)
        await self._end_left_over(there)
        return found

    @property
    def remains(self) -> str:
        return f"`ray list actors` shows actors, of which its own are called {self._prefix}…"

    async def end_left_over(self) -> str:
        try:
            return await super().end_left_over()
        finally:
            with contextlib.suppress(Exception):
                await call(self.context.release_timeout_s * CLOSING_SHARE, self._connection.close)

    def watch_for_end(self, name: str) -> "asyncio.Future[LeaseEnding]":
        return self._ends.setdefault(name, asyncio.get_running_loop().create_future())

    async def end_actor(self, name: str) -> None:
        """Returns once Ray says that it is no more, and without its word if Ray cannot be asked for long.

        A worker whose lease is over, or whose run is, ends by itself then, and its actor with it. Raises what the
        cluster raises.
        """
        timeout_s = self.context.release_timeout_s * CLOSING_SHARE
        try:
            await self._connection.ask(timeout_s, end_actor, name, self.settings.namespace, timeout_s)
        except Exception as error:
            since_s = time.monotonic() if self.silent_since_s is None else self.silent_since_s
            if not (self._closing or time.monotonic() - since_s > self.context.orchestrator_timeout_s):
                raise
            log.warning(
                "the Ray cluster cannot be asked to end an actor: its worker ends by itself within the timeout",
                actor=name,
                timeout_s=self.context.orchestrator_timeout_s,
                address=self.settings.address,
                error=told(error),
            )
        self._ends.pop(name, None)
        self._started.discard(name)

    def _start(self, name: str, command: Sequence[str], environment: Mapping[str, str], timeout_s: float) -> None:
        try:
            _start(name, self.settings, command, environment, timeout_s)
        finally:
            self._unanswered.discard(name)

    async def sweep(self) -> bool:
        settled = not self._unanswered
        there = await self.ask(named_actors, self.settings.namespace, self._prefix)
        await self._end_left_over(there)
        return settled and not there

    async def _end_left_over(self, there: Set[str]) -> None:
        for name in sorted(there - self._ends.keys()):
            log.warning("an actor of no lease is ended", actor=name)
            await self.end_actor(name)

    def _actor(self, lease: LeaseId, ticket: WorkerTicket) -> str:
        return f"{self._prefix}{lease}/{ticket.worker}"

    async def _connect(self) -> None:
        """Connect to the cluster. Raises `ProviderUnavailable`."""
        try:
            await asyncio.to_thread(self._connection.open, self.answer_s)
            self.used = True
        except RayUnusable as error:
            raise (ProviderSilent if error.passing else ProviderUnavailable)(f"{self.name}: {error}") from error

    async def ask(self, function: Callable[..., T], *arguments: Any) -> T:
        return await self._connection.ask(self.answer_s, function, *arguments)

    async def look(self) -> None:
        if self.silent_since_s is not None:
            await self._connect()
        left_over = await self._read()
        with contextlib.suppress(Exception):  # The next look finds what is left then.
            await self._end_left_over(left_over)

    async def _read(self) -> set[str]:
        """Ask the cluster for its state, and return the actors that belong to no lease."""
        known = set(self._ends)
        look = await self.ask(self._status, sorted(self._started))
        self._ray_market.places = places(look.free, self.settings.asked())
        for name, said in look.actors.said.items():
            if not said.runs:
                self._over(name, said.status)
        for name, reason in look.actors.gone.items():
            self._ended(name, LeaseEnding(EndCause.LOST, f"Ray says of actor {name}: {reason}"))
        return set(look.named - known)

    def _status(self, names: Sequence[str]) -> RayStatus:
        actors = self._questions.ask(names, self.settings.poll_s)
        return RayStatus(ray().available_resources(), named_actors(self.settings.namespace, self._prefix), actors)

    def _over(self, name: str, status: int | None) -> None:
        if status == 0:
            self._ended(name, LeaseEnding(EndCause.RELEASED, "the worker ended"))
            return
        how = "could not be started" if status is None else f"ended with status {status}"
        fault = "" if status is not None and status < 0 else f"its worker {how}"
        self._ended(name, LeaseEnding(EndCause.LOST, f"actor {name}'s worker {how}; see Ray's logs of it", fault))

    def _ended(self, name: str, ending: LeaseEnding) -> None:
        end = self._ends.get(name)
        if end is not None and not end.done():
            end.set_result(ending)

    async def unanswered(self, error: Exception) -> None:
        """Offer nothing until there is a new connection."""
        self._ray_market.places = 0
        self._questions.forget()
        with contextlib.suppress(Exception):
            await call(self.answer_s, self._connection.reset)


# What is called on the cluster, by the client's threads.


def _start(
    name: str, settings: RaySettings, command: Sequence[str], environment: Mapping[str, str], timeout_s: float
) -> None:
    """Start an actor, and return once it is up. Raises `TimeoutError`."""
    gpus = settings.gpus_per_worker if settings.num_gpus is None else settings.num_gpus
    actor: Any = (
        ray()
        .remote(WorkerActor)
        .options(
            name=name,
            namespace=settings.namespace,
            lifetime="detached",
            num_cpus=settings.num_cpus,
            num_gpus=gpus,
            resources=settings.resources,
            max_restarts=0,
            scheduling_strategy="SPREAD",
        )
    )
    handle = actor.remote(list(command), dict(environment))
    ray().get(handle.said.remote(), timeout=timeout_s)
