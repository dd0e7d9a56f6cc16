"""The run's fronts as processes: all serve agents on one socket, and one that ends is started again."""

import asyncio
import contextlib
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

import structlog

from elastic.protocol.sockets import address_of, listening_socket
from elastic.runtime.agents.hub import FrontHub
from elastic.system.supervision import KeptProcesses, WatchedProcess, how_ended

log = structlog.get_logger(__name__)

FRONTS = "fronts"
"""Their owner in a run's records."""
BACKLOG = 1024
HAND_OVER_S = 5.0
"""For a former process's front to hand over the socket that it serves agents on."""
LIVED_S = 30.0
"""A front that lived for so long is started again at once."""
BACK_OFF_S, BACK_OFF_MAX_S = 0.2, 5.0
DRAIN_S = 2.0


class FrontProcesses:
    """`command` starts a front; it gets `--fd N`, the socket that it serves agents on. `count` of them are kept."""

    def __init__(
        self,
        hub: FrontHub,
        run_dir: Path,
        command: Sequence[str],
        environment: Mapping[str, str],
        count: int,
    ) -> None:
        self._hub = hub
        self._command = command
        self._environment = environment
        self._count = count
        self._processes = KeptProcesses(run_dir, FRONTS)
        self._keeping: list[asyncio.Task[None]] = []

    async def start(self, host: str, port: int, former_port: int = 0) -> str:
        """Take over the fronts that a former process has left, start the others, and return where they serve agents.

        Raises `OSError`, where the address is not to be had.
        """
        names = [f"front-{number}" for number in range(self._count)]
        await self._processes.take_over(names)
        if self._processes.names:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(HAND_OVER_S):
                    await self._hub.handed_over.wait()
        if self._hub.listening is None:
            self._hub.listening = _listening(host, port, former_port)
        self._keeping = [asyncio.create_task(self._keep(name), name=name) for name in names]
        return str(address_of(self._hub.listening))

    async def aclose(self) -> None:
        for task in self._keeping:
            task.cancel()
        await asyncio.gather(*self._keeping, return_exceptions=True)
        await self._processes.aclose(DRAIN_S)

    async def _keep(self, name: str) -> None:
        loop, wait_s = asyncio.get_running_loop(), BACK_OFF_S
        while True:
            began_s = loop.time()
            try:
                watched = self._processes.get(name) or self._start(name)
                status = await watched.wait()
                log.warning("a front has ended; another one is started", front=name, how=how_ended(status))
                await self._processes.forget(name)
            except OSError as error:
                log.warning("a front does not start", front=name, error=str(error))
            wait_s = BACK_OFF_S if loop.time() - began_s > LIVED_S else min(2 * wait_s, BACK_OFF_MAX_S)
            await asyncio.sleep(wait_s)

    def _start(self, name: str) -> WatchedProcess:
        assert self._hub.listening is not None
        descriptor = self._hub.listening.fileno()
        command = [*self._command, "--fd", str(descriptor)]
        return self._processes.start(name, command, self._environment, pass_fds=(descriptor,))


def _listening(host: str, port: int, former_port: int) -> socket.socket:
    """Listen where a former process did, if that is free: agents know the address."""
    if former_port and port in (0, former_port):
        try:
            return listening_socket(host, former_port, BACKLOG)
        except OSError as error:
            log.warning("agents cannot come back to where they were served", port=former_port, reason=str(error))
    return listening_socket(host, port, BACKLOG)
