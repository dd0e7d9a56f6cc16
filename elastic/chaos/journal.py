"""The production journal without its thread: it commits when the process's loop gets round to it."""

import asyncio
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path

from elastic.chaos.loops import ProcessLoop
from elastic.runtime.journal import SqliteJournal


class SteppedJournal(SqliteJournal):
    def __init__(self, path: Path, commit_interval_s: float, notes: Mapping[str, str]) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, ProcessLoop)
        self._loop = loop
        super().__init__(path, commit_interval_s, notes=notes)
        self._connection.execute("PRAGMA synchronous=OFF")  # What dies here are processes, not machines.

    def durable(self) -> "Future[None]":
        future = super().durable()
        if not future.done():
            self._loop.call_later(self._loop.offload_s(), self._write_once)
        return future

    def _start(self) -> None:
        self._loop.call_later(self._interval_s, self._tick)

    def _tick(self) -> None:
        if not self._closed:
            self._write_once()
            self._start()

    def _finish(self) -> None:
        self._write_once()
