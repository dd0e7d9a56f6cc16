"""Answers requests at the control socket of a pool's process. Source: `elastic.pool_control`."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from elastic.cluster import ClusterError
from elastic.cluster.history import cluster_digest
from elastic.cluster.types import JobState
from elastic.pool.journal import PoolJournal
from elastic.pool.ports import DoneCommand, JobEntry
from elastic.pool.shell import PoolShell
from elastic.pool.standing import plan_of, standing
from elastic.pool_control import (
    POOL_CONTROL_VERSION,
    AskPool,
    CancelJob,
    PlanJob,
    PoolAcknowledged,
    PoolAnswer,
    PoolPlan,
    PoolRefusal,
    PoolRequest,
    PoolStanding,
    ResubmitJob,
    StopPool,
    SubmitJob,
)

SUBMISSION_BYTES_MAX = 1024 * 1024
STOPPING = "stopping"
"""A journal's note that the pool was told to stop and has not ended."""

decode_pool_request = msgspec.json.Decoder(PoolRequest).decode


class PoolCommandManager:
    """Turns requests into events of the shell. Each request takes effect once.

    `describe` returns the record of a submission, and raises `ValueError` for one that cannot be started. `pid` returns
    the id of a job's process, and `logs` where its logs are.
    """

    def __init__(
        self,
        pool: str,
        shell: PoolShell,
        journal: PoolJournal,
        describe: Callable[[SubmitJob], JobEntry],
        pid: Callable[[str], int | None],
        logs: Callable[[JobEntry], Path],
    ) -> None:
        self._pool, self._shell, self._journal = pool, shell, journal
        self._describe, self._pid, self._logs = describe, pid, logs

    async def answer(self, line: bytes) -> PoolAnswer:
        """Answer one request. Raises `msgspec.DecodeError` if the line is not a request."""
        request = decode_pool_request(line)
        match request:
            case AskPool():
                return PoolStanding(
                    pool=self._pool, pid=os.getpid(), version=POOL_CONTROL_VERSION, status=self._status()
                )
            case PlanJob():
                try:
                    return PoolPlan(plan=plan_of(self._shell.cluster, request.request))
                except ClusterError as error:
                    return PoolRefusal(kind="rejected", message=str(error))
            case _:
                return self._command(request)

    def _command(self, request: SubmitJob | CancelJob | ResubmitJob | StopPool) -> PoolAnswer:
        command = DoneCommand(request.id, _words(request))
        done = self._journal.words_of(request.id)
        if done is not None:
            if done != command.words:
                return PoolRefusal(kind="conflict", message=f"command {request.id} was another one: {done}")
            return PoolAcknowledged(id=request.id, repeated=True)
        if self._shell.stopping and not isinstance(request, StopPool):
            return PoolRefusal(kind="ending", message="the pool is stopping already")
        match request:
            case SubmitJob():
                return self._submit(request, command)
            case CancelJob(job=job):
                return self._no_such(job) or self._done(request.id, self._shell.cancel(job, command))
            case ResubmitJob(job=job):
                return self._resubmit(request.id, job, command)
            case StopPool():
                self._journal.keep(command)
                self._journal.set_note(STOPPING, "now" if request.now else "stop")
                return self._done(request.id, self._shell.stop(now=request.now))

    def _submit(self, request: SubmitJob, command: DoneCommand) -> PoolAnswer:
        cluster, job = self._shell.cluster, request.request.id
        if job in cluster.jobs:
            message = f"the pool has a job {job} already ({cluster.jobs[job].state}); name it otherwise"
            return PoolRefusal(kind="conflict", message=message)
        try:
            placement = plan_of(cluster, request.request)
            entry = self._describe(request)
        except ClusterError as error:
            return PoolRefusal(kind="rejected", message=str(error))
        except ValueError as error:
            return PoolRefusal(kind="invalid", message=str(error))
        self._shell.submit(request.request, entry, command)
        return PoolAcknowledged(id=request.id, placement=placement)

    def _resubmit(self, command_id: str, job: str, command: DoneCommand) -> PoolAnswer:
        if (unknown := self._no_such(job)) is not None:
            return unknown
        state = self._shell.cluster.jobs[job].state
        if state is not JobState.FAILED:
            return PoolRefusal(kind="conflict", message=f"job {job} is {state}; allowed: failed")
        return self._done(command_id, self._shell.resubmit(job, command))

    def _no_such(self, job: str) -> PoolRefusal | None:
        if job in self._shell.cluster.jobs:
            return None
        there = ", ".join(self._shell.cluster.jobs) or "none"
        return PoolRefusal(kind="unknown_job", message=f"the pool has no job {job}; there are: {there}")

    def _done(self, command_id: str, _: None) -> PoolAcknowledged:
        return PoolAcknowledged(id=command_id)

    def _status(self) -> dict[str, Any]:
        shell = self._shell
        found = standing(shell.cluster, shell.now_ns())
        found |= {
            "events": self._journal.events,
            "digest": cluster_digest(shell.cluster),
            "stopping": shell.stopping,
        }
        for node in found["nodes"]:
            live = shell.nodes.get(node["name"])
            node["keeper"] = {
                "pid": live.pid if live is not None else 0,
                "up": live is not None and live.connected,
                "residents": sorted(job for job, one in live.residents.items() if one.up) if live is not None else [],
            }
        for job in found["jobs"]:
            entry, live = shell.entries.get(job["name"]), shell.jobs.get(job["name"])
            job["directory"] = entry.directory if entry is not None else ""
            job["logs"] = str(self._logs(entry)) if entry is not None else ""
            job["script"] = bool(entry.script) if entry is not None else False
            job["pid"] = self._pid(job["name"])
            job["restarts"] = live.restarts if live is not None else 0
            job["host_bytes"] = dict(live.memory) if live is not None else {}
        return found


def invalid(message: str) -> PoolRefusal:
    return PoolRefusal(kind="invalid", message=message)


def _words(request: PoolRequest) -> str:
    """Return the text that tells one command from another. Secrets in a submission's environment are left out."""
    match request:
        case SubmitJob():
            return f"submit {request.request.id} in {request.directory}"
        case CancelJob(job=job):
            return f"cancel {job}"
        case ResubmitJob(job=job):
            return f"resubmit {job}"
        case StopPool(now=now):
            return f"stop {'now' if now else 'at a step'}"
        case _:
            return ""
