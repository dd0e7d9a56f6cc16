"""An earlier process of a run: takes leases, says what its provider emits, and kills itself where it is told to.

`python -m tests.providers.first_incarnation KIND RUN RUN_DIR BEGAN_NS LEASES DEATH SETTINGS`
"""

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from elastic.core.events import LeaseGranted
from elastic.processes import RecordedProcesses
from providers.base import ProviderEvent
from providers.serving import ServingProvider
from tests.providers.conftest import CAPACITY, Recorder, context_of, lease_request, provider_of

DEATHS = ["before the record", "before a process is recorded", "before the grant is told", "none"]


def die(*_: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def arm(death: str, provider: Any) -> None:
    """Have this process end at a point of a lease's beginning."""
    match death:
        case "before the record":
            RecordedProcesses.write = die
            provider.launch = provider.launch if not isinstance(provider, ServingProvider) else die
        case "before a process is recorded":
            RecordedProcesses.add = die
        case _:
            pass


async def main(kind: str, run: str, run_dir: str, began_ns: str, leases: str, death: str, settings: str) -> None:
    more = msgspec.json.decode(settings)
    context = context_of(run, Path(run_dir), int(began_ns))
    timeout_s = more.pop("orchestrator_timeout_s", context.orchestrator_timeout_s)
    provider = provider_of(kind, msgspec.structs.replace(context, orchestrator_timeout_s=timeout_s), **more)
    seen = Recorder()

    def emit(event: ProviderEvent) -> None:
        if isinstance(event, LeaseGranted):
            if death == "before the grant is told":
                die()
            print(event.lease, event.expires_at_ns, flush=True)
        seen.emit(event)

    begin: Callable[[], None] = lambda: arm(death, provider)  # noqa: E731
    if kind != "serving" or death == "before a process is recorded":
        begin()
    await provider.start(emit)
    begin()
    await seen.until(lambda r: r.available == CAPACITY)
    for number in range(1, int(leases) + 1):
        await provider.acquire(lease_request(number))
    await asyncio.sleep(600)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
