"""How long what runs and jobs of pools leave is kept, and what is over: looked at without a change, or removed.

- Only what has ended is touched, and nothing that a run which goes on could need.
- A removal is in the store before its first file goes, so another runner can finish a removal that is half done.
- Logs, checkpoints and trajectories go apart; the run, its figures and its report stay until the whole run goes, and
  so does the checkpoint that is kept for being the best.
"""

import contextlib
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from elastic.protocol.best_checkpoint import NOTE, NOTE_BYTES, best_noted
from elastic.runtime.journal import EvaluatedRow, RunDirectory, TrajectoryRow, open_journal
from elastic.runtime.journal.records import FRAME, TABLES
from elastic.server.history.apart import apart
from elastic.server.quotas.budgets import US_PER_DAY
from elastic.server.settings import ServerSettings
from elastic.system import tenant_files

RUN, TRAJECTORIES, CHECKPOINTS, LOGS = "run", "trajectories", "checkpoints", "logs"
PARTS = (TRAJECTORIES, CHECKPOINTS, LOGS)
UNRESUMABLE = (TRAJECTORIES, CHECKPOINTS)
"""Without these a run cannot go on."""
REMOVING, REMOVED = "removing", "removed"
SAID = ("token_ids", "sampled", "branches", "task")
"""Columns of trajectories with what was said in them."""
FORGETTING_S = 3600.0
"""Longest that the journals of a run take to forget what was said: they are written anew."""
_DIRECTORIES: Mapping[str, Sequence[str]] = {CHECKPOINTS: ("checkpoints", "weights"), LOGS: ("logs",)}


@dataclass(frozen=True, kw_only=True)
class RetentionRow:
    """Days for which each is kept after a run's end, uploads after they were last used; None where the server's policy
    says, or for ever."""

    scope: str
    runs_days: int | None = None
    trajectories_days: int | None = None
    checkpoints_days: int | None = None
    logs_days: int | None = None
    uploads_days: int | None = None
    version: int = 0

    def or_else(self, server: "RetentionRow") -> "RetentionRow":
        """Return the policy with what the server's says where this one says nothing."""
        own = {name: days for name, days in vars(self).items() if days is not None}
        return RetentionRow(**{**vars(server), **own})


@dataclass(frozen=True, kw_only=True)
class Left:
    """A run, or a job of a pool, by what it leaves: since when (None while it goes on), and what of it has been
    removed, or is about to be. A run has no `pool`."""

    id: str
    project: str
    ended_us: int | None
    retired: Mapping[str, str]
    name: str = ""
    pool: str = ""

    @property
    def url(self) -> str:
        return f"/v1/pools/{self.pool}/jobs/{self.id}" if self.pool else f"/v1/runs/{self.id}"

    def directory(self, settings: ServerSettings) -> Path:
        return settings.job_dir(self.project, self.id) if self.pool else settings.run_dir(self.id)


def due(left: Left, policy: RetentionRow, now_us: int) -> list[str]:
    """Return the expired parts of a run or job: all of it alone, or parts that still exist."""
    if left.ended_us is None or RUN in left.retired:
        return []
    if is_over(left.ended_us, policy.runs_days, now_us):
        return [RUN]
    there = [part for part in PARTS if part not in left.retired]
    return [part for part in there if is_over(left.ended_us, getattr(policy, f"{part}_days"), now_us)]


def is_over(since_us: int, days: int | None, now_us: int) -> bool:
    """Return whether what has ended, or was last used, then is kept no longer; None keeps it for ever."""
    return days is not None and now_us - since_us >= days * US_PER_DAY


def bytes_of(run_dir: Path, parts: Sequence[str]) -> int:
    """Return about how many bytes the removal of these parts would free."""
    if RUN in parts:
        return tenant_files.size_bytes(run_dir)
    kept = _kept(run_dir)
    found = sum(tenant_files.size_bytes(run_dir, name, kept) for part in parts for name in _DIRECTORIES.get(part, ()))
    if TRAJECTORIES in parts:
        with contextlib.suppress(OSError):
            found += _said_bytes(run_dir)
    return found


def remove(run_dir: Path, part: str) -> None:
    """Remove a part; what is gone already is left. Raises `OSError` where something cannot be removed. Where another
    directory is linked in place of the run's, the link may go, and nothing behind it."""
    if part == RUN:
        tenant_files.remove(run_dir)
        return
    if run_dir.is_symlink():
        raise OSError(f"{run_dir}: found a link; its {part} are not followed; allowed: a directory")
    kept = _kept(run_dir)
    for name in _DIRECTORIES.get(part, ()):
        tenant_files.remove(run_dir, name, kept)
    if part == TRAJECTORIES:
        _forget_what_was_said(run_dir)


def _kept(run_dir: Path) -> tenant_files.Keep:
    """What is kept for being the best checkpoint, and the note that says so."""
    with contextlib.suppress(OSError), tenant_files.opened(run_dir, f"checkpoints/{NOTE}") as note:
        if (best := best_noted(note.read(NOTE_BYTES))) is not None:
            return lambda name: name == NOTE or name.partition(".")[0] == f"{best:08d}"
    return tenant_files.none_kept


@apart()
def _said_bytes(run_dir: Path) -> int:
    found = 0
    with tenant_files.as_owner(run_dir):
        for journal in RunDirectory(run_dir).journal_paths():
            with contextlib.suppress(sqlite3.Error), contextlib.closing(open_journal(journal, "rw")) as connection:
                lengths = " + ".join(f"LENGTH({column})" for column in SAID)
                for table in _tables_of_trajectories(connection):
                    found += connection.execute(f"SELECT COALESCE(SUM({lengths}), 0) FROM {table}").fetchone()[0]
                frames = "SELECT COALESCE(SUM(LENGTH(body)), 0) FROM events WHERE kind = ?"
                found += connection.execute(frames, (FRAME,)).fetchone()[0]
    return found


@apart(FORGETTING_S)
def _forget_what_was_said(run_dir: Path) -> None:
    """Tokens go, and frames with tokens; what a report is made of stays. A journal whole, or not at all."""
    with tenant_files.as_owner(run_dir):
        for journal in RunDirectory(run_dir).journal_paths():
            _forget_in(journal)


def _forget_in(journal: Path) -> None:
    try:
        with contextlib.closing(open_journal(journal, "rw")) as connection:
            with connection:
                connection.execute("BEGIN")
                nothing = ", ".join(f"{column} = x''" for column in SAID)
                for table in _tables_of_trajectories(connection):
                    connection.execute(f"UPDATE {table} SET {nothing}")
                connection.execute("DELETE FROM events WHERE kind = ?", (FRAME,))
            connection.execute("VACUUM")
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    except sqlite3.Error as error:
        raise OSError(f"{journal}: {error}") from error


def _tables_of_trajectories(connection: sqlite3.Connection) -> list[str]:
    tables = (TABLES[kind] for kind in (TrajectoryRow, EvaluatedRow))
    return [table.name for table in tables if not table.lacks(connection)]
