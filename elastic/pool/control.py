"""Answers requests at the control socket of a pool's process. Source: `elastic.pool.control_messages`."""

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TypeAlias

import msgspec

from elastic.core.cluster import ClusterError
from elastic.core.cluster.history import cluster_digest
from elastic.core.cluster.state import JobRecord
from elastic.core.cluster.types import JobState, NodeId
from elastic.core.types import PolicyFault
from elastic.pool.control_messages import (
    JOBS_PAGE,
    POOL_CONTROL_VERSION,
    AskJobs,
    AskPoolStatus,
    AskTurns,
    AskVersion,
    CancelJob,
    DrainNode,
    MintTicket,
    PlanJob,
    PoolAcknowledged,
    PoolAnswer,
    PoolJobs,
    PoolPlan,
    PoolRefusal,
    PoolRequest,
    PoolStatusReply,
    PoolTurns,
    PoolVersion,
    PutBackDevice,
    ResubmitJob,
    SetQuota,
    StopPool,
    SubmitJob,
    TicketMinted,
)
from elastic.pool.holdings import PoolNode
from elastic.pool.journal import PoolJournal
from elastic.pool.machines import JoinTerms
from elastic.pool.node_tickets import NodeTickets
from elastic.pool.ports import DoneCommand, ForgottenJob, JobEntry
from elastic.pool.shell import PoolShell
from elastic.pool.status import (
    JobStatus,
    MachineStatus,
    NodeAgentStatus,
    PoolStatus,
    bills,
    job_status,
    plan_of,
    pool_status,
    queue_places,
    turns_of,
)

PoolCommand: TypeAlias = (
    SubmitJob | CancelJob | ResubmitJob | SetQuota | StopPool | PutBackDevice | MintTicket | DrainNode
)
SUBMISSION_BYTES_MAX = 16 * 1024 * 1024
"""With as many files as a job may have, each of the longest path."""
NAMED_MOST = 5
"""Jobs that a refusal names."""
STOPPING = "stopping"
"""A journal's note that the pool was told to stop and has not ended."""

decode_pool_request = msgspec.json.Decoder(PoolRequest).decode


class PoolCommandManager:
    """Turns requests into events of the shell. Each request takes effect once.

    `admit` returns the record of a job as it is kept, and raises `ValueError` for one that cannot be started. `pid`
    returns the id of a job's process, `logs` where its logs are, and `asked_for` which nodes are asked of a cluster.
    """

    def __init__(
        self,
        pool: str,
        shell: PoolShell,
        journal: PoolJournal,
        admit: Callable[[JobEntry], JobEntry],
        pid: Callable[[str], int | None],
        logs: Callable[[JobEntry], Path],
        tickets: NodeTickets,
        asked_for: Callable[[], Mapping[NodeId, str]] = dict,
    ) -> None:
        self._pool, self._shell, self._journal, self._tickets = pool, shell, journal, tickets
        self._admit, self._pid, self._logs, self._asked_for = admit, pid, logs, asked_for

    async def answer(self, line: bytes) -> PoolAnswer:
        """Answer one request. Raises `msgspec.DecodeError` if the line is not a request."""
        request = decode_pool_request(line)
        match request:
            case AskVersion():
                return PoolVersion(pid=os.getpid(), version=POOL_CONTROL_VERSION)
            case AskPoolStatus():
                return PoolStatusReply(pool=self._pool, pid=os.getpid(), status=self._status())
            case AskJobs():
                return self._jobs(request)
            case AskTurns():
                return PoolTurns(turns=turns_of(self._shell.cluster))
            case PlanJob():
                try:
                    return PoolPlan(plan=plan_of(self._shell.cluster, request.request, request.quota))
                except (ClusterError, PolicyFault) as error:
                    return PoolRefusal(kind="rejected", message=str(error))
            case _:
                return self._command(request)

    def _command(self, request: PoolCommand) -> PoolAnswer:
        command = DoneCommand(request.id, _words(request))
        done = self._journal.words_of(request.id)
        if done is not None:
            if done != command.words:
                return PoolRefusal(kind="conflict", message=f"command {request.id} was another one: {done}")
            if isinstance(request, MintTicket):
                return PoolRefusal(kind="conflict", message="this ticket was minted, and is not shown again")
            return PoolAcknowledged(id=request.id, repeated=True)
        if self._shell.stopping and not isinstance(request, StopPool):
            return PoolRefusal(kind="ending", message="the pool is stopping already")
        match request:
            case SubmitJob():
                return self._submit(request, command)
            case CancelJob(job=job):
                return self._no_such(job) or self._done(request.id, self._shell.cancel(job, command))
            case ResubmitJob():
                return self._resubmit(request, command)
            case SetQuota(job=job, quota=quota):
                return self._no_such(job) or self._done(request.id, self._shell.set_quota(job, quota, command))
            case PutBackDevice(device=device):
                return self._put_back(device, command)
            case MintTicket():
                return self._mint(request, command)
            case DrainNode(node=node):
                return self._drain(node, command)
            case StopPool():
                self._journal.keep(command)
                self._journal.set_note(STOPPING, "now" if request.now else "stop")
                return self._done(request.id, self._shell.stop(now=request.now))

    def _put_back(self, device: str, command: DoneCommand) -> PoolAnswer:
        if self._tickets.want_again(device) or self._shell.put_back(device):
            self._journal.keep(command)
            return PoolAcknowledged(id=command.id)
        there = ", ".join(self._shell.devices.set_aside) or "none"
        return PoolRefusal(kind="invalid", message=f"device {device!r} is not set aside; those that are: {there}")

    def _mint(self, request: MintTicket, command: DoneCommand) -> PoolAnswer:
        try:
            there = self._shell.nodes
            ticket = self._tickets.mint(request.label, request.valid_s, there, request.kind, request.nodes)
        except ValueError as error:
            return PoolRefusal(kind="invalid", message=str(error))
        self._journal.keep(command)
        return TicketMinted(id=command.id, ticket=ticket)

    def _drain(self, node: str, command: DoneCommand) -> PoolAnswer:
        try:
            self._tickets.void(node)
        except ValueError as error:
            return PoolRefusal(kind="conflict" if node in self._shell.nodes else "unknown_node", message=str(error))
        self._journal.keep(command)
        return self._done(command.id, self._shell.drain(node))

    def _submit(self, request: SubmitJob, command: DoneCommand) -> PoolAnswer:
        cluster, job = self._shell.cluster, request.request.id
        former = self._record(job)
        if former is not None:
            message = f"the pool has a job {job} already ({former.state}); name it otherwise"
            return PoolRefusal(kind="conflict", message=message)
        try:
            placement = plan_of(cluster, request.request, request.quota)
            entry = self._admit(request.entry)
        except (ClusterError, PolicyFault) as error:
            return PoolRefusal(kind="rejected", message=str(error))
        except ValueError as error:
            return PoolRefusal(kind="invalid", message=str(error))
        self._shell.submit(request.request, entry, command, request.quota)
        return PoolAcknowledged(id=request.id, placement=placement)

    def _resubmit(self, request: ResubmitJob, command: DoneCommand) -> PoolAnswer:
        job = request.job
        if (unknown := self._no_such(job)) is not None:
            return unknown
        record = self._record(job)
        if record is not None and record.state is not JobState.FAILED:
            return PoolRefusal(kind="conflict", message=f"job {job} is {record.state}; allowed: failed")
        forgotten = None if job in self._shell.cluster.jobs else self._journal.forgotten(job)
        return self._done(request.id, self._shell.resubmit(job, command, forgotten, request.quota))

    def _record(self, job: str) -> JobRecord | None:
        """Return what is known of a job, also of one that has left the cluster."""
        record = self._shell.cluster.jobs.get(job)
        if record is None and (forgotten := self._journal.forgotten(job)) is not None:
            return forgotten.record
        return record

    def _no_such(self, job: str) -> PoolRefusal | None:
        if self._record(job) is not None:
            return None
        there = ", ".join([*self._shell.cluster.jobs][-NAMED_MOST:]) or "none"
        return PoolRefusal(kind="unknown_job", message=f"the pool has no job {job}; there are: {there}")

    def _done(self, command_id: str, _: None) -> PoolAcknowledged:
        return PoolAcknowledged(id=command_id)

    def _status(self) -> PoolStatus:
        shell = self._shell
        cluster = shell.cluster
        found = pool_status(cluster, shell.now_ns(), self._first_of_all())
        known = {job.name for job in found.jobs}
        found.events = self._journal.events
        found.digest = cluster_digest(cluster)
        found.stopping = shell.stopping
        found.set_aside = dict(shell.devices.set_aside)
        found.asked_for = dict(self._asked_for())
        found.jobs_over = len(cluster.state.over) + self._journal.count_forgotten()
        found.jobs_left_out = sum(job not in known for job, record in cluster.jobs.items() if not record.over)
        joined = self._journal.joined()
        for node in found.nodes:
            node.devices = list(shell.devices.of(node.name))
            if (live := shell.nodes.get(node.name)) is not None:
                node.machine = _machine(live, joined.get(node.name))
                up = sorted(job for job, one in live.residents.items() if one.up)
                node.node_agent = NodeAgentStatus(pid=live.pid, up=live.connected, residents=up)
        for job in found.jobs:
            self._beside(job, shell.last_of(job.name))
        return found

    def _beside(self, job: JobStatus, last: ForgottenJob) -> JobStatus:
        """Add what is known of a job besides the cluster."""
        if last.entry is not None:
            job.directory, job.logs = last.entry.directory, str(self._logs(last.entry))
            job.script = bool(last.entry.script)
        job.pid, job.restarts, job.host_bytes = self._pid(job.name), last.restarts, last.host_bytes
        return job

    def _first_of_all(self) -> list[JobRecord]:
        """The jobs that a status shows, in the order in which they came: first of all those with a place, then those
        that wait for one, then the last that were over."""
        records = list(self._shell.cluster.jobs.values())
        if len(records) > JOBS_PAGE:
            records.sort(key=lambda record: (record.over, record.seat is None, -record.arrival))
            records = sorted(records[:JOBS_PAGE], key=lambda record: record.arrival)
        return records

    def _jobs(self, request: AskJobs) -> PoolJobs:
        cluster = self._shell.cluster
        if request.names:
            away = [self._journal.forgotten(name) for name in request.names if name not in cluster.jobs]
            return self._page([cluster.jobs[name] for name in request.names if name in cluster.jobs], away, None)
        before = cluster.state.arrivals + 1 if request.before is None else request.before
        living = [
            record for record in cluster.jobs.values() if record.arrival < before and self._is_in(record, request)
        ]
        kept: list[ForgottenJob] = []
        if not request.going_on:
            kept = self._journal.forgotten_jobs(before, request.most + 1, request.like, request.within)
        return self._page(living, kept, request.most)

    def _is_in(self, record: JobRecord, request: AskJobs) -> bool:
        job, entry = record.request.id, self._shell.entries.get(record.request.id)
        place = "" if entry is None else entry.directory.rpartition("/")[0]
        return request.like in job and request.within in ("", place) and not (request.going_on and record.over)

    def _page(self, living: Iterable[JobRecord], kept: Iterable[ForgottenJob | None], most: int | None) -> PoolJobs:
        """The latest `most` of these jobs."""
        cluster, shell = self._shell.cluster, self._shell
        owed = bills(cluster, max(shell.now_ns(), cluster.now_ns))
        lasts = [(shell.last_of(record.request.id), owed[record.request.id]) for record in living]
        lasts += [(one, one.record.billed) for one in kept if one is not None]
        lasts.sort(key=lambda one: -one[0].record.arrival)
        places = queue_places(cluster)
        jobs = [
            self._beside(job_status(cluster, one.record, billed, places.get(one.record.request.id)), one)
            for one, billed in lasts[:most]
        ]
        return PoolJobs(jobs=jobs, before=jobs[-1].arrival if len(lasts) > len(jobs) else None)


def _machine(node: PoolNode, terms: JoinTerms | None) -> MachineStatus | None:
    said = None if node.hello is None else node.hello.machine
    if said is None:
        return None
    return MachineStatus(
        host=said.host,
        label="" if terms is None else terms.label,
        site=said.site,
        relay=said.relay or ("" if node.site is None or node.site.told.relay is None else node.site.told.relay.place),
        device=said.device,
        count=said.count,
        memory_bytes=said.memory_bytes,
    )


def invalid(message: str) -> PoolRefusal:
    return PoolRefusal(kind="invalid", message=message)


def _words(request: PoolRequest) -> str:
    """Return the text that tells one command from another. Secrets in a submission's environment are left out."""
    match request:
        case SubmitJob():
            return f"submit {request.request.id} in {request.entry.directory}"
        case CancelJob(job=job):
            return f"cancel {job}"
        case ResubmitJob(job=job):
            return f"resubmit {job}"
        case SetQuota(job=job, quota=quota):
            return f"{job} is {'within its quota' if quota is None else f'beyond its quota: {quota.reason}'}"
        case PutBackDevice(device=device):
            return f"put back {device}"
        case MintTicket(label=label, kind=kind, nodes=nodes):
            as_nodes = f" as {kind}" if kind else ""
            return f"mint a ticket for {label!r}{as_nodes}{f', {nodes} nodes' if nodes > 1 else ''}"
        case DrainNode(node=node):
            return f"drain {node}"
        case StopPool(now=now):
            return f"stop {'now' if now else 'at a step'}"
        case _:
            return ""
