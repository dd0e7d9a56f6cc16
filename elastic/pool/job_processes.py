"""Processes that a pool's process starts and that outlive it: node agents, jobs' orchestrators, timed runs.

Each process is recorded in the pool's directory with what is needed to take it over. A restarted pool's process adopts
living processes, and learns of those that have ended meanwhile.
"""

import asyncio
import contextlib
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from elastic.system.supervision import RecordedProcesses, WatchedProcess, end_left_over


class ProcessLaunch(msgspec.Struct, frozen=True, kw_only=True):
    """How to start a process. The process that started it, or its successor, gets `kept` again once it has ended."""

    command: Sequence[str]
    environment: Mapping[str, str]
    log: Path
    kept: Mapping[str, str] = {}
    cwd: Path | None = None


_MEMBER = "process"
END_TIMEOUT_S = 30.0

Over = Callable[[str, Mapping[str, str], int | None], None]
"""Called with the name of a process that has ended, what was kept of it, and its exit status if known."""


class _DetachedProcess:
    """A process, and who waits for its end. One that has ended before this process began is not watched."""

    def __init__(self, recorded: RecordedProcesses, watched: WatchedProcess | None = None) -> None:
        self.recorded, self.watched = recorded, watched
        self.task: asyncio.Task[None] | None = None


class DetachedProcesses:
    """The processes of one owner, by name. `over` is called when a process and everything that it started have
    ended."""

    def __init__(self, directory: Path, pool: str, owner: str, over: Over) -> None:
        self._directory, self._pool, self._owner, self._over = directory, pool, owner, over
        self._running: dict[str, _DetachedProcess] = {}
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)

    def found(self) -> tuple[dict[str, Mapping[str, str]], dict[str, Mapping[str, str]]]:
        """Return the processes of an earlier process: living ones, which are watched from now on, and ended ones."""
        living: dict[str, Mapping[str, str]] = {}
        ended: dict[str, Mapping[str, str]] = {}
        for recorded in RecordedProcesses.found(self._directory, self._pool, self._owner):
            name, watched = recorded.kept["name"], recorded.adopted().get(_MEMBER)
            if watched is None or watched.over:
                ended[name] = recorded.kept
                self._running[name] = _DetachedProcess(recorded)
            else:
                living[name] = recorded.kept
                self._watch(name, recorded, watched)
        return living, ended

    async def settle(self, name: str) -> None:
        """Remove the remains and the record of an ended process. Raises `TimeoutError`."""
        running = self._running.pop(name, None)
        if running is not None:
            await end_left_over([running.recorded], END_TIMEOUT_S)

    def names(self) -> list[str]:
        return list(self._running)

    def kept(self, name: str) -> Mapping[str, str]:
        """Return what was kept of a process; nothing if there is none of this name."""
        running = self._running.get(name)
        return {} if running is None else running.recorded.kept

    def pid(self, name: str) -> int | None:
        running = self._running.get(name)
        return None if running is None or running.watched is None else running.watched.pid

    def start(self, name: str, launch: ProcessLaunch) -> None:
        """Start a process with no environment but the launch's and its mark. Raises `OSError`."""
        safe = "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in name)
        recorded = RecordedProcesses(
            self._directory, self._pool, self._owner, f"{self._owner}-{safe}", {**launch.kept, "name": name}
        )
        launch.log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with launch.log.open("ab") as output:
            watched = recorded.start(
                _MEMBER, launch.command, launch.environment, output, stdout=subprocess.DEVNULL, cwd=launch.cwd
            )
        self._watch(name, recorded, watched)

    def kill(self, name: str) -> None:
        """Kill a process. `over` is called once all of it is gone."""
        running = self._running.get(name)
        if running is not None and running.watched is not None:
            running.watched.kill()

    def close(self) -> None:
        """Stop watching. The processes live on."""
        for running in self._running.values():
            if running.task is not None:
                running.task.cancel()
            if running.watched is not None:
                running.watched.close()

    def _watch(self, name: str, recorded: RecordedProcesses, watched: WatchedProcess) -> None:
        running = self._running[name] = _DetachedProcess(recorded, watched)
        running.task = asyncio.create_task(self._await_end(name, running, watched), name=f"{self._owner} {name}")

    async def _await_end(self, name: str, running: _DetachedProcess, watched: WatchedProcess) -> None:
        status = await watched.wait()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_TIMEOUT_S):
                await running.recorded.end()
        if self._running.get(name) is running:
            del self._running[name]
            self._over(name, running.recorded.kept, status)
