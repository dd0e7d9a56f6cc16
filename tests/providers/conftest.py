"""Providers under test: ours by their kinds, stub workers and hosts, and a provider in memory."""

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest
import uvloop

from elastic.core.types import EndCause
from elastic.testing import providers
from elastic.testing.providers import *  # noqa: F403
from elastic.testing.providers import CAPACITY, STUB_WORKER
from providers.base import LeaseRequest, ProviderContext, ProviderSettings
from providers.base_provider import BaseProvider
from providers.markets import LeaseEnding, Market, ServerlessSettings, SpotSettings
from providers.pool import JobContext, PoolProvider, PoolSettings
from providers.reserved import ReservedProvider, TrainerProvider
from providers.serverless import ServerlessProvider
from providers.serving import ServingProvider
from providers.serving_messages import ServingSettings
from providers.spot import SpotProvider
from tests.providers.stub_pool import CLIENTS, LendingPool, stub_client

SHOWN_BY_INTERLEAVINGS = (
    "test_offers_what_is_left",
    "test_refuses_what_it_does_not_have",
    "test_a_released_lease_ends_once_however_often_it_is_released",
    "test_a_release_before_the_grant_is_not_forgotten",
)
"""One promise alone. Hosts, which take seconds to start, show it with every change by any interleaving."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        called = getattr(item, "callspec", None)
        if item.name.partition("[")[0] in SHOWN_BY_INTERLEAVINGS and called and called.params.get("kind") == "serving":
            item.add_marker(pytest.mark.nightly)


def pytest_asyncio_loop_factories(item: pytest.Item) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Runs are on uvloop where there is one; what deals with processes is tested on asyncio's own loop, too."""
    both = {"uvloop": uvloop.new_event_loop, "asyncio": asyncio.new_event_loop}
    return both if item.path.stem == "test_processes" else {"uvloop": uvloop.new_event_loop}


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


def context_of(run: str, run_dir: Path, began_ns: int, worker: str = STUB_WORKER) -> ProviderContext:
    """As of the suite, with serving hosts that stand in."""
    host = (sys.executable, str(Path(__file__).with_name("stub_host.py")))
    context = providers.context_of(run, run_dir, began_ns, worker)
    return msgspec.structs.replace(context, host_command=host, pass_env=("ELASTIC_STUB_AGENT",))


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
