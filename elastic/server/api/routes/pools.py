"""Pools that jobs share, and their jobs: shown, submitted, cancelled, resubmitted."""

import hashlib
import json
from typing import Annotated, Any

import sqlalchemy as sa
from fastapi import APIRouter, Path, Request, Response

from elastic import compose
from elastic.config import Config, ConfigError, validate
from elastic.control import new_command_id
from elastic.pool.config import job_request
from elastic.pool_control import PoolControl, SubmitJob
from elastic.resources import HostedJob, HostedPool, JobPlacement, JobSubmission, Listed, Submission
from elastic.server import ids
from elastic.server.api.auth import Caller
from elastic.server.api.job_limits import refuse_beyond
from elastic.server.api.routes.common import CallerDep, StateDep, project_of, rules
from elastic.server.api.routes.model_route import ModelRoute
from elastic.server.api.state import ServerState
from elastic.server.api.writes import WriteDep, WriteRequest, WriteResult
from elastic.server.intake import submissions
from elastic.server.permissions import Action
from elastic.server.pools import as_job, as_pool, asked, control_of, project_of_job
from elastic.server.problems import ApiProblem, not_found
from elastic.server.quotas.needs import RunNeeds
from elastic.server.settings import ServerSettings
from elastic.server.store import people

router = APIRouter(prefix="/v1/pools", tags=["pools"], route_class=ModelRoute)
PoolId = Annotated[str, Path(max_length=64)]
JobId = Annotated[str, Path(max_length=100)]

_OF_SUBMISSIONS = rules(
    Action.RUNS_WRITE,
    "invalid-configuration",
    "not-found",
    "job-rejected",
    "job-conflict",
    "quota-exceeded",
    "untrusted-neighbours",
    "pool-away",
)


@router.get("", **rules(Action.RUNS_READ))
def list_pools(request: Request, caller: CallerDep, state: StateDep) -> Listed[HostedPool]:
    """List the server's pools."""
    data = [_pool(state.settings, path.name, caller) for path in state.settings.pools]
    return Listed(url=request.url.path, data=data, has_more=False)


@router.get("/{pool}", **rules(Action.RUNS_READ, "not-found"))
def show_pool(pool: PoolId, caller: CallerDep, state: StateDep) -> HostedPool:
    """Show a pool: its nodes, groups, permits and what waits."""
    return _pool(state.settings, pool, caller)


@router.get("/{pool}/jobs", **rules(Action.RUNS_READ, "not-found", "pool-away"))
def list_jobs(pool: PoolId, request: Request, caller: CallerDep, state: StateDep) -> Listed[HostedJob]:
    """List a pool's jobs as far as the caller sees them, in the order in which they came."""
    return Listed(url=request.url.path, data=_jobs(state.settings, pool, caller), has_more=False)


@router.get("/{pool}/jobs/{job}", **rules(Action.RUNS_READ, "not-found", "pool-away"))
def show_job(pool: PoolId, job: JobId, caller: CallerDep, state: StateDep) -> HostedJob:
    """Show a job: where it is, how it fares, what it has cost."""
    return _job(state.settings, pool, job, caller)


@router.post(
    "/{pool}/jobs",
    status_code=201,
    response_model=HostedJob,
    **_OF_SUBMISSIONS,
)
def submit_job(pool: PoolId, body: JobSubmission, write: WriteDep) -> Response:
    """Submit a job. Once this is answered, the pool never loses it: it goes on without its process and this server."""
    control = control_of(write.state.settings, pool)
    project, config, needs = _checked(write.state, body, write.caller)
    command = _command_id(write)
    job = ids.new_id(ids.JOB) if not write.key else f"{ids.JOB}_{command[:26]}"
    _refuse_beyond(write.state, pool, project, needs, config.job.train_nodes, but=job)
    asked(control.plan(job_request(job, config.job, config.run.steps)))
    path = (write.state.settings.pooled / project / job).resolve()
    write.state.settings.storage(project).mkdir(mode=0o700, parents=True, exist_ok=True)
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    (path / "logs").mkdir(mode=0o700, exist_ok=True)
    compose.save_run_config(path, config)
    request_ = job_request(job, config.job, config.run.steps)
    try:
        asked(
            control.submit(
                SubmitJob(id=command, request=request_, directory=str(path), providers=tuple(body.providers))
            )
        )
    except ApiProblem as problem:
        if problem.kind != "pool-away":
            compose.discard_run(path)
        raise
    made = _job(write.state.settings, pool, job, write.caller)

    def work(tx: sa.Connection) -> WriteResult:
        place = f"{router.prefix}/{pool}/jobs/{job}"
        return WriteResult(201, made, {"location": place}, resource=place, project=project)

    return write.carry_out(Action.RUNS_WRITE, body, work)


@router.post(
    "/{pool}/jobs/dry-run",
    response_model=JobPlacement,
    **_OF_SUBMISSIONS,
)
def dry_run_job(pool: PoolId, body: JobSubmission, caller: CallerDep, state: StateDep) -> JobPlacement:
    """Say where a job would go now, at what marginal cost and planned slowdown, and for each group why not."""
    control = control_of(state.settings, pool)
    project, config, needs = _checked(state, body, caller)
    _refuse_beyond(state, pool, project, needs, config.job.train_nodes)
    plan = asked(control.plan(job_request("job", config.job, config.run.steps)))
    placement = plan["placement"]
    if placement is not None and caller.project is not None:
        placement = {key: value for key, value in placement.items() if key != "members"}
    return JobPlacement(pool=pool, slo=plan["slo"], placement=placement, refusals=plan["refusals"], why=plan["why"])


@router.post(
    "/{pool}/jobs/{job}/cancel",
    response_model=HostedJob,
    **rules(Action.RUNS_WRITE, "not-found", "job-conflict", "pool-away"),
)
def cancel_job(pool: PoolId, job: JobId, write: WriteDep) -> Response:
    """Cancel a job: everything of it ends now."""
    return _told(pool, job, write, PoolControl.cancel)


@router.post(
    "/{pool}/jobs/{job}/resubmit",
    response_model=HostedJob,
    **rules(Action.RUNS_WRITE, "not-found", "job-conflict", "quota-exceeded", "pool-away"),
)
def resubmit_job(pool: PoolId, job: JobId, write: WriteDep) -> Response:
    """Have a job that has failed go on from its last checkpoint, as a new arrival."""
    found = _job(write.state.settings, pool, job, write.caller)
    if found.project is not None:
        _refuse_beyond(write.state, pool, found.project, RunNeeds(), 1, but=job)
    return _told(pool, job, write, PoolControl.resubmit)


def _told(pool: str, job: str, write: WriteRequest, tell: Any) -> Response:
    found = _job(write.state.settings, pool, job, write.caller)
    asked(tell(control_of(write.state.settings, pool), found.id, _command_id(write)))
    now = _job(write.state.settings, pool, job, write.caller)
    return write.carry_out(Action.RUNS_WRITE, None, lambda _: WriteResult(200, now, project=found.project))


def _command_id(write: WriteRequest) -> str:
    """Return the id of the command for the pool: the same for each repetition under one Idempotency-Key."""
    if not write.key:
        return new_command_id()
    said = json.dumps([write.caller.actor, write.request.url.path, write.key])
    return hashlib.sha256(said.encode()).hexdigest()[:32]


def _checked(state: ServerState, body: JobSubmission, caller: Caller) -> tuple[str, Config, RunNeeds]:
    """The project, the whole configuration, and what a run of it would need. Raises `ApiProblem`."""
    with state.store.reading() as connection:
        project = project_of(connection, caller, body.project)
        row = people.project(connection, project)
    if row is not None and row["unix_user"] is not None:
        raise ApiProblem(
            "untrusted-neighbours",
            f"runs of this project are processes of {row['unix_user']!r}, a pool's are the server's own",
        )
    raw: dict[str, Any] = json.loads(json.dumps(body.config))
    if body.slo is not None:
        section = raw.setdefault("job", {})
        if isinstance(section, dict):
            section["slo"] = body.slo
    run = Submission(config=raw, providers=body.providers, project=body.project)
    new, _ = submissions.check(state.settings, run, project)
    try:
        return project, validate(Config, new.config, "config"), new.needs
    except ConfigError as error:
        raise ApiProblem("invalid-configuration", str(error)) from error


def _refuse_beyond(
    state: ServerState, pool: str, project: str, needs: RunNeeds, train_nodes: int, but: str = ""
) -> None:
    with state.store.reading() as connection:
        refuse_beyond(connection, state.settings, pool, project, needs, train_nodes, but)


def _pool(settings: ServerSettings, name: str, caller: Caller) -> HostedPool:
    control = control_of(settings, name)
    try:
        standing = asked(control.standing())
    except ApiProblem as problem:
        if problem.kind != "pool-away":
            raise
        return HostedPool(id=name, away=True)
    return as_pool(settings, standing, name, caller.project)


def _jobs(settings: ServerSettings, pool: str, caller: Caller) -> list[HostedJob]:
    standing = asked(control_of(settings, pool).standing())
    return [
        as_job(settings, pool, job) for job in standing.status["jobs"] if caller.sees(project_of_job(settings, job))
    ]


def _job(settings: ServerSettings, pool: str, job: str, caller: Caller) -> HostedJob:
    for found in _jobs(settings, pool, caller):
        if found.id == job:
            return found
    raise not_found("job", job)
