"""Files in directories that belong to another user, who may change them at any time and whom we do not trust.

A server that is root gives a run's directory to the user of its project. What it does there afterwards it does with
that user's rights (`as_owner`), so a link leads it nowhere that this user could not go. Single files are opened below
the directory's descriptor, without following links and without waiting for anybody, and only regular files.

Nothing else in the server opens, lists or removes what is in such a directory.
"""

import contextlib
import ctypes
import errno
import os
import platform
import secrets
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import BinaryIO, TypeAlias

_SETGROUPS = {"x86_64": 116, "aarch64": 159}
"""The number of the system call, by machine. The C library's own function changes all threads, this one its caller."""
_DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_DEPTH_MAX = 64
"""Directories in directories, of which a run has three."""
_TIMES_MAX = 1_000
_NO_FILE = (errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.ENXIO, errno.ENODEV, errno.EACCES)

Keep: TypeAlias = Callable[[str], bool]
"""Whether what has this name in a directory is to be kept."""

_libc = ctypes.CDLL(None, use_errno=True)


def none_kept(_: str) -> bool:
    return False


class NotAFile(FileNotFoundError):
    """What has the name is a link, a pipe or anything else but a file that its owner may open."""


@contextlib.contextmanager
def as_owner(directory: Path) -> Iterator[None]:
    """A context: this thread has the rights of the directory's owner to files, and no others.

    It must be left by the thread that entered it, so nothing is awaited within. Threads that are begun within keep
    these rights. Only root can take them; for others, and where `directory` is missing, nothing changes. Databases are
    opened by `elastic.system.sqlite` within, other files by the functions here. Raises `OSError`.
    """
    try:
        found = os.stat(directory)
    except FileNotFoundError:
        found = None
    if found is None or os.geteuid() != 0 or found.st_uid == _fsuid():
        yield
    else:
        with _rights_of(found.st_uid, found.st_gid):
            yield


def opened(directory: Path, name: str) -> BinaryIO:
    """Open a regular file below a directory to read it. Raises `OSError`, of which `NotAFile`."""
    return os.fdopen(_descriptor(directory, name, os.O_RDONLY), "rb")


def appended(directory: Path, name: str) -> BinaryIO:
    """Open a regular file below a directory to append to it; it and its directories are made if missing.

    Raises `OSError`, of which `NotAFile`.
    """
    return os.fdopen(_descriptor(directory, name, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab", buffering=0)


def is_file(directory: Path, name: str) -> bool:
    """Return whether there is a regular file of this name below the directory."""
    with contextlib.suppress(FileNotFoundError), opened(directory, name):
        return True
    return False


def files(directory: Path, name: str, suffix: str) -> list[tuple[str, os.stat_result]]:
    """Return the regular files in a directory below `directory` whose names end in `suffix`, by name."""
    found: list[tuple[str, os.stat_result]] = []
    with (
        contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError),
        as_owner(directory),
        _below(directory, PurePosixPath(name).parts) as place,
        _listed(place) as listed,
    ):
        for entry in sorted(one for one in os.listdir(listed) if one.endswith(suffix)):
            with contextlib.suppress(FileNotFoundError):
                status = os.stat(entry, dir_fd=listed, follow_symlinks=False)
                if stat.S_ISREG(status.st_mode):
                    found.append((entry, status))
    return found


def size_bytes(directory: Path, name: str = "", keep: Keep = none_kept) -> int:
    """Return the size of all regular files below a directory, or below one in it, as far as a run's directories go.

    Links are not followed. What it has in it that is to be kept, by its name, is not counted.
    """
    total = 0
    with contextlib.suppress(OSError), as_owner(directory), _below(directory, PurePosixPath(name).parts) as place:
        for _, _, status in _tree(place, keep=keep):
            total += status.st_size if stat.S_ISREG(status.st_mode) else 0
    return total


def remove(directory: Path, name: str = "", keep: Keep = none_kept) -> None:
    """Remove the directory, which lies in one of ours, or what has this name in it. Raises `OSError`. What
    it has in it that is to be kept, by its name, stays. Of a link only the link goes.

    This is done with our own rights, since its owner may have forbidden it to itself. What lies too deep is brought up
    first.
    """
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISDIR(os.lstat(directory / name).st_mode):
            (directory / name).unlink()
            return
        with _below(directory, PurePosixPath(name).parts) as place:
            for _ in range(_TIMES_MAX):
                if _emptied(place, keep):
                    break
            if any(map(keep, os.listdir(f"/proc/self/fd/{place}"))):
                return
        (directory / name).rmdir()


def _emptied(place: int, keep: Keep) -> bool:
    """Remove what is below a directory, but for what is to be kept in it; return whether that is all, or else has come
    up."""
    whole = True
    for parent, entry, status in _tree(place, keep=keep):
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISDIR(status.st_mode):
                os.unlink(entry, dir_fd=parent)
                continue
            try:
                os.rmdir(entry, dir_fd=parent)
            except OSError as error:
                if error.errno != errno.ENOTEMPTY:
                    raise
                os.rename(entry, f".{secrets.token_hex(8)}", src_dir_fd=parent, dst_dir_fd=place)
                whole = False
    return whole


def hand_over(top: Path, uid: int, gid: int) -> None:
    """Give a directory in one of ours, and what in it is of its owner so far, to another user. Raises `OSError`.

    The directory itself comes last: until then its new owner can change nothing in it.
    """
    former = os.stat(top).st_uid
    if former == uid:
        return
    with _below(top, ()) as place:
        for parent, entry, status in _tree(place):
            if status.st_uid == former:
                os.chown(entry, uid, gid, dir_fd=parent, follow_symlinks=False)
        os.chown(top, uid, gid, follow_symlinks=False)


def _tree(place: int, depth: int = 0, keep: Keep = none_kept) -> Iterator[tuple[int, str, os.stat_result]]:
    """Yield all that is below a directory: the descriptor of its own directory, its name and status; what is in a
    directory comes before it, but for what is deeper than `_DEPTH_MAX`. What is to be kept in the topmost one is
    left out, with all below."""
    with _listed(place) as listed:
        for entry in (one for one in os.listdir(listed) if not keep(one)):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # It is replaced meanwhile.
                status = os.stat(entry, dir_fd=listed, follow_symlinks=False)
                if stat.S_ISDIR(status.st_mode) and depth < _DEPTH_MAX:
                    below = os.open(entry, _DIRECTORY, dir_fd=listed)
                    try:
                        yield from _tree(below, depth + 1)
                    finally:
                        os.close(below)
                yield listed, entry, status


@contextlib.contextmanager
def _listed(place: int) -> Iterator[int]:
    listed = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=place)
    try:
        yield listed
    finally:
        os.close(listed)


def _descriptor(directory: Path, name: str, flags: int) -> int:
    *parents, last = PurePosixPath(name).parts
    try:
        with as_owner(directory), _below(directory, parents, make=bool(flags & os.O_CREAT)) as place:
            descriptor = os.open(last, flags | _FILE, 0o600, dir_fd=place)
    except OSError as error:
        if error.errno in _NO_FILE:
            raise NotAFile(error.errno, "no regular file that its owner may open", str(directory / name)) from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise NotAFile(errno.ENOENT, "no regular file", str(directory / name))
    return descriptor


@contextlib.contextmanager
def _below(directory: Path, parts: Sequence[str], *, make: bool = False) -> Iterator[int]:
    """A descriptor of the directory at these names below `directory`."""
    place = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in parts:
            if make:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, 0o700, dir_fd=place)
            further = os.open(part, _DIRECTORY, dir_fd=place)
            os.close(place)
            place = further
        yield place
    finally:
        os.close(place)


@contextlib.contextmanager
def _rights_of(uid: int, gid: int) -> Iterator[None]:
    former_uid, former_gid, former_groups = _fsuid(), _fsgid(), os.getgroups()
    _set_groups([])
    try:
        _libc.setfsgid(gid)
        _libc.setfsuid(uid)
        if (_fsuid(), _fsgid()) != (uid, gid):
            raise PermissionError(errno.EPERM, f"the rights of user {uid} cannot be taken")
        yield
    finally:
        _libc.setfsuid(former_uid)
        _libc.setfsgid(former_gid)
        _set_groups(former_groups)


def _fsuid() -> int:
    return _libc.setfsuid(ctypes.c_uint(0xFFFFFFFF))


def _fsgid() -> int:
    return _libc.setfsgid(ctypes.c_uint(0xFFFFFFFF))


def _set_groups(groups: list[int]) -> None:
    number = _SETGROUPS.get(platform.machine())
    if number is None:
        raise OSError(errno.ENOSYS, f"on {platform.machine()} one thread cannot leave its groups")
    if _libc.syscall(number, len(groups), (ctypes.c_uint * len(groups))(*groups)):
        raise OSError(ctypes.get_errno(), "this thread cannot change its groups")
