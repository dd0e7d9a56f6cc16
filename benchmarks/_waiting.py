"""Waiting for what others bring about, by looking again and again; and processes of a benchmark's own, which are asked
over a pipe."""

import asyncio
import multiprocessing
import time
from collections.abc import Callable
from typing import Any, Self, TypeVar

T = TypeVar("T")
EVERY_S = 0.05
WITHIN_S = 240.0


def comes(found: Callable[[], T | None], within_s: float, every_s: float = EVERY_S) -> T | None:
    """The first true value of `found`, None where there is none in time."""
    ends_s = time.monotonic() + within_s
    while not (value := found()):
        if time.monotonic() > ends_s:
            return None
        time.sleep(every_s)
    return value


def until(what: str, found: Callable[[], T | None], within_s: float, every_s: float = EVERY_S) -> T:
    """As `comes`. Raises `TimeoutError`, which names `what`."""
    if value := comes(found, within_s, every_s):
        return value
    raise TimeoutError(f"not within {within_s:g} s: {what}")


async def coming(found: Callable[[], T | None], within_s: float, every_s: float = EVERY_S) -> T | None:
    """As `comes`, while the loop goes on."""
    ends_s = time.monotonic() + within_s
    while not (value := found()):
        if time.monotonic() > ends_s:
            return None
        await asyncio.sleep(every_s)
    return value


async def awaited(what: str, found: Callable[[], T | None], within_s: float, every_s: float = EVERY_S) -> T:
    """As `until`, while the loop goes on."""
    if value := await coming(found, within_s, every_s):
        return value
    raise TimeoutError(f"not within {within_s:g} s: {what}")


class Child:
    """A process that runs `work` with its end of a pipe and these arguments. It is killed at the end of the context,
    unless it ends by itself within `ends_within_s`."""

    def __init__(
        self,
        work: Callable[..., object],
        *arguments: object,
        context: Any = multiprocessing,
        daemon: bool = True,
        ends_within_s: float = 0.0,
    ) -> None:
        self.pipe, far = context.Pipe()
        self._process = context.Process(target=work, args=(far, *arguments), daemon=daemon)
        self._ends_within_s = ends_within_s
        self._process.start()
        far.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.join(self._ends_within_s)
        self.close()

    def hear(self, within_s: float = WITHIN_S) -> Any:
        """What it says next. Raises it where it is an exception, and `TimeoutError`."""
        if not self.pipe.poll(within_s):
            raise TimeoutError(f"a process said nothing for {within_s:g} s")
        said = self.pipe.recv()
        if isinstance(said, Exception):
            raise said
        return said

    async def ask(self, question: object, within_s: float = WITHIN_S) -> Any:
        self.pipe.send(question)
        return await asyncio.to_thread(self.hear, within_s)

    def close(self) -> None:
        self._process.kill()
        self._process.join()
        self.pipe.close()
