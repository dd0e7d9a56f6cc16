"""Files that are there whole or not at all, whatever dies while they are written."""

import os
import secrets
from pathlib import Path

from elastic.system.host import here


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
                here().fsync(file.fileno())
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


class StandingFiles:
    """Files that somebody keeps open and writes, whose names must go on meaning them.

    What is removed or replaced can still be written, but nobody would ever find it.
    """

    def __init__(self, *paths: Path) -> None:
        self._known: dict[Path, tuple[int, int] | None] = dict.fromkeys(paths)

    def check(self) -> None:
        """Raises `OSError` if one that was there at an earlier check is gone, or is another one."""
        for path, known in self._known.items():
            try:
                found = os.stat(path)
            except FileNotFoundError:
                identity = None
            else:
                identity = found.st_dev, found.st_ino
            if known is None:
                self._known[path] = identity
            elif identity != known:
                what = "was removed" if identity is None else "was replaced by another file"
                raise OSError(f"{path.name} {what} while it was written")


def sync(path: Path) -> None:
    """Have a file's content, or a directory's entries, on disk. Raises `OSError`."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        here().fsync(descriptor)
    finally:
        os.close(descriptor)
