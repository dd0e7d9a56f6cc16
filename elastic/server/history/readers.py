"""Threads that read what projects' users wrote: however long that takes, it delays nobody but their own project."""

from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

import anyio
from anyio.to_thread import run_sync

T = TypeVar("T")

PER_PROJECT = 4
"""Reads of one project at once; others of it wait, without a thread."""


class ReadFiles(Protocol):
    """Calls a function that reads files of a project, in a thread of the project's."""

    def __call__(self, read: Callable[[], T], /) -> Awaitable[T]: ...


class TenantReaders:
    """The threads of all projects, of one event loop."""

    def __init__(self) -> None:
        self._limiters: dict[str, anyio.CapacityLimiter] = {}

    def of(self, project: str) -> ReadFiles:
        def reading(read: Callable[[], T], /) -> Awaitable[T]:
            limiter = self._limiters.setdefault(project, anyio.CapacityLimiter(PER_PROJECT))
            return run_sync(read, limiter=limiter)

        return reading
