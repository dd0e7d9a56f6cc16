"""Calls of vendors' clients, which block, and some of which outlast the time that they are given.

Each is made on a thread of its own, which never keeps the process, and is waited for until a deadline.
"""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from elastic.system.thread_lane import promised

T = TypeVar("T")

CALL_NAME = "vendor: "
"""What the names of calls' threads begin with."""


async def call(timeout_s: float, function: Callable[..., T], *arguments: Any) -> T:
    """What `function` returns. Raises what it raises, and `TimeoutError`."""
    try:
        async with asyncio.timeout(timeout_s):
            return await asyncio.wrap_future(_begun(function, *arguments))
    except TimeoutError as error:
        raise _late(error, timeout_s) from error


def called(timeout_s: float, function: Callable[..., T], *arguments: Any) -> T:
    """As `call`, for threads."""
    try:
        return _begun(function, *arguments).result(timeout_s)
    except TimeoutError as error:
        raise _late(error, timeout_s) from error


def _begun(function: Callable[..., T], *arguments: Any) -> Future[T]:
    result, call = promised(function, *arguments)
    threading.Thread(target=call, name=f"{CALL_NAME}{function.__name__}", daemon=True).start()
    return result


def _late(error: TimeoutError, timeout_s: float) -> TimeoutError:
    return error if str(error) else TimeoutError(f"no answer within {timeout_s:g} s")
