"""Short reads of many requests, carried out together: a thread and a connection for a few of them, not for each.

What comes while all threads are at work waits for the next one, so nothing that is found is older than its request.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError

from elastic.server.store.database import Store

T = TypeVar("T")

THREADS = 4
AT_ONCE = 16
"""Reads that one thread carries out over one connection."""

_Find = Callable[[sa.Connection], Any]


class GatheredReads:
    """Reads of a store, for one event loop. Each raises its own exceptions; a database that fails fails all reads of
    its connection."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._threads = ThreadPoolExecutor(THREADS, "reads")
        self._waiting: deque[tuple[_Find, asyncio.Future[Any]]] = deque()
        self._working: set[asyncio.Task[None]] = set()

    async def read(self, find: Callable[[sa.Connection], T]) -> T:
        """Return what `find` finds, which is called in a thread. Raises what it raises, and `StoreUnavailable`."""
        found: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._waiting.append((find, found))
        if len(self._working) < THREADS:
            work = asyncio.create_task(self._work(), name="reads")
            self._working.add(work)
            work.add_done_callback(self._working.discard)
        return await found

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting:
            taken = [self._waiting.popleft() for _ in range(min(AT_ONCE, len(self._waiting)))]
            answers = await loop.run_in_executor(self._threads, self._answers, [find for find, _ in taken])
            for (_, found), (value, error) in zip(taken, answers, strict=True):
                if found.done():  # Who asked is gone.
                    continue
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
