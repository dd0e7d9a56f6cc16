"""The journals of a run as one history.

- Incarnations that go on from each other's journals form one *segment*: they share the run's time and its workers, and
  of a thing that several recorded the last record counts.
- A run that began again at its trainer's checkpoint has several segments. They follow each other without the time
  between them, and the workers of all but the last carry their segment's number in their names.
- Work that a later segment repeated took place and was paid for; only the repetition counts as a result.
"""

import dataclasses
import functools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar, cast

import msgspec

from elastic.core import events as e
from elastic.core.ledger import DeviceBook
from elastic.core.types import Account, Nanoseconds
from elastic.runtime.journal import (
    CONTINUES,
    EvaluatedRow,
    EvaluationRow,
    GroupRow,
    JournalReader,
    JournalRecord,
    SampleRow,
    ShownJournal,
    StepRow,
    StoredRun,
    TrajectoryRow,
)
from elastic.runtime.status import ProviderStatus, RunStatus

R = TypeVar("R", bound=JournalRecord)
E = TypeVar("E", bound=e.Event)

TIMES = (
    *("t_ns", "requested_ns", "first_token_ns", "finished_ns", "left_ns", "started_ns", "ended_ns"),
    *("opened_ns", "cursor_ns", "closed_ns", "expires_at_ns", "deadline_ns"),
)
NAMES = ("lease", "worker", "from_worker", "to_worker")
RESULTS = (StepRow, GroupRow, TrajectoryRow)


class StepExtent(NamedTuple):
    """How many of a step's trajectories are `over`, have `failed` and were `truncated`; and the policy tokens of all,
    and of the longest."""

    over: int
    failed: int
    truncated: int
    tokens: int
    tokens_max: int

    def plus(self, other: "StepExtent") -> "StepExtent":
        return StepExtent(
            self.over + other.over,
            self.failed + other.failed,
            self.truncated + other.truncated,
            self.tokens + other.tokens,
            max(self.tokens_max, other.tokens_max),
        )


class Segment:
    """Journals that go on from each other, told as a part of the whole run.

    Times count from the run's beginning, and `prefix` stands before workers' names. Results of steps from
    `undone_from` on are left out: a later segment did them again.
    """

    def __init__(self, journals: Sequence[JournalReader], begun_ns: Nanoseconds, prefix: str, undone_from: float):
        self.begun_ns = begun_ns
        self.journals = journals
        self.prefix = prefix
        self.undone_from = undone_from
        self._is_retold = bool(begun_ns or prefix)

    @functools.cached_property
    def end_ns(self) -> Nanoseconds:
        return self.begun_ns + max(journal.last_ns() for journal in self.journals)

    def meta(self) -> dict[str, str]:
        return {key: value for journal in self.journals for key, value in journal.meta().items()}

    def rows(self, kind: type[R]) -> list[R]:
        """Records of a kind, as in `JournalReader`."""
        return self._as_whole(kind, [row for journal in self.journals for row in journal.rows(kind)])

    def _as_whole(self, kind: type[R], rows: list[R]) -> list[R]:
        """Records of a kind as the whole has them: the last one of each key, in its time, unless it was undone."""
        if kind.KEY and len(self.journals) > 1:
            rows = list({getattr(row, kind.KEY): row for row in rows}.values())
        if self._is_retold:
            rows = [msgspec.structs.replace(row, **self._retold(msgspec.structs.asdict(row))) for row in rows]
        return [row for row in rows if not self._is_undone(row)]

    def _is_undone(self, row: JournalRecord) -> bool:
        """Evaluations are of a version, which so many steps have led to."""
        if isinstance(row, EvaluationRow | EvaluatedRow):
            return (row.version if isinstance(row, EvaluationRow) else row.step) > self.undone_from
        return isinstance(row, RESULTS) and row.step >= self.undone_from

    def events_of(self, *kinds: type[E]) -> Iterator[tuple[Nanoseconds, E]]:
        """Events of these kinds in their order, each with its time."""
        names = [kind.__name__ for kind in kinds]
        for t_ns, event in (entry for journal in self.journals for entry in journal.events_of(*names)):
            if self._is_retold:
                event = msgspec.structs.replace(event, **self._retold(msgspec.structs.asdict(event)))
            yield self.begun_ns + t_ns, cast(E, event)

    def steps(self, behind: int, most: int) -> list[StepRow]:
        """What each step `behind` one came to, as `rows` has it; of more than `most` in a journal every so-manieth."""
        rows = [row for journal in self.journals for row in journal.thinned(StepRow, most, behind)]
        return self._as_whole(StepRow, rows)

    def mean_rewards(self, steps: Sequence[int]) -> dict[int, float]:
        """The mean reward of the scored trajectories of each of these steps."""
        sums, scored = defaultdict[int, float](float), defaultdict[int, int](int)
        for step, count, total in (row for journal in self.journals for row in journal.reward_sums(steps)):
            if step < self.undone_from and total is not None:
                scored[step] += count
                sums[step] += total
        return {step: sums[step] / count for step, count in scored.items()}

    def lengths(self, steps: Sequence[int]) -> dict[int, StepExtent]:
        """How long the trajectories of each of these steps were."""
        found: dict[int, StepExtent] = {}
        for step, over, failed, truncated, tokens, most in (row for j in self.journals for row in j.step_sums(steps)):
            if step < self.undone_from and tokens is not None:
                more = StepExtent(over, failed, truncated, tokens, most)
                found[step] = found[step].plus(more) if step in found else more
        return found

    def ages(self, steps: Sequence[int]) -> dict[int, tuple[float, int]]:
        """The mean and the highest age, in versions, of the tokens that each of these steps has trained."""
        sums: dict[int, tuple[int, int, int]] = {}
        for step, tokens, total, most in (row for j in self.journals for row in j.age_sums(steps)):
            if step < self.undone_from:
                before = sums.get(step, (0, 0, 0))
                sums[step] = (before[0] + tokens, before[1] + total, max(before[2], most))
        return {step: (total / tokens, most) for step, (tokens, total, most) in sums.items() if tokens}

    def books(self) -> list[DeviceBook]:
        """As they were written last."""
        books = {book.worker: book for journal in self.journals for book in journal.books()}
        if not self._is_retold:
            return list(books.values())
        return [dataclasses.replace(b, **self._retold(dataclasses.asdict(b))) for b in books.values()]

    def samples(self, most: int | None = None, behind_ns: Nanoseconds = -1) -> list[tuple[Nanoseconds, RunStatus]]:
        """Each later than a moment with its time; of more than `most` in a journal every so-manieth."""
        if most is None:
            return [(row.t_ns, row.status) for row in self.rows(SampleRow)]
        behind_ns -= self.begun_ns
        rows = {r.t_ns: r.status for journal in self.journals for r in journal.thinned(SampleRow, most, behind_ns)}
        return [(self.begun_ns + t_ns, status) for t_ns, status in rows.items()]

    def _retold(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """The fields whose values differ in the whole."""
        times = {name: self.begun_ns + fields[name] for name in TIMES if fields.get(name) is not None}
        return times | {name: self.prefix + fields[name] for name in NAMES if name in fields}


class History:
    """All segments of a run as one. `end_ns` is the last moment that a journal tells of."""

    def __init__(self, name: str, journals: Sequence[JournalReader]) -> None:
        """`journals` has that of each incarnation, the first one's first."""
        self.name = name
        chains: list[list[JournalReader]] = []
        for journal in journals:
            if chains and journal.meta().get(CONTINUES) == chains[-1][-1].path.name:
                chains[-1].append(journal)
            else:
                chains.append([journal])
        first_steps = [min(journal.first_step() for journal in chain) for chain in chains[1:]]
        self.segments: list[Segment] = []
        for number, chain in enumerate(chains):
            prefix = f"segment {number + 1}: " if number + 1 < len(chains) else ""
            undone_from = min(first_steps[number:], default=math.inf)
            self.segments.append(Segment(chain, self.end_ns, prefix, undone_from))

    @property
    def end_ns(self) -> Nanoseconds:
        return self.segments[-1].end_ns if self.segments else 0

    @property
    def broken(self) -> list[str]:
        """What of the journals could not be read so far, each with its file."""
        return [words for segment in self.segments for journal in segment.journals for words in journal.broken]

    def rows(self, kind: type[R]) -> list[R]:
        return [row for segment in self.segments for row in segment.rows(kind)]

    def steps(self, behind: int, most: int) -> list[StepRow]:
        """What each step `behind` one came to, as `rows` has it. `most` as in `Segment`."""
        return [row for segment in self.segments for row in segment.steps(behind, most)]

    def mean_rewards(self, steps: Sequence[int]) -> dict[int, float]:
        """The mean reward of the scored trajectories of each of these steps."""
        return {step: mean for segment in self.segments for step, mean in segment.mean_rewards(steps).items()}

    def lengths(self, steps: Sequence[int]) -> dict[int, StepExtent]:
        """How long the trajectories of each of these steps were."""
        return {step: found for segment in self.segments for step, found in segment.lengths(steps).items()}

    def ages(self, steps: Sequence[int]) -> dict[int, tuple[float, int]]:
        """The mean and the highest age, in versions, of the tokens that each of these steps has trained."""
        return {step: found for segment in self.segments for step, found in segment.ages(steps).items()}

    def events_of(self, *kinds: type[E]) -> Iterator[tuple[Nanoseconds, E]]:
        return (entry for segment in self.segments for entry in segment.events_of(*kinds))

    def segment_at(self, t_ns: Nanoseconds) -> int:
        """The number, from 1 on, of the segment at that time."""
        return sum(segment.begun_ns <= t_ns for segment in self.segments)

    def books(self) -> list[DeviceBook]:
        """Every segment's books.

        A crash leaves books open. These end with their segment, and their last stretch is unattributed.
        """
        books: list[DeviceBook] = []
        for segment in self.segments:
            books += segment.books()
            if segment is self.segments[-1]:
                break
            for book in books:
                if book.closed_ns is None:
                    book.add(Account.UNATTRIBUTED, segment.end_ns - book.cursor_ns)
                    book.closed_ns = segment.end_ns
        return books

    def samples(self, most: int | None = None, behind_ns: Nanoseconds = -1) -> list[tuple[Nanoseconds, RunStatus]]:
        """Every segment's samples; tokens and costs of each provider include those of earlier segments. `most` and
        `behind_ns` as in `Segment`."""
        samples: list[tuple[Nanoseconds, RunStatus]] = []
        for segment in self.segments:
            before = samples[-1][1].providers if samples else {}
            for t_ns, status in segment.samples(most, behind_ns if segment is self.segments[-1] else -1):
                for name, earlier in before.items():
                    provider = status.providers.setdefault(name, ProviderStatus())
                    provider.tokens += earlier.tokens
                    provider.usd += earlier.usd
                samples.append((t_ns, status))
        return [sample for sample in samples if sample[0] > behind_ns]


def config_of(meta: Mapping[str, str]) -> dict[str, Any] | None:
    """The configuration that a journal notes; None where what it notes is none."""
    try:
        return msgspec.json.decode(meta.get("config", "{}"), type=dict[str, Any])
    except msgspec.DecodeError:
        return None


@contextmanager
def history_of(run: StoredRun) -> Iterator[History]:
    """The whole history of a run, of each journal as far as it goes. Raises `JournalError` where one cannot be read."""
    with run.journals(ShownJournal) as journals:
        yield History(run.name, journals)
