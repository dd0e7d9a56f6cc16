"""Short reads of many requests, carried out together: a thread and a connection for a few of them, not for each.

What comes while all threads are at work waits for the next one, so nothing that is found is older than its request.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError

from elastic.server.store.database import Store, StoreUnavailable

T = TypeVar("T")

THREADS = 4
AT_ONCE = 16
"""Reads that one thread carries out over one connection."""
WAITING = 4_096
"""Reads that wait for a thread; beyond these, requests are refused at once."""

_Find = Callable[[sa.Connection], Any]


class GatheredReads:
    """Reads of a store, for requests of any event loops. Each raises its own exceptions; a database that fails fails
    all reads of its connection. One that hangs is waited for no longer than `timeout_s`."""

    def __init__(self, store: Store, timeout_s: float) -> None:
        self._store = store
        self._timeout_s = timeout_s
        self._threads = ThreadPoolExecutor(THREADS, "reads")
        self._waiting: deque[tuple[_Find, Future[Any]]] = deque()

    async def read(self, find: Callable[[sa.Connection], T]) -> T:
        """Return what `find` finds, which is called in a thread. Raises what it raises, and `StoreUnavailable`."""
        if len(self._waiting) >= WAITING:  # Of a database that hangs, also those that nobody waits for any more.
            raise StoreUnavailable("too many requests wait for its answers")
        found: Future[T] = Future()
        self._waiting.append((find, found))
        self._threads.submit(self._work)
        try:
            async with asyncio.timeout(self._timeout_s):
                return await asyncio.wrap_future(found)
        except TimeoutError:
            raise StoreUnavailable(f"no answer within {self._timeout_s:g} s") from None

    def _work(self) -> None:
        """Carry out what waits; nothing, where other threads have taken it all."""
        taken: list[tuple[_Find, Future[Any]]] = []
        with contextlib.suppress(IndexError):
            while len(taken) < AT_ONCE:
                find, found = self._waiting.popleft()
                if found.set_running_or_notify_cancel():
                    taken.append((find, found))
        if not taken:
            return
        for (_, found), (value, error) in zip(taken, self._answers([find for find, _ in taken]), strict=True):
            if error is None:
                found.set_result(value)
            else:
                found.set_exception(error)

    def _answers(self, wanted: list[_Find]) -> list[tuple[Any, Exception | None]]:
        answers: list[tuple[Any, Exception | None]] = []
        try:
            with self._store.reading() as connection:
                answers.extend(_answer(find, connection) for find in wanted)
        except Exception as error:
            answers += [(None, error)] * (len(wanted) - len(answers))
        return answers


def _answer(find: _Find, connection: sa.Connection) -> tuple[Any, Exception | None]:
    try:
        return find(connection), None
    except SQLAlchemyError:
        raise
    except Exception as error:
        return None, error
