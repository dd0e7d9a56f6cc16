"""Calls of users' functions, which are waited for so long and no longer.

A function that is not async runs in a thread of its own, beside the event loop. A call that takes too long is left
behind: a thread cannot be ended, but neither does it keep its process from ending.
"""

import asyncio
import contextlib
import inspect
import threading
from collections.abc import Awaitable, Callable, Mapping
from typing import Any


class TooSlow(Exception):
    """A call took longer than it may."""

    def __init__(self, limit_s: float) -> None:
        super().__init__(f"no answer within {limit_s:g} s")


async def called(function: Callable[..., Any], given: Mapping[str, Any], limit_s: float) -> Any:
    """What a function, async or not, returns. Raises `TooSlow`, and whatever it raises."""
    waiting = asyncio.ensure_future(_answer(function, given))
    try:
        await asyncio.wait({waiting}, timeout=limit_s)
    finally:
        waiting.cancel()  # It is not waited for: it may catch that.
    if not waiting.done():
        raise TooSlow(limit_s)
    return waiting.result()


async def _answer(function: Callable[..., Any], given: Mapping[str, Any]) -> Any:
    answer = function(**given) if inspect.iscoroutinefunction(function) else await _in_thread(function, given)
    return await _awaited(answer) if inspect.isawaitable(answer) else answer


async def _awaited(answer: Awaitable[Any]) -> Any:
    return await answer


async def _in_thread(function: Callable[..., Any], given: Mapping[str, Any]) -> Any:
    loop = asyncio.get_running_loop()
    over: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()

    def settle(answer: Any, error: BaseException | None) -> None:
        if not over.done():
            over.set_result((answer, error))

    def run() -> None:
        answer, error = None, None
        try:
            answer = function(**given)
        except BaseException as raised:
            error = raised
        with contextlib.suppress(RuntimeError):  # The loop is closed: nobody waits any more.
            loop.call_soon_threadsafe(settle, answer, error)

    threading.Thread(target=run, name=getattr(function, "__name__", "call"), daemon=True).start()
    answer, error = await over
    if error is not None:
        raise error
    return answer
