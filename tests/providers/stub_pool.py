"""A pool's process in a thread, which speaks `elastic.pool.messages` over real sockets and grants what it is asked for.

What it lends are processes of their own, so that they outlive whoever asked for them.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path

from elastic.core.cluster.types import PhaseKind
from elastic.pool import messages as w
from elastic.pool.client import PoolClient, PoolMembership
from elastic.pool.connection import FromDialler, PoolLink
from elastic.protocol.connection import ConnectionLost
from elastic.protocol.endpoint import Endpoint
from tests.pool.model import JobsPool, listen_as_pool

CLIENTS: list[PoolClient] = []
"""Of this process, for whoever is to close them."""
LOOK_S = 0.01
"""How often it is looked whether workers live."""


class _Job:
    """One job: its newest connection, and the processes that work for it."""

    def __init__(self, command: Sequence[str]) -> None:
        self.link: PoolLink[FromDialler] | None = None
        self.pool = JobsPool(lambda message: self.link.send(message) if self.link else None)
        self.pool.lent, self.pool.freed = self._start, self._kill
        self._command = command
        self._workers: dict[str, subprocess.Popen[bytes]] = {}

    def _start(self, node: str, ticket: w.WorkerTicketFrame) -> None:
        variables = {**os.environ, "ELASTIC_RUN": ticket.run, "ELASTIC_WORKER": ticket.worker}
        self._workers[ticket.worker] = subprocess.Popen(self._command, env=variables, start_new_session=True)

    def _kill(self, worker: str) -> None:
        if (process := self._workers.pop(worker, None)) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def look(self) -> None:
        for node, worker in list(self.pool.slices.items()):
            if (process := self._workers.get(worker)) is not None and process.poll() is not None:
                self.pool.park(node, "the resident died")

    def end(self) -> None:
        for worker in list(self._workers):
            self._kill(worker)


class LendingPool:
    """Where it is found stands in the directory. It ends with the tests' process, or with `stop`."""

    def __init__(self, directory: Path, command: Sequence[str]) -> None:
        self._command = command
        self._jobs: dict[str, _Job] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._address = directory / "pool.address"
        listening = threading.Event()
        self._thread = threading.Thread(
            target=self._loop.run_until_complete, args=(self._serve(listening),), daemon=True
        )
        self._thread.start()
        assert listening.wait(10)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join(10)
        self._loop.close()

    async def _serve(self, listening: threading.Event) -> None:
        server = await listen_as_pool(self._connected)
        host, port = server.sockets[0].getsockname()[:2]
        self._address.write_text(f"{host}:{port}")
        listening.set()
        while not self._stopping.is_set():
            for job in self._jobs.values():
                job.look()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._stopping.wait()
        server.close()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        for job in self._jobs.values():
            job.end()

    def _connected(self, link: PoolLink[FromDialler]) -> None:
        task = self._loop.create_task(self._hear(link))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _hear(self, link: PoolLink[FromDialler]) -> None:
        try:
            hello = await link.receive()
            assert isinstance(hello, w.JobHello)
            job = self._jobs.setdefault(hello.job, _Job(self._command))
            if job.link is not None:
                job.link.send(w.RefusedFrame("another process speaks for the job now", retry=False))
            job.link = link
            link.send(job.pool.welcome())
            while True:
                job.pool.hear(await link.receive())  # type: ignore[arg-type]
                if PhaseKind.ROLLOUT in job.pool.asked:
                    job.pool.grant(PhaseKind.ROLLOUT)
        except ConnectionLost:
            pass
        finally:
            link.abort()


def stub_client(directory: Path, run: str) -> PoolClient:
    """Of the stub pool in this directory."""
    address = (directory / "pool.address").read_text()
    client = PoolClient(PoolMembership(endpoint=Endpoint(address), job=run, placement=1, token="secret"))
    CLIENTS.append(client)
    return client
