"""Uploads on disk: received apart, whole and checked before they are seen, out of reach of the projects' processes.

An upload is a directory of regular files below `home/uploads/PROJECT/ID`, which appears there at once when the last of
its files has come. Until then they lie in `home/incoming/ID`, each under the SHA-256 of its content.
"""

import contextlib
import hashlib
import os
import secrets
import shutil
import stat
import time
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from elastic.protocol.api import UPLOAD_SCHEME, UploadFile
from elastic.server import ids
from elastic.server.settings import ServerSettings
from elastic.system.files import sync

SETTLED_S = 3600.0


class ChecksumMismatch(Exception):
    """The received content is not the announced content."""


class UploadStatus(NamedTuple):
    """An upload on disk: whether it is complete, how much there is of it, and when something last came."""

    ready: bool
    bytes: int
    touched_us: int


class UploadStorage:
    """The uploads of all projects of one server."""

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings

    def place(self, project: str, upload: str) -> Path:
        """Return the directory of a complete upload."""
        return self._settings.uploads(project) / upload

    def is_ready(self, project: str, upload: str) -> bool:
        return self.place(project, upload).is_dir()

    def status(self, project: str, upload: str) -> UploadStatus:
        place, incoming = self.place(project, upload), self._incoming(upload)
        top = place if (ready := place.is_dir()) else incoming
        paths = [top, *top.rglob("*")]
        touched_ns = size = 0
        for path in paths:
            with contextlib.suppress(OSError):  # It comes or goes meanwhile, or nothing has come yet.
                found = path.lstat()
                touched_ns = max(touched_ns, found.st_mtime_ns)
                size += found.st_size if stat.S_ISREG(found.st_mode) else 0
        return UploadStatus(ready, size, touched_ns // 1_000)

    def received(self, upload: str) -> set[str]:
        """The digests of what has come of an upload that is not complete yet."""
        try:
            return {name for name in os.listdir(self._incoming(upload)) if len(name) == 64}
        except FileNotFoundError:
            return set()

    def receiving(self, upload: str, digest: str, size_bytes: int) -> "Receiving":
        """Take in one file. Raises `OSError` where there is no room."""
        incoming = self._incoming(upload)
        incoming.mkdir(mode=0o700, parents=True, exist_ok=True)
        return Receiving(incoming, digest, size_bytes)

    def complete(self, project: str, upload: str, files: Iterable[UploadFile]) -> bool:
        """Let the upload be seen if all of its files are there. Whether it is. Raises `OSError`."""
        place, incoming, files = self.place(project, upload), self._incoming(upload), list(files)
        if place.is_dir():
            return True
        if {one.sha256 for one in files} - self.received(upload):
            return False
        place.parent.mkdir(parents=True, exist_ok=True)
        place.parent.chmod(0o711)  # Whatever the umask: the project's user passes through to what it may read.
        assembled = incoming / f"assembled.{secrets.token_hex(4)}"
        for one in files:
            target = assembled / one.path
            target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            # Two of its files may have one content: a run that changes one then changes both, and nobody else's.
            os.link(incoming / one.sha256, target)
        assembled.rename(place)
        sync(place.parent)
        shutil.rmtree(incoming, ignore_errors=True)
        return True

    def discard(self, project: str, upload: str) -> None:
        """Let an upload be gone at once; its files follow."""
        gone = self._incoming(f"gone.{secrets.token_hex(8)}")
        gone.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            self.place(project, upload).rename(gone)
        for path in (gone, self._incoming(upload)):
            shutil.rmtree(path, ignore_errors=True)

    def sweep(self, known: Iterable[tuple[str, str]]) -> None:
        """Drop what belongs to no upload: what a server that died was about to remove. `known` are projects and ids."""
        expected = set(known)
        for project in _listed(self._settings.all_uploads):
            for upload in _listed(project):
                if (project.name, upload.name) not in expected and _is_old(upload):
                    self.discard(project.name, upload.name)
        for path in _listed(self._settings.incoming):
            if path.name not in {upload for _, upload in expected} and _is_old(path):
                shutil.rmtree(path, ignore_errors=True)

    def _incoming(self, upload: str) -> Path:
        return self._settings.incoming / upload


class Receiving:
    """One file that is being received. Left without `keep`, it leaves nothing."""

    def __init__(self, incoming: Path, digest: str, size_bytes: int) -> None:
        self._final = incoming / digest
        self._draft = incoming / f"draft.{secrets.token_hex(8)}"
        self._size_bytes = size_bytes
        self._seen = hashlib.sha256()
        self.received_bytes = 0
        self._file = os.fdopen(os.open(self._draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):
            self._file.close()
        self._draft.unlink(missing_ok=True)

    def write(self, data: bytes) -> None:
        """Raises `ChecksumMismatch` for more than was announced, and `OSError` where there is no room."""
        self.received_bytes += len(data)
        if self.received_bytes > self._size_bytes:
            raise ChecksumMismatch(f"more than the {self._size_bytes} bytes that were announced")
        self._seen.update(data)
        self._file.write(data)

    def keep(self) -> None:
        """Have it durably there. Raises `ChecksumMismatch` and `OSError`."""
        if self.received_bytes != self._size_bytes:
            raise ChecksumMismatch(f"{self.received_bytes} bytes; announced: {self._size_bytes}")
        if self._seen.hexdigest() != self._final.name:
            raise ChecksumMismatch(f"SHA-256 {self._seen.hexdigest()}; announced: {self._final.name}")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._draft.replace(self._final)
        sync(self._final.parent)


def named(settings: ServerSettings, project: str, name: str) -> Path | None:
    """Return the path for `upload:ID` or `upload:ID/FILE` of this project; None if it does not exist."""
    upload, slash, inside = name.removeprefix(UPLOAD_SCHEME).partition("/")
    if not ids.is_id(upload, ids.UPLOAD) or (slash and not inside) or "\0" in inside:
        return None
    place = settings.uploads(project).resolve() / upload
    found = (place / inside).resolve() if inside else place
    if not found.is_relative_to(place) or (inside and found == place) or not found.exists():
        return None
    return found


def _is_old(path: Path) -> bool:
    """Whether no other server can be about to note it."""
    return time.time() - path.stat().st_mtime > SETTLED_S


def _listed(path: Path) -> list[Path]:
    return list(path.iterdir()) if path.is_dir() else []
