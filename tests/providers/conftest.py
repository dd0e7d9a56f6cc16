"""Providers under test: a recorder of their events, stub workers, and a provider in memory."""

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import msgspec
import psutil
import pytest
import uvloop

from elastic.core.events import LeaseEnded, LeaseGranted, LeaseRefused, OfferChanged
from elastic.core.types import EndCause, LeaseId
from elastic.protocol.endpoint import Endpoint
from providers.base import LeaseRequest, Provider, ProviderContext, ProviderEvent, ProviderSettings, WorkerTicket
from providers.base_provider import BaseProvider
from providers.markets import LeaseEnding, Market, ServerlessSettings, SpotSettings
from providers.pool import JobContext, PoolProvider, PoolSettings
from providers.reserved import ReservedProvider, TrainerProvider
from providers.serverless import ServerlessProvider
from providers.serving import ServingProvider
from providers.serving_messages import ServingSettings
from providers.spot import SpotProvider
from tests.providers.stub_pool import CLIENTS, LendingPool, stub_client

E = TypeVar("E", bound=ProviderEvent)

TIMEOUT_S = 20.0

STUB_WORKER = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
time.sleep(600)
"""
"""Sleeps, and so does a child of its own, which must not outlive it either."""


def pytest_asyncio_loop_factories(item: pytest.Item) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Runs are on uvloop where there is one; what deals with processes is tested on asyncio's own loop, too."""
    both = {"uvloop": uvloop.new_event_loop, "asyncio": asyncio.new_event_loop}
    return both if item.path.stem == "test_processes" else {"uvloop": uvloop.new_event_loop}


class Recorder:
    """What a provider emitted, in order."""

    def __init__(self) -> None:
        self.events: list[ProviderEvent] = []
        self._news = asyncio.Event()

    def emit(self, event: ProviderEvent) -> None:
        self.events.append(event)
        self._news.set()

    def of(self, kind: type[E], lease: LeaseId | None = None) -> list[E]:
        return [e for e in self.events if isinstance(e, kind) and lease in (None, getattr(e, "lease", None))]

    async def until(self, what: Callable[["Recorder"], object]) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            while not what(self):
                self._news.clear()
                await self._news.wait()

    async def ended(self, lease: LeaseId) -> LeaseEnded:
        await self.until(lambda r: r.of(LeaseEnded, lease))
        return self.of(LeaseEnded, lease)[0]

    async def answered(self, lease: LeaseId) -> LeaseGranted | LeaseRefused:
        await self.until(lambda r: r.of(LeaseGranted, lease) or r.of(LeaseRefused, lease))
        return (*self.of(LeaseGranted, lease), *self.of(LeaseRefused, lease))[0]

    async def offered(self, provider: Any, available: int) -> None:
        """Start a provider; returns once it offers so much."""
        await provider.start(self.emit)
        await self.until(lambda r: r.available == available)

    async def leased(self, provider: Any, number: int = 1) -> LeaseGranted:
        """Request a lease; returns its grant."""
        request = lease_request(number)
        await provider.acquire(request)
        granted = await self.answered(request.lease)
        assert isinstance(granted, LeaseGranted), granted
        return granted

    @property
    def available(self) -> int:
        offers = self.of(OfferChanged)
        return offers[-1].offer.available if offers else 0


class MemoryHandle:
    def __init__(self) -> None:
        self.lost = asyncio.Event()

    async def keep(self) -> LeaseEnding:
        await self.lost.wait()
        return LeaseEnding(EndCause.LOST, "told so by the test")

    async def give_back(self) -> None:
        pass


class MemoryProvider(BaseProvider[ProviderSettings]):
    """Capacity that is nothing but a number."""

    Settings: ClassVar[type[ProviderSettings]] = ProviderSettings
    retry_s = 0.0
    make_handle: Callable[[], MemoryHandle] = MemoryHandle

    def __init__(
        self,
        name: str,
        settings: ProviderSettings,
        context: ProviderContext,
        market: Callable[[str, ProviderSettings], Market] = Market,
    ) -> None:
        super().__init__(market(name, settings), context)

    async def launch(self, request: LeaseRequest, place: str) -> MemoryHandle:
        return self.make_handle()


def lease_request(number: int = 1) -> LeaseRequest:
    return LeaseRequest(lease=f"lease-{number}", tickets=(WorkerTicket(f"worker-{number}", f"secret-{number}"),))


def processes_with(**variables: str) -> list[int]:
    """Living processes of which all these environment variables are set so."""
    found = []
    for process in psutil.process_iter():
        try:
            environment = process.environ()
            if variables.items() <= environment.items() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


async def eventually(condition: Callable[[], object]) -> None:
    """Wait for something outside this process, which cannot tell us."""
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            if condition():
                return
            await asyncio.sleep(0.01)


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


CAPACITY = 2


def context_of(run: str, run_dir: Path, began_ns: int, worker: str = STUB_WORKER) -> ProviderContext:
    """The same in each process of a run, which began at `began_ns` of the machine's clock."""
    return ProviderContext(
        run=run,
        run_dir=run_dir,
        endpoint=Endpoint("127.0.0.1:1"),
        worker_command=(sys.executable, "-c", worker),
        host_command=(sys.executable, str(Path(__file__).with_name("stub_host.py"))),
        pass_env=("ELASTIC_STUB_AGENT",),
        now_ns=lambda: time.monotonic_ns() - began_ns,
        secret=lambda host: f"the token of {host}",
        acquire_timeout_s=TIMEOUT_S,
        release_timeout_s=TIMEOUT_S,
    )


def provider_of(kind: str, context: ProviderContext, **more: Any) -> Any:
    """One that offers `CAPACITY` leases and is called "provider"; `more` settings are those of its kind."""
    settings = {"max_workers": CAPACITY, **more}
    match kind:
        case "reserved":
            return ReservedProvider("provider", ProviderSettings.model_validate(settings), context)
        case "trainer":
            return TrainerProvider("provider", ProviderSettings.model_validate(settings), context)
        case "serverless":
            return ServerlessProvider(
                "provider", ServerlessSettings.model_validate({"overlap": 0, **settings}), context
            )
        case "spot":
            trace = context.run_dir / "market.csv"
            if not trace.exists():
                trace.write_text("0,add,a\n0,add,b\n600000,remove,a\n")
            return SpotProvider("provider", SpotSettings.model_validate({"trace": str(trace), **settings}), context)
        case "pool":
            client = stub_client(context.run_dir, context.run)
            context = JobContext(**msgspec.structs.asdict(context), pool=client)
            return PoolProvider("provider", PoolSettings.model_validate(settings), context)
        case "serving":
            serving = ServingSettings.model_validate({"hosts": CAPACITY, "poll_s": 0.05, **settings})
            return ServingProvider("provider", serving, context)
        case _:
            return MemoryProvider("provider", ProviderSettings.model_validate(settings), context)


@pytest.fixture
async def stub_pool(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[None]:
    """Two nodes, where the test is of a pool's provider."""
    if request.getfixturevalue("kind") != "pool":
        yield
        return
    pool = LendingPool(tmp_path, ("sleep", "600"))
    yield
    while CLIENTS:
        await CLIENTS.pop().aclose()
    pool.stop()


@pytest.fixture
def make_context(tmp_path: Path) -> Callable[..., ProviderContext]:
    began_ns = time.monotonic_ns()

    def make(run: str = "", worker: str = STUB_WORKER) -> ProviderContext:
        return context_of(run or f"test-{os.getpid()}-{tmp_path.name}", tmp_path, began_ns, worker)

    return make


@pytest.fixture
def context(make_context: Callable[..., ProviderContext]) -> ProviderContext:
    return make_context()


@pytest.fixture
async def opened() -> AsyncIterator[list[Provider]]:
    """Providers put in here are closed at the test's end."""
    providers: list[Provider] = []
    yield providers
    for provider in providers:
        await provider.aclose()
