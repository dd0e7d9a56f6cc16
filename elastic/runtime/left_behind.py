"""What a run may have left at its providers as a process of it ended: written down in the run's directory, until a
later process has proven it gone.

One writer at a time: the process that has the run's claim.
"""

import contextlib
from collections.abc import Mapping
from pathlib import Path

import msgspec

from elastic.system.files import write_whole

FILE = "left-behind.json"


def left_behind(run_dir: Path) -> dict[str, str]:
    """What each provider may still have of the run, in words; empty if nothing is known to be left."""
    with contextlib.suppress(FileNotFoundError, msgspec.DecodeError):
        return msgspec.json.decode((run_dir / FILE).read_bytes(), type=dict[str, str])
    return {}


def write_down(run_dir: Path, left: Mapping[str, str]) -> None:
    """Keep what these providers may have left, and forget those with nothing. Raises `OSError`."""
    known = left_behind(run_dir)
    kept = {name: words for name, words in {**known, **left}.items() if words}
    if kept:
        write_whole(run_dir / FILE, msgspec.json.encode(kept))
    else:
        (run_dir / FILE).unlink(missing_ok=True)
