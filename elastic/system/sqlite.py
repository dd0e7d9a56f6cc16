"""SQLite files, opened by path: the one place, for a path that is pasted into a URI means another file."""

import sqlite3
from pathlib import Path
from typing import Literal

from elastic.system.host import here

BUSY_TIMEOUT_S = 5.0


def open_sqlite(
    path: Path,
    mode: Literal["ro", "rw", "rwc"],
    *,
    timeout_s: float = BUSY_TIMEOUT_S,
    any_thread: bool = False,
) -> sqlite3.Connection:
    """Open a database: `ro` to read only, `rw` only if it is there, `rwc` also to create it. Nothing begins a
    transaction but BEGIN. A foreign lock is waited for `timeout_s`. Raises `sqlite3.Error`."""
    uri = f"{path.absolute().as_uri()}?mode={mode}"
    return here().connect(uri, uri=True, timeout=timeout_s, isolation_level=None, check_same_thread=not any_thread)
