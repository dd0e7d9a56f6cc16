"""What is a local pool's own: its processes come when called for, and go when idle."""

import asyncio

import psutil
import pytest

from functions.base import Call, FunctionUnavailable
from tests.functions.conftest import TIMEOUT_S, MakePool, eventually, function_processes


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


async def test_what_a_function_prints_is_not_an_answer(make_pool: MakePool) -> None:
    assert await make_pool("chat").invoke("key", None, TIMEOUT_S) == "said"


async def test_no_process_can_be_started(make_pool: MakePool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/no/such/python")
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
