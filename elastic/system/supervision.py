"""Processes that somebody answers for: recorded, marked, watched, taken over after a crash, and ended.

- Each is recorded, so that every reader of the record can watch it (`WatchedProcess`), also a process that has not
  started it.
- Each carries the record's mark in its environment, as does everything that it starts. The record has the mark before
  the first of them starts, so a process that ends what is recorded ends all of it, at any time.
"""

import asyncio
import contextlib
import os
import secrets
import signal
import subprocess
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, cast

import msgspec
import structlog

from elastic.system.files import write_whole
from elastic.system.processes import MARK_VARIABLE, RUN_VARIABLE, Identity, carries, identity, lives, pids

log = structlog.get_logger(__name__)

POLL_S = 0.01


def start_detached(
    command: Sequence[str], environment: Mapping[str, str], output: IO[Any], **options: Any
) -> "subprocess.Popen[bytes]":
    """Start a process in a session of its own, which reads nothing, inherits only `environment` and writes to `output`.

    `options` are further ones of `subprocess.Popen`. Raises `OSError`.
    """
    given: Any = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output, **options}
    return cast("subprocess.Popen[bytes]", subprocess.Popen(command, env=environment, start_new_session=True, **given))


def signal_name(number: int) -> str:
    """Return the name of a signal, as in `SIGKILL` or `SIGRTMIN+3`."""
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name
    if signal.SIGRTMIN < number < signal.SIGRTMAX:
        return f"SIGRTMIN+{number - signal.SIGRTMIN}"
    return f"signal {number}"


def how_ended(status: int | None) -> str:
    """Return how a process ended, in words that follow its name. `status` is as of `subprocess`: negative for a signal;
    None of another one's child."""
    if status is None:
        return "ended; how is not known, as an earlier process had started it"
    return f"was killed by {signal_name(-status)}" if status < 0 else f"exited with status {status}"


class WatchedProcess:
    """A process that is watched from where an event loop runs: our child, or one that an earlier process of ours began.

    It is held by a descriptor, which never comes to mean another process. How it ended is known of our child alone,
    which is reaped at its end.
    """

    def __init__(self, process: "Identity | subprocess.Popen[bytes]") -> None:
        self._child = None if isinstance(process, Identity) else process
        found = process if isinstance(process, Identity) else identity(process.pid)
        assert found is not None, "a child that nobody has waited for is there, if only as a zombie"
        self.identity = found
        self.status: int | None = None
        """The exit status, once it is over, if known."""
        self._over = asyncio.Event()
        self._fd: int | None = None
        try:
            descriptor = os.pidfd_open(found.pid)
        except ProcessLookupError:
            self._over.set()
            return
        # Only now: before, the id could have passed to another one in between.
        if identity(found.pid) != found:
            os.close(descriptor)
            self._over.set()
            return
        self._fd = descriptor
        asyncio.get_running_loop().add_reader(descriptor, self._ended)

    async def wait(self) -> int | None:
        """Wait for the end; returns the exit status, if known."""
        await self._over.wait()
        return self.status

    @property
    def pid(self) -> int:
        return self.identity.pid

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
        self.status = None if self._child is None else self._child.wait()
        self._over.set()


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
        """Return the records of earlier processes for this owner in this run. Other files are left alone."""
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

    def start(
        self, name: str, command: Sequence[str], environment: Mapping[str, str], output: IO[Any], **options: Any
    ) -> WatchedProcess:
        """Start one more with the mark, as `start_detached` does, and record it.

        Raises `OSError`, having left nothing running.
        """
        if not self._record.processes:
            self.write()
        child = start_detached(command, {**environment, **self.marks}, output, **options)
        try:
            self.add(name, child.pid)
            return WatchedProcess(child)
        except OSError:
            child.kill()
            child.wait()
            raise

    def adopted(self) -> dict[str, WatchedProcess]:
        """Watch the recorded processes, by name."""
        return {name: WatchedProcess(process) for name, process in self._record.processes.items()}

    def living(self) -> list[int]:
        """Return the recorded processes that live now. Reads through all processes of the machine."""
        return _survivors(self._record)

    async def kill(self) -> list[int]:
        """SIGKILL every process that carries the mark, until none is alive. Reaps the children of this process."""
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


class KeptProcesses:
    """Processes of a run that one `owner` keeps going, one under each name: each has a record and a log of its own.

    Those that a former process of the run has left are taken over; the keeper of one starts another where it ends.
    """

    def __init__(self, run_dir: Path, owner: str) -> None:
        self._run_dir = run_dir
        self._owner = owner
        self._recorded: dict[str, RecordedProcesses] = {}
        self._watched: dict[str, WatchedProcess] = {}

    async def take_over(self, names: Collection[str]) -> None:
        """Go on with those of these names that an earlier process has left alive; end all others of this owner."""
        for recorded in RecordedProcesses.found(records(self._run_dir), self._run_dir.name, self._owner):
            living = [one for one in recorded.adopted().values() if not one.over]
            if recorded.name in names and living:
                self._recorded[recorded.name], self._watched[recorded.name] = recorded, living[0]
            else:
                await recorded.end()

    @property
    def names(self) -> Collection[str]:
        """Return the names of the processes that are there."""
        return self._watched.keys()

    def get(self, name: str) -> WatchedProcess | None:
        return self._watched.get(name)

    def start(
        self, name: str, command: Sequence[str], environment: Mapping[str, str], **options: Any
    ) -> WatchedProcess:
        """Start it, with its output in its log; `options` are as in `start_detached`. Raises `OSError`."""
        recorded = RecordedProcesses(records(self._run_dir), self._run_dir.name, self._owner, name)
        self._recorded[name] = recorded
        with self.log(name).open("ab") as output:
            watched = self._watched[name] = recorded.start(name, command, environment, output, **options)
        return watched

    async def forget(self, name: str) -> None:
        """It has ended: end what it has started, too."""
        del self._watched[name]
        await self._recorded.pop(name).end()

    def log(self, name: str) -> Path:
        return self._run_dir / "logs" / f"{name}.log"

    async def aclose(self, drain_s: float) -> None:
        """Ask all of them to end; kill what has not in `drain_s`, and whatever they have started."""
        for watched in self._watched.values():
            watched.send(signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(drain_s):
                await asyncio.gather(*(watched.wait() for watched in self._watched.values()))
        for watched in self._watched.values():
            watched.close()
        for recorded in self._recorded.values():
            await recorded.end()


async def end_left_over(leftovers: Iterable[RecordedProcesses], timeout_s: float) -> None:
    """End what an earlier process left, and say so.

    Raises `TimeoutError` where something does not die in time; its record stays.
    """
    for one in leftovers:
        async with asyncio.timeout(timeout_s):
            killed = await one.end()
        log.warning("left over from an earlier process", what=one.name, killed=killed)


def _kill(record: _Record, pid: int) -> None:
    """SIGKILL a survivor, if its id means it still."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        descriptor = os.pidfd_open(pid)
        try:
            if _belongs(record, pid):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        finally:
            os.close(descriptor)


def _survivors(record: _Record) -> list[int]:
    """Living processes that are recorded, or carry the mark."""
    return [pid for pid in pids() if _belongs(record, pid)]


def _belongs(record: _Record, pid: int) -> bool:
    """A process may hide its environment, or its parent's death; the recorded ones are known all the same."""
    if carries(pid, MARK_VARIABLE, record.mark):
        return True
    return any(one.pid == pid and identity(pid) == one for one in record.processes.values()) and lives(pid)
