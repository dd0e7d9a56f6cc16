"""Where a worker holds its weights: in memory, or in files that outlive its process.

Either way what was begun is finished before anything else, so what is held is always one whole version.
"""

import errno
import fcntl
import itertools
import mmap
import os
import re
import stat
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np
import structlog

from elastic.weights.errors import WeightsCorrupted
from elastic.weights.held import Held, Staged
from elastic.weights.memory import Memory
from elastic.weights.redo import (
    PATTERNS_NAME,
    HeldRecord,
    check_patterns,
    decode_record,
    held_of,
    read_log,
    record_of,
    write_log,
)
from elastic.weights.relay import Buffer
from elastic.weights.signing import Trust
from elastic.weights.tensors import Bits

log = structlog.get_logger(__name__)


class Store:
    """Weights in memory."""

    def __init__(self) -> None:
        self._memory = Memory()
        self._held: Held | None = None
        self._staged: Staged | None = None
        self.not_used = ""
        """Why what was kept here before is not what is held; empty where nothing was, or it is."""

    @property
    def held(self) -> Held | None:
        self._finish()
        return self._held

    def at_rest(self) -> Held | None:
        """What is held, unless another thread is writing over it just now."""
        return self._held if self._staged is None else None

    def room(self, elements: int) -> Bits:
        """For the patterns of a version that does not build on what is held; uninitialised."""
        return self._memory.empty(elements)

    def put(self, staged: Staged) -> None:
        """Hold that version from now on. Again is a no-op."""
        if staged.held is self.held:
            return
        if staged.base is not None:
            if self._held is None or self._held.version != staged.base:
                held = "nothing" if self._held is None else self._held.version
                raise ValueError(f"version {staged.held.version} was staged over {staged.base}; held is {held}")
            staged = self._logged(staged)
        self._staged = staged
        self._finish()
        self._record()

    def drop(self) -> None:
        """Hold nothing."""
        self._held = self._staged = None

    def close(self) -> None:
        """Leave what outlives the process to the next."""

    def _logged(self, staged: Staged) -> Staged:
        """The same, once it can be finished whatever happens to this process."""
        return staged

    def _record(self) -> None:
        """What is held has changed."""

    def _finish(self) -> None:
        if (staged := self._staged) is not None:
            staged.write()
            self._held, self._staged = staged.held, None


_HELD, _STAGED, _LOCK, _PATTERNS = "held.json", "staged.bin", "lock", "patterns-"


class KeptStore(Store):
    """Weights in the files of `directory` (best in shared memory), which is this process's alone while it lives.

    `held.json` names the file of the patterns, which are mapped. `staged.bin` is a redo log, with the tiles' tags: it
    is there, complete, from before the first pattern is overwritten until after the last. What a killed process
    left is brought to a whole version when it is opened, and believed only where the manifest beside it is signed by
    the trainer that `trust` names, and is of these patterns. What cannot be written to files is held in memory alone.
    No link is followed, and no path out of the directory; one that others own or may write to is not used.
    Raises `BlockingIOError` where another process has the directory, and other `OSError`s.
    """

    def __init__(self, directory: Path, trust: Trust) -> None:
        super().__init__()
        self._directory = directory
        self._trust = trust
        self._files: dict[int, str] = {}
        """By the address at which they are mapped."""
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_ours(directory)
        self._lock = self._open(_LOCK, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._recover()
        except BaseException:
            self._lock.close()
            raise

    def room(self, elements: int) -> Bits:
        self._delete_patterns(but=self._file_of(self._held))
        name = f"{_PATTERNS}{os.urandom(8).hex()}"
        try:
            with self._open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL) as file:
                # Reserved now: a page that is not to be had later would be a signal instead of an error.
                os.posix_fallocate(file.fileno(), 0, max(2 * elements, 1))
            return self._map(name, elements)
        except OSError as error:
            self._warn(error)
            return super().room(elements)

    def drop(self) -> None:
        super().drop()
        self._forget()
        self._delete_patterns(but=None)

    def close(self) -> None:
        self._lock.close()

    def _recover(self) -> None:
        """What the process before left, if it can be made whole."""
        try:
            with self._open(_HELD) as file:
                record = decode_record(file.read(), HeldRecord)
            self._held = held_of(record, self._trust, partial(self._map, record.patterns))
            if (self._directory / _STAGED).exists():
                staged = self._open_log(self._held.bits)
                if self._held.version in (staged.base, staged.held.version):
                    self._staged = staged
                    self._finish()
            check_patterns(self._held, self._trust)
        except FileNotFoundError:
            self.drop()
        except (OSError, ValueError, WeightsCorrupted) as error:
            self.not_used = f"{self._directory}: {error}"
            self.drop()
        else:
            self._record()

    def _record(self) -> None:
        """Say what is held now; with that the log is of no use any more."""
        held, file = self._held, self._file_of(self._held)
        if held is None or file is None:
            self._forget()
            return
        try:
            self._write(_HELD, [msgspec.json.encode(record_of(held, file))])
        except OSError as error:
            self._not_kept(error)
        (self._directory / _STAGED).unlink(missing_ok=True)
        self._delete_patterns(but=file)

    def _logged(self, staged: Staged) -> Staged:
        """The same, written down, with its tags in the log."""
        file = self._file_of(staged.held)
        if file is None:
            return staged
        try:
            self._write(_STAGED, write_log(staged, file))
            return self._open_log(staged.held.bits, staged.held)
        except OSError as error:
            self._not_kept(error)
            return staged

    def _open_log(self, bits: Bits, held: Held | None = None) -> Staged:
        with self._open(_STAGED, os.O_RDWR) as file:
            return read_log(mmap.mmap(file.fileno(), 0), bits, self._trust, held)

    def _not_kept(self, error: OSError) -> None:
        """Whatever the files say will not be true any more."""
        self._warn(error)
        self._forget()

    def _warn(self, error: OSError) -> None:
        log.warning("weights not kept", directory=str(self._directory), reason=str(error))

    def _forget(self) -> None:
        for name in (_HELD, _STAGED):
            (self._directory / name).unlink(missing_ok=True)

    def _write(self, name: str, parts: Iterable[Buffer]) -> None:
        """All or nothing, as far as a killed process goes."""
        path = self._directory / f"{name}.new"
        path.unlink(missing_ok=True)
        with self._open(path.name, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as file:
            file.writelines(parts)
        path.replace(self._directory / name)

    def _open(self, name: str, flags: int = os.O_RDONLY) -> BinaryIO:
        """A file of the directory. Raises `OSError` for a link, and for what is no file of one name."""
        descriptor = os.open(self._directory / name, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode) or about.st_nlink != 1 or about.st_uid != os.geteuid():
            os.close(descriptor)
            raise PermissionError(errno.EPERM, "not a file of this user's alone", str(self._directory / name))
        return os.fdopen(descriptor, "rb" if flags == os.O_RDONLY else "r+b")

    def _map(self, name: str, elements: int) -> Bits:
        if not re.fullmatch(PATTERNS_NAME, name):
            raise WeightsCorrupted(f"patterns in {name!r}, which is no file of this directory")
        size_bytes = max(2 * elements, 1)
        with self._open(name, os.O_RDWR) as file:
            bits = np.frombuffer(mmap.mmap(file.fileno(), size_bytes), np.uint16, elements)
        self._files[bits.ctypes.data] = name
        return bits

    def _file_of(self, held: Held | None) -> str | None:
        return None if held is None else self._files.get(held.bits.ctypes.data)

    def _delete_patterns(self, but: str | None) -> None:
        self._files = {address: name for address, name in self._files.items() if name == but}
        for path in self._directory.glob(f"{_PATTERNS}*"):
            if path.name != but:
                path.unlink(missing_ok=True)


def _check_ours(directory: Path) -> None:
    """Raises `PermissionError` where somebody else could have written what is there."""
    about = directory.lstat()
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid() or about.st_mode & 0o022:
        raise PermissionError(errno.EPERM, "others own it, or may write to it", str(directory))


def open_store(directory: Path, trust: Trust) -> Store:
    """A store that is kept below `directory`: the first that no living process has. In memory where none can be."""
    for number in itertools.count():
        try:
            return KeptStore(directory / f"worker-{number}", trust)
        except BlockingIOError:
            continue
        except OSError as error:
            log.warning("weights not kept", directory=str(directory), reason=str(error))
            break
    return Store()
