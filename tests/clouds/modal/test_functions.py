"""What is Modal's own among function pools: blobs, batches, faults, scaling to zero, and the bill."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from functions.base import Call, FunctionError, FunctionMissing
from functions.modal import ModalFunctionPool
from tests.clouds.modal_server import Bench
from tests.functions.conftest import TIMEOUT_S, calls, eventually

__all__ = ["calls"]

pytestmark = [pytest.mark.clouds]


@pytest.fixture
async def make_pool(platform: Bench, calls: list[Call]) -> AsyncIterator[Callable[..., ModalFunctionPool]]:
    pools: list[ModalFunctionPool] = []

    def make(function: str, **settings: Any) -> ModalFunctionPool:
        reference = f"tests.functions.samples:{function}"
        pools.append(ModalFunctionPool(reference, meter=calls.append, **{"idle_s": 2.0, **settings}))
        return pools[-1]

    yield make
    for pool in pools:
        await pool.aclose()
    await eventually(lambda: platform.running() == [])


def since(platform: Bench, before: int) -> list[dict[str, Any]]:
    return platform.record()["containers"][before:]


def runs(path: str) -> int:
    return len(Path(path).read_text().splitlines())


async def test_what_is_too_large_for_a_message_goes_by_blobs(make_pool: Any, platform: Bench) -> None:
    pool = make_pool("length")
    for size in (8 * 1024, 9 * 1024, 3 * 2**20):
        assert await pool.invoke(f"of {size}", "x" * size, TIMEOUT_S) == size
    assert platform.record()["rpcs"]["BlobCreate"] >= 2


async def test_calls_that_come_together_share_a_container(make_pool: Any, platform: Bench, calls: list[Call]) -> None:
    before = len(platform.record()["containers"])
    pool = make_pool("process_id", concurrency=8, settings={"batch": 8, "batch_wait_s": 0.5})
    await pool.start()
    pids = await asyncio.gather(*(pool.invoke(f"key-{n}", None, TIMEOUT_S) for n in range(8)))
    assert len(set(pids)) <= 2
    assert len(since(platform, before)) <= 2
    assert len(calls) == 8
    await eventually(lambda: platform.running() == [])
    theirs = sum(one["usd"] for one in since(platform, before))
    assert 0.6 * theirs <= sum(call.usd for call in calls) <= 1.05 * theirs


async def test_containers_go_when_idle_and_their_whole_lives_are_on_the_bill(
    make_pool: Any, platform: Bench, calls: list[Call]
) -> None:
    before = len(platform.record()["containers"])
    pool = make_pool("double", concurrency=1, idle_s=2.0)
    for n in range(4):
        assert await pool.invoke(f"key-{n}", n, TIMEOUT_S) == 2 * n
        await asyncio.sleep(0.2)
    await eventually(lambda: platform.running() == [])
    theirs = sum(one["usd"] for one in since(platform, before))
    # What a container takes to end is Modal's to know; it is small against its life, unless the machine is crowded.
    assert 0.6 * theirs <= sum(call.usd for call in calls) <= 1.05 * theirs
    assert await pool.invoke("after", 4, TIMEOUT_S) == 8
    assert [call.cold_start_s > 0 for call in calls] == [True, False, False, False, True]


async def test_an_order_whose_answer_is_torn_is_sent_again_with_its_key_and_runs_once(
    make_pool: Any, platform: Bench, calls: list[Call], tmp_path: Path
) -> None:
    pool = make_pool("count", concurrency=2)
    await pool.start()
    paths = [str(tmp_path / f"lines-{n}") for n in range(12)]
    before = platform.record()
    platform.faults(seed=5, rpcs=["FunctionMap"], torn=0.3)
    assert await asyncio.gather(*(pool.invoke(path, path, TIMEOUT_S) for path in paths)) == [1] * len(paths)
    after = platform.record()
    torn = after["faults"]["torn"] - before["faults"].get("torn", 0)
    assert torn > 0
    assert after["rpcs"]["FunctionMap"] - before["rpcs"]["FunctionMap"] == len(paths) + torn
    assert [runs(path) for path in paths] == [1] * len(paths)
    assert len(calls) == len(paths)


async def test_no_call_costs_more_than_was_said_whatever_became_of_it(
    make_pool: Any, platform: Bench, calls: list[Call], tmp_path: Path
) -> None:
    timeout_s = 3.0
    well, mark = make_pool("double", concurrency=1, idle_s=4.0), tmp_path / "mark"
    await well.invoke("cold", 1, TIMEOUT_S)
    await asyncio.sleep(1.0)
    await well.invoke("after a rest", 1, timeout_s)
    for function, payload in (("fail", 7), ("die", 7), ("hang", str(mark))):
        with pytest.raises(FunctionError):
            await make_pool(function).invoke(function, payload, timeout_s if function == "hang" else TIMEOUT_S)
    assert len(calls) == 5
    for call in calls:
        limit_s = TIMEOUT_S if call.key in ("cold", "fail", "die") else timeout_s
        assert 0 < call.usd <= make_pool("double", idle_s=4.0).most_usd(limit_s), call


async def test_a_clock_that_is_off_here_changes_no_bill_and_leaves_nothing(
    make_pool: Any, platform: Bench, calls: list[Call], monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = time.time
    monkeypatch.setattr("functions.modal.time.time", lambda: now_s() - 3600)
    before = len(platform.record()["containers"])
    pool = make_pool("double", idle_s=30.0)
    assert await pool.invoke("key", 1, TIMEOUT_S) == 2
    (call,) = calls
    await pool.aclose()
    await eventually(lambda: platform.running() == [])
    (container,) = since(platform, before)
    lived_s = container["finished_s"] - container["started_s"]
    assert call.billed_s == pytest.approx(lived_s + 30.0, abs=5.0)


async def test_faults_of_the_platform_lose_no_call_and_run_none_twice(
    make_pool: Any, platform: Bench, tmp_path: Path
) -> None:
    pool = make_pool("count", concurrency=2)
    await pool.start()
    platform.faults(seed=3, unavailable=0.1, torn=0.2)
    paths = [str(tmp_path / f"lines-{n}") for n in range(12)]
    found = await asyncio.gather(*(pool.invoke(path, path, TIMEOUT_S) for path in paths), return_exceptions=True)
    platform.faults()
    answered = [path for path, one in zip(paths, found, strict=True) if one == 1]
    assert len(answered) > len(paths) // 2
    assert all(one == 1 or (isinstance(one, FunctionError) and one.retry_helps) for one in found)
    assert [runs(path) for path in answered] == [1] * len(answered)


async def test_failures_of_the_platform_and_lost_outputs_are_told_as_such(make_pool: Any, platform: Bench) -> None:
    pool = make_pool("double")
    await pool.start()
    platform.faults(internal_failure=1.0)
    with pytest.raises(FunctionError) as caught:
        await pool.invoke("key", 1, TIMEOUT_S)
    assert caught.value.retry_helps
    platform.faults(lost_output=1.0)
    with pytest.raises(FunctionError) as caught:
        await pool.invoke("key", 1, 1.0)
    assert caught.value.retry_helps
    platform.faults()
    assert await pool.invoke("key", 1, TIMEOUT_S) == 2


async def test_a_preempted_call_runs_again_and_answers(make_pool: Any, platform: Bench, tmp_path: Path) -> None:
    pool, mark = make_pool("hang_once"), tmp_path / "mark"
    running = asyncio.create_task(pool.invoke("key", str(mark), TIMEOUT_S))
    await eventually(mark.exists)
    platform.preempt(platform.running()[0]["task"])
    assert await running == "went on"


async def test_an_app_that_is_not_there_is_missing(make_pool: Any) -> None:
    pool = make_pool("double", settings={"app": "another"})
    with pytest.raises(FunctionMissing, match="elastic modal deploy --app another"):
        await pool.start()


async def test_a_call_costs_at_the_most_what_its_time_and_its_containers_do(make_pool: Any) -> None:
    pool = make_pool("double", idle_s=10, settings={"cores": 2.0, "memory_mb": 4096})
    second_usd = 2 * 0.0000131 + 4 * 0.00000222
    assert pool.most_usd(30.0) == pytest.approx(second_usd * 50.0)
