"""Small processes in the place of a pool's large ones: `python stubs.py resident DIR PHASE | job DIR`.

A resident holds a lock file while it has its node's device, so that two at once are seen. A job follows `script.json`
in its directory: steps, and how long its phases last; what it has done is in `steps` there.
"""

import asyncio
import contextlib
import fcntl
import json
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

from elastic.system.imports import importing

with importing():
    from elastic.core.cluster.types import PhaseKind
    from elastic.pool import messages as w
    from elastic.pool.client import PoolClient, membership_here
    from elastic.pool.connection import TO_RESIDENT, show_life
    from elastic.protocol.connection import ConnectionLost, over_socket
    from elastic.system.logs import STANDARD_ERROR, log_to

STUB = (sys.executable, str(Path(__file__).resolve()))
_ROLLOUT, _TRAIN = PhaseKind.ROLLOUT, PhaseKind.TRAIN


class Device:
    """A node's device, as far as this test machine has one: a lock that the kernel takes back from the dead."""

    def __init__(self, node: str = "") -> None:
        self._node = node or os.environ["STUB_NODE"]
        directory = Path(os.environ["STUB_DEVICES"])
        directory.mkdir(exist_ok=True)
        self._file = (directory / self._node).open("w")
        self._log = directory / "history"

    def take(self, permit: int) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.note(f"resumed {permit}")
        except BlockingIOError:
            self.note(f"VIOLATION {permit}")

    def free(self, permit: int) -> None:
        self.note(f"parked {permit}")
        fcntl.flock(self._file, fcntl.LOCK_UN)

    def note(self, what: str) -> None:
        who = f"{self._node} {os.environ['ELASTIC_POOL_JOB']}"
        with self._log.open("a") as history:
            history.write(f"{time.time():.3f} {who} {what}\n")


async def be_resident(directory: Path) -> None:
    behaviour = json.loads((directory / "script.json").read_text())
    link = await over_socket(
        socket.socket(fileno=int(os.environ["ELASTIC_NODE_AGENT_FD"])), TO_RESIDENT, "the node agent"
    )
    if os.environ.get("ELASTIC_DEVICES", "") in behaviour.get("dies_on", ()) and not (directory / "mended").exists():
        raise SystemExit(9)
    show_life(link)
    device, worker, permit = Device(), "", 0
    device.note("started quietly" if w.QUIET_VARIABLE in os.environ else "started alone")
    link.send(w.Warm())
    while True:
        match await link.receive():
            case w.Resume(permit=number):
                permit = number
                device.take(permit)
                (directory / f"resumed {os.environ.get('ELASTIC_WORKER', '')}").touch()
                link.send(w.DeviceResumed(permit, 0.001))
            case w.WorkAs(ticket=ticket):
                worker = ticket.worker
            case w.Leave(worker=left):
                link.send(w.Left(left))
                worker = ""
            case w.Park(permit=number):
                if behaviour.get("never_parks") and "ELASTIC_WORKER" not in os.environ:
                    continue
                if worker:
                    link.send(w.Left(worker))
                    worker = ""
                if permit:
                    device.free(number)
                permit = 0
                link.send(w.Parked(number, 0.001))


class StubJob:
    """A job's process: rolls out and trains in turn, and yields when it is recalled."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.script = json.loads((directory / "script.json").read_text())
        self.lends = not self.script.get("script")
        self.workers = 0
        self.held = 0
        """The permit under which a script computes."""
        self.stirred = asyncio.Event()

    @property
    def steps(self) -> int:
        with contextlib.suppress(FileNotFoundError, ValueError):
            return int((self.directory / "steps").read_text())
        return 0

    async def run(self) -> None:
        if self.script.get("led"):
            await asyncio.Event().wait()  # Whoever tests speaks with the pool for it.
        if status := self.script.get("exits"):
            raise SystemExit(status)
        membership = membership_here()
        assert membership is not None
        self.client = client = PoolClient(membership, None if self.lends else lambda: self.held)
        for hear in (client.on_slices, client.on_permits, client.on_trainer):
            hear(lambda news: self.stirred.set())
        self.welcome = await client.open(60.0)
        while self.steps < self.script["steps"]:
            for phase in self.script.get("phases", ("rollout", "train")):
                await self.phase(phase, self.script[f"{phase}_s"])
            (self.directory / "steps.new").write_text(str(self.steps + 1))
            (self.directory / "steps.new").rename(self.directory / "steps")
            client.part.report_steps(self.steps)
            if (self.directory / "stop").exists():
                (self.directory / "stopped").touch()
                return
        await client.aclose()
        (self.directory / "finished").touch()

    async def phase(self, name: str, left_s: float) -> None:
        hung = self.script.get("hangs_at") == self.steps and name == self.script.get("hangs_in", "rollout")
        phase, both = _ROLLOUT if name == "rollout" else _TRAIN, name == "both"
        client, part = self.client, self.client.part
        while left_s > 0:
            for _ in self.welcome.rollout_nodes if phase is _ROLLOUT and self.lends else ():
                client.part.offer(self.ticket("worker"))
            client.part.ask(phase, both=both)
            await self.until(lambda: part.permit_of(phase) is not None)
            turn = part.permit_of(phase)
            assert turn is not None
            permit = self.held = turn.number
            if phase is _TRAIN and part.trainer is None and self.lends:
                client.part.start_trainer(self.ticket("trainer"))
            while phase is _TRAIN and self.lends and permit in part.permits and not self.resumed():
                await self.until(lambda permit=permit: permit not in part.permits, 0.02)
            began_s = time.monotonic()
            devices = [] if self.lends else [Device(node) for node in turn.nodes]
            for device in devices:
                device.take(permit)
            if hung and not (self.directory / "hung").exists():
                (self.directory / "hung").touch()
                await self.until(lambda permit=permit: permit not in part.permits)
            await self.until(lambda permit=permit: permit not in part.permits or part.permits[permit].recalled, left_s)
            left_s -= time.monotonic() - began_s
            for device in devices:
                device.free(permit)
            for worker in list(part.workers):
                client.part.give_back(worker)
            await self.until(lambda permit=permit: not part.working(permit))
            self.held = 0
            client.part.leave(permit, finished=left_s <= 0)

    def ticket(self, what: str) -> w.WorkerTicketFrame:
        self.workers += 1
        return w.WorkerTicketFrame("run", f"{what}-{os.getpid()}-{self.workers}", "secret", "127.0.0.1:1")

    def resumed(self) -> bool:
        trainer = self.client.part.trainer
        return trainer is not None and (self.directory / f"resumed {trainer.worker}").exists()

    async def until(self, condition: Callable[[], bool], timeout_s: float | None = None) -> None:
        """Wait for the condition, or for as long as that."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not condition():
                    self.stirred.clear()
                    await self.stirred.wait()


if __name__ == "__main__":
    log_to(STANDARD_ERROR)
    what, where = sys.argv[1], Path(sys.argv[2])
    if what == "resident":
        with contextlib.suppress(ConnectionLost):
            asyncio.run(be_resident(where))
    else:
        asyncio.run(StubJob(where).run())
