"""Pools that jobs share: the server supervises them, asks them through their sockets, and shows projects their own
part."""

import asyncio
import contextlib
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import structlog
from msgspec import to_builtins

from elastic.compose.runs import is_claimed
from elastic.pool.control_messages import JOBS_PAGE, PoolControl
from elastic.pool.status import JobStatus, PoolStatus
from elastic.protocol.api import HostedJob, HostedPool
from elastic.protocol.run_control import CommandRefused, ControlError
from elastic.server.problems import ApiProblem, not_found
from elastic.server.settings import ServerSettings
from elastic.server.store import Store, jobs
from elastic.server.store.database import now_us
from elastic.system.isolation import IsolatedLoop, LoopFaults
from elastic.system.outages import backoff
from elastic.system.processes import OF_SITE, inherited
from elastic.system.supervision import start_detached

T = TypeVar("T")

log = structlog.get_logger(__name__)

ASK_TIMEOUT_S = 10.0
ANOTHERS = "another project's"
"""What a job is called of which the caller sees no more than that it is there."""
ARRIVES_US = 120_000_000
"""How long after a job was noted its pool may not have heard of it."""
LOOK_S = 1.0
"""How often the server checks that a pool's supervisor lives."""
SETTLING, SETTLE_S = "jobs", 10.0
"""How often the server asks what became of jobs. A request that needs to know asks at once."""
_KINDS = {
    "rejected": "job-rejected",
    "conflict": "job-conflict",
    "ending": "job-conflict",
    "unknown_job": "not-found",
    "unknown_node": "not-found",
}


def pool_dir(settings: ServerSettings, name: str) -> Path:
    """Return the directory of the server's pool of this name. Raises `ApiProblem`."""
    for path in settings.pools:
        if path.name == name:
            return path
    raise not_found("pool", name)


def control_of(settings: ServerSettings, name: str) -> PoolControl:
    """Return the control of the server's pool of this name. Raises `ApiProblem` if there is none."""
    return PoolControl(pool_dir(settings, name), ASK_TIMEOUT_S)


def asked(question: Coroutine[Any, Any, T]) -> T:
    """Wait for the pool's answer; for routes that run in a thread. Raises `ApiProblem`."""
    try:
        return asyncio.run(question)
    except CommandRefused as error:
        raise ApiProblem(_KINDS.get(error.kind, "invalid-request"), str(error)) from error
    except ControlError as error:
        log.warning("a pool does not answer", error=str(error))
        raise ApiProblem("pool-away", "the pool's process does not answer now") from error


def project_of_job(settings: ServerSettings, job: JobStatus) -> str | None:
    """Return the project of a job, by the job's directory; None for a job that was not submitted to this server."""
    with contextlib.suppress(ValueError):
        return Path(job.directory).relative_to(settings.pooled.resolve()).parts[0]
    return None


def as_job(settings: ServerSettings, pool: str, job: JobStatus) -> HostedJob:
    project = project_of_job(settings, job)
    return HostedJob.model_validate(to_builtins(job) | {"id": job.name, "pool": pool, "project": project})


def as_pool(settings: ServerSettings, status: PoolStatus, name: str, project: str | None) -> HostedPool:
    """Return the pool as this project may see it, without the names of other projects' jobs; None sees all jobs."""
    own = {job.name for job in status.jobs if project is None or project_of_job(settings, job) == project}

    def seen(job: str) -> str:
        return job if project is None or job in own else ANOTHERS

    pool = HostedPool.model_validate(to_builtins(status) | {"id": name, "away": False})
    for node, told in zip(pool.nodes, status.nodes, strict=True):
        node.job = node.job and seen(node.job)
        node.joined = told.machine is not None
    for permit in pool.permits:
        permit.job = seen(permit.job)
    for group in pool.groups:
        group.members = list(map(seen, group.members))
    pool.waits = [wait for wait in pool.waits if project is None or wait.key in own]
    return pool


def settle_jobs(store: Store, settings: ServerSettings, project: str | None = None) -> dict[str, int]:
    """Note what became of the jobs of one project or all: which go on, also again, and what they cost. Returns of those
    that go on at which place their pool heard of each. Raises `ApiProblem` where a pool does not answer.

    Jobs of a pool that the server was not started with stay as they were: nobody knows what becomes of them.
    """
    heard: dict[str, int] = {}
    for path in settings.pools:
        heard |= settle_pool(store, settings, path.name, project)
    return heard


def settle_pool(store: Store, settings: ServerSettings, pool: str, project: str | None = None) -> dict[str, int]:
    """As `settle_jobs`, for the jobs of one pool."""
    with store.reading() as connection:
        if not jobs.any_in(connection, pool, project):
            return {}
        living = {row["id"]: row for row in jobs.living(connection, pool, project)}
    within = "" if project is None else str((settings.pooled / project).resolve())
    control = control_of(settings, pool)
    told = {job.name: job for job in asked(control.all_jobs(within=within, going_on=True))}
    told = {name: job for name, job in told.items() if project_of_job(settings, job) is not None}
    heard = {name: job.arrival for name, job in told.items()}
    others = [name for name in living if name not in told]
    for first in range(0, len(others), JOBS_PAGE):
        names = others[first : first + JOBS_PAGE]
        told |= {job.name: job for job in asked(control.jobs(names=names)).jobs}
    changed = [job for name, job in told.items() if _has_changed(living.get(name), job)]
    # The request that submitted one of these has died before its pool heard of it.
    unheard = [row for name, row in living.items() if name not in told and now_us() - row["created_us"] > ARRIVES_US]
    if not changed and not unheard:
        return heard
    with store.writing() as tx:
        for job in changed:
            if job.over:
                said = {"state": job.state, "cause": job.reason, "resubmissions": job.resubmissions}
                jobs.end(tx, job.name, usd=job.usd, **said)
            else:
                waits = job.reason if job.beyond_quota else None
                jobs.settle(tx, job.name, usd=job.usd, over=False, waits=waits)
        for row in unheard:
            jobs.remove(tx, row["id"], row["created_us"])
    return heard


def _has_changed(row: Mapping[Any, Any] | None, job: JobStatus) -> bool:
    return row is None or job.over or row["usd"] != job.usd or (row["waits"] is not None) != job.beyond_quota


class PoolSupervisors:
    """Keeps a supervisor running for each pool, which keeps the pool's process running. Both outlive the server.

    It also notes now and then what became of the pools' jobs.
    """

    def __init__(
        self,
        store: Store,
        settings: ServerSettings,
        faults: LoopFaults | None = None,
        program: Sequence[str] = (sys.executable, "-P", "-m", "elastic.cli", "pool-run"),
    ) -> None:
        self._store, self._settings, self._program = store, settings, program
        self._settled_s = float("-inf")
        self._isolated = IsolatedLoop("pools", faults or LoopFaults())
        self._started: dict[Path, subprocess.Popen[bytes]] = {}
        self._starts: Counter[Path] = Counter()
        self._not_before_s: dict[Path, float] = {}

    async def run(self) -> None:
        """Restart dead supervisors until cancelled, with a back-off."""
        await self._isolated.repeat(self._look, LOOK_S)

    async def _look(self) -> None:
        for path in self._settings.pools:
            if not self._isolated.wait_s(path.name):
                with self._isolated.attempt(path.name):
                    self._keep_up(path)
        if time.monotonic() - self._settled_s > SETTLE_S:
            for path in self._settings.pools:
                with self._isolated.attempt(SETTLING), contextlib.suppress(ApiProblem):  # It is asked again.
                    await asyncio.to_thread(settle_pool, self._store, self._settings, path.name)
            self._settled_s = time.monotonic()

    def _keep_up(self, path: Path) -> None:
        child = self._started.get(path)
        lives = child is not None and child.poll() is None
        if lives or is_claimed(path) or time.monotonic() < self._not_before_s.get(path, 0.0):
            return
        if child is not None:
            log.warning("a pool's supervisor has ended", pool=path.name, status=child.returncode)
        self._start(path)
        wait_s = backoff(self._starts[path], self._settings.restart_base_s, self._settings.restart_max_s)
        self._not_before_s[path] = time.monotonic() + wait_s
        self._starts[path] += 1

    def _start(self, path: Path) -> None:
        command = [*self._program, str(path), "--supervise", "10"]
        (path / "logs").mkdir(mode=0o700, exist_ok=True)
        with (path / "logs" / "supervisor.log").open("ab") as output:
            self._started[path] = start_detached(command, inherited(*OF_SITE), output, umask=0o077)
