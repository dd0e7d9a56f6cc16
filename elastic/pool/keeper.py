"""A node's keeper: starts and kills residents, gives out the node's device by permit numbers, and measures memory.

- The device belongs to one job at a time, under a number that only grows. Before another job gets it, the job before
  has parked, or its processes are gone. A job that holds it beyond its time is killed, whatever the pool says.
- A resident is one process of one job with everything that it starts. It dies with its keeper: its socket closes, and
  the pool's process ends what is recorded.
- The keeper outlives the pool's process, and dials it again. It ends after a long silence.
"""

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Coroutine, Iterable
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import structlog

from elastic.core.cluster.types import JobId
from elastic.pool import messages as w
from elastic.pool.connection import FROM_RESIDENT, TO_KEEPER, LinkLost, NotLetIn, PoolLink, join, over_socket
from elastic.protocol.endpoint import Endpoint
from elastic.system.isolation import IsolatedLoop, LoopFaults
from elastic.system.processes import RecordedProcesses, inherited, signal_name

log = structlog.get_logger(__name__)

RESIDENTS = "residents"
"""Prefix of the owner of a node's resident records; the node's name follows."""


class KeeperTicket(msgspec.Struct, frozen=True, kw_only=True):
    """Where a keeper dials, and as whom. `records` is the directory of its process records. The token is never
    logged."""

    endpoint: Endpoint
    pool: str
    node: str
    token: str
    records: Path | None = None
    wait_s: float = 60.0


class _KeptResident:
    """A resident."""

    def __init__(self, order: w.StartResidentFrame, recorded: RecordedProcesses) -> None:
        self.order = order
        self.recorded = recorded
        self.process: asyncio.subprocess.Process | None = None
        self.link: PoolLink[w.FromResident] | None = None
        self.up = order.script
        self.permit = 0
        """Under which it has the device."""
        self.parking = False
        self.ending = ""
        """Why it is killed."""
        self.worker = order.environment.get("ELASTIC_WORKER", "")
        self.ticket: w.WorkerTicketFrame | None = None
        """Of a worker that it was not told of yet."""
        self.follower: w.StartResidentFrame | None = None
        """Started once this one is gone."""
        self.leave_s = 0.0
        self.resumed = w.DeviceResumed(0, 0.0, 0)


class _Device:
    """The holder of the device. `taking` is set once the pool has asked for it."""

    def __init__(self, permit: int, job: JobId, placement: int | None) -> None:
        self.permit, self.job, self.placement = permit, job, placement
        self.taking = False
        self.timer: asyncio.TimerHandle | None = None

    def due(self, after_s: float, act: Callable[[], object]) -> None:
        self.still()
        self.timer = asyncio.get_running_loop().call_later(after_s, act)

    def still(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


class Keeper:
    """The keeper of one node. `run` returns when the pool dismisses it or was silent for too long."""

    def __init__(
        self,
        ticket: KeeperTicket,
        memory: Callable[[Iterable[int]], int] | None = None,
        faults: LoopFaults | None = None,
    ) -> None:
        self._ticket = ticket
        self._isolated = IsolatedLoop("keeper", faults or LoopFaults(), clock=_now_s)
        self._memory = memory or held_bytes
        self._token = ticket.token
        self._kept: dict[JobId, _KeptResident] = {}
        self._device: _Device | None = None
        self._last_permit = 0
        self._scripts_over: dict[JobId, w.ResidentGone] = {}
        self._link: PoolLink[w.ToKeeper] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> str:
        """Work until the end, residents included; returns why it has ended."""
        try:
            return await self._serve()
        finally:
            if self._device is not None:
                self._device.still()
            for task in tuple(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await asyncio.gather(*(kept.recorded.end() for kept in self._kept.values()))

    async def _serve(self) -> str:
        within_s = self._ticket.wait_s
        while True:
            try:
                link, welcome = await join(self._ticket.endpoint, TO_KEEPER, self._hello, w.KeeperWelcome, within_s)
            except (NotLetIn, LinkLost) as end:
                return str(end)
            log.info("joined the pool", node=self._ticket.node)
            self._link, self._token, within_s = link, welcome.session, welcome.orphan_s
            link.watch(welcome.silence_s)
            measuring = asyncio.create_task(self._measure(welcome.measure_s), name="memory")
            try:
                while True:
                    message = await link.receive()
                    if isinstance(message, w.PoolRefused):
                        return message.reason
                    with self._isolated.attempt(type(message).__name__):
                        self._heed(message)
            except LinkLost as loss:
                log.warning("the pool's process is not heard", cause=str(loss))
            finally:
                measuring.cancel()
                self._link = None
                link.abort()

    def _hello(self) -> w.KeeperHello:
        residents = tuple(
            w.ResidentState(job, kept.order.placement, kept.worker, kept.permit, kept.up)
            for job, kept in self._kept.items()
        )
        ticket, device = self._ticket, self._device
        return w.KeeperHello(
            w.POOL_PROTOCOL_VERSION,
            ticket.node,
            self._token,
            os.getpid(),
            socket.gethostname(),
            self._last_permit,
            residents,
            tuple(self._scripts_over.values()),
            device.permit if device is not None else 0,
            device.job if device is not None else "",
        )

    def _say(self, message: w.FromKeeper) -> None:
        if self._link is not None:
            self._link.send(message)

    # What the pool says.

    def _heed(self, message: w.ToKeeper) -> None:
        match message:
            case w.StartResidentFrame():
                self._start(message)
            case w.GiveDevice(permit=permit, job=job, left_s=left_s):
                self._give(permit, job, left_s)
            case w.LendWorker():
                self._lend(message)
            case w.EndWorker():
                self._end_worker(message)
            case w.TakeDevice(permit=permit, job=job, left_s=left_s):
                self._take(permit, job, left_s)
            case w.EndResident(job=job, reason=reason, grace_s=grace_s):
                if job in self._kept:
                    self._end(self._kept[job], reason, grace_s)
            case _:
                pass

    def _start(self, order: w.StartResidentFrame) -> None:
        kept = self._kept.get(order.job)
        if kept is not None and kept.order.placement == order.placement and not kept.ending:
            if kept.up:
                self._say(w.ResidentUp(order.job, order.placement))
            return
        if kept is not None:
            kept.follower = order
            self._end(kept, "another one of its job takes its place", 0.0)
            return
        self._keep_permit(order)
        name = f"{self._ticket.node}-{order.job}-{order.placement}"
        owner = f"{RESIDENTS} {self._ticket.node}"
        kept = _KeptResident(order, RecordedProcesses(self._ticket.records, self._ticket.pool, owner, name))
        self._kept[order.job] = kept
        self._scripts_over.pop(order.job, None)
        self._spawn(self._attend(kept))

    def _keep_permit(self, order: w.StartResidentFrame) -> None:
        """A permit of an earlier placement is not for the resident of a later one."""
        device = self._device
        if device is None or device.job != order.job:
            return
        if device.placement is None:
            device.placement = order.placement
        elif device.placement != order.placement:
            device.still()
            self._device = None

    def _give(self, permit: int, job: JobId, left_s: float) -> None:
        device = self._device
        if permit < self._last_permit or (permit == self._last_permit and (device is None or device.job != job)):
            log.warning("a permit that counts no more is refused", permit=permit, last=self._last_permit)
            return
        if device is None or device.permit != permit:
            self._last_permit = permit
            if device is not None:
                device.still()
            for kept in self._kept.values():
                if kept.permit:
                    self._end(kept, f"permit {kept.permit} counts no more, and it has not parked", 0.0)
            orders = [] if (kept := self._kept.get(job)) is None else [kept.follower or kept.order]
            device = self._device = _Device(permit, job, orders[0].placement if orders else None)
        if not device.taking:
            device.due(left_s, self._overdue)
        self._resume()

    def _resume(self) -> None:
        """Let the device's holder compute, once no other job does."""
        device = self._device
        kept = None if device is None else self._kept.get(device.job)
        if device is None or kept is None or device.taking or not kept.up or kept.ending:
            return
        if any(one.permit for one in self._kept.values() if one is not kept):
            return
        if not kept.permit:
            kept.permit = device.permit
            self._tell(kept, w.Resume(device.permit))
        if kept.ticket is not None and kept.permit == device.permit:
            ticket, kept.ticket = kept.ticket, None
            self._tell(kept, w.WorkAs(device.permit, ticket))

    def _lend(self, message: w.LendWorker) -> None:
        kept, worker = self._kept.get(message.job), message.ticket.worker
        if kept is not None and kept.worker == worker:
            return
        if kept is None or kept.ending or self._device is None or self._device.permit != message.permit:
            self._say(w.WorkerLeft(message.permit, message.job, worker, 0.0, "the device is not its job's any more"))
            return
        kept.worker, kept.ticket = worker, message.ticket
        self._resume()

    def _end_worker(self, message: w.EndWorker) -> None:
        kept = self._kept.get(message.job)
        if kept is None or kept.worker != message.worker or kept.ticket is not None:
            if kept is not None and kept.worker == message.worker:
                kept.worker, kept.ticket = "", None
            self._say(w.WorkerLeft(message.permit, message.job, message.worker, 0.0))
        elif not kept.leave_s:
            kept.leave_s = _now_s()
            self._tell(kept, w.Leave(message.worker))

    def _take(self, permit: int, job: JobId, left_s: float) -> None:
        device, kept = self._device, self._kept.get(job)
        if device is None or device.permit != permit:
            if kept is None or kept.permit != permit:
                self._say(w.DeviceFreed(permit, job, 0.0, 0.0, 0, 0))
            return
        if device.taking:
            return
        device.taking = True
        device.due(left_s, self._overdue)
        if kept is None or kept.order.script or (not kept.permit and not kept.ending):
            self._drop_ticket(kept)
            if kept is not None:
                kept.permit = 0
            self._free(device, w.DeviceFreed(permit, job, 0.0, 0.0, 0, 0))
        elif not kept.ending:
            kept.parking = True
            self._tell(kept, w.Park(permit))

    def _drop_ticket(self, kept: _KeptResident | None) -> None:
        if kept is not None and kept.ticket is not None:
            ticket, kept.ticket, kept.worker = kept.ticket, None, ""
            self._say(w.WorkerLeft(self._last_permit, kept.order.job, ticket.worker, 0.0, "its slice is over"))

    def _free(self, device: _Device, freed: w.DeviceFreed) -> None:
        device.still()
        if self._device is device:
            self._device = None
        self._say(freed)

    def _overdue(self) -> None:
        """Kill the holder: the device's time is over, or parking took too long."""
        device = self._device
        assert device is not None
        kept = self._kept.get(device.job)
        if kept is not None and (kept.permit or kept.order.script):
            what = "it has not parked in time" if device.taking else "it held the device beyond its time"
            log.warning("resident killed", job=device.job, permit=device.permit, cause=what)
            self._end(kept, what, 0.0)
        else:
            self._free(device, w.DeviceFreed(device.permit, device.job, 0.0, 0.0, 0, 0))

    # Residents.

    async def _attend(self, kept: _KeptResident) -> None:
        """Start a resident, receive its messages, and make sure that all of it is gone at its end."""
        cause, code, job = "it could not be started", None, kept.order.job
        with self._isolated.attempt(f"resident of {job}") as attempt:
            try:
                await self._launch(kept)
                if kept.ending:
                    self._kill(kept)
                cause, code = await self._hear(kept)
            except OSError as error:
                cause = f"it could not be started: {error.strerror or error}"
            finally:
                if kept.link is not None:
                    kept.link.abort()
                with contextlib.suppress(ProcessLookupError):
                    if kept.process is not None and kept.process.returncode is None:
                        kept.process.kill()
        while True:
            with self._isolated.attempt(f"end of {job}") as ending:
                await kept.recorded.end()
            if not ending.fault:
                break
            await asyncio.sleep(self._isolated.wait_s(f"end of {job}"))
        self._gone(kept, kept.ending or attempt.fault or cause, code)

    async def _launch(self, kept: _KeptResident) -> None:
        order = kept.order
        ours, theirs = socket.socketpair()
        try:
            environment = inherited() | kept.recorded.marks | order.environment
            if self._has_others(order.job):
                environment[w.QUIET_VARIABLE] = "1"
            kept.recorded.write()
            with _appended(Path(order.log)) as output:
                kept.process = await asyncio.create_subprocess_exec(
                    *order.command,
                    env=environment | {w.KEEPER_VARIABLE: str(theirs.fileno())},
                    cwd=order.directory,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                    pass_fds=() if order.script else (theirs.fileno(),),
                )
            kept.recorded.add("resident", kept.process.pid)
            if not order.script:
                kept.link = await over_socket(ours, FROM_RESIDENT, f"the resident of {order.job}")
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        if order.script:
            ours.close()
            self._say(w.ResidentUp(order.job, order.placement))
            self._resume()

    def _has_others(self, job: JobId) -> bool:
        """Return whether other jobs may compute on this node while a process of this job starts."""
        has_device = self._device is not None and self._device.job == job
        return not has_device and any(other != job for other in self._kept)

    async def _hear(self, kept: _KeptResident) -> tuple[str, int | None]:
        """Receive messages until the resident's process has ended or is useless; returns why, and its exit status."""
        assert kept.process is not None
        waiting = asyncio.create_task(kept.process.wait())
        hearing = asyncio.create_task(self._listen(kept))
        try:
            await asyncio.wait((waiting, hearing), return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done() and not kept.order.script:
                # Its socket is closed: either it is ending right now, or it is of no use any more.
                await asyncio.wait((waiting,), timeout=0.5)
            if not waiting.done() and kept.order.script:
                await waiting
            status = waiting.result() if waiting.done() else None
        finally:
            for task in (waiting, hearing):
                task.cancel()
        if status is None:
            return "it does not speak with its keeper any more", None
        if status < 0:
            return f"it was killed by {signal_name(-status)}", status
        return f"it exited with status {status}; its output is in {kept.order.log}", status

    async def _listen(self, kept: _KeptResident) -> None:
        if kept.link is None:
            await asyncio.Event().wait()
        with contextlib.suppress(LinkLost):
            while kept.link is not None:
                message = await kept.link.receive()
                with self._isolated.attempt(f"message of {kept.order.job}"):
                    self._said(kept, message)

    def _said(self, kept: _KeptResident, message: w.FromResident) -> None:
        job = kept.order.job
        match message:
            case w.Warm():
                kept.up = True
                self._say(w.ResidentUp(job, kept.order.placement))
                self._resume()
            case w.DeviceResumed():
                kept.resumed = message
            case w.Left(worker=worker, cause=cause):
                if kept.order.phase is not w.PhaseKind.TRAIN and kept.worker == worker:
                    switch_s = _now_s() - kept.leave_s if kept.leave_s else 0.0
                    kept.worker, kept.leave_s = "", 0.0
                    self._say(w.WorkerLeft(message.permit, job, worker, switch_s, cause))
            case w.Parked(permit=permit):
                self._parked(kept, permit, message)
            case _:
                pass

    def _parked(self, kept: _KeptResident, permit: int, message: w.Parked) -> None:
        if kept.permit != permit or kept.ending:
            return
        kept.permit, kept.parking = 0, False
        resume_s = kept.resumed.resume_s if kept.resumed.permit == permit else 0.0
        freed = w.DeviceFreed(
            permit, kept.order.job, resume_s, message.park_s, message.state_bytes, message.rest_bytes, kept.worker
        )
        self._drop_ticket(kept)
        if self._device is not None and self._device.permit == permit:
            self._free(self._device, freed)
        else:
            self._say(freed)
        self._resume()

    def _tell(self, kept: _KeptResident, message: w.ToResident) -> None:
        if kept.link is not None:
            kept.link.send(message)

    def _end(self, kept: _KeptResident, reason: str, grace_s: float) -> None:
        if grace_s > 0 and kept.process is not None and kept.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                kept.process.terminate()
            self._spawn(self._kill_later(kept, reason, grace_s))
            return
        kept.ending = kept.ending or reason
        self._kill(kept)

    async def _kill_later(self, kept: _KeptResident, reason: str, grace_s: float) -> None:
        await asyncio.sleep(grace_s)
        if self._kept.get(kept.order.job) is kept:
            self._end(kept, reason, 0.0)

    def _kill(self, kept: _KeptResident) -> None:
        """Kill a resident. `_attend` does the rest once the process is gone."""
        with contextlib.suppress(ProcessLookupError):
            if kept.process is not None and kept.process.returncode is None:
                kept.process.kill()

    def _gone(self, kept: _KeptResident, cause: str, code: int | None) -> None:
        job, permit = kept.order.job, kept.permit
        if self._kept.get(job) is kept:
            del self._kept[job]
        kept.permit = 0
        device = self._device
        if device is not None and device.job == job and device.taking:
            device.still()
            self._device = None
        gone = w.ResidentGone(job, kept.order.placement, cause, permit, kept.worker, code)
        if kept.order.script:
            self._scripts_over[job] = gone  # How it has ended nobody else knows.
        self._say(gone)
        if kept.follower is not None:
            self._start(kept.follower)
        self._resume()

    # Memory.

    async def _measure(self, every_s: float) -> None:
        while True:
            await asyncio.sleep(every_s)
            for job, kept in list(self._kept.items()):
                with self._isolated.attempt(f"memory of {job}"):
                    found = await asyncio.to_thread(lambda kept=kept: self._memory(kept.recorded.living()))
                    if found and self._kept.get(job) is kept:
                        self._say(w.HostMemory(job, found))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def held_bytes(pids: Iterable[int]) -> int:
    """Return the memory that these processes use; for pages that they share with others, their part."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1]) * 1024
    return total


def _appended(path: Path) -> BinaryIO:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.open("ab")


def _now_s() -> float:
    return asyncio.get_running_loop().time()
