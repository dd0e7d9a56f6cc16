"""Looks at what many streams ask for again and again: one for all that ask within an interval."""

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from typing import Any, TypeVar

Found = TypeVar("Found")


class SharedLooks:
    """What was found lately, each under its key: nothing is found anew within `fresh_s`.

    An event loop shares its own looks only: one that ended cannot say how old its looks are.
    """

    def __init__(self, fresh_s: float) -> None:
        self._fresh_s = fresh_s
        self._looks: dict[Hashable, asyncio.Future[Any]] = {}

    async def at(
        self,
        key: Hashable,
        find: Callable[[], Found],
        in_thread: Callable[..., Awaitable[Any]] = asyncio.to_thread,
        fresh_s: float | None = None,
    ) -> Found:
        """Return what `find` finds, which is called in a thread, or what it found at most `fresh_s` ago (by default as
        old as all looks here may be). Raises what `find` raises."""
        look, loop = self._looks.get(key), asyncio.get_running_loop()
        if look is None or look.get_loop() is not loop:
            look = self._looks[key] = asyncio.ensure_future(in_thread(find))
            until_s = self._fresh_s if fresh_s is None else fresh_s
            look.add_done_callback(lambda done: loop.call_later(until_s, self._forget, key, done))
        return await asyncio.shield(look)

    def _forget(self, key: Hashable, look: asyncio.Future[Any]) -> None:
        if self._looks.get(key) is look:
            del self._looks[key]
