"""Calls of users' functions, which are waited for so long and no longer.

A function that is not async runs in a thread of its own, beside the event loop. A call that takes too long is left
behind: a thread cannot be ended, but neither does it keep its process from ending.
"""

import asyncio
import contextlib
import inspect
import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias


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
    answer, error = waiting.result()
    if error is not None:
        raise error
    return answer


def ends_caller(error: BaseException) -> bool:
    """Whether an error is the cancellation of the task that makes a call, and of none that the call has made."""
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0


_Answer: TypeAlias = tuple[Any, BaseException | None]


async def _answer(function: Callable[..., Any], given: Mapping[str, Any]) -> _Answer:
    """What it returns or raises. Nothing is raised here: `SystemExit` would end the event loop."""
    try:
        if inspect.iscoroutinefunction(function):
            return await function(**given), None
        answer, error = await _in_thread(function, given)
        return (await answer if inspect.isawaitable(answer) else answer), error
    except BaseException as error:
        return None, error


async def _in_thread(function: Callable[..., Any], given: Mapping[str, Any]) -> _Answer:
    loop = asyncio.get_running_loop()
    over: asyncio.Future[_Answer] = loop.create_future()

    def settle(answer: _Answer) -> None:
        if not over.done():
            over.set_result(answer)

    def run() -> None:
        answer: _Answer
        try:
            answer = function(**given), None
        except BaseException as error:
            answer = None, error
        with contextlib.suppress(RuntimeError):  # The loop is closed: nobody waits any more.
            loop.call_soon_threadsafe(settle, answer)

    threading.Thread(target=run, name=getattr(function, "__name__", "call"), daemon=True).start()
    return await over
