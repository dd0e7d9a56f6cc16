"""The orchestrator's disk, which may be slow, full or without power. After a loss of power it has everything that was
synced, and perhaps more.

Below a sync at each commit ("FULL"), SQLite syncs when it moves the log into the database.
"""

import errno
import os
import sqlite3
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import unquote, urlsplit

from elastic.core.types import Nanoseconds
from elastic.testing.faults.shell.threads import SimulatedThread, loop_here, sleep

SECTOR_BYTES = 512
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
        self._journal: _OnDisk | None = None
        self._commits = 0

    def connect(self, database: str, **options: Any) -> sqlite3.Connection:
        """`sqlite3.connect` of files on this disk. Journals are written to by way of it."""
        mode = database.rpartition("=")[2]
        if mode == "rwc" and self.is_full:
            raise sqlite3.OperationalError(os.strerror(errno.ENOSPC))
        if mode != "rw":
            return sqlite3.connect(database, **options)
        connection = sqlite3.connect(database, factory=_OnDisk, **options)
        connection.disk, connection.path = self, Path(unquote(urlsplit(database).path))
        return connection

    @property
    def is_full(self) -> bool:
        return self.full_until_ns > loop_here().clock.now_ns

    def turns(self) -> None:
        """Take the time of a commit, if a thread waits for it."""
        loop = loop_here()
        if SimulatedThread.running is not None:
            sleep(loop.offload_s() + (self.slow_s if self.slow_until_ns > loop.clock.now_ns else 0.0))

    def begun(self, journal: "_OnDisk") -> None:
        """Note that a journal was made and its database synced."""
        self._journal = journal
        if self._loses_power:
            self._named, self._database, self._log = False, journal.path.read_bytes(), b""
            self._commits = 0

    def committed(self, journal: "_OnDisk") -> None:
        """Note that a transaction was committed to the journal, with or without a sync of its log.

        The log is also synced before it is moved into the database, and the database after that.
        """
        self._commits += 1
        if not self._loses_power or self.lies:
            return
        database = journal.path.read_bytes()
        if journal.synced or database != self._database:
            self._named, self._database, self._log = True, database, _log(journal.path).read_bytes()

    def lose_power(self) -> None:
        """Reduce the newest journal to what was synced and an arbitrary part of the rest."""
        if self._journal is None:
            return
        path, log = self._journal.path, _log(self._journal.path)
        database, written = path.read_bytes(), log.read_bytes()
        self._journal.close()  # In this process SQLite would go on with what it knows of the files.
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


class _OnDisk(sqlite3.Connection):
    """A connection to a journal on a disk, which syncs nothing itself."""

    disk: Disk
    path: Path
    synced = False
    """Whether a commit is to wait for the disk."""

    def execute(self, sql: str, *parameters: Any) -> sqlite3.Cursor:
        disk = self.disk
        if sql.startswith("PRAGMA synchronous="):
            self.synced, sql = sql.endswith("FULL"), "PRAGMA synchronous=OFF"
            super().execute(f"PRAGMA wal_autocheckpoint={0 if disk.lies else CHECKPOINT_PAGES}")
            disk.begun(self)
        elif sql == "BEGIN IMMEDIATE":
            disk.turns()
            pages = 1 if disk.is_full else ENDLESS_PAGES  # One page is less than there are: not one more can be had.
            super().execute(f"PRAGMA max_page_count={pages}")
        done = super().execute(sql, *parameters)
        if sql == "COMMIT":
            disk.committed(self)
        return done
