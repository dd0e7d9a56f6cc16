"""A relay that is a directory: on one machine, or on a file system that all of them mount."""

import fcntl
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from elastic.system.host import here
from elastic.weights.blobs import Buffer, check_key
from elastic.weights.errors import BlobConflict, BlobNotFound, RelayError

INCOMING, MEMORY_LINK = ".incoming", ".memory"
"""Where blobs are while they are written, and a link to where there may be room for them in shared memory
(`elastic.weights.shared_memory`). No key begins with a dot, so none of these is ever listed."""

MEMORY_LEFT = 1 / 2
"""The share of the shared memory that must stay free beside a blob."""

_COMPARE_BYTES = 1 << 20

_UNFINISHED = "put-"
"""Names of blobs that are being written begin with this. Their writers hold locks on them."""

_ATTEMPTS = 100
"""How often a put is tried, since others may remove its directory while it is still empty."""


class DirectoryRelay:
    """`elastic.weights.relay.Relay` over files; the directory is made by the first `put`.

    A blob that was lost with the shared memory that it was in is not there.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._swept = False

    def put(self, key: str, *parts: Buffer) -> None:
        path = self._path(key)
        with _translated(path):
            for _ in range(_ATTEMPTS - 1):
                with suppress(FileNotFoundError, FileExistsError):
                    return self._put(path, parts)
            return self._put(path, parts)

    def _put(self, path: Path, parts: Sequence[Buffer]) -> None:
        incoming = self._root / INCOMING
        incoming.mkdir(parents=True, exist_ok=True)
        if not self._swept:
            _remove_unfinished(incoming)
            self._swept = True
        path.parent.mkdir(parents=True, exist_ok=True)
        if self._put_in_memory(path, parts):
            return
        with tempfile.NamedTemporaryFile(dir=incoming, prefix=_UNFINISHED, buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            _write_all(file.fileno(), parts)
            _place(os.link, Path(file.name), path)

    def _put_in_memory(self, path: Path, parts: Sequence[Buffer]) -> bool:
        """Put a blob into shared memory. Returns False if there is none, or no room in it."""
        memory = self._root / MEMORY_LINK
        try:
            space = here().disk_usage(memory)
            if space.free - sum(memoryview(part).nbytes for part in parts) < MEMORY_LEFT * space.total:
                return False
            descriptor, name = tempfile.mkstemp(dir=os.readlink(memory))
        except OSError:
            return False
        blob = Path(name)
        try:
            try:
                _write_all(descriptor, parts)
            finally:
                os.close(descriptor)
        except OSError:
            blob.unlink(missing_ok=True)
            return False
        try:
            if not _place(os.symlink, blob, path):
                blob.unlink()
        except BaseException:
            blob.unlink(missing_ok=True)
            raise
        return True

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        path = self._path(key)
        with _translated(path), path.open("rb") as file:
            file.seek(start)
            return file.read(-1 if length is None else length)

    def list_keys(self, prefix: str = "") -> list[str]:
        keys = []
        with _translated(self._root):
            for directory, below, files in os.walk(self._root):
                below[:] = [name for name in below if name != INCOMING]
                base = Path(directory).relative_to(self._root)
                keys += [(base / name).as_posix() for name in files if name != MEMORY_LINK]
        return sorted(key for key in keys if key.startswith(prefix) and (self._root / key).exists())

    def delete(self, key: str) -> None:
        path = self._path(key)
        with _translated(path):
            blob = Path(os.readlink(path)) if path.is_symlink() else path
            path.unlink(missing_ok=True)
            blob.unlink(missing_ok=True)
            _remove_empty(path.parent, self._root)

    def close(self) -> None:
        pass

    def _path(self, key: str) -> Path:
        return self._root / check_key(key)


@contextmanager
def _translated(path: Path) -> Iterator[None]:
    try:
        yield
    except (FileNotFoundError, IsADirectoryError) as error:
        raise BlobNotFound(f"{path}: no such blob") from error
    except OSError as error:
        raise RelayError(f"{error.filename or path}: {error.strerror}") from error


def _write_all(descriptor: int, parts: Iterable[Buffer]) -> None:
    for part in parts:
        rest = memoryview(part)
        while rest.nbytes:
            rest = rest.cast("B")[here().write(descriptor, rest) :]


def _place(link: Callable[[Path, Path], None], blob: Path, path: Path) -> bool:
    """Let `path` be `blob`, by a `link` to it; whether it was not there already. Raises `BlobConflict`."""
    try:
        # As atomic as a rename, but never over a blob that is already there.
        link(blob, path)
    except FileExistsError:
        if not _equal(path, blob):
            raise BlobConflict(f"{path}: holds other content already; blobs are immutable") from None
        return False
    return True


def _remove_unfinished(incoming: Path) -> None:
    """Removes files that killed writers left. A living writer that has not locked its file yet finds it missing, and
    begins again.
    """
    for path in incoming.glob(f"{_UNFINISHED}*"):
        with suppress(OSError), path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()


def _equal(one: Path, other: Path) -> bool:
    if one.stat().st_size != other.stat().st_size:
        return False
    with one.open("rb") as left, other.open("rb") as right:
        while chunk := left.read(_COMPARE_BYTES):
            if chunk != right.read(_COMPARE_BYTES):
                return False
    return True


def _remove_empty(directory: Path, root: Path) -> None:
    while directory != root:
        try:
            directory.rmdir()
        except OSError:
            return
        directory = directory.parent
