"""A live run that is capped, stopped, resumed and comes to the end of its budget, over the socket in its directory."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from elastic.compose.execution import RunOutcome, execute
from elastic.compose.plan import ChosenEnvironment, resolve
from elastic.compose.runs import new_run_dir
from elastic.config import Config
from elastic.core.controls import BUDGET_EXHAUSTED
from elastic.core.ledger import NANO_USD_PER_USD
from elastic.core.scheduler import Scheduler
from elastic.protocol.run_control import SOCKET, RunControl
from elastic.runtime.journal import RunDirectory, SampleRow
from elastic.runtime.orchestrator import Orchestrator
from tests.runtime.conftest import NoSettings, Parity

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.nightly]


@asynccontextmanager
async def process(
    config: Config, run_dir: Path, *, resume: bool = False
) -> AsyncIterator[tuple[Scheduler, "asyncio.Task[RunOutcome]"]]:
    """One process of the run, from when it takes commands on."""
    plan = resolve(config, ("spot",), "test")
    played = ChosenEnvironment(config=config.mixture[0], kind=Parity, settings=NoSettings())
    plan = msgspec.structs.replace(plan, environments=(played,))
    ready: asyncio.Future[Orchestrator] = asyncio.get_running_loop().create_future()
    running = asyncio.create_task(execute(plan, run_dir, resume=resume, on_ready=ready.set_result))
    async with asyncio.timeout(130):
        try:
            core = (await ready).scheduler
            await until(lambda: (run_dir / SOCKET).exists())
            yield core, running
        finally:
            running.cancel()
            await asyncio.wait([running])


async def until(true: Callable[[], Any]) -> None:
    while not true():  # noqa: ASYNC110
        await asyncio.sleep(0.02)


def status(run_dir: Path) -> str:
    with RunDirectory(run_dir).newest_journal() as journal:
        return journal.meta()["status"]


async def test_commands_hold_for_every_process_of_a_run(live_config) -> None:
    config: Config = live_config(trainer={"usd_per_gpu_hour": 3600.0, "checkpoint_every_steps": 1})
    config = config.model_copy(update={"run": config.run.model_copy(update={"steps": 500})})
    run_dir = new_run_dir(config)
    control = RunControl(run_dir)

    async with process(config, run_dir) as (core, running):
        await until(lambda: any(w.provider == "spot" and w.epoch for w in core.fleet.workers.values()))
        await control.cap("spot", 0, "cap")
        await until(lambda: not any(lease.provider == "spot" for lease in core.leases.leases.values()))
        reply = await control.status()
        assert reply.status["caps"] == {"spot": 0}
        assert [found["type"] for found in reply.status["conditions"]] == ["Capped"]
        await until(lambda: core.version)
        await control.stop("the GPUs are needed", "stop")
        outcome = await running
    assert (outcome.failed, outcome.stopped) == ("", "the GPUs are needed")
    assert status(run_dir) == "stopped: the GPUs are needed"

    async with process(config, run_dir, resume=True) as (core, running):
        assert (await control.stop("the GPUs are needed", "stop")).repeated
        await until(lambda: core.trainer() is not None)
        assert not any(lease.provider == "spot" for lease in core.leases.leases.values())
        cost_usd = sum(core.ledger.bill_nano_usd(core.now_ns).values()) / NANO_USD_PER_USD
        budget_usd = cost_usd + 25  # Dollars, at one a second, of which stopping may take sixteen.
        await control.budget(budget_usd)
        outcome = await running
    assert (outcome.failed, outcome.stopped.startswith(BUDGET_EXHAUSTED)) == ("", True)
    assert status(run_dir).startswith(f"stopped: {BUDGET_EXHAUSTED}")
    with RunDirectory(run_dir).newest_journal() as journal:
        last = journal.rows(SampleRow)[-1].status
    assert cost_usd < last.usd <= budget_usd
    assert BUDGET_EXHAUSTED in {found.reason for found in last.conditions}
