"""A run's env workers: processes that play its episodes by users' code. One that dies, or is held up, is started again,
and what it was playing begins again elsewhere.
"""

import asyncio
import contextlib
import fcntl
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import structlog

from elastic.core.ids import environment_of
from elastic.core.types import TrajectoryId
from elastic.environments.log_keeper import UNKEPT_STATUS
from elastic.runtime.blame import Blame
from elastic.runtime.hosted import FailRun
from elastic.system.last_words import last_words
from elastic.system.outages import backoff
from elastic.system.plain_values import told
from elastic.system.supervision import KeptProcesses, how_ended

log = structlog.get_logger(__name__)

ENV_WORKERS = "env workers"
"""Their owner in a run's records."""
EPISODE_HOSTS = "episode hosts"
"""The owner of those that play episodes in token ids."""
LOOK_S = 0.5
BACK_OFF_S, BACK_OFF_MAX_S = 0.2, 30.0
DRAIN_S = 2.0
LET_GO_S, LET_GO_LOOK_S = 2.0, 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvWorkerOrder:
    """How an env worker is started: by `command`, with its own driver's key among the `variables`.

    One that does not dial in `start_timeout_s`, or says nothing for `step_timeout_s`, is ended; one that dies more than
    `max_restarts` times in a row by a fault of its own fails the run. `section` is that of its environment in the
    configuration.
    """

    command: Sequence[str]
    variables: Mapping[str, str]
    start_timeout_s: float
    step_timeout_s: float
    max_restarts: int
    section: str = "environment"


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvWorkersOrder:
    """A run's env workers, by name. A name is the driver's, too. The run's records know them by their `owner`."""

    run_dir: Path
    workers: Mapping[str, EnvWorkerOrder]
    secrets: Collection[str]
    """The texts that are hidden in the last words of env workers."""
    owner: str = ENV_WORKERS


class Drivers(Protocol):
    """What is known of programs that play trajectories."""

    def unusable(self, driver: str) -> str:
        """Why it cannot play its environment, as it has said itself; empty if it has not."""
        ...

    def heard_s(self, driver: str) -> float | None:
        """When it last said anything (the loop's time); None before it has."""
        ...

    def done(self, driver: str) -> int:
        """How many trajectories it has finished, or steps of some, in this process's time."""
        ...

    def lost(self, driver: str, holds: Collection[TrajectoryId], cause: str) -> Blame:
        """It plays these trajectories and no others any more; the others begin again, or have failed. Returns whom
        that may be blamed on."""
        ...


class OneProcess(Protocol):
    """As `elastic.system.supervision.WatchedProcess`."""

    @property
    def over(self) -> bool: ...

    @property
    def status(self) -> int | None: ...

    async def wait(self) -> int | None: ...

    def kill(self) -> None: ...


class Processes(Protocol):
    """As `elastic.system.supervision.KeptProcesses`, which are those of this machine."""

    async def take_over(self, names: Collection[str]) -> None: ...

    def get(self, name: str) -> OneProcess | None: ...

    def start(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> OneProcess: ...

    async def forget(self, name: str) -> None: ...

    def log(self, name: str) -> Path: ...

    async def aclose(self, drain_s: float) -> None: ...


class _End(NamedTuple):
    how: str
    key: str = ""
    """Of its environment's section: what is to be mended where none has ever come, as another one would end so, too."""
    allowed: str = ""


class EnvWorkers:
    def __init__(
        self,
        order: EnvWorkersOrder,
        drivers: Drivers,
        fail: FailRun,
        processes: Processes | None = None,
    ) -> None:
        self._order = order
        self._drivers = drivers
        self._fail = fail
        self._processes = processes or KeptProcesses(order.run_dir, order.owner)
        self._keeping: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Take over those that a former process has left, and start the others."""
        workers = self._order.workers
        await self._processes.take_over(workers)
        self._keeping = [asyncio.create_task(self._keep(name, order), name=name) for name, order in workers.items()]

    async def aclose(self) -> None:
        for task in self._keeping:
            task.cancel()
        await asyncio.gather(*self._keeping, return_exceptions=True)
        await self._processes.aclose(DRAIN_S)

    async def _keep(self, name: str, order: EnvWorkerOrder) -> None:
        """Without it the run would wait for an env worker that nobody starts: whatever else goes wrong ends the run."""
        try:
            await self._start_again_and_again(name, order)
        except Exception as error:
            log.exception("an env worker cannot be kept", worker=name)
            self._fail(f"env worker {name} cannot be kept: {told(error)}")

    async def _start_again_and_again(self, name: str, order: EnvWorkerOrder) -> None:
        deaths = own = 0
        """In a row, and those of them that are its own fault."""
        while True:
            before = self._drivers.done(name)
            try:
                if (watched := self._processes.get(name)) is not None:  # It need only dial again.
                    end = _End((await self._ended(name, watched, order.step_timeout_s, order)).how)
                else:
                    watched = self._processes.start(name, order.command, order.variables)
                    end = await self._ended(name, watched, order.start_timeout_s, order)
                await self._processes.forget(name)
                await _let_go(self._processes.log(name))
            except OSError as error:
                end = _End(f"it does not start: {error}")
            cause = end.how
            if self._drivers.done(name) > before:
                deaths = own = 0
            words = last_words(self._processes.log(name), self._order.secrets)
            log.warning("an env worker has ended", worker=name, how=cause, last=words)
            blame = self._drivers.lost(name, (), f"its env worker has ended: {cause}")
            has_done = self._has_done(environment_of(name))
            why = self._drivers.unusable(name)
            if end.key and not self._has_come(environment_of(name)):
                found = f"env worker {name} could not begin: {cause}; it said {words or 'nothing'}"
                why = f"{order.section}.{end.key}: {found}; allowed: {end.allowed}"
            if why and not has_done:
                self._fail(why, bad_input=True)
                return
            deaths += 1
            own += blame is Blame.WORKERS or (blame is Blame.EPISODES and not has_done)
            if own > order.max_restarts:
                times = f"{deaths} times in a row without a finished trajectory ({order.section}.max_restarts)"
                self._fail(f"env worker {name} has ended {times}: {cause}; it said: {words}")
                return
            await asyncio.sleep(backoff(max(0, own - 1), BACK_OFF_S, BACK_OFF_MAX_S))

    def _has_done(self, environment: str) -> bool:
        """Whether its env workers have ever got anything done: then not they are to blame, but what they die of."""
        return any(self._drivers.done(name) for name in self._order.workers if environment_of(name) == environment)

    def _has_come(self, environment: str) -> bool:
        """Whether any of its env workers has ever dialled: then its code can be loaded."""
        heard = (self._drivers.heard_s(name) for name in self._order.workers if environment_of(name) == environment)
        return any(heard_s is not None for heard_s in heard)

    async def _ended(self, name: str, watched: OneProcess, start_s: float, order: EnvWorkerOrder) -> _End:
        """Wait for its end, and bring that about if it does not come in `start_s`, or says nothing for too long."""
        loop = asyncio.get_running_loop()
        since_s, limit_s, has_come = loop.time(), order.step_timeout_s, False
        while not watched.over:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await watched.wait()
            heard_s = self._drivers.heard_s(name)
            has_come = heard_s is not None and heard_s >= since_s
            until_s = heard_s + limit_s if heard_s is not None and has_come else since_s + start_s
            if not watched.over and loop.time() > until_s:
                watched.kill()
                await watched.wait()
                if has_come:
                    return _End(f"it said nothing for {limit_s:g} s")
                how = f"it did not dial the run within {start_s:g} s"
                return _End(how, "start_timeout_s", "a longer time, or code that is loaded in less")
        how = how_ended(watched.status)
        if has_come or watched.status is None or watched.status < 0 or watched.status == UNKEPT_STATUS:
            return _End(how)
        return _End(how, "settings", "code that can be loaded, and does not end its process")


async def _let_go(log: Path) -> None:
    """Wait until the log of a process that is gone has its last words: who keeps it (`elastic.environments.log_keeper`)
    locks it until then."""
    try:
        descriptor = os.open(log, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return  # It has said nothing.
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LET_GO_S):
                while True:
                    with contextlib.suppress(BlockingIOError):
                        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
                        return
                    await asyncio.sleep(LET_GO_LOOK_S)
    finally:
        os.close(descriptor)
