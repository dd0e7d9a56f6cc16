"""Waiting for what others bring about, by looking again and again."""

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar, cast

T = TypeVar("T")
EVERY_S = 0.05


def until(
    what: str, found: Callable[[], T | None], within_s: float, every_s: float = EVERY_S, *, must: bool = True
) -> T:
    """The first true value of `found`.

    Raises `TimeoutError`, which names `what`, where there is none in time; unless there must be one, the last value is
    returned then.
    """
    ends_s = time.monotonic() + within_s
    while not (value := found()) and not _late(what, within_s, ends_s, must):
        time.sleep(every_s)
    return cast(T, value)


async def awaited(
    what: str, found: Callable[[], T | None], within_s: float, every_s: float = EVERY_S, *, must: bool = True
) -> T:
    """As `until`, while the loop goes on."""
    ends_s = time.monotonic() + within_s
    while not (value := found()) and not _late(what, within_s, ends_s, must):  # noqa: ASYNC110
        await asyncio.sleep(every_s)
    return cast(T, value)


def _late(what: str, within_s: float, ends_s: float, must: bool) -> bool:
    late = time.monotonic() > ends_s
    if late and must:
        raise TimeoutError(f"not within {within_s:g} s: {what}")
    return late
