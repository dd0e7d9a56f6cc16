"""Models of what the operating system does for a pool: processes that are started, watched and killed, and the socket
between a node agent and its resident."""

import asyncio
import itertools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from elastic.core.types import NS_PER_S
from elastic.pool.job_processes import ProcessLaunch
from elastic.system.supervision import RecordedProcesses
from elastic.testing.faults.shell.network import NetworkLoop, WorldTransport
from elastic.testing.faults.shell.process import Process

if TYPE_CHECKING:
    from elastic.testing.faults.shell.pooled.world import PooledWorld

KILLED = -9
PIPE_S = 0.0001
"""How long a message between a node agent and its resident takes."""
FIRST_PID = 1000


class Pipe(WorldTransport):
    """One end of a connection inside a machine: neither weather nor repetitions befall it."""

    def __post_init__(self) -> None:
        asyncio.Transport.__init__(self)
        self.loop.pipes[self] = None

    def write(self, data: bytes | bytearray | memoryview) -> None:
        peer = self.peer
        if self.closing or self.lost or not data or peer is None or not peer.loop.alive:
            return
        self.on_way_bytes += len(data)
        self.free_ns = max(self.free_ns + 1000, self.loop.clock.now_ns + round(PIPE_S * NS_PER_S))
        peer.on_way.append(bytes(data))
        peer.loop.at_world(self.free_ns, peer._arrive)


class PairedSocket:
    """One end of a `socket.socketpair`, between processes of which the second is started later."""

    open_ends: ClassVar["dict[int, PairedSocket]"] = {}
    """Ends that no child has inherited yet."""
    _numbers: ClassVar[Iterator[int]] = itertools.count(3)

    def __init__(self) -> None:
        self.number = next(self._numbers)
        self.other: PairedSocket
        self.transport: Pipe

    @classmethod
    def pair(cls) -> "tuple[PairedSocket, PairedSocket]":
        ours, theirs = cls(), cls()
        ours.other, theirs.other = theirs, ours
        cls.open_ends[theirs.number] = theirs
        return ours, theirs

    @classmethod
    def inherited(cls, number: int, node_agent: NetworkLoop, child: NetworkLoop) -> "PairedSocket":
        """Return the end that a new child has inherited, connected to its node agent's."""
        theirs = cls.open_ends.pop(number)
        near, far = Pipe(node_agent, None, address="node_agent"), Pipe(child, None, address="resident")
        near.peer, far.peer = far, near
        theirs.other.transport, theirs.transport = near, far
        return theirs

    def fileno(self) -> int:
        return self.number

    def setblocking(self, flag: bool) -> None:
        pass

    def close(self) -> None:
        pass

    def connected(self, factory: Callable[[], Any]) -> tuple[Pipe, Any]:
        """Return the transport and protocol of this end, as `loop.create_connection` does."""
        transport, protocol = self.transport, factory()
        transport.protocol = protocol
        protocol.connection_made(transport)
        transport.loop.call_soon(transport._read)
        return transport, protocol


class ModelledChild(asyncio.SubprocessTransport):
    """A node agent's view of a child process."""

    def __init__(self, host: "PooledWorld", loop: NetworkLoop, process: Process, pid: int) -> None:
        super().__init__()
        self._host, self._loop, self._process, self._pid = host, loop, process, pid
        self._ended: asyncio.Future[int] = loop.create_future()
        host.at_end(process, self._exited)

    def _exited(self, status: int) -> None:
        if self._loop.alive and not self._ended.done():
            self._loop.call_soon(lambda: None if self._ended.done() else self._ended.set_result(status))

    def get_pid(self) -> int:
        return self._pid

    def get_returncode(self) -> int | None:
        return self._ended.result() if self._ended.done() else None

    def get_pipe_transport(self, fd: int) -> None:
        return None

    async def _wait(self) -> int:
        return await asyncio.shield(self._ended)

    def kill(self) -> None:
        self._host.end(self._process, KILLED)

    def terminate(self) -> None:
        self.kill()

    def close(self) -> None:
        pass


class ModelledRecord(RecordedProcesses):
    """The record of a node agent's residents, of which this machine knows nothing. `ends` ends what a node agent has
    left."""

    def __init__(
        self, directory: Path | None, pool: str, owner: str, name: str, ends: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__(None, pool, owner, name)
        self._ends = ends

    def add(self, name: str, pid: int) -> None:
        pass

    def living(self) -> list[int]:
        return []

    async def kill(self) -> list[int]:
        self._ends()
        await asyncio.sleep(0)
        return []


class StartedProcess(NamedTuple):
    """The record of a process that outlives who has started it."""

    kept: Mapping[str, str]
    process: Process
    pid: int


class ModelledProcesses:
    """`elastic.pool.job_processes.DetachedProcesses`. `records` outlive the pool's process."""

    def __init__(
        self,
        host: "PooledWorld",
        records: dict[str, dict[str, StartedProcess]],
        directory: Path,
        pool: str,
        owner: str,
        over: Callable[[str, Mapping[str, str], int | None], None],
    ) -> None:
        self._host, self._owner, self._over = host, owner, over
        self._loop = NetworkLoop.here()
        self._records = records.setdefault(owner, {})
        self._running: dict[str, StartedProcess] = {}

    def found(self) -> tuple[dict[str, Mapping[str, str]], dict[str, Mapping[str, str]]]:
        living: dict[str, Mapping[str, str]] = {}
        ended: dict[str, Mapping[str, str]] = {}
        for name, record in self._records.items():
            self._running[name] = record
            if record.process.alive:
                living[name] = record.kept
                self._watch(name, record)
            else:
                ended[name] = record.kept
        return living, ended

    async def settle(self, name: str) -> None:
        await asyncio.sleep(0.001)
        record = self._running.pop(name, None)
        if record is not None:
            if record.process.alive:
                self._host.end(record.process, KILLED)
            if self._records.get(name) is record:
                del self._records[name]

    def names(self) -> list[str]:
        return list(self._running)

    def kept(self, name: str) -> Mapping[str, str]:
        record = self._running.get(name)
        return {} if record is None else record.kept

    def pid(self, name: str) -> int | None:
        record = self._running.get(name)
        return record.pid if record is not None and record.process.alive else None

    def start(self, name: str, launch: ProcessLaunch) -> None:
        process = self._host.start(self._owner, name, launch.environment)
        record = StartedProcess(dict(launch.kept), process, FIRST_PID + len(self._records))
        self._records[name] = self._running[name] = record
        self._watch(name, record)

    def kill(self, name: str) -> None:
        record = self._running.get(name)
        if record is not None and record.process.alive:
            self._host.end(record.process, KILLED)

    def close(self) -> None:
        self._running.clear()

    def _watch(self, name: str, record: StartedProcess) -> None:
        def tell(status: int) -> None:
            if self._loop.alive:
                self._loop.call_soon(self._ended, name, record, status)

        self._host.at_end(record.process, tell)

    def _ended(self, name: str, record: StartedProcess, status: int) -> None:
        if self._running.get(name) is record:
            del self._running[name]
            if self._records.get(name) is record:
                del self._records[name]
            self._over(name, record.kept, status)
