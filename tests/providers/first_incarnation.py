"""An earlier process of a run: takes leases, tells which were granted, and kills itself where it is told to.

Each is forked from a server that has imported all it needs: an interpreter's start would take most of its time.
"""

import asyncio
import functools
import multiprocessing
import os
import signal
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from typing import Any

import msgspec

from elastic.core.events import LeaseGranted
from elastic.system.supervision import RecordedProcesses
from elastic.testing.providers import CAPACITY, ProviderRecorder, lease_request
from providers.base import ProviderContext, ProviderEvent
from providers.pool import PoolProvider
from providers.serving import ServingProvider
from tests.providers.conftest import context_of, provider_of

DEATHS = ["before the record", "before a process is recorded", "before the grant is told", "none"]


def die(*_: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def arm(death: str, provider: Any) -> None:
    """Have this process end at a point of a lease's beginning."""
    recorded: Any = RecordedProcesses
    match death:
        case "before the record":
            recorded.write = die
            if isinstance(provider, ServingProvider | PoolProvider):
                provider.__dict__["launch"] = die
        case "before a process is recorded":
            recorded.add = die
            if isinstance(provider, PoolProvider):
                provider.__dict__["_resident"] = die
        case _:
            pass


async def _live(kind: str, context: ProviderContext, leases: int, death: str, told: Connection, **more: Any) -> None:
    provider = provider_of(kind, context, **more)
    seen = ProviderRecorder()

    def emit(event: ProviderEvent) -> None:
        if isinstance(event, LeaseGranted):
            if death == "before the grant is told":
                die()
            told.send(event.lease)
        seen.emit(event)

    begin: Callable[[], None] = lambda: arm(death, provider)  # noqa: E731
    if kind != "serving" or death == "before a process is recorded":
        begin()
    await provider.start(emit)
    begin()
    await seen.until(lambda r: r.available == CAPACITY)
    for number in range(1, leases + 1):
        await provider.acquire(lease_request(number))
    await asyncio.sleep(600)


def main(
    *run: Any,
    kind: str,
    leases: int,
    death: str,
    settings: dict[str, Any],
    variables: Mapping[str, str],
    told: Connection,
) -> None:
    """`run` are arguments of `context_of`; `variables` are added to the environment."""
    os.environ.update(variables)
    context = context_of(*run)
    timeout_s = settings.pop("orchestrator_timeout_s", context.orchestrator_timeout_s)
    context = msgspec.structs.replace(context, orchestrator_timeout_s=timeout_s)
    asyncio.run(_live(kind, context, leases, death, told, **settings))


@functools.cache
def forks() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context
