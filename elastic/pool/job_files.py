"""The files of a job that nodes on other machines are sent: what they may be, and whether they are as they were."""

import hashlib
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

import msgspec

from elastic.pool.messages import FILES_MAX, JobFile

PATH_MAX = 500
"""Bytes of a file's path below the job's directory. So all of a job's files are told of in one message."""


SCRIPT_LOG = "script.log"
"""What the end of a script's log is called that comes back."""

_LOCK, _OF_OWN = "lock", frozenset({"secret", "session"})
"""Names in the directories of runs, pools and nodes: each of them has a lock, and one of the others."""
_TICKET = ".ticket"
"""How the name of a file ends that lets its owner in somewhere."""


class SubmittedFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file as it was when its job was submitted. It lies at `source` on the pool's machine."""

    file: JobFile
    source: str
    mtime_ns: int


def check_path(path: str) -> str:
    """Return the path of a file below a directory. Raises `ValueError` for one that is none, or leads out of it."""
    parts = path.split("/")
    if not path.isprintable() or len(path.encode()) > PATH_MAX or {"", ".", ".."} & {*parts}:
        allowed = f"one below the job's directory, of printable characters and at most {PATH_MAX} bytes"
        raise ValueError(f"found the path {path!r}; allowed: {allowed}")
    return path


def submitted_file(source: Path, path: str) -> SubmittedFile:
    """Read a file's digest. Blocks. Raises `ValueError` for what is no file, or changes meanwhile."""
    try:
        descriptor = os.open(source, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            before = os.fstat(descriptor)
            if not stat.S_ISREG(before.st_mode):
                raise ValueError(f"{source}: is no file")
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            after = os.fstat(descriptor)
    except OSError as error:
        raise ValueError(f"{source}: cannot be read ({error.strerror or error})") from error
    if (before.st_mtime_ns, before.st_size) != (after.st_mtime_ns, after.st_size):
        raise ValueError(f"{source}: changes while it is read")
    its = JobFile(check_path(path), digest, before.st_size, bool(before.st_mode & stat.S_IXUSR))
    return SubmittedFile(file=its, source=str(source), mtime_ns=before.st_mtime_ns)


def files_below(place: Path, path: str, bytes_max: int, *, follow: bool, hidden: bool = False) -> list[SubmittedFile]:
    """Read what is at a place, a file or a directory, all but tickets, and the directories of runs, pools and nodes; it
    belongs at `path` on nodes. Blocks.

    What is hidden is read with `hidden`, links to files with `follow`, other links never. Raises `ValueError` for what
    no node is sent, such as more than `FILES_MAX` files, or `bytes_max` bytes.
    """
    size_bytes = 0
    sources = list(_sources(place, PurePosixPath(path), follow=follow, hidden=hidden))
    if not sources:
        raise ValueError(f"{place}: has no files")
    for source, _ in sources:
        size_bytes += source.stat().st_size
        if size_bytes > bytes_max:
            raise ValueError(f"{place}: has more than {bytes_max} bytes; allowed: that many")
    return [submitted_file(source, str(name)) for source, name in sources]


def _sources(place: Path, path: PurePosixPath, *, follow: bool, hidden: bool) -> Iterator[tuple[Path, PurePosixPath]]:
    waiting, count = [(place, path)], 0
    while waiting:
        here, name = waiting.pop()
        try:
            kind = here.lstat().st_mode
            source = here.resolve(strict=True) if stat.S_ISLNK(kind) else here
            if stat.S_ISLNK(kind) and not (follow and source.is_file()):
                allowed = "a file, or a link to one" if follow else "a file or a directory"
                raise ValueError(f"{here}: is a symbolic link; allowed: {allowed}")
            if source.is_dir():
                seen = (one for one in source.iterdir() if hidden or not one.name.startswith("."))
                below = sorted((one for one in seen if one.suffix != _TICKET), reverse=True)
                names = {one.name for one in below}
                if _LOCK not in names or not names & _OF_OWN:
                    waiting += [(one, name / one.name) for one in below]
                continue
        except OSError as error:
            raise ValueError(f"{here}: cannot be read ({error.strerror or error})") from error
        if source.suffix == _TICKET:
            raise ValueError(f"{here}: is a ticket, which lets its owner in; allowed: what nodes may have")
        count += 1
        if count > FILES_MAX:
            raise ValueError(f"{place}: has more than {FILES_MAX} files; allowed: that many")
        yield source, name


def named_files(root: Path, names: Sequence[str], bytes_max: int) -> list[SubmittedFile]:
    """Read what is named below a directory, or all of it where nothing is. Blocks. Raises `ValueError`, also for a name
    that leads out of the directory, or through a link."""
    found: dict[str, SubmittedFile] = {}
    for name in names or ["."]:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts:
            raise ValueError(f"found {name!r}; allowed: what is below {root}")
        for part in [*path.parents][-2::-1]:
            if (root / part).is_symlink():
                raise ValueError(f"{root / part}: is a symbolic link; allowed: a directory")
        of_name = files_below(root / path, str(path), bytes_max, follow=False)
        found |= {one.file.path: one for one in of_name}
        if len(found) > FILES_MAX or sum(one.file.size_bytes for one in found.values()) > bytes_max:
            raise ValueError(f"more than {FILES_MAX} files or {bytes_max} bytes are named; allowed: that many")
    return [*found.values()]


def unchanged(files: Sequence[SubmittedFile]) -> list[SubmittedFile]:
    """Return the files as they are now. Blocks; reads those that were written since. Raises `ValueError` for one whose
    content is not what it was."""
    found: list[SubmittedFile] = []
    for one in files:
        try:
            now = os.lstat(one.source)
        except OSError as error:
            raise ValueError(f"{one.source}: cannot be read any more ({error.strerror or error})") from error
        if (now.st_size, now.st_mtime_ns) == (one.file.size_bytes, one.mtime_ns) and stat.S_ISREG(now.st_mode):
            found.append(one)
            continue
        its = submitted_file(Path(one.source), one.file.path)
        if its.file.digest != one.file.digest:
            raise ValueError(f"{one.source}: has changed since the job was submitted")
        found.append(msgspec.structs.replace(one, mtime_ns=its.mtime_ns))
    return found
