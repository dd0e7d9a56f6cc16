"""Workers as actors of a Ray cluster that is there already, placed by the resources that they need.

- The cluster is reached by the Ray Client (`ray://`): when its head is lost, calls fail, and the run goes on.
- Actors are detached and have names: they outlive the run's process, and its next one finds them. Those of no lease
  are ended. An actor ends with its worker's process, and that process with its actor.
- Ray takes some fifteen seconds to see that a node is gone. A worker's connection tells it within three, so turns go
  on elsewhere before that; whether an actor still stands is asked for the sake of its lease alone.
"""

import asyncio
import contextlib
import ctypes
import importlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, ClassVar, TypeVar

import structlog
from pydantic import Field

from elastic.core.types import EndCause, LeaseId
from providers.base import (
    Emit,
    KnownLease,
    LeaseRequest,
    ProviderContext,
    ProviderSettings,
    ProviderUnavailable,
    WorkerTicket,
    worker_environment,
)
from providers.base_provider import BaseProvider, Found, LeaseHandle
from providers.markets import CapacityUnavailable, LeaseEnding, Market
from providers.ray_relay import NODE_VARIABLE, told

log = structlog.get_logger(__name__)
T = TypeVar("T")

CONNECT_TIMEOUT_S = 60.0
LINGER_S = 5.0
"""For an actor whose worker has ended to say how."""
CALLS = 8
"""To the cluster at once; each has a thread while it lasts."""

Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class RaySettings(ProviderSettings):
    address: str = Field("ray://127.0.0.1:10001", pattern=r"^ray://.+", description="of the cluster's client server")
    namespace: str = Field("elastic", min_length=1, description="of the actors' names")
    num_cpus: Amount = Field(1.0, description="what a worker takes of a node, besides its GPUs …")
    num_gpus: Amount | None = Field(None, description="… of which Ray counts as many as gpus_per_worker, unless set")
    resources: dict[str, Amount] = Field(default_factory=dict, description="… and what Ray calls custom resources")
    poll_s: float = Field(2.0, gt=0, description="time between two looks at the cluster")

    def asked(self) -> dict[str, float]:
        """What one worker takes, in Ray's names."""
        gpus = self.gpus_per_worker if self.num_gpus is None else self.num_gpus
        asked = {"CPU": self.num_cpus, "GPU": gpus, **self.resources}
        return {name: amount for name, amount in asked.items() if amount}


class RayMarket(Market[RaySettings]):
    """As many workers as the cluster has `places` for now, by its own word."""

    def __init__(self, name: str, settings: RaySettings) -> None:
        super().__init__(name, settings)
        self.places = 0

    def free(self) -> int:
        return self.places


def places(available: Mapping[str, float], asked: Mapping[str, float]) -> int:
    """How many workers fit into what is available, if it is not too much in pieces."""
    return int(min((available.get(name, 0.0) / amount for name, amount in asked.items()), default=0))


class WorkerActor:
    """An actor: a worker's process on a node, from its start to its end."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._status: int | None = None
        self._ended = threading.Event()
        threading.Thread(target=self._work, args=(command, environment), daemon=True).start()

    def ready(self) -> None:
        """Answers once it stands."""

    def join(self) -> int | None:
        """Wait for the process's end; its status, None if it could not be started."""
        self._ended.wait()
        return self._status

    def _work(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        cluster = _ray().get_runtime_context().gcs_address
        # Of this thread's death its child is told, and it lives as long as the actor does.
        with contextlib.suppress(OSError):
            process = subprocess.Popen(
                [sys.executable, *command],
                env={**os.environ, **environment, NODE_VARIABLE: cluster},
                preexec_fn=_die_with_parent,
            )
            self._status = process.wait()
        self._ended.set()
        time.sleep(LINGER_S)
        os._exit(0)


def _die_with_parent() -> None:
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


class Cluster:
    """A Ray cluster, by its client. Its calls block threads of their own, for a bounded time.

    Ray keeps one connection for a process, which all threads share.
    """

    def __init__(self, settings: RaySettings) -> None:
        self.connected = False
        self._settings = settings
        self._threads = ThreadPoolExecutor(CALLS, thread_name_prefix="ray")

    async def call(self, timeout_s: float, function: Callable[..., T], *arguments: Any) -> T:
        """What `function` returns, on the cluster. Raises what it raises, and `TimeoutError`."""
        async with asyncio.timeout(timeout_s):
            return await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)

    async def connect(self) -> None:
        """Raises `ImportError`, `RuntimeError` for another version, and `ConnectionError`."""

        def connect() -> None:
            _ray().init(self._settings.address, namespace=self._settings.namespace)

        await self.call(CONNECT_TIMEOUT_S, connect)
        self.connected = True

    def disconnect(self) -> None:
        """Actors stay."""
        if self.connected:
            self.connected = False
            with contextlib.suppress(Exception):
                _ray().shutdown()

    def close(self) -> None:
        self.disconnect()
        self._threads.shutdown(wait=False, cancel_futures=True)


class _Actors:
    """A lease's `LeaseHandle`: the actors of these names."""

    def __init__(self, provider: "RayProvider", names: Sequence[str]) -> None:
        self._provider = provider
        self._names = names

    async def keep(self) -> LeaseEnding:
        """Until an actor has ended. While the cluster cannot be asked, the workers' connections say how they are."""
        waits = [asyncio.create_task(self._provider.end_of(name), name=f"actor {name}") for name in self._names]
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        return done.pop().result()

    async def give_back(self) -> None:
        for name in self._names:
            await self._provider.end_actor(name)


class RayProvider(BaseProvider[RaySettings]):
    """Leases one worker each, on whatever node has room for it."""

    Settings: ClassVar[type[RaySettings]] = RaySettings

    def __init__(self, name: str, settings: RaySettings, context: ProviderContext) -> None:
        self._ray_market = RayMarket(name, settings)
        super().__init__(self._ray_market, context)
        self._cluster = Cluster(settings)
        self._prefix = f"elastic/{context.run}/{name}/"

    async def start(self, emit: Emit) -> None:
        await self._connect()
        asked = self.settings.asked()
        nodes = await self._cluster.call(CONNECT_TIMEOUT_S, _nodes)
        if not any(places(node, asked) for node in nodes):
            there = "; ".join(sorted({_told(node) for node in nodes})) or "no node"
            raise ProviderUnavailable(
                f"{self.name}: no node of the Ray cluster at {self.settings.address} has what a worker asks for "
                f"({_told(asked)}); its nodes have {there}: set num_cpus, num_gpus or resources, or add nodes"
            )
        await self._look()
        await super().start(emit)
        self.run_in_background(self._watch(), "watch")

    async def launch(self, request: LeaseRequest, place: str) -> LeaseHandle:
        names = [self._actor(request.lease, ticket) for ticket in request.tickets]
        handle = _Actors(self, names)
        command = self.context.worker_command[1:]
        try:
            for name, ticket in zip(names, request.tickets, strict=True):
                environment = dict(worker_environment(self.context, ticket))
                await self._cluster.call(
                    self.context.acquire_timeout_s, _start, name, self.settings, command, environment
                )
        except BaseException as error:
            with contextlib.suppress(Exception):
                await handle.give_back()
            if isinstance(error, TimeoutError):
                raise CapacityUnavailable(
                    f"the Ray cluster had no room for a worker ({_told(self.settings.asked())})"
                ) from error
            raise
        await self._look()
        return handle

    async def find(self, known: Mapping[LeaseId, KnownLease]) -> Mapping[LeaseId, Found]:
        await self._connect()
        wanted = {
            self._actor(lease_id, ticket): lease_id for lease_id, one in known.items() for ticket in one.request.tickets
        }
        there = await self._cluster.call(CONNECT_TIMEOUT_S, _named, self._prefix)
        for name in there:
            if name not in wanted:
                log.warning("left over from an earlier process", what=name)
                await self.end_actor(name)
        whole = {
            lease_id: [self._actor(lease_id, ticket) for ticket in one.request.tickets]
            for lease_id, one in known.items()
        }
        return {lease_id: Found(_Actors(self, names)) for lease_id, names in whole.items() if set(names) <= set(there)}

    async def aclose(self) -> None:
        await super().aclose()
        self._cluster.close()

    async def end_of(self, name: str) -> LeaseEnding:
        """When an actor is over, and how."""
        while True:
            try:
                status = await self._cluster.call(
                    self.settings.poll_s + CONNECT_TIMEOUT_S, _status, name, self.settings.poll_s
                )
            except _Gone as gone:
                return LeaseEnding(EndCause.LOST, f"Ray says of actor {name}: {gone}")
            except Exception as error:
                log.debug("an actor could not be asked", actor=name, error=repr(error))
                await asyncio.sleep(self.settings.poll_s)
                continue
            match status:
                case "runs":
                    pass
                case 0:
                    return LeaseEnding(EndCause.RELEASED, "the worker ended")
                case _:
                    return LeaseEnding(
                        EndCause.LOST, f"actor {name}'s worker ended with status {status}; see Ray's logs of it"
                    )

    async def end_actor(self, name: str) -> None:
        """Returns once Ray says that it is no more. Raises `TimeoutError`, and what the cluster raises."""
        await self._cluster.call(self.context.release_timeout_s, _end, name)

    def _actor(self, lease: LeaseId, ticket: WorkerTicket) -> str:
        return f"{self._prefix}{lease}/{ticket.worker}"

    async def _connect(self) -> None:
        """Raises `ProviderUnavailable`."""
        if self._cluster.connected:
            return
        where = f"{self.name}: the Ray cluster at {self.settings.address}"
        try:
            await self._cluster.connect()
        except ImportError as error:
            raise ProviderUnavailable(
                f"{self.name}: Ray is not installed here; pip install 'elastic-rl[ray]'"
            ) from error
        except (ConnectionError, TimeoutError) as error:
            raise ProviderUnavailable(
                f"{where} does not answer ({told(error)}); is its head up, and its client port open to this machine?"
            ) from error
        except RuntimeError as error:
            raise ProviderUnavailable(
                f"{where} does not take this client: {told(error)}; install its versions of Ray and Python here"
            ) from error

    async def _look(self) -> None:
        available = await self._cluster.call(CONNECT_TIMEOUT_S, _available)
        self._ray_market.places = places(available, self.settings.asked())

    async def _watch(self) -> None:
        """Keep the offer true; while the cluster cannot be asked, nothing is offered."""
        lost = False
        while True:
            await asyncio.sleep(self.settings.poll_s)
            try:
                if lost:
                    await self._connect()
                await self._look()
                lost = False
            except Exception as error:
                if not lost:
                    log.warning(
                        "the Ray cluster cannot be asked: workers go on, and none is asked for until it answers",
                        address=self.settings.address,
                        error=repr(error),
                    )
                lost, self._ray_market.places = True, 0
                self._cluster.disconnect()
            self.announce()


class _Gone(Exception):
    """The actor is no more, or its node."""


# What is called on the cluster, by the client's threads.


def _ray() -> Any:
    """An extra, which types need not know."""
    return importlib.import_module("ray")


def _nodes() -> list[dict[str, float]]:
    return [node["Resources"] for node in _ray().nodes() if node["Alive"]]


def _available() -> dict[str, float]:
    return _ray().available_resources()


def _named(prefix: str) -> list[str]:
    return [name for name in _ray().util.list_named_actors() if str(name).startswith(prefix)]


def _start(name: str, settings: RaySettings, command: Sequence[str], environment: Mapping[str, str]) -> None:
    ray = _ray()
    gpus = settings.gpus_per_worker if settings.num_gpus is None else settings.num_gpus
    actor: Any = ray.remote(WorkerActor).options(
        name=name,
        namespace=settings.namespace,
        lifetime="detached",
        num_cpus=settings.num_cpus,
        num_gpus=gpus,
        resources=settings.resources,
        max_restarts=0,
        max_concurrency=4,
        scheduling_strategy="SPREAD",
    )
    handle = actor.remote(list(command), dict(environment))
    ray.get(handle.ready.remote())


def _status(name: str, wait_s: float) -> Any:
    """The exit status of an actor's worker, or "runs"."""
    ray = _ray()
    gone = ray.exceptions.RayActorError, ValueError  # the latter: no actor has this name
    try:
        return ray.get(ray.get_actor(name).join.remote(), timeout=wait_s)
    except ray.exceptions.GetTimeoutError:
        return "runs"
    except gone as error:
        raise _Gone(str(error).partition("\n")[0]) from error


def _end(name: str) -> None:
    ray = _ray()
    while True:
        try:
            ray.kill(ray.get_actor(name), no_restart=True)
        except ValueError:
            return
        time.sleep(0.1)


def _told(resources: Mapping[str, float]) -> str:
    own = {
        name: amount for name, amount in resources.items() if not name.startswith(("node:", "object_store", "memory"))
    }
    return ", ".join(f"{name} {amount:g}" for name, amount in sorted(own.items())) or "nothing"
