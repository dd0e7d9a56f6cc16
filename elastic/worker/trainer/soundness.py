"""Whether a trainer's checkpoint is as it was written, by the digests in its header.

Without torch, which takes seconds to import: a pool asks before it sends a checkpoint to another machine.
"""

import hashlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import msgspec
import xxhash
from safetensors import SafetensorError, safe_open

from elastic.engine.model.stored import CheckpointError, file_headers
from elastic.system.cores import cores

HEADER_KEY = "elastic_trainer"
DIGESTS_KEY = "digests"
HEADER_FILE = "elastic.json"
"""The file in a checkpoint's directory that describes it."""
_READ_BYTES = 1 << 22


class StoredParts(Protocol):
    """What lies at a checkpoint's path, with nothing of it checked. Methods raise `OSError` and `SafetensorError`."""

    @property
    def header(self) -> Mapping[str, str]: ...

    def parts(self) -> Sequence[str]:
        """What has a digest each, by name."""
        ...

    def digest(self, part: str) -> str: ...


class StoredFile:
    """The `StoredParts` of a file: its tensors. Raises `CheckpointError` and `SafetensorError`."""

    def __init__(self, path: Path) -> None:
        with safe_open(path, framework="np") as file:
            self.header: Mapping[str, str] = file.metadata() or {}
        self._path, self._stored = path, file_headers(path)
        self.shapes: Mapping[str, tuple[int, ...]] = {name: one.shape for name, one in self._stored.items()}

    def parts(self) -> Sequence[str]:
        return sorted(self._stored)

    def digest(self, part: str) -> str:
        its, found = self._stored[part], xxhash.xxh3_128()
        with self._path.open("rb") as file:
            file.seek(its.begin)
            for begin in range(its.begin, its.end, _READ_BYTES):
                found.update(file.read(min(_READ_BYTES, its.end - begin)))
        return found.hexdigest()


class StoredFiles:
    """The `StoredParts` of a directory: all of its files but the header."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.header: Mapping[str, str] = msgspec.json.decode((path / HEADER_FILE).read_bytes(), type=dict[str, str])

    def parts(self) -> Sequence[str]:
        return sorted(file.name for file in self._path.iterdir() if file.name != HEADER_FILE)

    def digest(self, part: str) -> str:
        return digest_of(self._path / part)


def damage(path: Path) -> str:
    """Say what of a checkpoint is not as it was written; empty where nothing is. Reads all of it."""
    try:
        state = StoredFiles(path) if path.is_dir() else StoredFile(path)
        check_digests(path, state, state.parts())
    except CheckpointError as error:
        return str(error)
    except (OSError, SafetensorError, msgspec.DecodeError, UnicodeDecodeError) as error:
        return f"{path}: cannot be read ({error})"
    return ""


def check_digests(path: Path, state: StoredParts, parts: Sequence[str]) -> None:
    """These parts are as they were written, and there are no others than there were. Raises `CheckpointError`."""
    header = state.header
    try:
        written = msgspec.json.decode(header[DIGESTS_KEY], type=dict[str, str])
    except (KeyError, msgspec.DecodeError) as error:
        raise CheckpointError(f"{path}: damaged: it has no digests ({error})") from error
    with ThreadPoolExecutor(cores()) as executor:
        found = dict(zip(parts, executor.map(state.digest, parts), strict=True))
    found[HEADER_KEY] = digest_of(header.get(HEADER_KEY, "").encode())
    odd = {name for name, one in found.items() if written.get(name) != one}
    odd |= written.keys() ^ {*state.parts(), HEADER_KEY}
    if odd:
        raise CheckpointError(f"{path}: damaged: {min(odd)} is not as it was written")


def digest_of(data: bytes | memoryview | Path) -> str:
    """XXH3-128 of bytes, or of a file's: it shows damage, and takes no longer than reading them. Hashing releases the
    interpreter."""
    if isinstance(data, Path):
        with data.open("rb") as file:
            return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()
    return xxhash.xxh3_128_hexdigest(data)
