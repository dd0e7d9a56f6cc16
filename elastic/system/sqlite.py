"""SQLite files, opened by path: the one place, for a path that is pasted into a URI means another file."""

import contextlib
import ctypes
import errno
import functools
import os
import sqlite3
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from elastic.system import tenant_files
from elastic.system.host import here

BUSY_TIMEOUT_S = 5.0
TENANTS_BUSY_TIMEOUT_S = 0.5
TENANTS_CPU_S, TENANTS_BYTES_PER_S = 10.0, 10e6
"""Seconds of a processor, and one more for so many bytes that it takes on disk, after which a tenant's database is read
no further: its pages may lead in circles."""
TENANTS_VALUE_BYTES_MAX = 64 * 2**20
TENANTS_BYTES_MIN, TENANTS_BYTES_SHARE = 2**20, 8
"""One statement brings at most so many bytes, or so many times what its database takes on disk. A sound one, whose rows
stand there once, stays below that; one whose pages lead in circles could bring rows for ever."""
ROW_BYTES = 16
"""Of a row, besides its text and bytes, and 1 for each other column: about what they take on disk."""
_STEPS_AT_ONCE = 1_000
"""Of SQLite's machine. One may copy all of a value."""
_VFS_CALLS = 13
"""Function pointers of `sqlite3_vfs` before the one that replaces system calls."""


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
    tenants = tenant_files.is_within()
    if tenants:
        _open_without_waiting()
    timeout_s = min(timeout_s, TENANTS_BUSY_TIMEOUT_S) if tenants else timeout_s
    uri = f"{path.absolute().as_uri()}?mode={mode}"
    made = here().connect(uri, uri=True, timeout=timeout_s, isolation_level=None, check_same_thread=not any_thread)
    if tenants:
        thread_time, disk_bytes = here().thread_time, _disk_bytes(path)
        ends_s = thread_time() + TENANTS_CPU_S + disk_bytes / TENANTS_BYTES_PER_S
        made.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, TENANTS_VALUE_BYTES_MAX)
        made.set_progress_handler(lambda: thread_time() > ends_s, _STEPS_AT_ONCE)
        made.row_factory = _bounded_rows(path, TENANTS_BYTES_MIN + TENANTS_BYTES_SHARE * disk_bytes)
    return made


def _disk_bytes(path: Path) -> int:
    """Return what a database takes on disk, with what is still to be moved into it."""
    found = 0
    for suffix in ("", "-wal"):
        with contextlib.suppress(OSError):
            found += 512 * path.with_name(path.name + suffix).stat().st_blocks
    return found


def _bounded_rows(path: Path, bytes_max: int) -> Callable[[sqlite3.Cursor, tuple[Any, ...]], tuple[Any, ...]]:
    """Return what takes in each row of a tenant's database, and raises `sqlite3.OperationalError` for too many."""
    told: tuple[sqlite3.Cursor | None, int] = None, 0

    def take(cursor: sqlite3.Cursor, row: tuple[Any, ...]) -> tuple[Any, ...]:
        nonlocal told
        size = ROW_BYTES + sum([len(value) if isinstance(value, (str, bytes)) else 1 for value in row])
        told = cursor, size + (told[1] if told[0] is cursor else 0)
        if told[1] > bytes_max:
            raise sqlite3.OperationalError(f"{path.name}: it tells more than it can hold")
        return row

    return take


class _Vfs(ctypes.Structure):
    """SQLite's `sqlite3_vfs`, by which it calls its system."""

    _fields_ = (
        *(("version", ctypes.c_int), ("file_bytes", ctypes.c_int), ("path_bytes", ctypes.c_int)),
        *(("next", ctypes.c_void_p), ("name", ctypes.c_char_p), ("data", ctypes.c_void_p)),
        ("calls", ctypes.c_void_p * _VFS_CALLS),
        ("replace", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)),
    )


@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_int, use_errno=True)
def _opened(path: bytes, flags: int, mode: int) -> int:
    """Open a file as SQLite asks, without waiting for anybody; what is neither a file nor a directory is not opened."""
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY, mode)
    except OSError as error:
        ctypes.set_errno(error.errno or errno.EIO)
        return -1
    if stat.S_IFMT(os.fstat(descriptor).st_mode) not in (stat.S_IFREG, stat.S_IFDIR):
        os.close(descriptor)
        ctypes.set_errno(errno.ENXIO)
        return -1
    return descriptor


@functools.cache
def _open_without_waiting() -> None:
    """Have SQLite open all of this process's files by `_opened`. Between a look at a name and its opening a pipe may
    take the place of a file, so only what has been opened can be looked at."""
    import _sqlite3

    library = ctypes.CDLL(_sqlite3.__file__)  # With the libraries that it needs, of which SQLite is one.
    library.sqlite3_vfs_find.restype = ctypes.POINTER(_Vfs)
    vfs = library.sqlite3_vfs_find(None)
    if vfs.contents.replace(vfs, b"open", ctypes.cast(_opened, ctypes.c_void_p)):
        raise sqlite3.OperationalError("this SQLite does not let its files be opened without waiting")
