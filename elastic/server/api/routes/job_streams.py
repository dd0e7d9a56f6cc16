"""Streams of pools' jobs, as runs have them. They need no answer of the pool's process but for what a job came to."""

import asyncio

import sqlalchemy as sa
from fastapi import APIRouter

from elastic.server.api.routes.common import CallerDep, StateDep, seen
from elastic.server.api.routes.events import Followed, add_streams, end_event
from elastic.server.api.routes.model_route import ModelRoute
from elastic.server.api.routes.pools import JobId, PoolId
from elastic.server.pools import asked, control_of
from elastic.server.problems import ApiProblem, not_found
from elastic.server.store import jobs

router = APIRouter(prefix="/v1/pools", tags=["streams"], route_class=ModelRoute)


async def _job(pool: PoolId, job: JobId, caller: CallerDep, state: StateDep) -> Followed:
    """Raises `ApiProblem` where the caller sees no such job."""

    def find() -> sa.RowMapping | None:
        with state.store.reading() as connection:
            return jobs.find(connection, job)

    def came_to() -> dict[str, str | None]:
        try:
            told = asked(control_of(state.settings, pool).jobs(names=[job])).jobs
        except ApiProblem as problem:
            return {"state": None, "cause": problem.detail}
        return {"state": told[0].state, "cause": told[0].reason} if told else {"state": "deleted", "cause": ""}

    async def over() -> bool:
        now = await state.looks.at((job, "row"), find)
        return now is None or now["ended_us"] is not None

    async def last_event() -> bytes:
        return end_event("job.ended", await state.looks.at((job, "came to"), came_to))

    row = seen(caller, "job", job, await asyncio.to_thread(find))
    if row["pool"] != pool:
        raise not_found("job", job)
    directory = state.settings.job_dir(row["project"], job)
    return Followed(job, directory, row["project"], row["ended_us"] is not None, over, last_event)


add_streams(router, "/{pool}/jobs/{job}", _job)
