"""Where compiled codecs are kept: beside the sources, or at another place where that cannot be written.

Numba looks for a place as soon as a codec is imported, and without one the import fails: sources may be read-only, as
in an image, and their user may have no home.
"""

import atexit
import importlib
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

VARIABLE = "NUMBA_CACHE_DIR"
FOLDER = "compiled"


def place_below(directory: Path) -> Mapping[str, str]:
    """The environment variable for processes whose compiled codecs may lie below this directory.

    Empty where the default place can be written, or another one was chosen by a person.
    """
    return {} if os.environ.get(VARIABLE) or _default() else {VARIABLE: str(directory / FOLDER)}


def settle() -> None:
    """Have the codecs that this process imports from now on kept apart by numba's version: environments that share
    sources, or a person's place, would read each other's, and an older LLVM fails at a newer one's. A process without
    a place gets one of its own until it ends."""
    place = os.environ.get(VARIABLE) or _default()
    if not place:
        place = os.environ[VARIABLE] = tempfile.mkdtemp(prefix="elastic-compiled-")
        atexit.register(shutil.rmtree, place, ignore_errors=True)
    numba = importlib.import_module("numba")
    numba.config.CACHE_DIR = os.path.join(place, f"numba-{numba.__version__}")


def _default() -> str:
    """Beside the sources, or the user's; empty where neither can be written."""
    users = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "numba")
    places = Path(__file__).parents[1] / "weights" / "codecs" / "__pycache__", users
    return next(map(str, filter(_is_writable, places)), "")


def _is_writable(directory: Path) -> bool:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=directory).close()
    except OSError:
        return False
    return True
