"""What every function pool promises, whatever stands behind it. Source: `functions.base.FunctionPool`."""

import asyncio
from pathlib import Path

import psutil
import pytest

from functions.base import (
    BadResult,
    Call,
    CallOutcome,
    FunctionError,
    FunctionMissing,
    FunctionRaised,
    FunctionTimedOut,
    FunctionUnavailable,
)
from functions.local import Prices
from tests.functions.conftest import TIMEOUT_S, MakePool, eventually, function_processes


async def test_returns_what_the_function_returns(make_pool: MakePool, calls: list[Call]) -> None:
    """Real processes of the pool answer."""
    pool = make_pool("double")
    results = await asyncio.gather(*(pool.invoke(f"key-{n}", n, TIMEOUT_S) for n in range(20)))
    assert results == [2 * n for n in range(20)]
    assert sorted(call.key for call in calls) == sorted(f"key-{n}" for n in range(20))
    assert {call.outcome for call in calls} == {CallOutcome.OK}
    assert await make_pool("double_later").invoke("later", 3, TIMEOUT_S) == 6, "a function may be async"


async def test_a_key_runs_once_however_often_it_is_asked(
    make_pool: MakePool, calls: list[Call], tmp_path: Path
) -> None:
    pool, lines = make_pool("count"), str(tmp_path / "lines")
    together = await asyncio.gather(*(pool.invoke("key", lines, TIMEOUT_S) for _ in range(5)))
    assert together == [1] * 5
    assert await pool.invoke("key", lines, TIMEOUT_S) == 1
    assert await pool.invoke("another", lines, TIMEOUT_S) == 2
    assert len(calls) == 2


async def test_a_failed_key_may_be_asked_again(make_pool: MakePool, calls: list[Call], tmp_path: Path) -> None:
    pool, mark = make_pool("fail_once"), str(tmp_path / "mark")
    with pytest.raises(FunctionRaised, match="ValueError: not yet"):
        await pool.invoke("key", mark, TIMEOUT_S)
    assert await pool.invoke("key", mark, TIMEOUT_S) == "well"
    assert [call.outcome for call in calls] == [CallOutcome.RAISED, CallOutcome.OK]


async def test_one_that_leaves_does_not_take_the_call_from_those_who_joined(
    make_pool: MakePool, tmp_path: Path
) -> None:
    pool, lines = make_pool("count"), str(tmp_path / "lines")
    first = asyncio.create_task(pool.invoke("key", lines, TIMEOUT_S))
    await eventually(function_processes)
    second = asyncio.create_task(pool.invoke("key", lines, TIMEOUT_S))
    await asyncio.sleep(0)
    first.cancel()
    assert await second == 1


@pytest.mark.parametrize(
    ("function", "error", "outcome", "retry_helps"),
    [
        ("fail", FunctionRaised, CallOutcome.RAISED, True),
        ("unsendable", BadResult, CallOutcome.BAD_RESULT, False),
        ("die", FunctionUnavailable, CallOutcome.UNAVAILABLE, True),
        ("not_there", FunctionMissing, CallOutcome.UNAVAILABLE, False),
        ("not_a_function", FunctionMissing, CallOutcome.UNAVAILABLE, False),
        ("no.such.module:function", FunctionMissing, CallOutcome.UNAVAILABLE, False),
    ],
)
async def test_each_failure_is_told_apart(
    function: str,
    error: type[FunctionError],
    outcome: CallOutcome,
    retry_helps: bool,
    make_pool: MakePool,
    calls: list[Call],
) -> None:
    with pytest.raises(error, match=function.rpartition(".")[2]) as caught:
        await make_pool(function).invoke("key", 7, TIMEOUT_S)
    assert (caught.value.outcome, caught.value.retry_helps) == (outcome, retry_helps)
    assert [call.outcome for call in calls] == [outcome]


async def test_a_call_out_of_time_takes_its_processes_along(
    make_pool: MakePool, calls: list[Call], tmp_path: Path
) -> None:
    pool, path = make_pool("hang"), tmp_path / "pids"
    await pool.start()
    with pytest.raises(FunctionTimedOut, match=r"did not answer within 1 s") as caught:
        await pool.invoke("key", str(path), 1.0)
    assert caught.value.retry_helps
    assert calls[0].outcome is CallOutcome.TIMED_OUT
    for pid in map(int, path.read_text().split()):
        await eventually(lambda pid=pid: not psutil.pid_exists(pid) or psutil.Process(pid).status() == "zombie")


async def test_one_who_joins_waits_no_longer_than_it_said(make_pool: MakePool, tmp_path: Path) -> None:
    pool, path = make_pool("hang"), tmp_path / "pids"
    first = asyncio.create_task(pool.invoke("key", str(path), TIMEOUT_S))
    await eventually(path.exists)
    with pytest.raises(FunctionTimedOut, match=r"within 0\.05 s"):
        await pool.invoke("key", str(path), 0.05)
    assert not first.done()
    await pool.aclose()
    with pytest.raises(FunctionUnavailable, match="closed"):
        await first


async def test_a_death_leaves_the_pool_well(make_pool: MakePool, tmp_path: Path) -> None:
    pool, mark = make_pool("die_once"), str(tmp_path / "mark")
    with pytest.raises(FunctionUnavailable, match="ended with status -9"):
        await pool.invoke("key", mark, TIMEOUT_S)
    assert await pool.invoke("key", mark, TIMEOUT_S) == "alive"


async def test_closing_ends_calls_as_unavailable_and_leaves_nothing(
    make_pool: MakePool, calls: list[Call], tmp_path: Path
) -> None:
    pool, path = make_pool("hang"), tmp_path / "pids"
    running = asyncio.create_task(pool.invoke("key", str(path), TIMEOUT_S))
    await eventually(path.exists)
    await pool.aclose()
    await pool.aclose()
    with pytest.raises(FunctionUnavailable, match="closed"):
        await running
    with pytest.raises(FunctionUnavailable, match="closed"):
        await pool.invoke("another", str(path), TIMEOUT_S)
    assert [call.outcome for call in calls] == [CallOutcome.UNAVAILABLE]
    assert function_processes() == []


async def test_calls_are_metered(make_pool: MakePool, calls: list[Call], prices: Prices) -> None:
    pool = make_pool("double", concurrency=1, prices=prices._replace(pacing_s=0.1))
    await asyncio.gather(*(pool.invoke(key, 1, TIMEOUT_S) for key in "ab"))
    cold, warm = calls
    assert cold.cold_start_s > 0
    assert warm.cold_start_s == 0
    assert min(cold.duration_s, warm.duration_s) >= 0.099  # a loop's clock may be a millisecond off
    assert warm.queued_s >= cold.duration_s > cold.queued_s
    for call in calls:
        assert call.usd == pytest.approx(prices.usd_per_call + call.billed_s * prices.usd_per_s)


async def test_a_call_that_found_no_place_in_time_costs_nothing(
    make_pool: MakePool, calls: list[Call], prices: Prices, tmp_path: Path
) -> None:
    pool, path = make_pool("hang", concurrency=1, prices=prices), tmp_path / "pids"
    first = asyncio.create_task(pool.invoke("key", str(path), TIMEOUT_S))
    await eventually(path.exists)
    with pytest.raises(FunctionTimedOut):
        await pool.invoke("another", str(path), 0.05)
    assert [(call.key, call.usd) for call in calls] == [("another", 0.0)]
    await pool.aclose()
    await asyncio.wait({first})
    assert calls[-1].usd > 0
    assert isinstance(first.exception(), FunctionUnavailable)


async def test_a_function_that_cannot_run_is_found_before_the_first_call(make_pool: MakePool) -> None:
    with pytest.raises(FunctionMissing, match="not_there"):
        await make_pool("not_there").start()
    pool = make_pool("double")
    await pool.start()
    assert await pool.invoke("key", 2, TIMEOUT_S) == 4
