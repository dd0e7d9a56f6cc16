"""The node agent's end of a resident's socket."""

import asyncio
import socket
from typing import Self, TypeVar

from elastic.pool.connection import FROM_RESIDENT, PoolLink
from elastic.pool.messages import (
    DeviceResumed,
    FromResident,
    Leave,
    Left,
    Park,
    Parked,
    Resume,
    Warm,
    WorkAs,
    WorkerTicketFrame,
)
from elastic.protocol.connection import over_socket
from tests.worker.conftest import PATIENCE_S

SaidT = TypeVar("SaidT", Warm, DeviceResumed, Parked, Left)


class NodeAgent:
    """Of one resident. Gives the device and takes it away, and waits until that is done."""

    def __init__(self) -> None:
        self._end, self.resident = socket.socketpair()
        self.permit = 0

    async def hear(self, kind: type[SaidT]) -> SaidT:
        """What is said next, which has to be this."""
        async with asyncio.timeout(PATIENCE_S):
            said = await self.link.receive()
        assert isinstance(said, kind), said
        return said

    async def give(self) -> DeviceResumed:
        self.permit += 1
        self.link.send(Resume(self.permit))
        said = await self.hear(DeviceResumed)
        assert said.permit == self.permit
        return said

    async def take(self, working: str = "") -> Parked:
        """`working`: the worker that the resident is, which has to end first."""
        self.link.send(Park(self.permit))
        if working:
            assert (await self.hear(Left)).worker == working
        said = await self.hear(Parked)
        assert said.permit == self.permit
        return said

    def lend(self, worker: str, join: str, token: str, run: str = "run") -> None:
        self.link.send(WorkAs(WorkerTicketFrame(run, worker, token, join)))

    def call_back(self, worker: str) -> None:
        self.link.send(Leave(worker))

    async def __aenter__(self) -> Self:
        self.link: PoolLink[FromResident] = await over_socket(self._end, FROM_RESIDENT, "the resident")
        return self

    async def __aexit__(self, *_: object) -> None:
        self.link.abort()
