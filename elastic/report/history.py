"""The journals of a run as one history.

An incarnation that went on from the journal of the one before shares a life with it: one time, one set of workers, and
of each thing its last record counts. A run that was begun again at its trainer's checkpoint has several lives: they
follow each other without what lay between them, and their workers have different names. What a later life did again,
for want of a checkpoint, took place and was paid for, but it is no result.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec

from elastic.core import events as e
from elastic.core.ledger import DeviceBook
from elastic.core.types import Account, Nanoseconds
from elastic.runtime.journal import (
    CONTINUES,
    GroupRow,
    JournalReader,
    JournalRecord,
    SampleRow,
    StepRow,
    StoredRun,
    TrajectoryRow,
)
from elastic.runtime.status import ProviderStatus, RunStatus

R = TypeVar("R", bound=JournalRecord)

TIMES = (
    *("t_ns", "requested_ns", "first_token_ns", "finished_ns", "left_ns", "started_ns", "ended_ns"),
    *("opened_ns", "cursor_ns", "closed_ns", "expires_at_ns", "deadline_ns"),
)
NAMES = ("lease", "worker", "from_worker", "to_worker")
RESULTS = (StepRow, GroupRow, TrajectoryRow)


class Segment:
    """Journals that go on from each other as a part of the whole: in the run's time, and with `prefix` before its
    workers' names.

    Of its results those of steps from `undone_from` on are left out.
    """

    def __init__(self, journals: Sequence[JournalReader], begun_ns: Nanoseconds, prefix: str, undone_from: float):
        self.begun_ns = begun_ns
        self.end_ns = begun_ns + max(journal.last_ns() for journal in journals)
        self._journals = journals
        self.prefix = prefix
        self._undone_from = undone_from

    def meta(self) -> dict[str, str]:
        return {key: value for journal in self._journals for key, value in journal.meta().items()}

    def rows(self, kind: type[R]) -> list[R]:
        """Records of a kind, as in `JournalReader`."""
        rows = [row for journal in self._journals for row in journal.rows(kind)]
        if kind.KEY and len(self._journals) > 1:
            rows = list({getattr(row, kind.KEY): row for row in rows}.values())
        if self.begun_ns or self.prefix:
            rows = [msgspec.structs.replace(row, **self._retold(msgspec.structs.asdict(row))) for row in rows]
        return [row for row in rows if not isinstance(row, RESULTS) or row.step < self._undone_from]

    def events_of(self, *kinds: str) -> Iterator[tuple[Nanoseconds, e.Event]]:
        """Events, as in `JournalReader`."""
        for t_ns, event in (entry for journal in self._journals for entry in journal.events_of(*kinds)):
            yield self.begun_ns + t_ns, msgspec.structs.replace(event, **self._retold(msgspec.structs.asdict(event)))

    def books(self) -> list[DeviceBook]:
        """As they were written last."""
        books = {book.worker: book for journal in self._journals for book in journal.books()}
        return [dataclasses.replace(b, **self._retold(dataclasses.asdict(b))) for b in books.values()]

    def samples(self) -> list[tuple[Nanoseconds, RunStatus]]:
        return [(row.t_ns, row.status) for row in self.rows(SampleRow)]

    def _retold(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """What is another in the whole."""
        times = {name: self.begun_ns + fields[name] for name in TIMES if fields.get(name) is not None}
        return times | {name: self.prefix + fields[name] for name in NAMES if name in fields}


class History:
    """All lives of a run, read as if they were one. `end_ns` is the last moment that is known of it."""

    def __init__(self, name: str, journals: Sequence[JournalReader]) -> None:
        """`journals` has that of each incarnation, the first one's first."""
        self.name = name
        lives: list[list[JournalReader]] = []
        for journal in journals:
            if lives and journal.meta().get(CONTINUES) == lives[-1][-1].path.name:
                lives[-1].append(journal)
            else:
                lives.append([journal])
        first_steps = [min(map(_first_step, life)) for life in lives[1:]]
        self.lives: list[Segment] = []
        self.end_ns = 0
        for number, life in enumerate(lives):
            prefix = f"life {number + 1}: " if number + 1 < len(lives) else ""
            undone_from = min(first_steps[number:], default=math.inf)
            self.lives.append(Segment(life, self.end_ns, prefix, undone_from))
            self.end_ns = self.lives[-1].end_ns

    def rows(self, kind: type[R]) -> list[R]:
        return [row for life in self.lives for row in life.rows(kind)]

    def events_of(self, *kinds: str) -> Iterator[tuple[Nanoseconds, e.Event]]:
        return (entry for life in self.lives for entry in life.events_of(*kinds))

    def life_at(self, t_ns: Nanoseconds) -> int:
        """The number, from 1 on, of the life that was lived then."""
        return sum(life.begun_ns <= t_ns for life in self.lives)

    def books(self) -> list[DeviceBook]:
        """Every life's. One that a crash left open ends with its life, and what is missing in it is unattributed."""
        books: list[DeviceBook] = []
        for life in self.lives:
            books += life.books()
            if life is self.lives[-1]:
                break
            for book in books:
                if book.closed_ns is None:
                    book.add(Account.UNATTRIBUTED, life.end_ns - book.cursor_ns)
                    book.closed_ns = life.end_ns
        return books

    def samples(self) -> list[tuple[Nanoseconds, RunStatus]]:
        """Every life's, with what each provider's earlier workers accepted and cost."""
        samples: list[tuple[Nanoseconds, RunStatus]] = []
        for life in self.lives:
            before = samples[-1][1].providers if samples else {}
            for t_ns, status in life.samples():
                for name, earlier in before.items():
                    provider = status.providers.setdefault(name, ProviderStatus())
                    provider.tokens += earlier.tokens
                    provider.usd += earlier.usd
                samples.append((t_ns, status))
        return samples


@contextmanager
def history_of(run: StoredRun) -> Iterator[History]:
    """The whole history of a run. Raises `JournalError` where a journal of it cannot be read."""
    with run.journals() as journals:
        yield History(run.name, journals)


def _first_step(journal: JournalReader) -> float:
    """The first that a life has come to anything in."""
    return min((row.step for kind in (StepRow, GroupRow) for row in journal.rows(kind)), default=math.inf)
