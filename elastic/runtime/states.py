"""A run's state at a moment, in a file beside the trainer's checkpoint of then: who takes the run up begins there.

A file that is damaged, or that another version of this program has written, is as good as none: the journal has all.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import structlog

log = structlog.get_logger(__name__)

CHECKPOINTS = "checkpoints"
"""Where they are in a run's directory."""
KEEP = 2
"""Of the trainer's checkpoints as many are kept."""
_SUFFIX = ".state"


class SavedRun(msgspec.Struct, frozen=True, kw_only=True):
    """`state` is what a `Run` saved after the first `events` events of `journal`, the last one at `t_ns`.

    `digest` is that of its scheduler then.
    """

    journal: str
    events: int
    t_ns: int
    digest: str
    state: bytes


def write(directory: Path, version: int, saved: SavedRun) -> None:
    """Keep the state of when `version` was published, and no more than `KEEP` of them."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{version:08d}{_SUFFIX}"
    beside = path.with_suffix(".partial")
    with beside.open("wb") as file:
        file.write(msgspec.msgpack.encode(saved))
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
    for old in sorted(directory.glob(f"*{_SUFFIX}"))[:-KEEP]:
        old.unlink(missing_ok=True)


def newest_first(directory: Path) -> Iterator[SavedRun]:
    """Those that can be read."""
    for path in sorted(directory.glob(f"*{_SUFFIX}"), reverse=True):
        try:
            yield msgspec.msgpack.decode(path.read_bytes(), type=SavedRun)
        except (OSError, msgspec.DecodeError) as error:
            log.warning("saved state not used", path=str(path), reason=str(error))
