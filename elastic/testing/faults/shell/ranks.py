"""The ranks of a modelled trainer. What is done together is done when all have done it, as in collectives.

In checkpoints each rank is a thread of the trainer's process, and writes and reads files of its own by the production
code's protocol. A stopped rank does nothing at its next step, and at all others until it goes on.
"""

import contextlib
import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec

from elastic.core.types import NS_PER_S, Nanoseconds
from elastic.engine.model.stored import CheckpointError
from elastic.system.host import here
from elastic.worker.trainer import checkpoint
from elastic.worker.trainer.ranks import Ranks

T = TypeVar("T")

STEP_S = 0.02
"""Longest that a rank takes for anything, unless it is stopped."""
FILES = 2
"""The files of each rank in a checkpoint: it can be killed between them."""


class TrainerRanks:
    """All ranks of one trainer's process. `now_ns` is the world's time."""

    def __init__(self, size: int, now_ns: Callable[[], Nanoseconds]) -> None:
        self.size = size
        self._now_ns = now_ns
        self._stopped_until_ns = [0] * size
        self._began_ns: Nanoseconds | None = None

    def stop(self, rank: int, until_ns: Nanoseconds) -> None:
        self._stopped_until_ns[rank] = max(until_ns, self._stopped_until_ns[rank])

    @property
    def are_well(self) -> bool:
        """Whether none is stopped."""
        return self._now_ns() >= max(self._stopped_until_ns)

    def waited_s(self) -> float:
        """How long they have been at what they do now; 0 where they do nothing."""
        return 0.0 if self._began_ns is None else (self._now_ns() - self._began_ns) / NS_PER_S

    def together(self) -> None:
        """Do what takes each rank a step. Called on a thread of the process, and nothing else is done meanwhile."""
        if self.size > 1:
            with self._under_way():
                for rank in range(self.size):
                    self.step(rank)

    def save(self, path: Path, counters: checkpoint.Counters, parts: list[bytes]) -> None:
        """Write a checkpoint with a part of each rank's."""

        def write(ranks: "_Together") -> None:
            checkpoint.write_directory(path, counters, ranks, partial(_write_part, ranks, parts[ranks.rank]))

        self._on_each(write)

    def load(self, path: Path) -> tuple[checkpoint.Counters, list[bytes]]:
        """Read a checkpoint: its counters, and each rank's part. Raises `CheckpointError`."""

        def read(ranks: "_Together") -> tuple[checkpoint.Counters, bytes]:
            counters = checkpoint.read_directory(path, ranks)
            return counters, b"".join(file.read_bytes() for file in _files(path, ranks.rank))

        found = self._on_each(read)
        return found[0][0], [part for _, part in found]

    def step(self, rank: int) -> None:
        """The rank goes on, unless it is stopped. Called on its thread."""
        here().sleep(random.uniform(0, STEP_S))
        while (left_ns := self._stopped_until_ns[rank] - self._now_ns()) > 0:
            here().sleep(left_ns / NS_PER_S)

    def _on_each(self, work: Callable[["_Together"], T]) -> list[T]:
        """Do this on all ranks at the same time. Raises the first one's `CheckpointError`, which all have."""
        meeting, found = _Meeting(self.size), dict[int, T | CheckpointError]()

        def carry_out(rank: int) -> None:
            self.step(rank)
            try:
                result: T | CheckpointError = work(_Together(self, rank, meeting))
            except CheckpointError as error:
                result = error
            meeting.enter(found, rank, result)

        with self._under_way():
            for rank in range(1, self.size):
                here().thread(target=partial(carry_out, rank), name=f"rank {rank}").start()
            carry_out(0)
            meeting.wait(found)
        results: list[T] = []
        for _, result in sorted(found.items()):
            if isinstance(result, CheckpointError):
                raise result
            results.append(result)
        return results

    @contextlib.contextmanager
    def _under_way(self) -> Iterator[None]:
        self._began_ns = self._now_ns()
        try:
            yield
        finally:
            self._began_ns = None


class _Meeting:
    """Where the ranks wait for each other."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._changed = here().condition()
        self.said: dict[int, dict[int, str]] = {}
        """What the ranks have said: the first of each, the second, and so on."""

    def enter(self, found: dict[int, T], rank: int, result: T) -> None:
        with self._changed:
            found[rank] = result
            self._changed.notify_all()

    def wait(self, found: dict[int, T]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: len(found) == self._size)


class _Together(Ranks):
    """One of the ranks, as production code has it."""

    def __init__(self, trainer: TrainerRanks, rank: int, meeting: _Meeting) -> None:
        self.rank, self.size = rank, trainer.size
        self._trainer, self._meeting = trainer, meeting
        self._calls = 0

    def step(self) -> None:
        self._trainer.step(self.rank)

    def texts(self, mine: str) -> list[str]:
        self.step()
        said = self._meeting.said.setdefault(self._calls, {})
        self._calls += 1
        self._meeting.enter(said, self.rank, mine)
        self._meeting.wait(said)
        return [said[rank] for rank in range(self.size)]


def whole(path: Path, ranks: int) -> bool:
    """Whether all ranks' parts of a checkpoint are there, as they were written."""
    try:
        checkpoint.read_directory(path)
    except CheckpointError:
        return False
    return all(len(_files(path, rank)) == FILES for rank in range(ranks))


def _write_part(ranks: _Together, part: bytes, directory: Path) -> None:
    half = len(part) // FILES
    for number, content in enumerate((part[:half], part[half:])):
        ranks.step()
        (directory / f"__{ranks.rank}_{number}").write_bytes(content)


def _files(path: Path, rank: int) -> list[Path]:
    return sorted(path.glob(f"__{rank}_*"))


def dealt(parts: int, content: list[T]) -> list[bytes]:
    """The content in so many parts, of which each has every so many-th."""
    return [msgspec.msgpack.encode(content[part::parts]) for part in range(parts)]


def gathered(kind: type[T], parts: list[bytes]) -> list[T]:
    """What `dealt` has dealt."""
    piles = [msgspec.msgpack.decode(part, type=list[kind]) for part in parts]
    return [piles[place % len(piles)][place // len(piles)] for place in range(sum(map(len, piles)))]
