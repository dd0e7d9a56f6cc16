"""Files between the pool's process and a node agent on another machine, chunk by chunk over the connection that they
have: either end serves those that it has told of, and fetches what it has been told of.

A file that was fetched in part goes on from there, also after the connection was lost or a process has died. It has its
name only once its content has the digest that was told.
"""

import asyncio
import contextlib
import errno
import hashlib
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path

from elastic.pool.job_files import SubmittedFile
from elastic.pool.messages import CHUNK_BYTES, AskChunk, FileChunk, JobFile
from elastic.protocol.frames import WireError
from elastic.system.files import replace_durably, sync

WINDOW = 4
"""Chunks that are asked for at a time."""
ASKED_MAX = 4 * WINDOW
"""Questions of a peer that may wait."""
PART = ".part"

Say = Callable[[AskChunk | FileChunk], object]


class FilesUnavailable(Exception):
    """Files cannot be had. The message says which, and why."""


class FileServer:
    """Answers for chunks, one after the other, as long as `run` goes on. Of a file that was written since it was told
    of nothing is sent."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self._offered: dict[str, SubmittedFile] = {}
        self._asked: asyncio.Queue[AskChunk] = asyncio.Queue()

    def offer(self, files: Iterable[SubmittedFile]) -> None:
        """Serve these, too, by their digests."""
        self._offered.update((one.file.digest, one) for one in files)

    def asked(self, question: AskChunk) -> None:
        """Answer soon. Raises `WireError` for a peer that asks for too much at once."""
        if self._asked.qsize() >= ASKED_MAX:
            raise WireError(f"asked for more than {ASKED_MAX} chunks at once")
        self._asked.put_nowait(question)

    async def run(self) -> None:
        while True:
            question = await self._asked.get()
            offered = self._offered.get(question.digest)
            if offered is None:
                self._say(FileChunk(question.digest, question.offset, cause="it was not offered"))
            else:
                self._say(await asyncio.to_thread(_chunk, question, offered))


def _chunk(question: AskChunk, offered: SubmittedFile) -> FileChunk:
    data, cause = b"", ""
    try:
        descriptor = os.open(offered.source, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            data = os.pread(descriptor, CHUNK_BYTES, question.offset)
            now = os.fstat(descriptor)
            if (now.st_size, now.st_mtime_ns) != (offered.file.size_bytes, offered.mtime_ns):
                data, cause = b"", "it has changed"
        finally:
            os.close(descriptor)
    except OSError as error:
        cause = f"it cannot be read: {error.strerror or error}"
    return FileChunk(question.digest, question.offset, data, cause or ("" if data else "it ends before"))


class FileFetcher:
    """Fetches files, one at a time, from the peer of the connection that there is. A peer that sends nothing for
    `patience_s`, or is away for so long, is waited for no more. So many bytes of the disk stay free, whoever else fills
    it."""

    def __init__(self, free_bytes_min: int = 0) -> None:
        self.patience_s, self._free_bytes_min = 0.0, free_bytes_min
        self._say: Say | None = None
        self._stirred = asyncio.Event()
        self._chunks: deque[FileChunk] = deque()
        self._digest = ""
        self._at_work = asyncio.Lock()

    def joined(self, say: Say, patience_s: float) -> None:
        """There is a connection, a new one or the first."""
        self._say, self.patience_s = say, patience_s
        self._chunks.clear()
        self._stirred.set()

    def left(self) -> None:
        self._say = None
        self._chunks.clear()
        self._stirred.set()

    def heard(self, chunk: FileChunk) -> None:
        if chunk.digest == self._digest and len(self._chunks) < ASKED_MAX:
            self._chunks.append(chunk)
            self._stirred.set()

    async def fetch(self, file: JobFile, place: Path) -> None:
        """Have the file at `place`. Raises `FilesUnavailable`, and `OSError`, as for a disk that is full."""
        async with self._at_work:
            self._digest = file.digest
            self._chunks.clear()
            try:
                await self._fetch(file, place.with_name(place.name + PART), place)
            finally:
                self._digest = ""

    async def _fetch(self, file: JobFile, part: Path, place: Path) -> None:
        seen, offset = await asyncio.to_thread(_kept, part, file.size_bytes)
        asked, by = offset, self._say
        while offset < file.size_bytes:
            if by is not self._say or by is None:
                by, asked = await self._peer(file), offset
            while asked < min(file.size_bytes, offset + WINDOW * CHUNK_BYTES):
                by(AskChunk(file.digest, asked))
                asked += CHUNK_BYTES
            chunk = await self._next(file, by)
            if chunk is None or (chunk.offset != offset and not chunk.cause):
                continue  # Another connection, or an answer to what was asked before a failure.
            if chunk.cause:
                raise FilesUnavailable(f"{file.path}: {chunk.cause}")
            if len(chunk.data) != min(CHUNK_BYTES, file.size_bytes - offset):
                raise FilesUnavailable(f"{file.path}: another part came than was asked for; it may have changed")
            await asyncio.to_thread(_write, part, chunk.data, offset, self._free_bytes_min)
            seen.update(chunk.data)
            offset += len(chunk.data)
        if seen.hexdigest() != file.digest:
            await asyncio.to_thread(part.unlink)
            raise FilesUnavailable(f"{file.path}: its content has not the digest {file.digest} that was told")
        await asyncio.to_thread(_name, part, place)

    async def _next(self, file: JobFile, by: Say) -> FileChunk | None:
        """Return the next chunk, or None once the connection is another. Raises `FilesUnavailable`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.patience_s):
                while self._say is by:
                    if self._chunks:
                        return self._chunks.popleft()
                    self._stirred.clear()
                    await self._stirred.wait()
                return None
        raise FilesUnavailable(f"{file.path}: nothing of it came for {self.patience_s:g} s")

    async def _peer(self, file: JobFile) -> Say:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.patience_s):
                while self._say is None:
                    self._stirred.clear()
                    await self._stirred.wait()
                return self._say
        raise FilesUnavailable(f"{file.path}: whoever has it was not heard for {self.patience_s:g} s")


def _kept(part: Path, size_bytes: int) -> "tuple[hashlib._Hash, int]":
    """Return what was fetched before, as a hash and a size; nothing where that is more than there should be."""
    seen, offset = hashlib.sha256(), 0
    if part.is_symlink() or (part.exists() and part.stat().st_size > size_bytes):
        part.unlink()
    with open(os.open(part, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600), "rb") as file:
        while data := file.read(1 << 20):
            seen.update(data)
            offset += len(data)
    return seen, offset


def _write(part: Path, data: bytes, offset: int, free_bytes_min: int) -> None:
    """Whoever waits for this may be gone meanwhile, so the file is open for as long as it is written."""
    if free_bytes_min and shutil.disk_usage(part.parent).free < free_bytes_min + len(data):
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {free_bytes_min} bytes stay free", str(part))
    descriptor = os.open(part, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        written = 0
        while written < len(data):
            written += os.pwrite(descriptor, data[written:], offset + written)
    finally:
        os.close(descriptor)


def _name(part: Path, place: Path) -> None:
    sync(part)
    replace_durably(part, place)
