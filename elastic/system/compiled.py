"""Where compiled codecs are kept: numba's default place, or another one where that cannot be written.

Numba looks for a place as soon as a codec is imported, and without one the import fails: sources may be read-only, as
in an image, and their user may have no home.
"""

import atexit
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

VARIABLE = "NUMBA_CACHE_DIR"
FOLDER = "compiled"


def place_below(directory: Path) -> Mapping[str, str]:
    """The environment variable for processes whose compiled codecs may lie below this directory.

    Empty where the default place can be written, or another one was chosen by a person.
    """
    return {} if os.environ.get(VARIABLE) or _default_is_writable() else {VARIABLE: str(directory / FOLDER)}


def settle() -> None:
    """Give this process a place of its own until it ends, if it has none: before a codec is imported."""
    if os.environ.get(VARIABLE) or _default_is_writable():
        return
    place = tempfile.mkdtemp(prefix="elastic-compiled-")
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    os.environ[VARIABLE] = place
    if (numba := sys.modules.get("numba")) is not None:
        numba.config.reload_config()


def _default_is_writable() -> bool:
    beside_the_sources = Path(__file__).parents[1] / "weights" / "codecs" / "__pycache__"
    users = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "numba")
    return _is_writable(beside_the_sources) or _is_writable(users)


def _is_writable(directory: Path) -> bool:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=directory).close()
    except OSError:
        return False
    return True
