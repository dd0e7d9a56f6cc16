"""A real run on this machine, for benchmarks that watch or disturb one: the orchestrator here, workers as processes."""

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from pydantic import BaseModel

from benchmarks._processes import end_soon
from benchmarks._waiting import awaited
from elastic.compose.execution import RunOutcome, execute
from elastic.compose.plan import ChosenEnvironment, RunPlan
from elastic.compose.processes import run_loop
from elastic.compose.scheduling import limits, policies
from elastic.config import Config
from elastic.core.commands import Command
from elastic.core.digest import digest
from elastic.core.events import Event
from elastic.core.fleet import Worker
from elastic.core.scheduler import Scheduler
from elastic.core.types import Nanoseconds, WorkerState
from elastic.environments.base import Environment
from elastic.runtime.journal import RunDirectory
from elastic.runtime.orchestrator import Orchestrator
from elastic.system.signals import TERMINATION, act_on
from providers.base import Provider, ProviderSettings
from providers.reserved import ReservedProvider

T = TypeVar("T")

Capacity: TypeAlias = tuple[type[Provider], ProviderSettings]
"""A provider's type and its settings."""

POLL_S = 0.01
CLOSE_TIMEOUT_S = 60.0
MEASURED = "measured"


class RunEnded(Exception):
    """The run ended by itself before it was measured; the message has its cause."""


def reserved(workers: int) -> Capacity:
    """Workers on this machine that nobody takes away."""
    return ReservedProvider, ProviderSettings.model_validate({"max_workers": workers})


class LiveRun:
    """A run under way. `now_ns` of its orchestrator is the clock of its journal."""

    def __init__(self, orchestrator: Orchestrator, run_dir: Path, outcome: "asyncio.Task[RunOutcome]") -> None:
        self.orchestrator = orchestrator
        self._run_dir = run_dir
        self._outcome = outcome

    async def until(self, what: str, condition: Callable[[], T | None], timeout_s: float) -> T:
        """The first true value of `condition`. Raises `TimeoutError` naming `what`, or `RunEnded`."""

        def found() -> T | None:
            if not (value := condition()) and self._outcome.done():
                raise RunEnded(self._outcome.result().failed)
            return value

        return await awaited(what, found, timeout_s, POLL_S)

    def ready(self, provider: str = "") -> list[Worker]:
        """Workers that can be given turns, of one provider or of any."""
        workers = self.orchestrator.scheduler.fleet.workers.values()
        return [w for w in workers if w.state is WorkerState.READY and provider in ("", w.provider)]

    def process_id(self, worker: Worker) -> int:
        """Of a worker whose lease is one local process."""
        record = json.loads((self._run_dir / "leases" / f"{worker.lease}.json").read_text())
        return next(iter(record["processes"].values()))["pid"]


@contextlib.asynccontextmanager
async def live_run(
    config: Config,
    run_dir: Path,
    providers: Mapping[str, Capacity],
    environment: type[Environment],
    environment_settings: BaseModel,
) -> AsyncIterator[LiveRun]:
    """A run in `run_dir`, from its orchestrator's start to the end of all its processes."""
    plan = RunPlan(
        config=config,
        providers={name: settings for name, (_, settings) in providers.items()},
        provider_types={name: kind for name, (kind, _) in providers.items()},
        environments=(ChosenEnvironment(config=config.mixture[0], kind=environment, settings=environment_settings),),
    )
    run_dir.mkdir()  # noqa: ASYNC240 - nothing else runs yet
    (run_dir / "config.json").write_text(config.model_dump_json())
    ready: asyncio.Future[Orchestrator] = asyncio.get_running_loop().create_future()
    outcome = asyncio.create_task(execute(plan, run_dir, on_ready=ready.set_result))
    await asyncio.wait({ready, outcome}, return_when=asyncio.FIRST_COMPLETED)
    if not ready.done():
        raise RunEnded(outcome.result().failed)
    orchestrator = ready.result()
    try:
        yield LiveRun(orchestrator, run_dir, outcome)
    finally:
        orchestrator.stop(MEASURED)
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            ended = await outcome
    if ended.failed != MEASURED:
        raise RunEnded(ended.failed)


def replay(config: Config, run_dir: Path, live: Scheduler) -> Iterator[tuple[Nanoseconds, Event, list[Command]]]:
    """Every event of a run that has ended, with what the core decided: a fresh core decides it again.

    Raises `RuntimeError` at the end if it did not come to the state of the `live` one.
    """
    scheduler = Scheduler(live.plan, limits(config), policies(config), 0)
    with RunDirectory(run_dir).newest_journal() as journal:
        for t_ns, event in journal.events():
            yield t_ns, event, scheduler.handle(event, t_ns)
    if digest(scheduler) != digest(live):
        raise RuntimeError(f"{run_dir}: replaying the journal came to another state than the run did")


def run_to_end(work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; SIGINT and SIGTERM end it, with all it started, and exit."""
    try:
        return run_loop(_until_signal(work))
    except asyncio.CancelledError:
        sys.exit(130)


async def _until_signal(work: Coroutine[Any, Any, T]) -> T:
    task = asyncio.current_task()
    assert task is not None
    act_on(TERMINATION, task.cancel, end_soon)
    return await work
