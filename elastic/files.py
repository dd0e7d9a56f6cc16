"""Files that are there whole or not at all, whatever dies while they are written."""

import os
import secrets
from pathlib import Path


def write_whole(path: Path, data: bytes, *, durable: bool = True) -> None:
    """Make `path` hold `data`. A process that dies meanwhile leaves the former content.

    With `durable` the content also outlives a power failure. The file is readable by its owner alone.
    Raises `OSError`; the former content is then still there.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Two processes may write the same file at the same time, so each has a name of its own for the unfinished one.
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        unfinished.replace(path)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise
    if durable:
        sync(path.parent)


def replace_durably(source: Path, target: Path) -> None:
    """Give `source`, a synced file of the same directory, the name of `target`. Raises `OSError`."""
    source.replace(target)
    sync(target.parent)


def sync(path: Path) -> None:
    """Have a file's content, or a directory's entries, on disk. Raises `OSError`."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
