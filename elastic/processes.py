"""Processes that a run starts on this machine: what they inherit, and how none of them outlives it.

- They inherit the environment variables that are named here or by the run, and no others: no cloud keys.
- Each is recorded, by its id and the tick of this boot at which it started, so that a clock that is set hides nothing
  and an id that passed to another process means nothing.
- Each carries a mark in its environment, and so does everything it starts, in whatever session or process group.
  Whoever ends the recorded processes ends all that carry their mark; so does the run's next process, after a crash.
"""

import asyncio
import contextlib
import fnmatch
import functools
import os
import secrets
import signal
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

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
"""What a pattern never brings along; a secret has to be named."""


def inherited(*further: str) -> dict[str, str]:
    """Our environment, as far as a process of a run may have it: `INHERITED` and what is named besides."""
    wanted = {*INHERITED, *further}
    patterns = [name for name in wanted if "*" in name]
    return {
        name: value
        for name, value in os.environ.items()
        if name in wanted or (_matches(name, patterns) and not _matches(name, _SECRETS))
    }


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


class Identity(msgspec.Struct, frozen=True):
    """A process of this boot of this machine, and no other before or after it with the same id."""

    pid: int
    start_ticks: int
    boot: str


def identity(pid: int) -> Identity | None:
    """Of a process that is there, even as a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The second field is the command in parentheses, which may hold spaces and parentheses; the 22nd is the start.
    return Identity(pid, int(text.rpartition(")")[2].split()[19]), _boot())


@functools.cache
def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def records(run_dir: Path) -> Path:
    """Where a run's processes are recorded."""
    return run_dir / "leases"


class _Record(msgspec.Struct, frozen=True):
    run: str
    owner: str
    name: str
    mark: str
    processes: list[Identity]


class RecordedProcesses:
    """Processes that belong together: they carry one mark, stand in one record, and end together.

    `directory` holds the run's records, `owner` says who in the run answers for this one. Without a `directory` there
    is no record, and only this process can end them.
    """

    def __init__(self, directory: Path | None, run: str, owner: str, name: str) -> None:
        self._path = None if directory is None else directory / f"{name}.json"
        self._record = _Record(run, owner, name, secrets.token_hex(16), [])

    @property
    def marks(self) -> dict[str, str]:
        """Environment variables that each of the processes has to be started with."""
        return {RUN_VARIABLE: self._record.run, MARK_VARIABLE: self._record.mark}

    def add(self, pid: int) -> None:
        """Record one more. Raises `OSError`."""
        found = identity(pid)
        if self._path is None or found is None:
            return
        self._record = msgspec.structs.replace(self._record, processes=[*self._record.processes, found])
        self._path.parent.mkdir(parents=True, exist_ok=True)
        partial = self._path.with_suffix(".partial")
        partial.write_bytes(msgspec.json.encode(self._record))
        partial.replace(self._path)

    async def end(self) -> None:
        """SIGKILL all that is alive and carries the mark, and forget the record; what is ours to reap we have reaped.

        When cancelled, the record stays.
        """
        await _end_survivors(self._record)
        if self._path is not None:
            self._path.unlink(missing_ok=True)


async def end_recorded(directory: Path, run: str, owner: str, timeout_s: float) -> list[str]:
    """End what an earlier process recorded for this owner in this run; returns a line about each record.

    Raises `TimeoutError` where something does not die in time; its record stays.
    """
    lines: list[str] = []
    for path, record in _read(directory):
        if isinstance(record, msgspec.DecodeError):
            lines.append(f"{path}: not a record of processes ({record}); left as it is")
        elif (record.run, record.owner) == (run, owner):
            async with asyncio.timeout(timeout_s):
                killed = await _end_survivors(record)
            path.unlink(missing_ok=True)
            did = f"killed {', '.join(map(str, killed))}" if killed else "nothing of it was alive"
            lines.append(f"{record.name} of {owner}: {did}")
    return lines


def _read(directory: Path) -> list[tuple[Path, _Record | msgspec.DecodeError]]:
    found: list[tuple[Path, _Record | msgspec.DecodeError]] = []
    for path in sorted(directory.glob("*.json")):
        try:
            found.append((path, msgspec.json.decode(path.read_bytes(), type=_Record)))
        except msgspec.DecodeError as error:
            found.append((path, error))
    return found


async def _end_survivors(record: _Record) -> list[int]:
    killed: set[int] = set()
    while survivors := await asyncio.to_thread(_survivors, record):
        for pid in survivors:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        killed.update(survivors)
        await asyncio.sleep(POLL_S)
    return sorted(killed)


def _survivors(record: _Record) -> list[int]:
    """Living processes that are recorded, or carry the mark: their environment may hide it, or their parent's death."""
    recorded = {process.pid for process in record.processes if identity(process.pid) == process and _lives(process.pid)}
    mark = f"{MARK_VARIABLE}={record.mark}".encode()
    return sorted(recorded | {pid for pid in _pids() if mark in _environment(pid)})


def _pids() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdecimal())


def _environment(pid: int) -> Sequence[bytes]:
    """As it was at the start, and only of our own processes; empty once it dies."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return ()


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False
