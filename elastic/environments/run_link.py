"""An env worker's connection to its run, over the Unix socket in the run's directory.

The run may die and be started again: the link dials again, says which trajectories it still plays, and asks again what
was not answered.
"""

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeAlias

import structlog

from elastic.core.types import TrajectoryId
from elastic.protocol.connection import ConnectionLost, SessionRefused
from elastic.protocol.frames import RefusedFrame, WireError
from elastic.protocol.front_messages import (
    CAUSE_MAX,
    FRONT_VERSION,
    Declined,
    DriverBeat,
    DriverHello,
    EnvironmentUnusable,
    FromFront,
    FromRun,
    TrajectoryBegun,
    TrajectoryShown,
)
from elastic.protocol.run_connection import (
    REDIAL_MAX_S,
    REDIAL_S,
    WELCOME_TIMEOUT_S,
    RunConnection,
    connected,
    welcomed,
)
from elastic.system.host import here
from elastic.system.signals import TERMINATION, act_on

log = structlog.get_logger(__name__)

KEY_VARIABLE = "ELASTIC_ENV_WORKER_KEY"
"""Environment variable with the driver's key that an env worker shows to its run."""
CHAT_KEY_VARIABLE = "ELASTIC_ENV_WORKER_CHAT_KEY"
"""The same with a viewer's key, for judges that are the policy itself."""
BEAT_S = 1.0

DriverAnswer: TypeAlias = TrajectoryBegun | TrajectoryShown | Declined


class EnvWorkerKeys(NamedTuple):
    """What an env worker shows to its run, and judges to the fronts."""

    run: str = ""
    chat: str = ""


NO_KEYS = EnvWorkerKeys()


def take_keys() -> EnvWorkerKeys:
    """The keys that this process was started with, which its environment has no more then."""
    return EnvWorkerKeys(*(os.environ.pop(variable, "") for variable in (KEY_VARIABLE, CHAT_KEY_VARIABLE)))


class RunGone(Exception):
    """No process has been at the run for too long, or it wants no env worker."""


def _nothing_else(message: FromRun) -> None:
    raise WireError(f"{type(message).__name__} is nothing for an env worker")


class EnvRunLink:
    """`key` is a driver's. `holds` has the trajectories that are being played. `hear` takes what answers no request,
    and `welcomed` is called on each connection, before anything is heard. `connect` opens one, by the socket in the
    run's directory unless another way is given; it may raise `OSError`."""

    def __init__(
        self,
        run_dir: Path,
        key: str,
        away_s: float,
        hear: Callable[[FromRun], None] = _nothing_else,
        welcomed: Callable[[], None] = lambda: None,
        connect: Callable[[], Awaitable[RunConnection]] | None = None,
    ) -> None:
        self.holds: set[TrajectoryId] = set()
        self._run_dir = run_dir
        self._key = key
        self._away_s = away_s
        self._hears = hear
        self._welcomed = welcomed
        self._connect = connect or partial(connected, run_dir)
        self._connection: RunConnection | None = None
        self._was_there = False
        self._asked: dict[int, tuple[Callable[[int], FromFront], asyncio.Future[DriverAnswer]]] = {}
        self._number = 0

    def send(self, message: FromFront) -> None:
        """Tell the run, if it is there."""
        if self._connection is not None:
            self._connection.send(message)

    async def ask(self, request: Callable[[int], FromFront]) -> DriverAnswer:
        """The run's answer to what `request` makes of a number, however often the run is started again meanwhile."""
        self._number += 1
        number = self._number
        answer: asyncio.Future[DriverAnswer] = asyncio.get_running_loop().create_future()
        self._asked[number] = request, answer
        if self._connection is not None:
            self._connection.send(request(number))
        try:
            return await answer
        finally:
            self._asked.pop(number, None)

    async def run(self) -> NoReturn:
        """Keep the connection. Raises `RunGone`."""
        lost_s, wait_s = here().monotonic(), REDIAL_S
        while True:
            try:
                connection = await self.dial()
            except SessionRefused as refused:
                raise RunGone(str(refused)) from refused
            except (OSError, ConnectionLost) as error:
                log.debug("run not reached", error=str(error))
                if here().monotonic() - lost_s > self._away_s or not self._run_dir.is_dir():
                    raise RunGone(f"no process has been at the run for {self._away_s:g} s") from error
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, REDIAL_MAX_S)
                continue
            self._connection, welcome_s = connection, here().monotonic()
            self._welcomed()
            if self._asked and self._was_there:
                log.info("the run is asked again what it has not answered", questions=len(self._asked))
            self._was_there = True
            for number, (request, _) in list(self._asked.items()):
                connection.send(request(number))
            beats = asyncio.create_task(self._beat(connection), name="beats")
            try:
                await connection.listen(self._hear)
            except ConnectionLost as error:
                log.warning("run lost", cause=str(error))
            finally:
                beats.cancel()
                self._connection, lost_s = None, here().monotonic()
                connection.abort()
            if lost_s - welcome_s > REDIAL_MAX_S:
                wait_s = REDIAL_S
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, REDIAL_MAX_S)

    async def _beat(self, connection: RunConnection) -> None:
        while True:
            connection.send(DriverBeat())
            await asyncio.sleep(BEAT_S)

    async def dial(self) -> RunConnection:
        """A connection on which the run has said welcome. Raises `OSError`, `ConnectionLost` and `SessionRefused`."""
        connection = await self._connect()
        await welcomed(connection, DriverHello(FRONT_VERSION, self._key, sorted(self.holds)))
        return connection

    def _hear(self, messages: list[FromRun]) -> None:
        for message in messages:
            match message:
                case TrajectoryBegun() | TrajectoryShown() | Declined():
                    _, answer = self._asked.get(message.request, (None, None))
                    if answer is not None and not answer.done():
                        if isinstance(message, TrajectoryBegun):
                            self.holds.add(message.trajectory)  # Now: the link may be lost before anybody looks.
                        answer.set_result(message)
                case RefusedFrame(reason, _):
                    raise ConnectionLost(reason)
                case _:
                    self._hears(message)


async def report_unusable(run_dir: Path, key: str, cause: str) -> None:
    """Tell the run, if it is there, that its environment cannot be played."""
    link = EnvRunLink(run_dir, key, 0.0)
    with contextlib.suppress(OSError, TimeoutError, ConnectionLost, SessionRefused):
        async with asyncio.timeout(WELCOME_TIMEOUT_S):
            connection = await link.dial()
            connection.send(EnvironmentUnusable(cause[:CAUSE_MAX]))
            await connection.lost


async def serve_run(link: EnvRunLink, work: Sequence[Coroutine[Any, Any, NoReturn]]) -> None:
    """Keep the link, and do this beside it, until the run is over, or a signal. Raises what the work raises."""
    ended = asyncio.Event()
    heed_no_more = act_on(TERMINATION, ended.set)
    linking = asyncio.create_task(link.run(), name="run")
    slots = [asyncio.create_task(one, name=f"slot {number}") for number, one in enumerate(work)]
    waiting = asyncio.create_task(ended.wait(), name="signal")
    try:
        await asyncio.wait({linking, waiting, *slots}, return_when=asyncio.FIRST_COMPLETED)
        for task in (linking, *slots):
            if task.done() and isinstance(error := task.exception(), Exception):
                if not isinstance(error, RunGone):
                    raise error
                log.info("the run wants no env worker", reason=str(error))
    finally:
        heed_no_more()
        for task in (linking, waiting, *slots):
            task.cancel()
        await asyncio.wait({linking, waiting, *slots}, timeout=1.0)
