"""Calls on daemon threads: in order, with their results and errors, and never in the way of an exit."""

import asyncio
import subprocess
import sys
import threading

import pytest

from elastic.worker.threads import DaemonThread, run_in_thread


async def test_calls_are_made_in_order_on_one_thread() -> None:
    thread = DaemonThread("test")
    seen: list[tuple[int, int]] = []
    calls = [thread.run(10, lambda i=i: seen.append((i, threading.get_ident()))) for i in range(50)]
    await asyncio.gather(*calls)
    thread.stop()
    assert [i for i, _ in seen] == list(range(50))
    assert len({ident for _, ident in seen}) == 1


async def test_results_and_errors_come_back() -> None:
    assert await run_in_thread(10, divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        await run_in_thread(10, divmod, 7, 0)


async def test_a_call_that_takes_too_long_times_out_and_the_next_waits_for_it() -> None:
    thread, release = DaemonThread("test"), threading.Event()
    with pytest.raises(TimeoutError):
        await thread.run(0.01, release.wait, 10)
    with pytest.raises(TimeoutError):
        await thread.run(0.01, int)
    release.set()
    assert await thread.run(10, int) == 0
    thread.stop()


async def test_a_call_nobody_waits_for_any_more_is_not_made() -> None:
    thread, release, made = DaemonThread("test"), threading.Event(), threading.Event()
    first = asyncio.create_task(thread.run(10, release.wait, 10))
    second = asyncio.create_task(thread.run(10, made.set))
    await asyncio.sleep(0)
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    release.set()
    await first
    await thread.run(10, int)
    thread.stop()
    assert not made.is_set()


def test_a_call_that_never_returns_does_not_keep_the_process() -> None:
    code = """
import asyncio, threading
from elastic.worker.threads import run_in_thread
try:
    asyncio.run(run_in_thread(0.01, threading.Event().wait))
except TimeoutError:
    print("timed out")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout == "timed out\n"
    assert done.stderr == ""
