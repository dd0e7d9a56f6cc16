"""What is a local pool's own: its processes come when called for, and go when idle."""

import asyncio
import sys
from pathlib import Path

import msgspec
import psutil
import pytest

from elastic.system.supervision import RecordedProcesses
from functions.base import BadResult, Call, FunctionRaised, FunctionUnavailable
from functions.local import FUNCTIONS
from functions.process import ANSWER_BYTES_MAX, LOG_BYTES_MAX
from tests.functions.conftest import TIMEOUT_S, MakePool, eventually, function_processes


def is_alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


async def test_concurrency_is_capped(make_pool: MakePool, calls: list[Call]) -> None:
    pool = make_pool("process_id", concurrency=2)
    pids = await asyncio.gather(*(pool.invoke(f"key-{n}", None, TIMEOUT_S) for n in range(10)))
    assert len(set(pids)) <= 2
    assert sum(call.cold_start_s > 0 for call in calls) == len(set(pids))


async def test_scales_to_zero_and_back(make_pool: MakePool, calls: list[Call]) -> None:
    pool = make_pool("process_id", idle_s=0.05)
    first = await pool.invoke("first", None, TIMEOUT_S)
    await eventually(lambda: not function_processes())
    second = await pool.invoke("second", None, TIMEOUT_S)
    assert first != second
    assert [call.cold_start_s > 0 for call in calls] == [True, True]


async def test_a_warm_process_is_used_again(make_pool: MakePool, calls: list[Call]) -> None:
    pool = make_pool("process_id")
    await pool.start()
    pids = {await pool.invoke(f"key-{n}", None, TIMEOUT_S) for n in range(5)}
    assert len(pids) == 1
    assert all(call.cold_start_s == 0 for call in calls)


async def test_one_that_died_while_idle_is_replaced(make_pool: MakePool) -> None:
    pool = make_pool("process_id")
    first = await pool.invoke("first", None, TIMEOUT_S)
    psutil.Process(first).kill()
    await eventually(lambda: not function_processes())
    try:
        second = await pool.invoke("second", None, TIMEOUT_S)
    except FunctionUnavailable:  # the call was quicker than the news of the death: a retry helps, as it says
        second = await pool.invoke("second", None, TIMEOUT_S)
    assert second != first


async def test_what_a_function_detached_ends_with_its_call(make_pool: MakePool, tmp_path: Path) -> None:
    pool, path = make_pool("detach"), tmp_path / "pid"
    running = asyncio.create_task(pool.invoke("key", str(path), TIMEOUT_S))
    await eventually(path.exists)
    await pool.aclose()
    assert not is_alive(int(path.read_text()))
    with pytest.raises(FunctionUnavailable):
        await running


KILLED = """
import asyncio, pathlib, sys
from functions.local import LocalFunctionPool

async def main(records, path):
    pool = LocalFunctionPool("tests.functions.samples:detach", run="run", records=pathlib.Path(records))
    await pool.invoke("key", path, 600.0)

asyncio.run(main(*sys.argv[1:]))
"""


async def test_what_outlived_a_killed_orchestrator_ends_with_the_next(tmp_path: Path) -> None:
    records, path = tmp_path / "leases", tmp_path / "pid"
    orchestrator = await asyncio.create_subprocess_exec(sys.executable, "-c", KILLED, str(records), str(path))
    await eventually(path.exists)
    detached = int(path.read_text())
    (record,) = records.iterdir()
    (function,) = msgspec.json.decode(record.read_bytes())["processes"].values()
    orchestrator.kill()
    await orchestrator.wait()
    await eventually(lambda: not is_alive(function["pid"]))
    assert is_alive(detached)
    assert RecordedProcesses.found(records, "another", FUNCTIONS) == []
    (left,) = RecordedProcesses.found(records, "run", FUNCTIONS)
    async with asyncio.timeout(TIMEOUT_S):
        assert await left.end() == [detached]
    assert not is_alive(detached)
    assert list(records.iterdir()) == []


async def test_records_go_with_their_processes(make_pool: MakePool, tmp_path: Path) -> None:
    records = tmp_path / "leases"
    pool = make_pool("double", run="run", records=records)
    assert await pool.invoke("key", 2, TIMEOUT_S) == 4
    assert len(list(records.iterdir())) == 1
    await pool.aclose()
    assert list(records.iterdir()) == []


@pytest.mark.parametrize(
    ("function", "size", "error", "says"),
    [
        ("large", ANSWER_BYTES_MAX, BadResult, "at most 1048576 can be sent"),
        ("forge", 2**26, BadResult, "an answer of 67108864 bytes; at most 1048576 are taken"),
        ("forge_nested", 2**19, FunctionUnavailable, "answered nonsense"),
        ("fail_at_length", 2**26, FunctionRaised, "xxx…"),
    ],
)
async def test_an_answer_costs_the_pool_no_memory(
    make_pool: MakePool, function: str, size: int, error: type[Exception], says: str
) -> None:
    pool = make_pool(function)
    await pool.start()
    before = psutil.Process().memory_info().rss
    with pytest.raises(error, match=says):
        await pool.invoke("key", size, TIMEOUT_S)
    assert psutil.Process().memory_info().rss - before < 32 * 2**20


async def test_functions_inherit_what_they_need_and_no_secret(
    make_pool: MakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_SECRET_ACCESS_KEY", "ELASTIC_SITE_TOKEN", "JUDGE_KEY", "JUDGE_URL", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "1")
    found = await make_pool("environment", pass_env=("JUDGE_KEY",)).invoke("key", None, TIMEOUT_S)
    assert found.keys() >= {"PATH", "OMP_NUM_THREADS", "JUDGE_KEY"}
    assert not found.keys() & {"AWS_SECRET_ACCESS_KEY", "ELASTIC_SITE_TOKEN", "JUDGE_URL"}


async def test_what_a_function_prints_is_not_an_answer(make_pool: MakePool) -> None:
    assert await make_pool("chat").invoke("key", None, TIMEOUT_S) == "said"


async def test_no_process_can_be_started(make_pool: MakePool, tmp_path: Path) -> None:
    (tmp_path / "functions.log").mkdir()  # So that what it says can be written nowhere.
    with pytest.raises(FunctionUnavailable, match="no process could be started") as caught:
        await make_pool("double").start()
    assert caught.value.retry_helps


@pytest.mark.parametrize("after_s", [0.0, 0.001, 0.005, 0.02])
async def test_a_cold_start_that_is_cut_short_leaves_nothing(make_pool: MakePool, after_s: float) -> None:
    pool = make_pool("double")
    running = asyncio.create_task(pool.invoke("key", 1, TIMEOUT_S))
    await asyncio.sleep(after_s)
    await pool.aclose()
    assert function_processes() == []
    await asyncio.wait({running})
    assert isinstance(running.exception(), FunctionUnavailable) or running.result() == 2


async def test_what_functions_print_does_not_fill_the_disk(make_pool: MakePool, tmp_path: Path) -> None:
    log, most = tmp_path / "functions.log", 2 * LOG_BYTES_MAX
    pool = make_pool("print_mib", concurrency=1, idle_s=0.05)
    for number in range(5):
        await pool.invoke(f"key-{number}", LOG_BYTES_MAX // 2**20, TIMEOUT_S)
    assert LOG_BYTES_MAX <= log.stat().st_size < most
    await eventually(lambda: not function_processes())
    await pool.invoke("of another process", 16, TIMEOUT_S)
    assert log.stat().st_size < most
    assert log.read_bytes().endswith(b"this log is full: what the function says from now on is lost\n")
