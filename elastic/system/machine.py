"""What this machine gives a process: file descriptors, pauses of its own choosing, and a look at its processors."""

import asyncio
import contextlib
import gc
import os
import resource
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import psutil

T = TypeVar("T")


def raise_descriptor_limit() -> int:
    """Allow this process as many open files as it may have, instead of the fewer that it was given; returns how many.

    Every connection takes one.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


LOWEST_PRIORITY = 19


def quietly(work: Callable[[], T]) -> T:
    """Do this on a thread of the lowest CPU priority, and by default I/O priority, and return its result or raise its
    error.

    On Linux priorities are a thread's own, and a process may not raise them again without privileges: so only this
    thread, and those that it starts, give way to others.
    """
    with ThreadPoolExecutor(1, "quiet", initializer=_lower_priority) as thread:
        return thread.submit(work).result()


def _lower_priority() -> None:
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)


FULL_COLLECTION_INTERVAL_S = 60.0
YOUNG_COLLECTION_INTERVAL_S = 0.05
YOUNG_OBJECTS, YOUNG_ROUNDS, NEVER = 10_000, 2, 1 << 30
"""The thresholds for young objects, which `collect_young` has gone before they are reached, so that collections come
between decisions; for old ones, one that is not reached."""


def defer_full_collections() -> None:
    """Leave what exists now out of all garbage collections, and have the old generation collected on request only.

    A full collection walks every object of a process. Of a large run that takes tens of milliseconds, and it would come
    in the middle of a decision.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, YOUNG_ROUNDS, NEVER)


def collect_young() -> None:
    """To be called every `YOUNG_COLLECTION_INTERVAL_S`, so that what has come since is little.

    CPython counts how many more objects have come than gone. Thresholds alone would have collections in the middle of
    one decision in two hundred; and a process whose old objects go as fast as new ones come reaches them late, and then
    a collection walks tens of thousands.
    """
    gc.collect(1)


async def collect_between_decisions() -> None:
    """The collections of a process that has deferred them, for ever: as a task of the loop they come between two
    callbacks."""
    while True:
        for _ in range(round(FULL_COLLECTION_INTERVAL_S / YOUNG_COLLECTION_INTERVAL_S)):
            await asyncio.sleep(YOUNG_COLLECTION_INTERVAL_S)
            collect_young()
        gc.collect()


class CpuSampler:
    """The share of the machine's processors that was in use since the last look.

    Where it cannot be read (no descriptor is left), it is what it was last.
    """

    def __init__(self) -> None:
        self._share = 0.0

    def share(self) -> float:
        with contextlib.suppress(OSError):
            self._share = psutil.cpu_percent() / 100
        return self._share
