"""Rows on their way to one logger: each is there once, whatever dies meanwhile.

- A logger is asked which rows it has before anything is written: at the beginning, and after each failure. What it has
  is not written again; what it lacks is.
- Rows are written in the order of their steps.
- Nothing is remembered between two processes: a position that is kept elsewhere can differ from what was written.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import msgspec


class TrackedSample(msgspec.Struct, frozen=True, kw_only=True):
    """A trajectory as a person reads it: its reward, and its messages with the keys `role` and `content`."""

    trajectory: str
    reward: float
    messages: list[dict[str, str]]


class TrackedRow(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of one finished step. `at_s` is the time of its end, in seconds since 1970."""

    step: int
    at_s: float
    figures: Mapping[str, float]
    samples: Sequence[TrackedSample] = ()


class TrackedRun(msgspec.Struct, frozen=True, kw_only=True):
    """The run as loggers know it. Its name is its own in `project`; what a logger keeps on this machine may be below
    `directory`. `settings` are shown beside the curves."""

    name: str
    project: str
    directory: Path
    settings: Mapping[str, Any] = {}


class LoggerDown(Exception):
    """A logger could not be reached or written. What was under way may be there or not. The message says why."""


class Logger(Protocol):
    """Where rows go. All methods block. Whatever they raise means that the logger is down for now."""

    def open(self) -> set[int]:
        """Connect, anew where something has failed. Returns the steps whose rows are there."""
        ...

    def write(self, row: TrackedRow) -> None:
        """Add a row behind all that are there: all of it or nothing, now or soon."""
        ...

    def close(self) -> None:
        """Have all that was written be there, and disconnect."""
        ...


class Delivery:
    """Brings rows to one logger."""

    def __init__(self, logger: Logger) -> None:
        self._logger = logger
        self._there: set[int] | None = None
        """Steps whose rows the logger has; None while it has to be asked."""
        self._passed = 0
        """How many of the finished steps, from the first on, the tracker has."""

    def advance(self, finished: Sequence[int], row_of: Callable[[int], TrackedRow]) -> int:
        """Write the rows of finished steps that are not there yet; returns how many. Raises `LoggerDown`.

        `finished` has all that was finished at the call before, in the same order, and more.
        """
        written = 0
        if self._there is None:
            self._passed = 0
            with self._asking():
                self._there = self._logger.open()
        while self._passed < len(finished):
            step = finished[self._passed]
            if step not in self._there:
                row = row_of(step)
                with self._asking():
                    self._logger.write(row)
                self._there.add(step)
                written += 1
            self._passed += 1
        return written

    def lacking(self, finished: Iterable[int]) -> int:
        """How many finished steps are not known to be there."""
        return sum(step not in (self._there or ()) for step in finished)

    def close(self) -> None:
        """Raises `LoggerDown`."""
        if self._there is not None:
            with self._asking():
                self._logger.close()
            self._there = None

    @contextmanager
    def _asking(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # Libraries raise what they like; either way the logger is to be asked again.
            self._there = None
            first_line = str(error).strip().partition("\n")[0]
            raise LoggerDown(first_line or type(error).__name__) from error
