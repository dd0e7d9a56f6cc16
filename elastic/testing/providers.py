"""What the providers' conformance suite needs, as pytest fixtures: a recorder of events, a run's surroundings, workers.

A third party's provider passes the suite from one file, with `asyncio_mode = "auto"` of pytest-asyncio:

    from elastic.testing.provider_conformance import *
    from elastic.testing.providers import *

    @pytest.fixture
    def make_provider():
        return lambda context: MyProvider("provider", MySettings(max_workers=CAPACITY), context)
"""

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest

from elastic.core.events import LeaseEnded, LeaseGranted, LeaseRefused, OfferChanged
from elastic.core.types import LeaseId
from elastic.protocol.endpoint import Endpoint
from providers.base import LeaseRequest, Provider, ProviderContext, ProviderEvent, WorkerTicket

__all__ = ["CAPACITY", "context", "leases_machines", "make_context", "opened", "provider", "recorder"]

E = TypeVar("E", bound=ProviderEvent)

CAPACITY = 2
"""How many leases a provider under test is to offer, of one worker each. Its name is to be "provider"."""
TIMEOUT_S = 20.0

STUB_WORKER = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
time.sleep(600)
"""
"""Sleeps, and so does a child of its own, which must not outlive it either."""


class ProviderRecorder:
    """What a provider emitted, in order."""

    def __init__(self) -> None:
        self.events: list[ProviderEvent] = []
        self._news = asyncio.Event()

    def emit(self, event: ProviderEvent) -> None:
        self.events.append(event)
        self._news.set()

    def of(self, kind: type[E], lease: LeaseId | None = None) -> list[E]:
        return [e for e in self.events if isinstance(e, kind) and lease in (None, getattr(e, "lease", None))]

    async def until(self, what: Callable[["ProviderRecorder"], object]) -> None:
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


def context_of(run: str, run_dir: Path, began_ns: int, worker: str = STUB_WORKER) -> ProviderContext:
    """The same in each process of a run, which began at `began_ns` of the machine's clock."""
    return ProviderContext(
        run=run,
        run_dir=run_dir,
        endpoint=Endpoint("127.0.0.1:1"),
        worker_command=(sys.executable, "-c", worker),
        now_ns=lambda: time.monotonic_ns() - began_ns,
        secret=lambda host: f"the token of {host}",
        acquire_timeout_s=TIMEOUT_S,
        release_timeout_s=TIMEOUT_S,
    )


@pytest.fixture
def recorder() -> ProviderRecorder:
    return ProviderRecorder()


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


@pytest.fixture
async def provider(
    make_provider: Callable[[ProviderContext], Any],
    context: ProviderContext,
    recorder: ProviderRecorder,
    opened: list[Provider],
) -> Provider:
    """A provider that has begun to offer all it has."""
    provider = make_provider(context)
    opened.append(provider)
    await recorder.offered(provider, CAPACITY)
    return provider


@pytest.fixture
def leases_machines() -> bool:
    """Whether its leases are of machines that can be told apart, of which a barred one stays out; override it."""
    return False
