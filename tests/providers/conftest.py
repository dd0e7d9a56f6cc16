"""Providers under test: a recorder of their events, stub workers, and a provider in memory."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import ClassVar, TypeVar

import psutil
import pytest
import uvloop

from elastic.core.events import LeaseEnded, LeaseGranted, LeaseRefused, OfferChanged
from elastic.core.types import EndCause, LeaseId
from providers.base import LeaseRequest, Provider, ProviderContext, ProviderEvent, ProviderSettings, WorkerTicket
from providers.keeper import Ending, LeaseKeeper, Refusal

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

    @property
    def available(self) -> int:
        offers = self.of(OfferChanged)
        return offers[-1].offer.available if offers else 0


class MemoryHolding:
    def __init__(self) -> None:
        self.lost = asyncio.Event()

    async def keep(self) -> Ending:
        await self.lost.wait()
        return Ending(EndCause.LOST, "told so by the test")

    async def give_back(self) -> None:
        pass


class MemoryProvider(LeaseKeeper[ProviderSettings]):
    """Capacity that is nothing but a number."""

    Settings: ClassVar[type[ProviderSettings]] = ProviderSettings

    def __init__(self, name: str, settings: ProviderSettings, context: ProviderContext) -> None:
        super().__init__(name, settings, context)
        self.holdings: dict[LeaseId, MemoryHolding] = {}

    def free(self) -> int:
        return self.settings.max_workers - len(self.holdings)

    async def take(self, request: LeaseRequest) -> MemoryHolding:
        if self.free() <= 0:
            raise Refusal("memory is full")
        self.holdings[request.lease] = MemoryHolding()
        return self.holdings[request.lease]

    def forget(self, lease: LeaseId, *, barred: bool) -> None:
        del self.holdings[lease]

    async def reconcile(self) -> list[str]:
        return []


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


@pytest.fixture
def make_context(tmp_path: Path) -> Callable[..., ProviderContext]:
    def make(run: str = "", worker: str = STUB_WORKER) -> ProviderContext:
        return ProviderContext(
            run=run or f"test-{os.getpid()}-{tmp_path.name}",
            run_dir=tmp_path,
            join="127.0.0.1:1",
            worker_command=(sys.executable, "-c", worker),
            host_command=(sys.executable, str(Path(__file__).with_name("stub_host.py"))),
            pass_env=("ELASTIC_STUB_AGENT",),
            acquire_timeout_s=TIMEOUT_S,
            release_timeout_s=TIMEOUT_S,
        )

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
