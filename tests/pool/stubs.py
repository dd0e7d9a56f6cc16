"""Small processes in the place of a pool's large ones: `python stubs.py pool DIR | resident DIR PHASE | job DIR`.

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
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from elastic.compose.pool import PoolPrograms, PoolWiring, run_pool
from elastic.core.cluster.types import NodeId, PhaseKind
from elastic.pool import messages as w
from elastic.pool.connection import TO_JOB, TO_RESIDENT, PoolLink, join
from elastic.pool.ports import JobEnding, JobEntry
from elastic.protocol.connection import ConnectionLost, over_socket
from elastic.protocol.endpoint import Endpoint
from elastic.system.logs import STANDARD_ERROR, log_to

STUB = (sys.executable, str(Path(__file__).resolve()))
_ROLLOUT, _TRAIN = PhaseKind.ROLLOUT, PhaseKind.TRAIN


class StubPrograms(PoolPrograms):
    def run_command(self, entry: JobEntry) -> Sequence[str]:
        return (*STUB, "job", entry.directory)

    def resident_command(self, entry: JobEntry, phase: PhaseKind) -> Sequence[str]:
        return (*STUB, "resident", entry.directory, phase.value)

    def resident(
        self, entry: JobEntry, placement: int, node: NodeId, phase: PhaseKind, ticket: w.WorkerTicketFrame | None
    ) -> w.StartResidentFrame:
        frame = super().resident(entry, placement, node, phase, ticket)
        frame.environment.update(
            STUB_NODE=node, STUB_PLACEMENT=str(placement), STUB_DEVICES=str(self._directory.resolve() / "devices")
        )
        return frame

    def ended(self, entry: JobEntry, kept: Mapping[str, str], status: int | None) -> JobEnding:
        for how in ("finished", "stopped", "failed"):
            if (Path(entry.directory) / how).exists():
                return JobEnding(how, "as it said")
        return JobEnding("died", "its process died" if status is None else f"status {status}")

    def admit(self, entry: JobEntry) -> JobEntry:
        said = json.loads((Path(entry.directory) / "script.json").read_text())
        script = (*STUB, "job", entry.directory) if entry.script else ()
        return msgspec.structs.replace(entry, max_restarts=said.get("max_restarts", 3), script=script)


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
    link = await over_socket(socket.socket(fileno=int(os.environ["ELASTIC_KEEPER_FD"])), TO_RESIDENT, "the keeper")
    device, worker, permit = Device(), "", 0
    device.note("started quietly" if w.QUIET_VARIABLE in os.environ else "started alone")
    link.send(w.Warm())
    while True:
        match await link.receive():
            case w.Resume(permit=number):
                permit = number
                device.take(permit)
                (directory / f"resumed {os.environ.get('ELASTIC_WORKER', '')}").touch()
                link.send(w.DeviceResumed(permit, 0.001, 1000))
            case w.WorkAs(ticket=ticket):
                worker = ticket.worker
            case w.Leave(worker=left):
                link.send(w.Left(permit, left))
                worker = ""
            case w.Park(permit=number):
                if behaviour.get("never_parks") and "ELASTIC_WORKER" not in os.environ:
                    continue
                if worker:
                    link.send(w.Left(permit, worker))
                    worker = ""
                if permit:
                    device.free(number)
                permit = 0
                link.send(w.Parked(number, 0.001, 1000, 10))


class StubJob:
    """A job's process: rolls out and trains in turn, and yields when it is recalled."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.script = json.loads((directory / "script.json").read_text())
        self.link: PoolLink[w.ToJob] | None = None
        self.welcome: w.JobWelcome | None = None
        self.granted: w.Granted | None = None
        self.asked: w.AskPhase | None = None
        self.recalled = False
        self.lost = False
        self.trainer = ""
        self.parked: list[str] = []
        self.stirred = asyncio.Event()
        self.workers = 0

    @property
    def steps(self) -> int:
        with contextlib.suppress(FileNotFoundError, ValueError):
            return int((self.directory / "steps").read_text())
        return 0

    def hello(self) -> w.JobHello:
        token, placement = os.environ["ELASTIC_POOL_TOKEN"], int(os.environ["ELASTIC_POOL_PLACEMENT"])
        job, script = os.environ["ELASTIC_POOL_JOB"], bool(self.script.get("script"))
        held = self.granted.permit if script and self.granted is not None and not self.lost else 0
        return w.JobHello(w.POOL_PROTOCOL_VERSION, job, token, placement, script, held)

    async def run(self) -> None:
        if self.script.get("led"):
            await asyncio.Event().wait()  # Whoever tests speaks with the pool for it.
        if status := self.script.get("exits"):
            raise SystemExit(status)
        await self.dial()
        listening = asyncio.create_task(self.listen())
        while self.steps < self.script["steps"]:
            for phase in self.script.get("phases", ("rollout", "train")):
                await self.phase(phase, self.script[f"{phase}_s"])
            (self.directory / "steps.new").write_text(str(self.steps + 1))
            (self.directory / "steps.new").rename(self.directory / "steps")
            self.say(w.StepsDone(self.steps))
            if (self.directory / "stop").exists():
                (self.directory / "stopped").touch()
                return
        listening.cancel()
        (self.directory / "finished").touch()

    async def phase(self, name: str, left_s: float) -> None:
        hung = self.script.get("hangs_at") == self.steps and name == self.script.get("hangs_in", "rollout")
        phase, both = _ROLLOUT if name == "rollout" else _TRAIN, name == "both"
        while left_s > 0:
            granted = await self.turn(w.AskPhase(phase, both))
            lends = not self.script.get("script")
            if phase is _TRAIN and not self.trainer and lends:
                self.workers += 1
                self.trainer = f"trainer-{os.getpid()}-{self.workers}"
                self.say(w.StartTrainer(w.WorkerTicketFrame("run", self.trainer, "secret", "127.0.0.1:1")))
            if phase is _ROLLOUT and lends:
                for node in granted.nodes:
                    self.workers += 1
                    ticket = w.WorkerTicketFrame("run", f"{node}-{os.getpid()}-{self.workers}", "secret", "127.0.0.1:1")
                    self.say(w.LendSlice(granted.permit, node, ticket))
            while (
                phase is _TRAIN
                and lends
                and not self.lost
                and not (self.directory / f"resumed {self.trainer}").exists()
            ):
                with contextlib.suppress(TimeoutError):
                    await self.until(lambda: self.lost, 0.02)
            began_s = time.monotonic()
            devices = [] if lends else [Device(node) for node in granted.nodes]
            for device in devices:
                device.take(granted.permit)
            if hung and not (self.directory / "hung").exists():
                (self.directory / "hung").touch()
                await self.until(lambda: self.lost)
            with contextlib.suppress(TimeoutError):
                await self.until(lambda: self.recalled or self.lost, left_s)
            left_s -= time.monotonic() - began_s
            for device in devices:
                device.free(granted.permit)
            if self.lost:
                continue
            if phase is _ROLLOUT and lends:
                self.parked, count = [], len(granted.nodes)
                for node in granted.nodes:
                    self.say(w.ReturnSlice(granted.permit, node))
                await self.until(lambda count=count: self.lost or len(self.parked) >= count)
            self.granted = None
            self.yielded = w.YieldPhase(granted.permit, finished=left_s <= 0)
            self.say(self.yielded)

    async def turn(self, wish: w.AskPhase) -> w.Granted:
        self.granted, self.recalled, self.lost = None, False, False
        self.say(wish)
        while (granted := self.granted) is None or granted.phase is not wish.phase or granted.both != wish.both:
            self.stirred.clear()
            await self.stirred.wait()
        return granted

    async def until(self, condition, timeout_s: float | None = None) -> None:
        async with asyncio.timeout(timeout_s):
            while not condition():
                self.stirred.clear()
                await self.stirred.wait()

    def say(self, message) -> None:
        assert self.link is not None
        self.link.send(message)
        if self.script.get("repeats"):
            self.link.send(message)
        self.asked = message if isinstance(message, w.AskPhase) else self.asked

    async def dial(self) -> None:
        endpoint = Endpoint(os.environ["ELASTIC_POOL"], fingerprint=os.environ["ELASTIC_POOL_FINGERPRINT"])
        self.link, self.welcome = await join(endpoint, TO_JOB, self.hello, w.JobWelcome, 60.0)
        self.link.watch(self.welcome.silence_s)
        self.trainer = self.welcome.trainer

    async def listen(self) -> None:
        while True:
            assert self.link is not None
            try:
                message = await self.link.receive()
            except ConnectionLost:
                await self.dial()
                assert self.welcome is not None
                held = self.granted  # What it held may have been yielded meanwhile, to nobody.
                self.link.send(w.StepsDone(self.steps))
                numbers = {one.permit: one for one in self.welcome.permits}
                if held is not None and held.permit not in numbers:
                    self.lost = True
                yielded = getattr(self, "yielded", None)
                for number, one in numbers.items():
                    if yielded is not None and number == yielded.permit:
                        self.link.send(yielded)
                    elif held is None or held.permit != number:
                        self.granted = w.Granted(number, one.phase, one.nodes, one.left_s, one.both)
                    self.recalled = self.recalled or one.recalled
                if held is None and self.granted is None and self.asked is not None:
                    self.link.send(self.asked)
                self.parked += [*self.welcome.rollout_nodes]  # What was asked meanwhile may never be answered.
                self.stirred.set()
                continue
            match message:
                case w.Granted():
                    self.granted = message
                case w.Recalled():
                    self.recalled = True
                case w.PermitOver(permit=permit):
                    self.lost = self.lost or (self.granted is not None and self.granted.permit == permit)
                case w.SliceParked(node=node):
                    self.parked.append(node)
                case w.TrainerEnded(worker=worker):
                    self.trainer = "" if worker == self.trainer else self.trainer
                case _:
                    pass
            self.stirred.set()


if __name__ == "__main__":
    log_to(STANDARD_ERROR)
    what, where = sys.argv[1], Path(sys.argv[2])
    if what == "pool":
        raise SystemExit(run_pool(where, PoolWiring(programs=StubPrograms)))
    if what == "resident":
        with contextlib.suppress(ConnectionLost):
            asyncio.run(be_resident(where))
    else:
        asyncio.run(StubJob(where).run())
