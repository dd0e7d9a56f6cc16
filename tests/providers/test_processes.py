"""Processes on this machine: nothing outlives what it belongs to, and nobody else's process is touched."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from structlog.testing import capture_logs

from elastic.core.events import LeaseRefused
from elastic.system.host import Host, on
from elastic.system.processes import OF_SITE, Identity, identity
from elastic.system.supervision import RecordedProcesses, WatchedProcess, records
from elastic.testing.providers import TIMEOUT_S, ProviderRecorder, eventually, lease_request, processes_with
from elastic.worker import weights
from providers.base import ProviderContext, ProviderSettings, ProviderUnavailable, WorkerTicket
from providers.processes import ProcessGroup, new_record
from providers.reserved import ReservedProvider

SLEEP = (sys.executable, "-c", "import time; time.sleep(600)")


def group_of(context: ProviderContext) -> ProcessGroup:
    return ProcessGroup(context, new_record(context, "provider", "lease-1"))


SETSID = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
time.sleep(600)
"""
"""Starts a process in a session of its own, where no signal to a group reaches it."""


async def test_what_left_its_session_ends_with_its_group(context: ProviderContext) -> None:
    group = group_of(context)
    group.start("worker-1", (sys.executable, "-c", SETSID), {})
    await eventually(lambda: len(processes_with(ELASTIC_RUN=context.run)) == 2)
    await group.kill()
    assert processes_with(ELASTIC_RUN=context.run) == []


LEAVES = """
import subprocess, sys
from elastic.system.processes import end_own_kin
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
end_own_kin()
"""


async def test_who_leaves_by_itself_takes_along_what_it_started_and_nothing_else(context: ProviderContext) -> None:
    bystander, group = ProcessGroup(context, new_record(context, "provider", "lease-2")), group_of(context)
    bystander.start("worker-2", SLEEP, {})
    group.start("worker-1", (sys.executable, "-c", LEAVES), {})
    assert (await group.wait()).status == 0
    await eventually(lambda: len(processes_with(ELASTIC_RUN=context.run)) == 1)
    await bystander.kill()
    await group.kill()


def left_over(context: ProviderContext) -> list[RecordedProcesses]:
    return RecordedProcesses.found(records(context.run_dir), context.run, "provider")


def record_of(context: ProviderContext, *processes: Identity) -> Path:
    body = {
        "run": context.run,
        "owner": "provider",
        "name": "lease-1",
        "mark": "of nobody",
        "processes": {f"worker-{number}": process for number, process in enumerate(processes)},
    }
    path = context.run_dir / "leases" / "lease-1.json"
    path.parent.mkdir()
    path.write_bytes(msgspec.json.encode(body))
    return path


async def test_a_survivor_is_found_whatever_the_clock_says(context: ProviderContext) -> None:
    """Its record says the tick of its start, which no setting of a clock changes."""
    survivor = await asyncio.create_subprocess_exec(*SLEEP, start_new_session=True)
    found = identity(survivor.pid)
    assert found is not None
    record_of(context, found)
    with on(Host(unix_ns=lambda: 0)):
        (left,) = left_over(context)
        assert await left.end() == [survivor.pid]
    assert await survivor.wait() == -9


@pytest.mark.parametrize("other", [{"start_ticks": 1}, {"boot": "another"}])
async def test_a_recycled_process_id_is_left_alone(context: ProviderContext, other: dict[str, Any]) -> None:
    """The record names a process of the same id that started at another time, or before the machine did."""
    foreign = await asyncio.create_subprocess_exec(*SLEEP, start_new_session=True)
    try:
        found = identity(foreign.pid)
        assert found is not None
        path = record_of(context, msgspec.structs.replace(found, **other))
        (left,) = left_over(context)
        watched = WatchedProcess(left.processes["worker-0"])
        watched.kill()
        await watched.wait()
        assert await left.end() == []
        assert not path.exists()
        assert psutil.Process(foreign.pid).status() != psutil.STATUS_ZOMBIE
    finally:
        foreign.kill()
        await foreign.wait()


async def test_workers_inherit_what_they_need_and_no_secret(
    context: ProviderContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    secrets = ("AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID", "HF_TOKEN", "ELASTIC_SERVING_TOKEN", "PYTHON_API_KEY")
    for name in (*secrets, "WANDB_API_KEY", "NAMED_ONE", "NAMED_TWO", "NAMED_TOKEN"):
        monkeypatch.setenv(name, "theirs")
    for name in ("LC_ALL", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", *OF_SITE):
        monkeypatch.setenv(name, "0")
    named = msgspec.structs.replace(context, pass_env=("WANDB_API_KEY", "NAMED_*"))
    group = group_of(named)
    script = "import os, json; print(json.dumps(dict(os.environ)))"
    group.start("worker-1", (sys.executable, "-c", script), {"WORD": "said"})
    found = json.loads((await group.wait()).log.read_text())
    await group.kill()
    assert not found.keys() & {*secrets, "NAMED_TOKEN"}
    given = {"PATH", "LC_ALL", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "WORD", *OF_SITE}
    assert found.keys() >= given | {"WANDB_API_KEY", "NAMED_ONE", "NAMED_TWO"}


def test_what_a_machine_tells_its_workers_is_what_they_read() -> None:
    assert (weights.SITE_VARIABLE, weights.SITE_TOKEN_VARIABLE) == OF_SITE


async def test_a_broken_record_is_reported_and_kept(context: ProviderContext) -> None:
    path = context.run_dir / "leases" / "lease-1.json"
    path.parent.mkdir()
    path.write_text("{")
    with capture_logs() as logs:
        assert left_over(context) == []
    assert [line["path"] for line in logs] == [str(path)]
    assert path.exists()


async def test_an_adopted_process_is_watched_and_killed(context: ProviderContext) -> None:
    """Nobody who adopts it reaps it; its parent here does only once it has been seen to be over."""
    child = await asyncio.to_thread(subprocess.Popen, SLEEP)
    found = identity(child.pid)
    assert found is not None
    watched, closed = WatchedProcess(found), WatchedProcess(found)
    closed.close()
    waiting = asyncio.create_task(watched.wait())
    await asyncio.sleep(0)
    assert not waiting.done()
    watched.kill()
    async with asyncio.timeout(TIMEOUT_S):
        await waiting
        await WatchedProcess(found).wait()
    assert child.wait() == -9
    await WatchedProcess(found).wait()
    watched.kill()


async def test_output_goes_to_the_log(context: ProviderContext) -> None:
    group = group_of(context)
    script = "import os; print(os.environ['WORD']); raise SystemExit(3)"
    group.start("worker-1", (sys.executable, "-c", script), {"WORD": "said"})
    end = await group.wait()
    await group.kill()
    assert end.status == 3
    assert "status 3" in str(end)
    assert end.log.read_text() == "said\n"


async def test_what_cannot_be_recorded_does_not_run(context: ProviderContext) -> None:
    (context.run_dir / "leases").write_text("in the way")
    with pytest.raises(OSError, match="leases"):
        group_of(context).start("worker-1", SLEEP, {})
    assert processes_with(ELASTIC_RUN=context.run) == []


async def test_a_worker_that_cannot_start_refuses_the_lease(
    context: ProviderContext, recorder: ProviderRecorder
) -> None:
    (context.run_dir / "logs").write_text("in the way")
    provider = ReservedProvider("provider", ProviderSettings(), context)  # type: ignore[call-arg]
    await provider.start(recorder.emit)
    await provider.acquire(lease_request())
    answer = await recorder.answered("lease-1")
    assert isinstance(answer, LeaseRefused)
    assert "logs" in answer.reason
    await provider.aclose()


async def test_a_command_that_does_not_exist_is_named(context: ProviderContext, recorder: ProviderRecorder) -> None:
    broken = msgspec.structs.replace(context, worker_command=("/no/such/elastic", "worker"))
    provider = ReservedProvider("provider", ProviderSettings(), broken)  # type: ignore[call-arg]
    with pytest.raises(ProviderUnavailable, match="/no/such/elastic"):
        await provider.start(recorder.emit)
    await provider.aclose()
    assert recorder.events == []


SAYS = "import os, signal, sys; print('told', {token!r}, file=sys.stderr, flush=True); {end}"


@pytest.mark.parametrize(
    ("end", "fault"),
    [
        ("sys.exit('the device is in use')", "its process exited with status 1: told [removed] | the device is in use"),
        ("os.abort()", "its process was killed by SIGABRT: told [removed]"),
        ("os.kill(os.getpid(), signal.SIGKILL)", ""),
        ("sys.exit(143)", ""),
        ("sys.exit(0)", ""),
    ],
)
async def test_a_worker_that_fails_by_itself_tells_why_without_its_secrets(
    context: ProviderContext, end: str, fault: str
) -> None:
    token = "told-by-the-worker"
    request = msgspec.structs.replace(lease_request(), tickets=(WorkerTicket("worker-1", token),))
    command = (sys.executable, "-c", SAYS.format(token=token, end=end))
    failing = msgspec.structs.replace(context, worker_command=command)
    provider = ReservedProvider("reserved", ProviderSettings.model_validate({}), failing)
    recorder = ProviderRecorder()
    await provider.start(recorder.emit)
    await provider.acquire(request)
    assert (await recorder.ended("lease-1")).fault == fault
    await provider.aclose()
