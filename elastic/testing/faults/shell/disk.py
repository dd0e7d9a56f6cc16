"""The orchestrator's disk, which may be slow, full or without power. After a loss of power it has everything that was
synced, and perhaps more.

The journal on it is the production journal, on a thread of its process.
"""

import errno
import os
from collections.abc import Mapping
from pathlib import Path
from random import Random

from elastic.core.types import Nanoseconds
from elastic.runtime.journal import SqliteJournal
from elastic.testing.faults.shell.loops import ProcessLoop
from elastic.testing.faults.shell.threads import SimulatedThread, sleep

SECTOR_BYTES = 512
FULL = 2
"""SQLite's name for a sync at each commit. Below it, SQLite syncs when it moves the log into the database."""
CHECKPOINT_PAGES = 60
"""Low enough that the journals of worlds sometimes move their log into the database."""
ENDLESS_PAGES = 2**30


class Disk:
    """The disk of a journal's files. With `lies` it reports syncs that it has not done.

    Its content is tracked only if it `loses_power` at some time.
    """

    def __init__(self, chance: Random, *, loses_power: bool, lies: bool) -> None:
        self.slow_until_ns: Nanoseconds = 0
        self.slow_s = 0.0
        """What a commit takes besides meanwhile."""
        self.full_until_ns: Nanoseconds = 0
        self.lies = lies
        self.forgot = False
        """Whether something was lost with its power."""
        self._chance = chance
        self._loses_power = loses_power
        self._named = False
        """Whether the newest journal's name is in the directory for certain: once its log has been synced."""
        self._database = self._log = b""
        """What is certain to be in its files."""
        self._journal: ModelledJournal | None = None
        self._commits = 0

    def begun(self, journal: "ModelledJournal") -> None:
        """Note that a journal was made and its database synced."""
        self._journal = journal
        if self._loses_power:
            self._named, self._database, self._log = False, journal.path.read_bytes(), b""
            self._commits = 0

    def committed(self, path: Path, synced: bool) -> None:
        """Note that a transaction was committed to the journal, with or without a sync of its log.

        The log is also synced before it is moved into the database, and the database after that.
        """
        self._commits += 1
        if not self._loses_power or self.lies:
            return
        database = path.read_bytes()
        if synced or database != self._database:
            self._named, self._database, self._log = True, database, _log(path).read_bytes()

    def lose_power(self) -> None:
        """Reduce the newest journal to what was synced and an arbitrary part of the rest."""
        if self._journal is None:
            return
        path, log = self._journal.path, _log(self._journal.path)
        database, written = path.read_bytes(), log.read_bytes()
        self._journal.forsake()  # In this process SQLite would go on with what it knows of the files.
        if not self._named and self._chance.random() < 1 / 4:
            path.unlink()
            self.forgot |= self._commits > 0
        else:
            left = self._mixed(self._log, written)
            self.forgot |= left != written
            path.write_bytes(database)
            log.write_bytes(left)
        self._journal = None

    def _mixed(self, kept: bytes, now: bytes) -> bytes:
        """Return `kept` with unsynced writes up to some sector, which is torn, and perhaps with later sectors."""
        if kept == now:
            return now
        sectors = range(0, len(now), SECTOR_BYTES)
        until = self._chance.randint(0, len(sectors)) * SECTOR_BYTES
        later = self._chance.choice((0.0, 0.5))
        mixed = bytearray(kept.ljust(len(now), b"\0"))
        for at in sectors:
            if at < until or self._chance.random() < later:
                mixed[at : at + SECTOR_BYTES] = now[at : at + SECTOR_BYTES]
        return bytes(mixed)


def _log(path: Path) -> Path:
    return path.with_name(f"{path.name}-wal")


class ModelledJournal(SqliteJournal):
    """The journal with its files in memory, where `disk` harms them."""

    def __init__(
        self,
        path: Path,
        commit_interval_s: float,
        durable_against: str,
        pending_bytes: int,
        notes: Mapping[str, str],
        disk: Disk,
    ) -> None:
        self._loop = ProcessLoop.here()
        self._disk = disk
        super().__init__(
            path, commit_interval_s, durable_against=durable_against, pending_bytes=pending_bytes, notes=notes
        )
        (level,) = self._connection.execute("PRAGMA synchronous").fetchone()
        self._synced = level >= FULL
        self._connection.execute("PRAGMA synchronous=OFF")
        self._connection.execute(f"PRAGMA wal_autocheckpoint={0 if disk.lies else CHECKPOINT_PAGES}")
        disk.begun(self)

    @property
    def _is_full(self) -> bool:
        return self._disk.full_until_ns > self._loop.clock.now_ns

    def _create(self, notes: Mapping[str, str]) -> None:
        if self._is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super()._create(notes)

    def _write_once(self) -> bool:
        if SimulatedThread.running is not None and (self._batch.bytes or self._batch.waiting):
            slow = self._disk.slow_until_ns > self._loop.clock.now_ns
            sleep(self._loop.offload_s() + (self._disk.slow_s if slow else 0.0))
        return super()._write_once()

    def _commit(self, batch: object) -> None:
        pages = 1 if self._is_full else ENDLESS_PAGES  # One page is less than there are: not one more can be had.
        self._connection.execute(f"PRAGMA max_page_count={pages}")
        super()._commit(batch)  # pyright: ignore[reportArgumentType]
        self._disk.committed(self.path, self._synced)

    def _finish(self) -> None:
        """Write the rest at once. The loop cannot wait for a thread that it has to step."""
        self._write_once()

    def forsake(self) -> None:
        """Close the files as they are. The next process finds other files after a loss of power."""
        self._connection.close()
