"""An env worker's connection to its run, over the Unix socket in the run's directory.

The run may die and be started again: the link dials again, says which trajectories it still plays, and asks again what
was not answered.
"""

import asyncio
import contextlib
import socket
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, TypeAlias

import structlog

from elastic.core.types import TrajectoryId
from elastic.protocol.connection import Connection, ConnectionLost, SessionRefused, over_socket
from elastic.protocol.frames import RefusedFrame, WireError
from elastic.protocol.front_messages import (
    FRONT_SIDE,
    FRONT_VERSION,
    SOCKET,
    Declined,
    DriverBeat,
    DriverHello,
    FromFront,
    FromRun,
    FrontWelcome,
    TrajectoryBegun,
    TrajectoryShown,
)
from elastic.protocol.run_control import socket_address
from elastic.system.host import here

log = structlog.get_logger(__name__)

BEAT_S = 1.0
WELCOME_S = 5.0
REDIAL_S, REDIAL_MAX_S = 0.1, 1.0

DriverAnswer: TypeAlias = TrajectoryBegun | TrajectoryShown | Declined


class RunGone(Exception):
    """No process has been at the run for too long, or it wants no env worker."""


class EnvRunLink:
    """`key` is a driver's. `holds` has the trajectories that are being played."""

    def __init__(self, run_dir: Path, key: str, away_s: float) -> None:
        self.holds: set[TrajectoryId] = set()
        self._run_dir = run_dir
        self._key = key
        self._away_s = away_s
        self._connection: Connection[FromFront, FromRun] | None = None
        self._asked: dict[int, tuple[Callable[[int], FromFront], asyncio.Future[DriverAnswer]]] = {}
        self._number = 0

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
                connection = await self._dial()
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
            if self._asked:
                log.info("the run is asked again what it has not answered", questions=len(self._asked))
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

    async def _beat(self, connection: Connection[FromFront, FromRun]) -> None:
        while True:
            connection.send(DriverBeat())
            await asyncio.sleep(BEAT_S)

    async def _dial(self) -> Connection[FromFront, FromRun]:
        end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            with socket_address(self._run_dir, SOCKET) as address:
                end.connect(address)
            end.send(b"\0")  # Behind which a front hands over its socket; here is none.
            connection = await over_socket(end, FRONT_SIDE, "the run")
        except BaseException:
            end.close()
            raise
        with contextlib.ExitStack() as unless_welcome:
            unless_welcome.callback(connection.abort)
            connection.send(DriverHello(FRONT_VERSION, self._key, sorted(self.holds)))
            try:
                async with asyncio.timeout(WELCOME_S):
                    welcome = await connection.receive()
            except TimeoutError as error:
                raise ConnectionLost("the run said nothing") from error
            match welcome:
                case FrontWelcome():
                    unless_welcome.pop_all()
                    return connection
                case RefusedFrame(reason, retry) if not retry:
                    raise SessionRefused(reason)
                case _:
                    raise ConnectionLost(f"no welcome: {welcome}")

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
                    raise WireError(f"{type(message).__name__} is nothing for an env worker")
