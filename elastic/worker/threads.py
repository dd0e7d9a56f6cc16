"""Blocking calls off the event loop, on threads that never keep a process alive."""

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from elastic.system.host import here
from elastic.system.thread_lane import promised

LOOK_SHARE = 1 / 10
"""Interval of looking at progress, as a share of the timeout."""

P = ParamSpec("P")
T = TypeVar("T")


class DaemonThread:
    """One thread that makes calls in the order of their requests.

    A call that never returns delays the calls behind it, which then time out too. Unlike a thread of
    `asyncio.to_thread`, it does not delay the process's exit.
    """

    def __init__(self, name: str) -> None:
        self._lane = here().lane(name)

    async def run(self, timeout_s: float, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return the call's result. Raises `TimeoutError` if it is late; the call itself goes on."""
        async with asyncio.timeout(timeout_s):
            return await self._ask(function, *args, **kwargs)

    async def run_while(
        self,
        progress: Callable[[], object],
        timeout_s: float,
        function: Callable[P, T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """As `run`, but the time counts from the last change of `progress`."""
        loop = asyncio.get_running_loop()
        future = self._ask(function, *args, **kwargs)
        seen, since_s = progress(), loop.time()
        try:
            while True:
                await asyncio.wait({future}, timeout=timeout_s * LOOK_SHARE)
                if future.done():
                    return future.result()
                if (now := progress()) != seen:
                    seen, since_s = now, loop.time()
                elif loop.time() - since_s >= timeout_s:
                    raise TimeoutError
        finally:
            future.cancel()

    def _ask(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]:
        result, call = promised(function, *args, **kwargs)
        self._lane.submit(call)
        return asyncio.wrap_future(result)

    def stop(self) -> None:
        """End the thread after its pending calls. No call may be requested after this."""
        self._lane.stop()


async def run_in_thread(timeout_s: float, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Make one call on a thread of its own; as `DaemonThread.run`."""
    thread = DaemonThread(getattr(function, "__name__", "call"))
    try:
        return await thread.run(timeout_s, function, *args, **kwargs)
    finally:
        thread.stop()
