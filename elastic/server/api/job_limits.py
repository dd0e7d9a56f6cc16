"""A project's quota, for jobs on pools. A pool's queue knows of no projects, so what is beyond a quota is refused as it
comes, and does not wait as a run does. What goes on is not touched by a quota that is lowered."""

from collections.abc import Iterator

import msgspec
import sqlalchemy as sa

from elastic.compose.pool_config import POOL_CONFIG, load_pool
from elastic.protocol.api import ProblemError, QuotaUse
from elastic.server.api.routes.quotas import as_quota
from elastic.server.intake import submissions
from elastic.server.pools import pool_dir
from elastic.server.problems import ApiProblem
from elastic.server.quotas.needs import RunNeeds
from elastic.server.settings import ServerSettings
from elastic.server.store import jobs, quotas
from elastic.server.store.jobs import JobsUse
from elastic.server.store.quotas import TRAINER, QuotaRow


def train_gpus(settings: ServerSettings, pool: str, train_nodes: int) -> int:
    """Return the GPUs of so many training nodes of the pool, of the kind with the most. Raises `ApiProblem` for a pool
    that is not there."""
    kinds = load_pool(pool_dir(settings, pool) / POOL_CONFIG).pool.train
    return train_nodes * max(kind.gpus for kind in kinds)


def refuse_beyond(connection: sa.Connection, project: str, needs: RunNeeds, trainer_gpus: int, but: str = "") -> None:
    """Raises `ApiProblem` for one more job, with so many GPUs for training, that is beyond the project's quota now, or
    will always be.

    `but` is the job itself, where it was submitted before.
    """
    row = quotas.quota(connection, project)
    if not row.version:
        return
    submissions.refuse_beyond(row, msgspec.structs.replace(needs, trainer_gpus=trainer_gpus))
    found = [*beyond(row, as_quota(connection, row).use, jobs.use(connection, project, but), trainer_gpus)]
    if found:
        faults = [ProblemError(pointer="#/project", detail=words) for words in found]
        raise ApiProblem("quota-exceeded", "; ".join(found), faults)


def beyond(quota: QuotaRow, runs: QuotaUse, jobs: JobsUse, trainer_gpus: int) -> Iterator[str]:
    """Yield what one more job with so many GPUs for training would be beyond."""
    there = runs.runs + jobs.jobs
    if quota.runs_max is not None and there >= quota.runs_max:
        yield f"the project has {there} of {quota.runs_max} runs and jobs at once"
    held = runs.gpus.get(TRAINER, 0) + jobs.trainer_gpus
    if held + trainer_gpus > quota.gpus.get(TRAINER, held + trainer_gpus):
        yield f"the job trains on {trainer_gpus} GPUs; the project has {held} of {quota.gpus[TRAINER]} in trainers"
    spent = runs.allotted_usd + jobs.usd
    if quota.budget_usd is not None and spent >= quota.budget_usd:
        yield f"of ${quota.budget_usd:g} ${spent:g} is spent by jobs, or spent by runs or allotted to them"
    if quota.usd_per_day is not None and runs.allotted_today_usd >= quota.usd_per_day:
        yield f"of ${quota.usd_per_day:g} a day ${runs.allotted_today_usd:g} was allotted to runs today"
