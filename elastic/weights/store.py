"""Where a worker holds its weights: in memory, or in files that outlive its process.

Either way what was begun is finished before anything else, so what is held is always one whole version.
"""

import fcntl
import itertools
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import structlog

from elastic.weights.errors import WeightsCorrupted
from elastic.weights.held import Held, Staged
from elastic.weights.manifest import open_seal, seal
from elastic.weights.memory import Memory
from elastic.weights.redo import SCHEMA_VERSION, HeldRecord, elements_of, held_of, read_log, record_of, write_log
from elastic.weights.relay import Buffer
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
    left is brought to a whole version when it is opened, and believed only where every tile's sum is right. What
    cannot be written to files is held in memory alone. Raises `BlockingIOError` where another process has the
    directory, and other `OSError`s.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self._directory = directory
        self._files: dict[int, str] = {}
        """By the address at which they are mapped."""
        directory.mkdir(parents=True, exist_ok=True)
        self._lock = (directory / _LOCK).open("ab")
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
            with (self._directory / name).open("x+b") as file:
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
            record = open_seal((self._directory / _HELD).read_bytes(), HeldRecord, SCHEMA_VERSION)
            bits = self._map(record.patterns, elements_of(record))
            self._held = held_of(record, bits)
            if (self._directory / _STAGED).exists():
                staged = self._open_log(bits)
                if staged.held.run == record.run and record.version in (staged.base, staged.held.version):
                    self._staged = staged
                    self._finish()
            if wrong := self._held.wrong_tiles():
                raise WeightsCorrupted(f"the sums of {len(wrong)} tiles are wrong")
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
            self._write(_HELD, [seal(record_of(held, file))])
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
        with (self._directory / _STAGED).open("r+b") as file:
            return read_log(mmap.mmap(file.fileno(), 0), bits, held)

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
        with path.open("wb") as file:
            file.writelines(parts)
        path.replace(self._directory / name)

    def _map(self, name: str, elements: int) -> Bits:
        size_bytes = max(2 * elements, 1)
        with (self._directory / name).open("r+b") as file:
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


def open_store(directory: Path) -> Store:
    """A store that is kept below `directory`: the first that no living process has. In memory where none can be."""
    for number in itertools.count():
        try:
            return KeptStore(directory / f"worker-{number}")
        except BlockingIOError:
            continue
        except OSError as error:
            log.warning("weights not kept", directory=str(directory), reason=str(error))
            break
    return Store()
