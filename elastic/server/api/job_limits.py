"""A project's quota, for jobs on pools. A job that is beyond it waits in its pool's queue, with its reason, and begins
once the quota allows it. What goes on is not touched by a quota that is lowered.

Jobs of a project begin in the order in which they were submitted: none is let before one that waits.
"""

import asyncio
import math
from collections.abc import Iterator, Mapping, Sequence

import msgspec
import sqlalchemy as sa

from elastic.compose.pool_config import POOL_CONFIG, load_pool
from elastic.core.cluster.types import BeyondQuota, JobRequest
from elastic.protocol.api import QuotaUse
from elastic.server.api.routes.quotas import as_quota
from elastic.server.intake import submissions
from elastic.server.pools import asked, control_of, pool_dir, settle_jobs
from elastic.server.problems import ApiProblem
from elastic.server.quotas.needs import RunNeeds
from elastic.server.settings import ServerSettings
from elastic.server.store import Store, jobs, quotas
from elastic.server.store.jobs import JobsUse
from elastic.server.store.quotas import TRAINER, QuotaRow
from elastic.system.isolation import IsolatedLoop, LoopFaults

ADMIT_S = 2.0
"""How often jobs that wait for quotas are looked at."""
WAITING_MAX = 1000
"""How many of a project's jobs may wait for its quota: each look asks their pools about all of them."""
BEHIND = "jobs of the project that came before it wait, too"


def train_gpus(settings: ServerSettings, pool: str, request: JobRequest) -> int:
    """Return the GPUs of the training nodes of the pool that a job asks for, of the kind of which they are most. Raises
    `ApiProblem` for a pool that is not there."""
    kinds = load_pool(pool_dir(settings, pool) / POOL_CONFIG).spec().train
    return max(request.train_nodes_of(kind) * kind.gpus for kind in kinds)


def beyond_quota(
    connection: sa.Connection, project: str, needs: RunNeeds, trainer_gpus: int, but: str = ""
) -> BeyondQuota | None:
    """Return why one more job, with so many GPUs for training, has to wait for the project's quota; None if it need
    not. Raises `ApiProblem` for one that the quota never allows, and where too many wait.

    `but` is the job itself, where it was submitted before.
    """
    row = quotas.quota(connection, project)
    if not row.version:
        return None
    submissions.refuse_beyond(row, msgspec.structs.replace(needs, trainer_gpus=trainer_gpus))
    use = jobs.use(connection, project, but)
    if use.waiting >= WAITING_MAX:
        raise ApiProblem("quota-exceeded", f"{use.waiting} jobs of the project wait for it; allowed: {WAITING_MAX}")
    return BeyondQuota(project, BEHIND) if use.waiting else _beyond(connection, row, use, trainer_gpus)


def waiting_projects(store: Store, settings: ServerSettings) -> list[str]:
    """Return the projects of which jobs wait for their quotas."""
    with store.reading() as connection:
        return sorted({row["project"] for row in jobs.waiting(connection, _pools(settings))})


def admit_waiting(store: Store, settings: ServerSettings, project: str) -> None:
    """Let jobs begin that waited for their project's quota, as far as it allows them now. Raises `ApiProblem` where a
    pool does not answer: what was submitted after that pool's job waits, too."""
    heard = settle_jobs(store, settings, project)
    with store.reading() as connection:
        rows = jobs.waiting(connection, _pools(settings), project)
    beyond: BeyondQuota | None = None
    for row in _as_told(rows, heard):
        if beyond is None:
            with store.reading() as connection:
                quota, use = quotas.quota(connection, project), jobs.use(connection, project)
                beyond = found = _beyond(connection, quota, use, row["train_gpus"])
        else:
            found = BeyondQuota(project, BEHIND)
        if found is None or found.reason != row["waits"]:
            asked(control_of(settings, row["pool"]).set_quota(row["id"], found))
            with store.writing() as tx:
                jobs.note_wait(tx, row["id"], None if found is None else found.reason)


def _as_told(rows: Sequence[sa.RowMapping], heard: Mapping[str, int]) -> Iterator[sa.RowMapping]:
    """Yield jobs as they were submitted, those of one pool as it has heard of them: it tells their places so."""
    of_pools: dict[str, Iterator[sa.RowMapping]] = {}
    for pool in {row["pool"] for row in rows}:
        its = [row for row in rows if row["pool"] == pool]
        of_pools[pool] = iter(sorted(its, key=lambda row: heard.get(row["id"], math.inf)))
    for row in rows:
        yield next(of_pools[row["pool"]])


def _pools(settings: ServerSettings) -> list[str]:
    return [path.name for path in settings.pools]


class WaitingJobs:
    """Lets jobs begin that wait for their projects' quotas, until it is cancelled."""

    def __init__(self, store: Store, settings: ServerSettings, faults: LoopFaults | None = None) -> None:
        self._store, self._settings = store, settings
        self._isolated = IsolatedLoop("jobs beyond quotas", faults or LoopFaults())

    async def run(self) -> None:
        await self._isolated.repeat(self._look, ADMIT_S)

    async def _look(self) -> None:
        for project in await asyncio.to_thread(waiting_projects, self._store, self._settings):
            try:
                await asyncio.to_thread(admit_waiting, self._store, self._settings, project)
            except ApiProblem as problem:
                # A pool that is away is asked again, may not have heard yet of a job that is being submitted, and takes
                # no more while it is stopping. Meanwhile other projects' jobs begin.
                if problem.kind not in ("pool-away", "not-found", "job-conflict"):
                    raise


def _beyond(connection: sa.Connection, row: QuotaRow, use: JobsUse, trainer_gpus: int) -> BeyondQuota | None:
    reasons = [*_reasons(row, as_quota(connection, row).use, use, trainer_gpus)]
    return BeyondQuota(row.project, "; ".join(reasons)) if reasons else None


def _reasons(quota: QuotaRow, runs: QuotaUse, jobs: JobsUse, trainer_gpus: int) -> Iterator[str]:
    """Yield what one more job with so many GPUs for training would be beyond."""
    there = runs.runs + jobs.jobs
    if quota.runs_max is not None and there >= quota.runs_max:
        yield f"the project has {there} of {quota.runs_max} runs and jobs at once"
    held = runs.gpus.get(TRAINER, 0) + jobs.trainer_gpus
    if held + trainer_gpus > quota.gpus.get(TRAINER, held + trainer_gpus):
        yield f"the job trains on {trainer_gpus} GPUs; the project has {held} of {quota.gpus[TRAINER]} in trainers"
    if quota.budget_usd is not None and runs.allotted_usd + jobs.usd >= quota.budget_usd:
        yield f"the project's ${quota.budget_usd:g} are spent by jobs, or spent by runs or allotted to them"
    if quota.usd_per_day is not None and runs.allotted_today_usd >= quota.usd_per_day:
        yield f"the project's ${quota.usd_per_day:g} a day were allotted to runs today"
