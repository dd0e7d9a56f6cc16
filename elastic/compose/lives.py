"""A run's lives: what its journals say of those before, and how it begins another."""

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import msgspec

from elastic.compose.plan import resolve
from elastic.compose.runs import config_replaced
from elastic.compose.scheduling import limits, policies, run_plan
from elastic.config import Config, ConfigError, validate
from elastic.core.digest import digest
from elastic.core.scheduler import Scheduler
from elastic.runtime.journal import Journal, JournalError, JournalReader, RunDirectory, StepRow, StoredRun

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


def past_life(run: RunDirectory) -> PastLife:
    """How far a run has come, by the newest of its journals that knows with which providers it began.

    Raises `ConfigError` for one that cannot be read, and for a run that was only simulated.
    """
    try:
        for path in reversed(run.journal_paths()):
            with JournalReader(path) as journal:
                past = _told_by(journal)
            if past is not None:
                return past
    except JournalError as error:
        raise ConfigError(f"{error}; the run goes on without this journal once it is moved away") from error
    return PastLife()


def _told_by(journal: JournalReader) -> PastLife | None:
    """What one journal says of the life it is of; None if that had hardly begun."""
    meta, steps = journal.meta(), journal.rows(StepRow)
    if "simulated" in meta:
        raise ConfigError(f"{journal.path}: a simulated run; only live ones can go on")
    if "providers" not in meta:
        return None
    return PastLife(
        providers=tuple(name for name in meta["providers"].split(",") if name),
        status=meta.get("status", ""),
        steps_done=steps[-1].step + 1 if steps else 0,
    )


@contextlib.contextmanager
def next_life(run: RunDirectory, config: Config, scheduler: Scheduler) -> Iterator[PastLife]:
    """What the run did before; its configuration makes room for that of the life that is lived within.

    One that fails before the trainer is there leaves no trace: neither its journal nor its configuration.
    """
    past, journal = past_life(run), run.next_journal_path()
    with config_replaced(run.path, config) as put_back:
        try:
            yield past
        except Exception:
            if scheduler.version is None:
                run.discard_journal(journal)
                put_back()
            raise


def replay(run: StoredRun) -> Scheduler:
    """The scheduler in the state to which the newest of the run's journals leads (invariant 13)."""
    with run.newest_journal() as journal:
        meta, where = journal.meta(), str(journal.path)
        config = validate(Config, json.loads(meta["config"]), where)
        plan = resolve(config, [name for name in meta["providers"].split(",") if name], where)
        scheduler = Scheduler(run_plan(plan), limits(config), policies(config), 0)
        for t_ns, event in journal.events():
            scheduler.handle(event, t_ns)
    return scheduler
