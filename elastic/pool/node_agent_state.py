"""What a node's agent decides: who has the device, under which number and until when, and who is killed.

A pure state machine: it is told what has happened and the time, and answers what is to be done. A job has one resident
at a time; one that is to follow another starts once that one is gone.
"""

from dataclasses import dataclass
from typing import TypeAlias

import msgspec

from elastic.core.cluster.types import JobId, NodeId
from elastic.pool import messages as w


class ResidentSaid(msgspec.Struct, frozen=True):
    """The job's resident has sent this."""

    job: JobId
    message: w.FromResident


class ScriptStarted(msgspec.Struct, frozen=True):
    """The process of a resident that is a script runs."""

    job: JobId


class RanksListened(msgspec.Struct, frozen=True):
    """The job's resident is a trainer's first rank, which others reach `at` this address."""

    job: JobId
    at: str


class ResidentEnded(msgspec.Struct, frozen=True):
    """All processes of the job's resident are gone. `code`: its exit status, if known. `fault`: what is wrong with the
    node's devices."""

    job: JobId
    cause: str
    code: int | None = None
    fault: str = ""


class WakeupDue(msgspec.Struct, frozen=True):
    """It is later, and nothing else has happened."""


class TellPool(msgspec.Struct, frozen=True):
    """Send this to the pool, if its process is there."""

    message: w.FromNodeAgent


class TellResident(msgspec.Struct, frozen=True):
    """Send this to the job's resident."""

    job: JobId
    message: w.ToResident


class BeginResident(msgspec.Struct, frozen=True):
    """Start a resident; `ResidentEnded` follows at some time. `quietly`: others may compute here meanwhile."""

    order: w.StartResidentFrame
    quietly: bool


class Signal(msgspec.Struct, frozen=True):
    """Ask the job's resident to end, or with `kill` end it: at once, or as soon as it has been started."""

    job: JobId
    cause: str
    kill: bool


class PermitRefused(msgspec.Struct, frozen=True):
    """A permit counts no more; the device stays whose it is."""

    permit: int


class Untaken(msgspec.Struct, frozen=True):
    """A fault of the pool: it gives the device under `permit` without having taken back what it gave under `former`."""

    permit: int
    former: int


NodeAgentEvent: TypeAlias = w.ToNodeAgent | ResidentSaid | ScriptStarted | RanksListened | ResidentEnded | WakeupDue
NodeAgentCommand: TypeAlias = TellPool | TellResident | BeginResident | Signal | PermitRefused | Untaken


@dataclass(slots=True)
class _KeptResident:
    """A resident that has been started and is not gone."""

    order: w.StartResidentFrame
    worker: str
    up: bool
    permit: int = 0
    """Under which it has the device."""
    ending: str = ""
    """Why it is killed."""
    kill_s: float | None = None
    """When it is killed that was asked to end."""
    end_reason: str = ""
    """Why it was asked to."""
    ticket: w.WorkerTicketFrame | None = None
    """The ticket of a worker that the resident was not told of yet."""
    follower: w.StartResidentFrame | None = None
    """Started once this one is gone."""
    leaving: bool = False
    """Whether its worker was told to leave."""
    resume_s: float = 0.0
    """How long it took to resume under its permit."""
    ranks_at: str = ""
    """Where ranks on other nodes reach it."""


@dataclass(slots=True)
class _Device:
    """The holder of the device. `taking` is set once the pool has asked for it; at `until_s` the holder is killed."""

    permit: int
    job: JobId
    placement: int | None
    until_s: float
    taking: bool = False


class NodeAgentState:
    """The decisions of one node's agent. Times are seconds of any clock that never goes back."""

    def __init__(self) -> None:
        self.last_permit = 0
        self._kept: dict[JobId, _KeptResident] = {}
        self._device: _Device | None = None
        self._scripts_over: dict[JobId, w.ResidentGone] = {}
        self._now_s = 0.0
        self._commands: list[NodeAgentCommand] = []

    def handle(self, event: NodeAgentEvent, now_s: float) -> list[NodeAgentCommand]:
        """Take in what has happened; returns what is to be done, in this order."""
        self._now_s = now_s
        match event:
            case w.StartResidentFrame():
                self._start(event)
            case w.GiveDevice():
                self._give(event)
            case w.LeaveWorker():
                self._end_worker(event)
            case w.TakeDevice(permit=permit, job=job, left_s=left_s):
                self._take(permit, job, left_s)
            case w.EndResident(job=job, reason=reason, grace_s=grace_s):
                self._end(job, reason, grace_s)
            case ResidentSaid(job=job, message=message) if job in self._kept:
                self._said(job, self._kept[job], message)
            case ScriptStarted(job=job) if job in self._kept:
                self._is_up(self._kept[job])
            case RanksListened(job=job, at=at) if job in self._kept:
                self._listens(self._kept[job], at)
            case ResidentEnded() if event.job in self._kept:
                self._gone(event)
            case _:
                pass
        self._pass_time()
        commands, self._commands = self._commands, []
        return commands

    def next_wakeup_s(self) -> float | None:
        """Return when `WakeupDue` is due, unless something else happens before."""
        due_s = [kept.kill_s for kept in self._kept.values() if kept.kill_s is not None]
        if self._device is not None and not self._dies(self._device):
            due_s.append(self._device.until_s)
        return min(due_s, default=None)

    @property
    def idle(self) -> bool:
        """Whether there is no resident, and the device is no job's."""
        return not self._kept and self._device is None

    def hello(
        self, node: NodeId, token: str, pid: int, devices: tuple[str, ...] = (), machine: w.NodeMachine | None = None
    ) -> w.NodeAgentHello:
        """Return what a node agent says as it dials: what there is on its node, and how scripts have ended, which
        nobody else knows."""
        residents = tuple(
            w.ResidentState(job, kept.order.placement, kept.worker, kept.permit, kept.up, kept.ranks_at)
            for job, kept in self._kept.items()
        )
        version, over = w.POOL_PROTOCOL_VERSION, tuple(self._scripts_over.values())
        said = version, node, token, pid, self.last_permit, residents, over, *self.given(), devices, machine
        return w.NodeAgentHello(*said)

    def given(self) -> tuple[int, JobId]:
        """Return the permit under which a job has the device, and the job; 0 if none has it."""
        return (0, "") if self._device is None else (self._device.permit, self._device.job)

    def _say(self, message: w.FromNodeAgent) -> None:
        self._commands.append(TellPool(message))

    def _pass_time(self) -> None:
        for job, kept in self._kept.items():
            if kept.kill_s is not None and kept.kill_s <= self._now_s:
                self._kill(job, kept.end_reason)
        device = self._device
        if device is None or device.until_s > self._now_s or self._dies(device):
            return
        kept = self._kept.get(device.job)
        if kept is not None and (kept.permit or kept.order.script):
            self._kill(device.job, "it has not parked in time" if device.taking else "it held the device too long")
        else:
            self._free(w.DeviceFreed(device.permit, device.job))

    def _dies(self, device: _Device) -> bool:
        """Whether the device's holder is killed already."""
        kept = self._kept.get(device.job)
        return kept is not None and bool(kept.ending) and bool(kept.permit or kept.order.script)

    # What the pool says.

    def _start(self, order: w.StartResidentFrame) -> None:
        kept = self._kept.get(order.job)
        if kept is not None and kept.order.placement == order.placement and not kept.ending:
            if kept.up:
                self._say(w.ResidentUp(order.job, order.placement))
            if kept.ranks_at:
                self._listens(kept, kept.ranks_at)
            return
        if kept is not None:
            kept.follower = order
            self._kill(order.job, "another one of its job takes its place")
            return
        self._keep_permit(order)
        self._kept[order.job] = _KeptResident(order, order.environment.get("ELASTIC_WORKER", ""), order.script)
        self._scripts_over.pop(order.job, None)
        others = any(other != order.job for other in self._kept)
        self._commands.append(BeginResident(order, quietly=others and self.given()[1] != order.job))

    def _keep_permit(self, order: w.StartResidentFrame) -> None:
        """A permit of an earlier placement is not for the resident of a later one."""
        device = self._device
        if device is None or device.job != order.job:
            return
        if device.placement is None:
            device.placement = order.placement
        elif device.placement != order.placement:
            self._device = None

    def _give(self, order: w.GiveDevice) -> None:
        device, permit, job = self._device, order.permit, order.job
        if permit < self.last_permit or (permit == self.last_permit and (device is None or device.job != job)):
            self._commands.append(PermitRefused(permit))
            self._work_as(None, order)
            return
        until_s = self._now_s + order.left_s
        if device is None or device.permit != permit:
            self.last_permit = permit
            if device is not None and not device.taking:
                self._commands.append(Untaken(permit, device.permit))
            for other, kept in self._kept.items():
                if kept.permit:
                    self._kill(other, f"permit {kept.permit} counts no more, and it has not parked")
            kept = self._kept.get(job)
            placement = None if kept is None else (kept.follower or kept.order).placement
            self._device = _Device(permit, job, placement, until_s)
        elif not device.taking:
            device.until_s = until_s
        self._work_as(self._kept.get(job), order)
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
            self._commands.append(TellResident(device.job, w.Resume(device.permit)))
        if kept.ticket is not None and kept.permit == device.permit:
            ticket, kept.ticket = kept.ticket, None
            self._commands.append(TellResident(device.job, w.WorkAs(ticket)))

    def _work_as(self, kept: _KeptResident | None, order: w.GiveDevice) -> None:
        """Keep the order's ticket for the resident that is to have the device, if there is one."""
        ticket = order.ticket
        if ticket is None or (kept is not None and kept.worker == ticket.worker):
            return
        if kept is None or kept.ending:
            self._say(w.WorkerLeft(order.job, ticket.worker, "the device is not its job's any more"))
            return
        kept.worker, kept.ticket = ticket.worker, ticket

    def _end_worker(self, message: w.LeaveWorker) -> None:
        kept = self._kept.get(message.job)
        if kept is None or kept.worker != message.worker or kept.ticket is not None:
            if kept is not None and kept.worker == message.worker:
                kept.worker, kept.ticket = "", None
            self._say(w.WorkerLeft(message.job, message.worker))
        elif not kept.leaving:
            kept.leaving = True
            self._commands.append(TellResident(message.job, w.Leave(message.worker)))

    def _take(self, permit: int, job: JobId, left_s: float) -> None:
        device, kept = self._device, self._kept.get(job)
        if device is None or device.permit != permit:
            if kept is None or kept.permit != permit:
                self._say(w.DeviceFreed(permit, job))
            return
        if device.taking:
            return
        device.taking, device.until_s = True, self._now_s + left_s
        if kept is None or kept.order.script or kept.permit != permit:
            # Nobody computes under this permit. Who is killed for an older one keeps the next one waiting.
            if kept is not None:
                self._drop_ticket(kept)
                kept.permit = 0 if kept.order.script else kept.permit
            self._free(w.DeviceFreed(permit, job))
        elif not kept.ending:
            self._commands.append(TellResident(job, w.Park(permit)))

    def _drop_ticket(self, kept: _KeptResident) -> None:
        if kept.ticket is not None:
            ticket, kept.ticket, kept.worker = kept.ticket, None, ""
            self._say(w.WorkerLeft(kept.order.job, ticket.worker, "its slice is over"))

    def _free(self, freed: w.DeviceFreed) -> None:
        self._device = None
        self._say(freed)

    def _end(self, job: JobId, reason: str, grace_s: float) -> None:
        kept = self._kept.get(job)
        if kept is not None and grace_s > 0:
            kept.kill_s, kept.end_reason = self._now_s + grace_s, reason
            self._commands.append(Signal(job, reason, kill=False))
        elif kept is not None:
            self._kill(job, reason)

    def _kill(self, job: JobId, cause: str) -> None:
        kept = self._kept[job]
        kept.ending, kept.kill_s = kept.ending or cause, None
        self._commands.append(Signal(job, kept.ending, kill=True))

    # What residents say, and their ends.

    def _is_up(self, kept: _KeptResident) -> None:
        kept.up = True
        self._say(w.ResidentUp(kept.order.job, kept.order.placement))
        self._resume()

    def _listens(self, kept: _KeptResident, at: str) -> None:
        kept.ranks_at = at
        self._say(w.RanksAwaited(kept.order.job, kept.order.placement, at))

    def _said(self, job: JobId, kept: _KeptResident, message: w.FromResident) -> None:
        match message:
            case w.Warm():
                self._is_up(kept)
            case w.DeviceResumed(permit=permit, resume_s=resume_s) if permit == kept.permit:
                kept.resume_s = resume_s
            case w.Left(worker=worker, cause=cause):
                if kept.order.phase is not w.PhaseKind.TRAIN and kept.worker == worker:
                    kept.worker, kept.leaving = "", False
                    self._say(w.WorkerLeft(job, worker, cause))
            case w.Parked():
                self._parked(job, kept, message)
            case w.DeviceResumed() | w.StillHere():
                pass

    def _parked(self, job: JobId, kept: _KeptResident, message: w.Parked) -> None:
        permit = message.permit
        if kept.permit != permit or kept.ending:
            return
        switch_s = message.cold_s + kept.resume_s + message.park_s
        freed = w.DeviceFreed(permit, job, switch_s, message.cold_s)
        kept.permit, kept.resume_s = 0, 0.0
        self._drop_ticket(kept)
        if self.given()[0] == permit:
            self._free(freed)
        else:
            self._say(freed)
        self._resume()

    def _gone(self, event: ResidentEnded) -> None:
        kept = self._kept.pop(event.job)
        if self._device is not None and self._device.job == event.job and self._device.taking:
            self._device = None
        cause = kept.ending or event.cause
        gone = w.ResidentGone(event.job, kept.order.placement, cause, kept.permit, event.code, event.fault)
        if kept.order.script:
            self._scripts_over[event.job] = gone
        self._say(gone)
        if kept.follower is not None:
            self._start(kept.follower)
        self._resume()
