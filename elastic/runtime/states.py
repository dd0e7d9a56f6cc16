"""Saved states of a run: a file beside each checkpoint of the trainer, from which the run's next process begins.

A file that is damaged, or that another version of this program wrote, is passed over: the journal has everything.
"""

import functools
import hashlib
from collections.abc import Iterator
from pathlib import Path

import msgspec
import structlog

import elastic
from elastic.system.files import write_whole

log = structlog.get_logger(__name__)

CHECKPOINTS = "checkpoints"
"""The directory of states within a run's directory."""
KEEP = 2
"""Number of the trainer's checkpoints that are kept."""
_SUFFIX = ".state"
_OWN = ("core", "runtime")
"""Rooms whose data types states consist of."""


class SavedRun(msgspec.Struct, frozen=True, kw_only=True):
    """`state` is what a `Run` saved after the first `events` events of `journal`, the last one at `t_ns`.

    `digest` is that of its scheduler then.
    """

    journal: str
    events: int
    t_ns: int
    digest: str
    state: bytes


class _File(msgspec.Struct, frozen=True):
    program: str
    digest: bytes
    saved: bytes


@functools.cache
def _program() -> str:
    """Which version of this program this is, as far as states are concerned."""
    sources = [path for room in _OWN for path in sorted(Path(*elastic.__path__, room).rglob("*.py"))]
    return hashlib.blake2b(b"".join(path.read_bytes() for path in sources), digest_size=16).hexdigest()


def _digest(saved: bytes) -> bytes:
    return hashlib.blake2b(saved, digest_size=16).digest()


def encoded(saved: SavedRun) -> bytes:
    body = msgspec.msgpack.encode(saved)
    return msgspec.msgpack.encode(_File(_program(), _digest(body), body))


def decoded(content: bytes) -> SavedRun:
    """Raises `ValueError` for what is damaged, or of another version of this program."""
    file = msgspec.msgpack.decode(content, type=_File)
    if file.program != _program():
        raise ValueError("another version of this program wrote it")
    if file.digest != _digest(file.saved):
        raise ValueError("it is damaged")
    return msgspec.msgpack.decode(file.saved, type=SavedRun)


def write(directory: Path, version: int, saved: SavedRun) -> None:
    """Keep the state of when `version` was published, and no more than `KEEP` of them."""
    write_whole(directory / f"{version:08d}{_SUFFIX}", encoded(saved))
    for old in sorted(directory.glob(f"*{_SUFFIX}"))[:-KEEP]:
        old.unlink(missing_ok=True)


def newest_first(directory: Path) -> Iterator[SavedRun]:
    """Return the states that can be read and that this version of the program wrote."""
    for path in sorted(directory.glob(f"*{_SUFFIX}"), reverse=True):
        try:
            yield decoded(path.read_bytes())
        except (OSError, ValueError) as error:
            log.warning("saved state not used", path=str(path), reason=str(error))
