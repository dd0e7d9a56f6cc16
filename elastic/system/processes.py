"""Processes of this machine: who they are, what ours inherit, and which were started with a mark in their environment.

- Ours inherit the environment variables that are named here or by the run, and no others: no cloud keys.
- A process is its id and the tick of this boot at which it started, so that a clock that is set hides nothing and an
  id that passed to another process means nothing.
- What carries a mark passes it to everything that it starts, in whatever session or process group.
"""

import contextlib
import ctypes
import fnmatch
import os
import select
import signal
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import msgspec

from elastic.system.host import here

END_S = 5.0
"""For a process that was killed to be gone."""
RUN_VARIABLE, MARK_VARIABLE = "ELASTIC_RUN", "ELASTIC_MARK"

INHERITED = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TMPDIR", "TZ", "LANG", "LANGUAGE", "LC_*"),
    *("PYTHON*", "VIRTUAL_ENV", "CONDA_PREFIX", "LD_LIBRARY_PATH", "LD_PRELOAD"),
    *("CUDA_*", "NVIDIA_*", "NCCL_*", "HIP_VISIBLE_DEVICES", "TORCH*", "PYTORCH_*", "TRITON_*", "NUMBA_*"),
    *("OMP_*", "MKL_*", "KMP_*", "GOMP_*", "OPENBLAS_*"),
    *("XDG_CACHE_HOME", "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "SSL_CERT_FILE", "SSL_CERT_DIR"),
)
"""Names of environment variables, and patterns of names, that every process of a run inherits."""
OF_SITE = ("ELASTIC_SITE", "ELASTIC_SITE_TOKEN")
"""What a machine may tell workers on it, besides what every process of a run inherits; see `elastic.worker.weights`."""

_PR_SET_PDEATHSIG = 1
"""`prctl`'s, of Linux."""

_PATTERNS = tuple(name for name in INHERITED if "*" in name)
_SECRETS = ("*KEY*", "*TOKEN*", "*SECRET*", "*PASSW*", "*CREDENTIAL*")
"""Variables that patterns never match; a secret must be named."""


def inherited(*further: str) -> dict[str, str]:
    """Our environment, as far as a process of a run may have it: `INHERITED` and what is named besides."""
    wanted = {*INHERITED, *further}
    patterns = [name for name in wanted if "*" in name]
    return {
        name: value
        for name, value in os.environ.items()
        if name in wanted or (_matches(name, patterns) and not _matches(name, _SECRETS))
    }


def named(*further: str) -> dict[str, str]:
    """Return those variables of our environment that are named here and are not inherited otherwise."""
    return beside_usual(inherited(*further))


def beside_usual(variables: Mapping[str, str]) -> dict[str, str]:
    """Return those of these variables that are not inherited unless they are named."""
    return {name: value for name, value in variables.items() if not _is_usual(name)}


def _is_usual(name: str) -> bool:
    return name in INHERITED or (_matches(name, _PATTERNS) and not _matches(name, _SECRETS))


def told_secrets() -> list[str]:
    """The values of our environment variables that are secrets by their names, which a process may have been given."""
    return [value for name, value in os.environ.items() if _matches(name, _SECRETS)]


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


class Identity(msgspec.Struct, frozen=True):
    """A process of this boot of this machine, and no other before or after it with the same id."""

    pid: int
    start_ticks: int
    boot: str


def identity(pid: int) -> Identity | None:
    """Return the identity of an existing process, even of a zombie."""
    fields = _fields(pid)
    return Identity(pid, int(fields[19]), here().boot_id()) if fields else None


def used_ticks(pid: int) -> int | None:
    """Return the processor time that a process has used, in ticks; None where there is none."""
    fields = _fields(pid)
    return int(fields[11]) + int(fields[12]) if fields else None


def is_due(pid: int) -> bool:
    """Return whether a thread of a process runs, or waits for a processor or a disk."""
    with contextlib.suppress(OSError):
        return any(_fields(f"{pid}/task/{thread}")[:1] in (["R"], ["D"]) for thread in os.listdir(f"/proc/{pid}/task"))
    return False


def is_stopped(pid: int) -> bool:
    """Return whether a signal has stopped a process."""
    return _fields(pid)[:1] == ["T"]


def _fields(pid: int | str) -> list[str]:
    """What the system says of a process, from its state on; nothing where there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return []
    # Before that stands the command in parentheses, which may hold spaces and parentheses.
    return text.rpartition(")")[2].split()


def marked(variable: str, value: str, uid: int) -> Identity | None:
    """Return a living process of this user that was started with this environment variable."""
    for pid in pids():
        # First the identity: what is asked of the id afterwards is of that process, if it still has it in the end.
        found = identity(pid)
        if carries(pid, variable, value) and lives(pid) and _user(pid) == uid:
            return found if identity(pid) == found else None
    return None


def _user(pid: int) -> int | None:
    """Return the user of a process; None if it is gone, or has rights of several."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return None
    (uids,) = (line.split()[1:] for line in lines if line.startswith("Uid:"))
    return int(uids[0]) if len(set(uids)) == 1 else None


def end_own_kin() -> None:
    """SIGKILL whatever carries the mark that this process has, but not itself: what it has started, at its end."""
    mark, own = os.environ.get(MARK_VARIABLE, ""), os.getpid()
    for pid in pids() if mark else ():
        if pid != own and carries(pid, MARK_VARIABLE, mark):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)


def end_with_parent() -> None:
    """Have the kernel kill this process as soon as the thread that started it is gone, also while it is stopped."""
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


def end_marked(variable: str, value: str) -> None:
    """SIGKILL whatever of this user was started with this environment variable, and wait until it is dead."""
    while (found := marked(variable, value, os.getuid())) is not None:
        with contextlib.suppress(ProcessLookupError):
            descriptor = os.pidfd_open(found.pid)
            try:
                # Only now: before, the id could have passed to another one in between.
                if identity(found.pid) == found:
                    signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                    select.select([descriptor], [], [], END_S)
            finally:
                os.close(descriptor)


def pids() -> Iterator[int]:
    """Return the ids of all processes of this machine."""
    return (int(name) for name in os.listdir("/proc") if name.isdecimal())


def carries(pid: int, variable: str, value: str) -> bool:
    """Return whether a process of this user was started with this environment variable; never of one that has died."""
    try:
        return f"{variable}={value}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False


def lives(pid: int) -> bool:
    """Return whether there is such a process, and it is no zombie."""
    return _fields(pid)[:1] not in ([], ["Z"], ["X"])
