"""Notes beside a trainer's checkpoints, which it heeds: which one is kept whatever later ones come, and, where it is on
another machine than its run, which ones the run has."""

from collections.abc import Iterable
from pathlib import Path

import msgspec

from elastic.system.files import write_whole

NOTE = "best.json"
NOTE_BYTES = 256
"""More than a note has."""
RETURNED = ".returned.json"


class _Best(msgspec.Struct, frozen=True):
    version: int


def keep_best(checkpoints: Path, version: int) -> None:
    """Have the checkpoint of this version kept, and none before it for being the best. Raises `OSError`."""
    write_whole(checkpoints / NOTE, msgspec.json.encode(_Best(version)), durable=False)  # Who resumes says it again.


def best_kept(checkpoints: Path) -> int | None:
    """The version whose checkpoint is kept; None where there is no such note, or it cannot be read."""
    try:
        return best_noted((checkpoints / NOTE).read_bytes())
    except OSError:
        return None


def best_noted(note: bytes) -> int | None:
    """The version that such a note names; None where it is none."""
    try:
        return msgspec.json.decode(note, type=_Best).version
    except msgspec.DecodeError:
        return None


def note_returned(checkpoints: Path, names: Iterable[str]) -> None:
    """Note that the run has the checkpoints of these names, and no others. Raises `OSError`."""
    write_whole(checkpoints / RETURNED, msgspec.json.encode(sorted(names)), durable=False)


def returned(checkpoints: Path) -> frozenset[str] | None:
    """The names of the checkpoints that the run has; None for a trainer on its machine, which has them all."""
    try:
        return msgspec.json.decode((checkpoints / RETURNED).read_bytes(), type=frozenset[str])
    except FileNotFoundError:
        return None
