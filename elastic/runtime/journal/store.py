"""Where runs are kept, and where the journals of their incarnations are found."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Protocol

from elastic.config import ConfigError, JournalConfig, given_path
from elastic.core.ids import is_evaluated
from elastic.core.types import TrajectoryId
from elastic.runtime.journal.reader import JournalReader
from elastic.runtime.journal.records import EvaluatedRow, TrajectoryRow
from elastic.runtime.journal.writer import JournalError, SqliteJournal
from elastic.system.files import write_whole

JOURNAL = "journal.sqlite"
"""The first incarnation's journal. The second's is `journal.2.sqlite`, and so on; none is ever moved."""
CONFIG = "config.json"
"""The file that makes a directory a run's."""
START = "start"
"""The file in which a run notes when it began, in nanoseconds since 1970: files' times change, and clocks are set."""
SIMULATED = "simulated"
"""The key of a journal's note of what was simulated; live runs' have none."""
_LATER = re.compile(r"journal\.(\d+)\.sqlite")
BESIDE = ("-wal", "-shm")
"""Files that SQLite keeps beside an open journal."""


class StoredRun(Protocol):
    """A run, wherever it is kept."""

    @property
    def name(self) -> str: ...

    def journals(self, reader: type[JournalReader] = JournalReader) -> AbstractContextManager[Sequence[JournalReader]]:
        """The journals of its incarnations, the first one's first. Raises `JournalError` where one cannot be read."""
        ...

    def newest_journal(self) -> JournalReader:
        """The latest incarnation's. Raises `JournalError` where there is none, or it cannot be read."""
        ...

    def begin_journal(
        self, settings: JournalConfig, *, waits: bool = False, notes: Mapping[str, str] | None = None
    ) -> SqliteJournal:
        """The next incarnation's; the rest as in `SqliteJournal`. Raises `JournalError` where it cannot be written."""
        ...


class RunStore(Protocol):
    """Many runs. What each of them is called is unique."""

    def runs(self) -> Sequence[StoredRun]:
        """All of them, oldest first."""
        ...

    def find(self, name: str) -> StoredRun:
        """A run by its name, or the `latest`. Raises `ConfigError` that names those there are."""
        ...


class RunDirectory:
    """A run in a directory of its own."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def name(self) -> str:
        return self.path.name

    def start_ns(self) -> int:
        """When the run began, as it noted itself, by which runs have their order; 0 where it is gone."""
        try:
            return int((self.path / START).read_text())
        except (OSError, ValueError):
            with suppress(OSError):
                return (self.path / CONFIG).stat().st_mtime_ns
        return 0

    def is_simulated(self) -> bool:
        try:
            with self.newest_journal() as journal:
                return SIMULATED in journal.meta()
        except JournalError:
            return False

    def journal_paths(self) -> list[Path]:
        """The journals of its incarnations, the first one's first."""
        first = [self.path / JOURNAL] if (self.path / JOURNAL).exists() else []
        return [*first, *self._later().values()]

    def next_journal_path(self) -> Path:
        """Return the path of the next incarnation's journal, which does not exist yet."""
        later = self._later()
        if not later and not (self.path / JOURNAL).exists():
            return self.path / JOURNAL
        return self.path / f"journal.{max(later, default=1) + 1}.sqlite"

    @contextmanager
    def journals(self, reader: type[JournalReader] = JournalReader) -> Iterator[Sequence[JournalReader]]:
        with ExitStack() as stack:
            paths = self.journal_paths() or [self.path / JOURNAL]
            yield [stack.enter_context(reader(path)) for path in paths]

    def newest_journal(self) -> JournalReader:
        return JournalReader((self.journal_paths() or [self.path / JOURNAL])[-1])

    def begin_journal(
        self, settings: JournalConfig, *, waits: bool = False, notes: Mapping[str, str] | None = None
    ) -> SqliteJournal:
        return SqliteJournal(
            self.next_journal_path(),
            settings.commit_interval_s,
            durable_against=settings.durable_against,
            lock_timeout_s=settings.lock_timeout_s,
            pending_bytes=round(settings.pending_mb * 2**20),
            waits=waits,
            notes=notes,
        )

    def trajectories(self, names: Sequence[TrajectoryId]) -> dict[TrajectoryId, TrajectoryRow]:
        """Return the rows of these trajectories that have ended. The latest incarnation's row counts."""
        found: dict[TrajectoryId, TrajectoryRow] = {}
        for path in reversed(self.journal_paths()):
            if left := [name for name in names if name not in found]:
                with JournalReader(path) as journal:
                    found |= journal.by_key(TrajectoryRow, [name for name in left if not is_evaluated(name)])
                    found |= journal.by_key(EvaluatedRow, [name for name in left if is_evaluated(name)])
        return found

    def discard_journal(self, path: Path) -> None:
        """Remove the journal of an incarnation that came to nothing."""
        for suffix in ("", *BESIDE):
            path.with_name(path.name + suffix).unlink(missing_ok=True)

    def _later(self) -> dict[int, Path]:
        """The journals after the first one, by the numbers in their names, in order."""
        found = {int(m[1]): p for p in self.path.glob("journal.*") if (m := _LATER.fullmatch(p.name))}
        return dict(sorted(found.items()))


class DirectoryStore:
    """Runs that are directories beside each other, each known by its configuration."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def runs(self) -> list[RunDirectory]:
        found = [RunDirectory(path.parent) for path in self.directory.glob(f"*/{CONFIG}")]
        return sorted(found, key=lambda run: (run.start_ns(), run.name))

    def note_start(self, run: RunDirectory, now_ns: int) -> None:
        """Have `run` be the latest: its start is now, or where a clock was set back just behind that of the one before.
        Raises `OSError`."""
        before = [other.start_ns() for other in self.runs() if other.path != run.path]
        write_whole(run.path / START, b"%d" % max(now_ns, *(start_ns + 1 for start_ns in before), 0))

    def find(self, name: str, *, simulated: bool = False) -> RunDirectory:
        """As in `RunStore`. A run's path counts as one of its names. The `latest` is a simulation only if such count,
        too, or there is nothing else."""
        runs = self.runs()
        if name == "latest" and runs:
            return next((run for run in reversed(runs) if simulated or not run.is_simulated()), runs[-1])
        for candidate in (given_path(name), self.directory / name):
            if (candidate / CONFIG).is_file():
                return RunDirectory(candidate)
        there = ", ".join(run.name for run in runs[-5:]) or "none"
        raise ConfigError(f"no run {name!r} in {self.directory}; the latest are: {there}")
