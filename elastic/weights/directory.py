"""A relay that is a directory: on one machine, or on a file system that all of them mount."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from elastic.weights.errors import BlobConflict, BlobNotFound, RelayError
from elastic.weights.relay import Buffer, check_key

_INCOMING = ".incoming"
"""Holds blobs while they are written. No key begins with a dot, so none of these is ever listed."""

_COMPARE_BYTES = 1 << 20


class DirectoryRelay:
    """`elastic.weights.relay.Relay` over files; the directory is made by the first `put`."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def put(self, key: str, *parts: Buffer) -> None:
        path = self._path(key)
        with _translated(path):
            incoming = self._root / _INCOMING
            incoming.mkdir(parents=True, exist_ok=True)
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=incoming, buffering=0) as file:
                for part in parts:
                    _write_all(file.fileno(), part)
                try:
                    # As atomic as a rename, but never over a blob that is already there.
                    os.link(file.name, path)
                except FileExistsError:
                    if not _equal(path, Path(file.name)):
                        raise BlobConflict(f"{path}: holds other content already; blobs are immutable") from None

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        path = self._path(key)
        with _translated(path), path.open("rb") as file:
            file.seek(start)
            return file.read(-1 if length is None else length)

    def list_keys(self, prefix: str = "") -> list[str]:
        keys = []
        with _translated(self._root):
            for directory, below, files in os.walk(self._root):
                below[:] = [name for name in below if name != _INCOMING]
                base = Path(directory).relative_to(self._root)
                keys += [(base / name).as_posix() for name in files]
        return sorted(key for key in keys if key.startswith(prefix))

    def delete(self, key: str) -> None:
        path = self._path(key)
        with _translated(path):
            path.unlink(missing_ok=True)
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


def _write_all(descriptor: int, part: Buffer) -> None:
    rest = memoryview(part)
    while rest.nbytes:
        rest = rest.cast("B")[os.write(descriptor, rest) :]


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
