"""A run's lives: what its journals say of those before, and how it begins another."""

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from elastic.compose.plan import resolve
from elastic.compose.runs import save_run_config
from elastic.compose.scheduling import limits, policies, run_plan
from elastic.config import Config, ConfigError, validate
from elastic.core.digest import digest
from elastic.core.scheduler import Scheduler
from elastic.runtime.journal import Journal, JournalError, JournalReader, earlier_journals, next_archive

JOURNAL = "journal.sqlite"
RUNNING = "running"
UNEXPECTED = "failed: it ended unexpectedly"


@dataclass
class Ending:
    """How a life ends, as its journal says it."""

    status: str = UNEXPECTED

    def conclude(self, failed: str) -> None:
        """By itself, and why it `failed` ("": it did not)."""
        self.status = f"failed: {failed}" if failed else "finished"


@contextlib.contextmanager
def journaled(journal: Journal, scheduler: Scheduler, meta: Mapping[str, str]) -> Iterator[Ending]:
    """Journal what a life is and, whatever happens within, how it ended; the journal is closed then."""
    ending = Ending()
    try:
        for key, value in meta.items():
            journal.meta(key, value)
        yield ending
    except Exception as error:
        ending.status = f"failed: {error}"
        raise
    finally:
        journal.meta("digest", digest(scheduler))
        journal.meta("status", ending.status)
        journal.close()


class PastLife(msgspec.Struct, frozen=True, kw_only=True):
    """What a run did before it is resumed."""

    providers: tuple[str, ...] = ()
    status: str = ""
    steps_done: int = 0


def past_life(run_dir: Path) -> PastLife:
    """How far a run has come, by the newest of its journals that knows with which providers it began.

    Raises `ConfigError` for one that cannot be read, and for a run that was only simulated.
    """
    newest = run_dir / JOURNAL
    for path in (newest, *reversed(earlier_journals(newest))):
        past = _told_by(path) if path.exists() else None
        if past is not None:
            return past
    return PastLife()


def _told_by(journal_path: Path) -> PastLife | None:
    """What one journal says of the life it is of; None if that had hardly begun."""
    try:
        with contextlib.closing(JournalReader(journal_path)) as reader:
            meta, steps = reader.meta(), reader.rows("steps")
    except JournalError as error:
        raise ConfigError(f"{error}; the run goes on without this journal once it is moved away") from error
    if "simulated" in meta:
        raise ConfigError(f"{journal_path}: a simulated run; only live ones can go on")
    if "providers" not in meta:
        return None
    return PastLife(
        providers=tuple(name for name in meta["providers"].split(",") if name),
        status=meta.get("status", ""),
        steps_done=steps[-1]["step"] + 1 if steps else 0,
    )


@contextlib.contextmanager
def next_life(run_dir: Path, config: Config, scheduler: Scheduler) -> Iterator[PastLife]:
    """What the run did before, its journal and configuration making room for those of the life that is lived within.

    One that fails before the trainer is there leaves no trace: what made room is put back.
    """
    past = past_life(run_dir)
    settings, journal = run_dir / "config.json", run_dir / JOURNAL
    former_settings, archived = settings.read_bytes(), next_archive(journal)
    save_run_config(run_dir, config)
    _move_journal(journal, archived)
    try:
        yield past
    except Exception:
        if scheduler.version is None:
            _move_journal(archived, journal)
            settings.write_bytes(former_settings)
        raise


def _move_journal(source: Path, target: Path) -> None:
    """Move a journal, and what SQLite keeps beside it, to where nothing is left of any other."""
    for suffix in ("", "-wal", "-shm"):
        target.with_name(target.name + suffix).unlink(missing_ok=True)
        with contextlib.suppress(FileNotFoundError):
            source.with_name(source.name + suffix).rename(target.with_name(target.name + suffix))


def replay(run_dir: Path) -> Scheduler:
    """The scheduler in the state to which the run's journal leads (invariant 13)."""
    reader = JournalReader(run_dir / JOURNAL)
    try:
        meta = reader.meta()
        config = validate(Config, json.loads(meta["config"]), str(reader.path))
        plan = resolve(config, [name for name in meta["providers"].split(",") if name], str(reader.path))
        scheduler = Scheduler(run_plan(plan), limits(config), policies(config), 0)
        for t_ns, event in reader.events():
            scheduler.handle(event, t_ns)
    finally:
        reader.close()
    return scheduler
