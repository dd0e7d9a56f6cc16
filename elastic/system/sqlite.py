"""SQLite files, opened by path: the one place, for a path that is pasted into a URI means another file."""

import contextlib
import itertools
import sqlite3
import stat
from pathlib import Path
from typing import Literal

from elastic.system import tenant_files
from elastic.system.host import here

BUSY_TIMEOUT_S = 5.0
TENANTS_BUSY_TIMEOUT_S = 0.5
TENANTS_STEPS_MAX = 500_000_000
"""Steps of SQLite's machine, some ten seconds, that a tenant's database may take to read: its pages may lead in
circles. A run of a million events takes a hundredth."""
TENANTS_VALUE_BYTES_MAX = 64 * 2**20
_STEPS_AT_ONCE = 1_000_000


def open_sqlite(
    path: Path,
    mode: Literal["ro", "rw", "rwc"],
    *,
    timeout_s: float = BUSY_TIMEOUT_S,
    any_thread: bool = False,
) -> sqlite3.Connection:
    """Open a database: `ro` to read only, `rw` only if it is there, `rwc` also to create it. Nothing begins a
    transaction but BEGIN. A foreign lock is waited for `timeout_s`. Within `tenant_files.as_owner` all that a database
    can cost its reader is bounded. Raises `sqlite3.Error`."""
    with contextlib.suppress(OSError):
        if not stat.S_ISREG(path.stat().st_mode):  # To open a pipe would wait for its other end.
            raise sqlite3.OperationalError(f"{path.name} is no regular file")
    tenants = tenant_files.is_within()
    timeout_s = min(timeout_s, TENANTS_BUSY_TIMEOUT_S) if tenants else timeout_s
    uri = f"{path.absolute().as_uri()}?mode={mode}"
    made = here().connect(uri, uri=True, timeout=timeout_s, isolation_level=None, check_same_thread=not any_thread)
    if tenants:
        steps = itertools.count(_STEPS_AT_ONCE, _STEPS_AT_ONCE)
        made.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, TENANTS_VALUE_BYTES_MAX)
        made.set_progress_handler(lambda: next(steps) > TENANTS_STEPS_MAX, _STEPS_AT_ONCE)
    return made
