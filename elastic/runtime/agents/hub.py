"""The run's end of connections of fronts and env workers: a Unix socket in its directory that only its user can open,
and who lets them in.

A front hands over the socket on which it serves agents as it connects, so that another front can be started on it after
this process was replaced.
"""

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import structlog

from elastic.core.types import TrajectoryId
from elastic.protocol import front_messages as m
from elastic.protocol.connection import ConnectionLost, over_socket
from elastic.protocol.frames import RefusedFrame
from elastic.protocol.run_connection import PeerConnection
from elastic.protocol.run_control import private_socket
from elastic.protocol.run_secrets import RunSecrets

log = structlog.get_logger(__name__)

FRONTS_MAX = 256
HAND_OVER_S = 5.0
"""For a front that has connected to hand over its socket."""
HELLO_S = 5.0
"""For a new connection to say hello."""
STOPPING = RefusedFrame("the run is stopping", retry=True)
SPEAKS = RefusedFrame(f"the run speaks version {m.FRONT_VERSION} with its fronts and env workers", retry=False)


class Counterpart(Protocol):
    """Serves the fronts and drivers that have been let in."""

    @property
    def connections(self) -> int:
        """How many are served."""
        ...

    def serves(self, driver: str) -> bool:
        """Whether it serves the env worker that is this driver; empty is for fronts."""
        ...

    def take(self, connection: PeerConnection, driver: str, holds: list[TrajectoryId]) -> None:
        """Serve a front, or the env worker that is this driver and still plays these trajectories."""
        ...

    def close(self) -> None: ...


class Doorkeeper:
    """Lets in fronts and env workers that say hello in the run's version, these with a driver's key, and brings each to
    the first of the `counterparts` that serves it. Once the run is `stopped` nobody is let in."""

    def __init__(self, run_name: str, secrets: RunSecrets, stopped: Callable[[], bool], *known: Counterpart) -> None:
        self.counterparts = list(known)
        self._run_name = run_name
        self._secrets = secrets
        self._stopped = stopped

    @property
    def connections(self) -> int:
        return sum(one.connections for one in self.counterparts)

    async def welcome(self, connection: PeerConnection) -> None:
        """Serve a new connection once it has said hello. Raises `TimeoutError` and `ConnectionLost`."""
        async with asyncio.timeout(HELLO_S):
            hello = await connection.receive()
        driver = self._driver(hello)
        serving = None if driver is None else next((one for one in self.counterparts if one.serves(driver)), None)
        if driver is None or serving is None:
            connection.close(SPEAKS)
        elif self._stopped():
            connection.close(STOPPING)
        else:
            connection.send(m.FrontWelcome(m.FRONT_VERSION, self._run_name))
            serving.take(connection, driver, hello.holds if isinstance(hello, m.DriverHello) else [])

    def _driver(self, hello: m.FromFront) -> str | None:
        """The driver whose key an env worker shows; empty for a front, and None for a peer that is not let in."""
        if not isinstance(hello, m.FrontHello | m.DriverHello) or hello.version != m.FRONT_VERSION:
            return None
        if isinstance(hello, m.FrontHello):
            return ""
        caller = self._secrets.caller_of(hello.key)
        return None if caller is None else caller.driver or None

    def close(self) -> None:
        for one in self.counterparts:
            one.close()


class FrontHub:
    """Takes connections of fronts and env workers to the `doorkeeper` while it is open."""

    def __init__(self, run_dir: Path, doorkeeper: Doorkeeper) -> None:
        self.listening: socket.socket | None = None
        """On which fronts serve agents."""
        self.handed_over = asyncio.Event()
        """Set once a front has handed over that socket."""
        self._run_dir = run_dir
        self._doorkeeper = doorkeeper
        self._tasks: set[asyncio.Task[None]] = set()
        self._door: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Raises `OSError`. A socket that a former process has left is replaced."""
        door = self._door = private_socket(self._run_dir, m.SOCKET)
        door.listen(FRONTS_MAX)
        door.setblocking(False)
        self._accepting = self._spawn(self._accept(door), "fronts")

    async def aclose(self) -> None:
        if self._accepting is not None:  # Whom it has taken has begun to be welcomed once it is over.
            self._accepting.cancel()
            await asyncio.gather(self._accepting, return_exceptions=True)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._doorkeeper.close()
        for held in (self._door, self.listening):
            if held is not None:
                held.close()
        self._door = self.listening = None
        (self._run_dir / m.SOCKET).unlink(missing_ok=True)

    async def _accept(self, door: socket.socket) -> None:
        while True:
            end, _ = await asyncio.get_running_loop().sock_accept(door)
            if self._doorkeeper.connections >= FRONTS_MAX:
                end.close()
                continue
            self._spawn(self._welcome(end), "front")

    async def _welcome(self, end: socket.socket) -> None:
        with contextlib.ExitStack() as unless_welcome:
            unless_welcome.callback(end.close)
            try:
                async with asyncio.timeout(HAND_OVER_S):
                    self._take_listening(await _descriptor(end))
                    connection = await over_socket(end, m.RUN_SIDE, "a front")
            except OSError as error:
                log.warning("a front has handed nothing over", error=str(error))
                return
            unless_welcome.pop_all()
            unless_welcome.callback(connection.abort)
            try:
                await self._doorkeeper.welcome(connection)
            except (TimeoutError, ConnectionLost) as error:
                log.warning("a front did not say hello", error=str(error))
                return
            unless_welcome.pop_all()

    def _take_listening(self, descriptor: int | None) -> None:
        if descriptor is None:
            return
        if self.listening is None:
            self.listening = socket.socket(fileno=descriptor)
            self.handed_over.set()
        else:
            os.close(descriptor)

    def _spawn(self, work: "asyncio._CoroutineLike[None]", name: str) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


async def _descriptor(end: socket.socket) -> int | None:
    """The descriptor that comes with the first byte, if any does."""
    end.setblocking(False)
    readable = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(end, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(end)
    said, descriptors, _, _ = socket.recv_fds(end, 1, 1)
    if not said:
        raise ConnectionError("closed at once")
    for one in descriptors[1:]:
        with contextlib.suppress(OSError):
            os.close(one)
    return descriptors[0] if descriptors else None
