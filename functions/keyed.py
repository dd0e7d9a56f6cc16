"""What all function pools share: a key's call runs once at a time, its result is kept, and repeats join it."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import msgspec

from functions.base import (
    BadResult,
    FunctionMissing,
    FunctionRaised,
    FunctionTimedOut,
    FunctionUnavailable,
    Meter,
)
from functions.process import Answer, Loaded, Missing, Raised, Returned, Unsendable

RECORDED_MAX = 100_000
"""Number of results that a pool keeps, the newest ones. It exceeds the calls of a run at any one time."""

UNDECODABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What msgspec raises for bytes that are no answer: the last for nesting beyond all reason."""


def value_of(function: str, answer: Answer) -> Any:
    """Return the function's result; None if it was only loaded. Raises `FunctionError`."""
    match answer:
        case Returned(result):
            try:
                return msgspec.msgpack.decode(result)
            except UNDECODABLE as error:
                raise BadResult(f"{function}: its result makes no sense: {error}") from error
        case Raised(error):
            raise FunctionRaised(f"{function} raised {error}")
        case Unsendable(error):
            raise BadResult(f"{function}: its result of type {error}")
        case Missing(error):
            raise FunctionMissing(f"{function} cannot be loaded: {error}")
        case Loaded():
            return None


class KeyedPool:
    """The part of a `FunctionPool` that knows calls by key. A subclass makes the single call."""

    def __init__(self, function: str, meter: Meter) -> None:
        self.function = function
        self._meter = meter
        self._calls: dict[str, asyncio.Task[Any]] = {}
        self._recorded: dict[str, Any] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed = False

    async def _call(self, key: str, payload: bytes, timeout_s: float) -> Any:
        """Make the call of a key, and meter it. Raises `FunctionError`."""
        raise NotImplementedError

    async def invoke(self, key: str, payload: Any, timeout_s: float) -> Any:
        if key in self._recorded:
            return self._recorded[key]
        if self._closed:
            raise FunctionUnavailable(f"{self.function}: its pool is closed")
        if (running := self._calls.get(key)) is not None:
            await asyncio.wait({running}, timeout=timeout_s)
            if not running.done():
                raise self._timed_out(timeout_s)
            return self._result_of(running)
        encoded = msgspec.msgpack.encode(payload)
        call = self._own(self._recording(key, encoded, timeout_s), f"{self.function} of {key}")
        self._calls[key] = call
        call.add_done_callback(lambda call: self._ended(key, call))
        await asyncio.wait({call})
        return self._result_of(call)

    async def _end_calls(self) -> None:
        """Cancel every call, and wait until nothing of the pool runs here."""
        self._closed = True
        for call in self._calls.values():
            call.cancel()
        await self._settled()

    async def _settled(self) -> None:
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def _recording(self, key: str, payload: bytes, timeout_s: float) -> Any:
        result = await self._call(key, payload, timeout_s)
        self._recorded[key] = result
        if len(self._recorded) > RECORDED_MAX:
            del self._recorded[next(iter(self._recorded))]
        return result

    def _result_of(self, call: asyncio.Task[Any]) -> Any:
        if call.cancelled():
            raise FunctionUnavailable(f"{self.function}: its pool was closed")
        return call.result()

    def _ended(self, key: str, call: asyncio.Task[Any]) -> None:
        del self._calls[key]
        if not call.cancelled():
            call.exception()  # the caller may have left: nobody else would look at it

    def _timed_out(self, timeout_s: float) -> FunctionTimedOut:
        return FunctionTimedOut(f"{self.function} did not answer within {timeout_s:g} s")

    def _own(self, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
