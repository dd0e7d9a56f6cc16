"""Processes on this machine: nothing outlives what it belongs to, and nobody else's process is touched."""

import asyncio
import json
import sys

import msgspec
import psutil
import pytest

from elastic.core.events import LeaseRefused
from providers.base import ProviderContext, ProviderSettings, ProviderUnavailable
from providers.processes import ProcessGroup, reconcile
from providers.reserved import ReservedProvider
from tests.providers.conftest import Recorder, eventually, lease_request, processes_with

SLEEP = (sys.executable, "-c", "import time; time.sleep(600)")

ORCHESTRATOR = """
import asyncio, pathlib, sys
from providers.base import ProviderContext
from providers.processes import ProcessGroup

async def main(run, run_dir):
    context = ProviderContext(run=run, run_dir=pathlib.Path(run_dir), join="", worker_command=(),
                              acquire_timeout_s=9, release_timeout_s=9)
    command = (sys.executable, "-c", "import time; time.sleep(600)")
    await ProcessGroup(context, "provider", "lease-1").start("worker-1", command, {"ELASTIC_WORKER": "worker-1"})
    await asyncio.sleep(600)

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs PR_SET_PDEATHSIG")
async def test_a_worker_dies_with_its_orchestrator(context: ProviderContext) -> None:
    orchestrator = await asyncio.create_subprocess_exec(
        sys.executable, "-c", ORCHESTRATOR, context.run, str(context.run_dir)
    )
    await eventually(lambda: processes_with(ELASTIC_WORKER="worker-1", ELASTIC_RUN=context.run))
    await eventually((context.run_dir / "leases" / "lease-1.json").exists)
    orchestrator.kill()
    await orchestrator.wait()
    await eventually(lambda: not processes_with(ELASTIC_RUN=context.run))
    assert await reconcile(context, "provider") == ["lease lease-1 of provider: nothing of it was alive"]
    assert list((context.run_dir / "leases").iterdir()) == []


async def test_a_recycled_process_id_is_left_alone(context: ProviderContext) -> None:
    """The record names a process of the same id that started at another time."""
    group = ProcessGroup(context, "provider", "lease-1")
    await group.start("worker-1", SLEEP, {})
    try:
        path = context.run_dir / "leases" / "lease-1.json"
        record = json.loads(path.read_bytes())
        record["processes"][0]["started_s"] -= 60
        path.write_text(json.dumps(record))
        assert await reconcile(context, "provider") == ["lease lease-1 of provider: nothing of it was alive"]
        assert psutil.pid_exists(record["processes"][0]["pid"])
    finally:
        await group.kill()


async def test_a_process_of_the_same_group_id_without_the_runs_mark_is_left_alone(context: ProviderContext) -> None:
    stranger = await asyncio.create_subprocess_exec(*SLEEP, start_new_session=True)
    process = {"pid": stranger.pid, "started_s": psutil.Process(stranger.pid).create_time()}
    record = {"run": context.run, "provider": "provider", "name": "lease-1", "processes": [process]}
    (context.run_dir / "leases").mkdir()
    (context.run_dir / "leases" / "lease-1.json").write_bytes(msgspec.json.encode(record))
    await reconcile(context, "provider")
    assert psutil.Process(stranger.pid).status() != psutil.STATUS_ZOMBIE
    stranger.kill()
    await stranger.wait()


async def test_a_broken_record_is_reported_and_kept(context: ProviderContext) -> None:
    path = context.run_dir / "leases" / "lease-1.json"
    path.parent.mkdir()
    path.write_text("{")
    (line,) = await reconcile(context, "provider")
    assert str(path) in line
    assert path.exists()


async def test_output_goes_to_the_log(context: ProviderContext) -> None:
    group = ProcessGroup(context, "provider", "lease-1")
    script = "import os; print(os.environ['WORD']); raise SystemExit(3)"
    await group.start("worker-1", (sys.executable, "-c", script), {"WORD": "said"})
    end = await group.wait()
    await group.kill()
    assert end.status == 3
    assert "status 3" in str(end)
    assert end.log.read_text() == "said\n"


async def test_what_cannot_be_recorded_does_not_run(context: ProviderContext) -> None:
    (context.run_dir / "leases").write_text("in the way")
    with pytest.raises(OSError, match="leases"):
        await ProcessGroup(context, "provider", "lease-1").start("worker-1", SLEEP, {})
    assert processes_with(ELASTIC_RUN=context.run) == []


async def test_a_worker_that_cannot_start_refuses_the_lease(context: ProviderContext, recorder: Recorder) -> None:
    (context.run_dir / "logs").write_text("in the way")
    provider = ReservedProvider("provider", ProviderSettings(), context)  # type: ignore[call-arg]
    await provider.start(recorder.emit)
    await provider.acquire(lease_request())
    answer = await recorder.answered("lease-1")
    assert isinstance(answer, LeaseRefused)
    assert "logs" in answer.reason
    await provider.aclose()


async def test_a_command_that_does_not_exist_is_named(context: ProviderContext, recorder: Recorder) -> None:
    broken = msgspec.structs.replace(context, worker_command=("/no/such/elastic", "worker"))
    provider = ReservedProvider("provider", ProviderSettings(), broken)  # type: ignore[call-arg]
    with pytest.raises(ProviderUnavailable, match="/no/such/elastic"):
        await provider.start(recorder.emit)
    await provider.aclose()
    assert recorder.events == []


@pytest.mark.parametrize("ticks", range(6))
async def test_a_start_that_is_cut_short_leaves_nothing(context: ProviderContext, ticks: int) -> None:
    group = ProcessGroup(context, "provider", "lease-1")
    starting = asyncio.create_task(group.start("worker-1", SLEEP, {}))
    for _ in range(ticks):
        await asyncio.sleep(0)
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)
    await group.kill()
    assert processes_with(ELASTIC_RUN=context.run) == []
