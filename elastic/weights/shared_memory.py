"""Room for a directory relay's blobs in shared memory, while a run lasts.

The relay's directory stays what everybody names, lists and reads. While it has a link `.memory` to a directory in
shared memory, a blob is written there and its key is a symbolic link to it; what finds no room there lies on the disk
as ever, so a full memory costs speed and nothing else. So readers have to be on the same machine.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import structlog

from elastic.weights.directory import INCOMING, MEMORY_LINK

log = structlog.get_logger(__name__)

SHARED_MEMORY = Path("/dev/shm")
_PREFIX = "elastic-relay-"


@contextlib.contextmanager
def in_memory(root: Path, memory: Path = SHARED_MEMORY) -> Iterator[None]:
    """Have the blobs of the directory relay at `root` in `memory` where that can be, until the block is left.

    Then what is left of them is on the disk. Blobs that a killed process of the same run had there are still there.
    What runs left in `memory` that were killed and are not `kept_in_memory` is removed, and of the keys at `root` those
    whose blobs went with it: they count as deleted.
    """
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(_linked(root, memory))
        except OSError as error:
            log.info("weights on the disk", directory=str(root), reason=str(error))
        remove_leftovers(memory)
        _unlink_missing(root)
        yield


@contextlib.contextmanager
def kept_in_memory(root: Path) -> Iterator[None]:
    """What the relay at `root` has in memory stays, also where the process that put it there is killed.

    After that process, and all that keep it, nothing of it is left.
    """
    with _held(root / MEMORY_LINK) as place:
        yield
    if place is not None:
        _remove_leftover(place)


@contextlib.contextmanager
def _linked(root: Path, memory: Path) -> Iterator[None]:
    link = root / MEMORY_LINK
    with contextlib.ExitStack() as stack:
        place = stack.enter_context(_held(link))
        if place is None:
            link.unlink(missing_ok=True)
            link.symlink_to(tempfile.mkdtemp(prefix=_PREFIX, dir=memory))
            place = stack.enter_context(_held(link))
            if place is None:
                raise FileNotFoundError(f"{link}: taken for a leftover")
        try:
            yield
        finally:
            link.unlink(missing_ok=True)
            _bring_to_disk(root)
            shutil.rmtree(place, ignore_errors=True)


@contextlib.contextmanager
def _held(link: Path) -> Iterator[Path | None]:
    """The place that `link` names, which counts as no leftover meanwhile; None where there is none."""
    with contextlib.ExitStack() as stack:
        place = None
        with contextlib.suppress(OSError):
            found = link.readlink()
            stack.enter_context(_locked(found, fcntl.LOCK_SH))
            place = found if found.exists() else None
        yield place


@contextlib.contextmanager
def _locked(place: Path, flags: int) -> Iterator[None]:
    descriptor = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, flags)
        yield
    finally:
        os.close(descriptor)


def remove_leftovers(memory: Path = SHARED_MEMORY) -> None:
    """Remove what killed processes have left in `memory`, and nobody keeps."""
    for place in memory.glob(f"{_PREFIX}*"):
        _remove_leftover(place)


def _remove_leftover(place: Path) -> None:
    """Removes the place unless a process holds its lock. Places of other users cannot be opened and stay."""
    with contextlib.suppress(OSError), _locked(place, fcntl.LOCK_EX | fcntl.LOCK_NB):
        shutil.rmtree(place, ignore_errors=True)


def _links(root: Path) -> list[Path]:
    """Keys whose blobs are elsewhere, manifests last."""
    found = [Path(directory, name) for directory, _, names in os.walk(root) for name in names if name != MEMORY_LINK]
    return sorted((path for path in found if path.is_symlink()), key=lambda path: (path.suffix == ".json", path))


def _unlink_missing(root: Path) -> None:
    for path in reversed(_links(root)):
        if not path.exists():
            path.unlink(missing_ok=True)


def _bring_to_disk(root: Path) -> None:
    """As far as the disk has room; manifests come last, so that none is there without what it names."""
    links = _links(root)
    try:
        while links:
            copy = shutil.copyfile(links[0], root / INCOMING / "blob")
            os.replace(copy, links.pop(0))
    except OSError as error:
        log.warning("weights not brought to the disk", directory=str(root), blobs=len(links), reason=str(error))
        (root / INCOMING / "blob").unlink(missing_ok=True)
        for path in reversed(links):
            path.unlink(missing_ok=True)
