"""Processes that a run starts on this machine: what they inherit, how they are found again, and how they are ended.

- They inherit the environment variables that are named here or by the run, and no others: no cloud keys.
- Each is recorded, by its id and the tick of this boot at which it started, so that a clock that is set hides nothing
  and an id that passed to another process means nothing. Whoever reads the record can watch it (`Adopted`).
- Each carries a mark in its environment, and so does everything it starts, in whatever session or process group. The
  record has the mark before the first of them starts, so whoever ends what is recorded ends all of it, at any time.
"""

import asyncio
import contextlib
import fnmatch
import os
import secrets
import signal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import structlog

from elastic.system.boot_clock import boot_id
from elastic.system.files import write_whole

log = structlog.get_logger(__name__)

RUN_VARIABLE, MARK_VARIABLE = "ELASTIC_RUN", "ELASTIC_MARK"
POLL_S = 0.01

INHERITED = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TMPDIR", "TZ", "LANG", "LANGUAGE", "LC_*"),
    *("PYTHON*", "VIRTUAL_ENV", "CONDA_PREFIX", "LD_LIBRARY_PATH", "LD_PRELOAD"),
    *("CUDA_*", "NVIDIA_*", "NCCL_*", "TORCH*", "PYTORCH_*", "TRITON_*", "NUMBA_*"),
    *("OMP_*", "MKL_*", "KMP_*", "GOMP_*", "OPENBLAS_*"),
    *("XDG_CACHE_HOME", "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "SSL_CERT_FILE", "SSL_CERT_DIR"),
)
"""Names of environment variables, and patterns of names, that every process of a run inherits."""

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
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The second field is the command in parentheses, which may hold spaces and parentheses; the 22nd is the start.
    return Identity(pid, int(text.rpartition(")")[2].split()[19]), boot_id())


def records(run_dir: Path) -> Path:
    """Return the directory of a run's process records."""
    return run_dir / "leases"


class _Record(msgspec.Struct, frozen=True):
    run: str
    owner: str
    name: str
    mark: str
    kept: dict[str, str] = {}
    processes: dict[str, Identity] = {}


class RecordedProcesses:
    """Processes that belong together: they carry one mark, stand in one record, and end together.

    `directory` holds the run's records, `owner` says who in the run answers for this one, and `kept` is what else that
    one has to know to take them over. Without a `directory` there is no record, and only this process can end them.
    """

    def __init__(
        self, directory: Path | None, run: str, owner: str, name: str, kept: Mapping[str, str] | None = None
    ) -> None:
        self._path = None if directory is None else directory / f"{name}.json"
        self._record = _Record(run, owner, name, secrets.token_hex(16), dict(kept or {}))

    @classmethod
    def found(cls, directory: Path, run: str, owner: str) -> "list[RecordedProcesses]":
        """Yield the records of earlier processes for this owner in this run. Other files are left alone."""
        found: list[RecordedProcesses] = []
        for path in sorted(directory.glob("*.json")):
            try:
                record = msgspec.json.decode(path.read_bytes(), type=_Record)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                log.warning("not a record of processes; left as it is", path=str(path), error=str(error))
                continue
            if (record.run, record.owner) == (run, owner):
                found.append(cls(directory, run, owner, record.name))
                found[-1]._path, found[-1]._record = path, record
        return found

    @property
    def name(self) -> str:
        return self._record.name

    @property
    def kept(self) -> Mapping[str, str]:
        return self._record.kept

    @property
    def processes(self) -> Mapping[str, Identity]:
        """The recorded processes, by name."""
        return self._record.processes

    @property
    def marks(self) -> dict[str, str]:
        """Environment variables that each of the processes has to be started with."""
        return {RUN_VARIABLE: self._record.run, MARK_VARIABLE: self._record.mark}

    def write(self) -> None:
        """Have the record on disk. Raises `OSError`."""
        if self._path is not None:
            write_whole(self._path, msgspec.json.encode(self._record), durable=False)

    def add(self, name: str, pid: int) -> None:
        """Record one more. Raises `OSError`."""
        if (found := identity(pid)) is not None:
            self._record = msgspec.structs.replace(self._record, processes={**self._record.processes, name: found})
            self.write()

    def living(self) -> list[int]:
        """Return the recorded processes that live now. Reads through all processes of the machine."""
        return _survivors(self._record)

    async def kill(self) -> list[int]:
        """SIGKILL all that is alive and carries the mark, until nothing is; what is ours to reap we have reaped."""
        killed: set[int] = set()
        while survivors := await asyncio.to_thread(_survivors, self._record):
            for pid in survivors:
                _kill(self._record, pid)
            killed.update(survivors)
            await asyncio.sleep(POLL_S)
        self._record = msgspec.structs.replace(self._record, processes={})
        return sorted(killed)

    async def end(self) -> list[int]:
        """Kill what is alive, and forget the record; which that was. When cancelled, the record stays."""
        killed = await self.kill()
        if self._path is not None:
            self._path.unlink(missing_ok=True)
        return killed


def signal_name(number: int) -> str:
    """Return the name of a signal, as in `SIGKILL` or `SIGRTMIN+3`."""
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name
    if signal.SIGRTMIN < number < signal.SIGRTMAX:
        return f"SIGRTMIN+{number - signal.SIGRTMIN}"
    return f"signal {number}"


async def end_left_over(leftovers: Iterable[RecordedProcesses], timeout_s: float) -> None:
    """End what an earlier process left, and say so.

    Raises `TimeoutError` where something does not die in time; its record stays.
    """
    for one in leftovers:
        async with asyncio.timeout(timeout_s):
            killed = await one.end()
        log.warning("left over from an earlier process", what=one.name, killed=killed)


class Adopted:
    """A process that need not be our child, watched from where an event loop runs.

    It is held by a descriptor, which never comes to mean another process. How it ended is not known.
    """

    def __init__(self, process: Identity) -> None:
        self.pid = process.pid
        self._over = asyncio.Event()
        self._fd: int | None = None
        try:
            descriptor = os.pidfd_open(process.pid)
        except ProcessLookupError:
            self._over.set()
            return
        # Only now: before, the id could have passed to another one in between.
        if identity(process.pid) != process:
            os.close(descriptor)
            self._over.set()
            return
        self._fd = descriptor
        asyncio.get_running_loop().add_reader(descriptor, self._ended)

    async def wait(self) -> None:
        await self._over.wait()

    @property
    def over(self) -> bool:
        return self._over.is_set()

    def kill(self) -> None:
        self.send(signal.SIGKILL)

    def send(self, number: signal.Signals) -> None:
        if self._fd is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._fd, number)

    def close(self) -> None:
        """Watch no longer."""
        if self._fd is not None:
            asyncio.get_running_loop().remove_reader(self._fd)
            os.close(self._fd)
            self._fd = None

    def _ended(self) -> None:
        self.close()
        self._over.set()


def _kill(record: _Record, pid: int) -> None:
    """SIGKILL a survivor, if its id means it still."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        descriptor = os.pidfd_open(pid)
        try:
            if _belongs(record, pid):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        finally:
            os.close(descriptor)


def marked(variable: str, value: str, uid: int) -> Identity | None:
    """Return a living process of this user that was started with this environment variable."""
    for pid in _pids():
        # First the identity: what is asked of the id afterwards is of that process, if it still has it in the end.
        found = identity(pid)
        if f"{variable}={value}".encode() in _environment(pid) and _lives(pid) and _user(pid) == uid:
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


def _survivors(record: _Record) -> list[int]:
    """Living processes that are recorded, or carry the mark."""
    return [pid for pid in _pids() if _belongs(record, pid)]


def _belongs(record: _Record, pid: int) -> bool:
    """A process may hide its environment, or its parent's death; the recorded ones are known all the same."""
    if f"{MARK_VARIABLE}={record.mark}".encode() in _environment(pid):
        return True
    return any(one.pid == pid and identity(pid) == one for one in record.processes.values()) and _lives(pid)


def end_own_kin() -> None:
    """SIGKILL whatever carries the mark that this process has, but not itself: what it has started, at its end."""
    mark, own = os.environ.get(MARK_VARIABLE), os.getpid()
    for pid in _pids() if mark else ():
        if pid != own and f"{MARK_VARIABLE}={mark}".encode() in _environment(pid):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)


def _pids() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdecimal())


def _environment(pid: int) -> Sequence[bytes]:
    """Return the environment with which a process of this user started; empty once the process dies."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return ()


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False
