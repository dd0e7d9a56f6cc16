"""Which checkpoint is kept whatever later ones come: a note beside them, which the run writes and its trainer heeds."""

from pathlib import Path

import msgspec

from elastic.system.files import write_whole

NOTE = "best.json"
NOTE_BYTES = 256
"""More than a note has."""


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
