"""Pools that jobs share, and their jobs: shown, submitted, cancelled, resubmitted."""

import hashlib
import json
import re
from functools import partial
from typing import Annotated, Any

import sqlalchemy as sa
from fastapi import APIRouter, Path, Query, Request, Response
from msgspec import to_builtins

from elastic.compose.job_files import run_files
from elastic.compose.pool_config import POOL_CONFIG, job_request, load_pool
from elastic.compose.runs import discard_run, save_run_config
from elastic.config import Config, ConfigError
from elastic.core.cluster import JobRequest
from elastic.core.cluster.types import BeyondQuota
from elastic.pool.control_messages import JOB_NAME, PoolControl, SubmitJob
from elastic.pool.job_files import SubmittedFile
from elastic.pool.ports import JobEntry
from elastic.pool.status import JobStatus
from elastic.protocol.api import HostedJob, HostedPool, HostedTurn, JobPlacement, JobSubmission, Listed, Submission
from elastic.protocol.run_control import new_command_id
from elastic.server import ids
from elastic.server.api.auth import Caller
from elastic.server.api.job_limits import beyond_quota, train_gpus
from elastic.server.api.routes.common import (
    CallerDep,
    StateDep,
    project_of,
    refuse_code,
    refuse_gone,
    refuse_profiles,
    refuse_retired,
    rules,
)
from elastic.server.api.routes.model_route import ModelRoute
from elastic.server.api.state import ServerState
from elastic.server.api.writes import WriteDep, WriteRequest, WriteResult, created
from elastic.server.intake.checking import checked
from elastic.server.permissions import Action
from elastic.server.pools import ANOTHERS, as_job, as_pool, asked, control_of, pool_dir, project_of_job, settle_jobs
from elastic.server.problems import ApiProblem, configuration_errors, invalid_configuration, not_found
from elastic.server.quotas.needs import RunNeeds
from elastic.server.retention.rules import REMOVED, RUN
from elastic.server.settings import ServerSettings
from elastic.server.store import jobs, people, quotas
from elastic.server.store.pages import LIMIT, LIMIT_MAX

router = APIRouter(prefix="/v1/pools", tags=["pools"], route_class=ModelRoute)
PoolId = Annotated[str, Path(max_length=64)]
JobId = Annotated[str, Path(max_length=100)]
NodeName = Annotated[str, Path(max_length=100)]

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


@router.get("/{pool}/turns", **rules(Action.RUNS_READ, "not-found", "pool-away"))
def list_turns(
    pool: PoolId,
    request: Request,
    caller: CallerDep,
    state: StateDep,
    after_s: Annotated[float, Query(ge=0, description="those that ended later")] = 0.0,
) -> Listed[HostedTurn]:
    """List the last turns on a pool's nodes that are over, in the order in which they ended. Those before its process
    was started are missing."""
    turns = [turn for turn in asked(control_of(state.settings, pool).turns()) if turn.until_s > after_s]
    place = None if caller.project is None else state.settings.pooled / caller.project
    own = {job for job in {turn.job for turn in turns} if place is None or (place / job).is_dir()}
    data = [
        HostedTurn.model_validate(to_builtins(turn) | {"job": turn.job if turn.job in own else ANOTHERS})
        for turn in turns
    ]
    return Listed(url=request.url.path, data=data, has_more=False)


@router.post(
    "/{pool}/nodes/{node}/drain",
    response_model=HostedPool,
    **rules(Action.SERVER_WRITE, "not-found", "job-conflict", "pool-away"),
)
def drain_node(pool: PoolId, node: NodeName, write: WriteDep) -> Response:
    """Let a node of another machine go: its jobs go on elsewhere from their step's end. It is `draining` until then."""
    if (former := write.answered(None)) is not None:
        return former
    asked(control_of(write.state.settings, pool).drain(node, _command_id(write)))
    now = _pool(write.state.settings, pool, write.caller)
    return write.carry_out(Action.SERVER_WRITE, None, lambda _: WriteResult(200, now))


@router.get("/{pool}/jobs", **rules(Action.RUNS_READ, "not-found", "invalid-cursor", "pool-away"))
def list_jobs(
    pool: PoolId,
    request: Request,
    caller: CallerDep,
    state: StateDep,
    limit: Annotated[int, Query(ge=1, le=LIMIT_MAX)] = LIMIT,
    starting_after: Annotated[str | None, Query(max_length=100, description="a job's id: older ones")] = None,
) -> Listed[HostedJob]:
    """List a pool's jobs as far as the caller sees them, newest first."""
    settings, control = state.settings, control_of(state.settings, pool)
    before: int | None = None
    if starting_after is not None:
        try:
            before = _found(settings, pool, starting_after, caller).arrival
        except ApiProblem as problem:
            if problem.kind != "not-found":
                raise
            words = f"starting_after: {starting_after!r} is of no job of this list"
            raise ApiProblem("invalid-cursor", words) from None
    within = "" if caller.project is None else str((settings.pooled / caller.project).resolve())
    page = asked(control.jobs(within=within, before=before, most=limit))
    data = [as_job(settings, pool, job) for job in page.jobs]
    return Listed(url=request.url.path, data=data, has_more=page.before is not None)


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
    """Submit a job. Once this is answered, the pool never loses it: it goes on without its process and this server. A
    job beyond its project's quota is queued until the quota allows it."""
    if (former := write.answered(body)) is not None:
        return former
    state, settings = write.state, write.state.settings
    control = control_of(settings, pool)
    project, config, needs = _checked(state, body, write.caller)
    command = _command_id(write)
    job = ids.new_id(ids.JOB) if not write.key else f"{ids.JOB}_{command[:26]}"
    request = _request(job, config, needs.rollout_gpus)
    asked(control.plan(request))
    _settle_for_quota(state, project)
    gpus, fingerprint = train_gpus(settings, pool, request), write.fingerprint(body)
    with state.store.writing() as tx:
        row = jobs.find(tx, job)
        if row is not None and row["fingerprint"] != fingerprint:
            raise ApiProblem("idempotency-mismatch", f"Idempotency-Key {write.key!r} came with another request before")
        if row is None:
            beyond = beyond_quota(tx, project, needs, gpus)
            refuse_gone(tx, project, config.model_dump_json())
            waits = None if beyond is None else beyond.reason
            jobs.insert(tx, job, project, pool, fingerprint, config.model_dump_json(), gpus, waits)
        else:
            beyond = None if row["waits"] is None else BeyondQuota(project, row["waits"])
            jobs.note_again(tx, job)
    path = settings.job_dir(project, job).resolve()
    settings.storage(project).mkdir(mode=0o700, parents=True, exist_ok=True)
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    (path / "logs").mkdir(mode=0o700, exist_ok=True)
    save_run_config(path, config)
    try:
        files = _files(settings, pool, config)
        entry = JobEntry(job=job, directory=str(path), providers=tuple(body.providers), files=files)
        asked(control.submit(SubmitJob(id=command, request=request, entry=entry, quota=beyond)))
    except ApiProblem as problem:
        if problem.kind != "pool-away":
            discard_run(path)
            with state.store.writing() as tx:
                jobs.remove(tx, job)
        raise
    made = _job(settings, pool, job, write.caller)

    def work(tx: sa.Connection) -> WriteResult:
        return created(f"{router.prefix}/{pool}/jobs/{job}", made, project)

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
    _settle_for_quota(state, project)
    request = _request("job", config, needs.rollout_gpus)
    with state.store.reading() as connection:
        gpus = train_gpus(state.settings, pool, request)
        beyond = beyond_quota(connection, project, needs, gpus)
    plan = asked(control.plan(request, beyond))
    told = JobPlacement.model_validate(to_builtins(plan) | {"pool": pool})
    if told.placement is not None and caller.project is not None:
        told.placement.members = None
    return told


@router.post(
    "/{pool}/jobs/{job}/cancel",
    response_model=HostedJob,
    **rules(Action.RUNS_WRITE, "not-found", "job-conflict", "pool-away"),
)
def cancel_job(pool: PoolId, job: JobId, write: WriteDep) -> Response:
    """Cancel a job: everything of it ends now."""
    return write.answered(None) or _told(pool, job, write, PoolControl.cancel)


@router.post(
    "/{pool}/jobs/{job}/resubmit",
    response_model=HostedJob,
    **rules(
        Action.RUNS_WRITE,
        "invalid-configuration",
        "not-found",
        "job-conflict",
        "run-retired",
        "quota-exceeded",
        "pool-away",
    ),
)
def resubmit_job(pool: PoolId, job: JobId, write: WriteDep) -> Response:
    """Have a job that has failed go on from its last checkpoint, as a new arrival, once its project's quota allows
    it."""
    if (former := write.answered(None)) is not None:
        return former
    state, found = write.state, _job(write.state.settings, pool, job, write.caller)
    if found.project is None:
        return _told(pool, job, write, PoolControl.resubmit)
    _settle_for_quota(state, found.project)
    beyond: BeyondQuota | None = None
    with state.store.writing() as tx:
        row = jobs.find(tx, job)
        if not state.settings.job_dir(found.project, job).is_dir():
            refuse_retired(job, {RUN: REMOVED}, "job")  # Its row has gone, too.
        if row is not None:
            refuse_retired(job, row["retired"], "job")
            refuse_gone(tx, found.project, row["config"])
            beyond = beyond_quota(tx, found.project, RunNeeds(), row["train_gpus"], but=job)
            waits = None if beyond is None else beyond.reason
            jobs.settle(tx, job, usd=row["usd"], over=False, waits=waits)
    try:
        return _told(pool, job, write, partial(PoolControl.resubmit, quota=beyond))
    except ApiProblem as problem:
        if problem.kind != "pool-away":
            settle_jobs(state.store, state.settings, found.project)
            if row is not None and row["ended_us"] is not None:
                with state.store.writing() as tx:
                    jobs.note_refused(tx, row)
        raise


def _request(job: str, config: Config, rollout_gpus: int) -> JobRequest:
    """Raises `ApiProblem`."""
    try:
        return job_request(job, config.job, config.run.steps, config.job.plan, config.trainer.gpus, rollout_gpus)
    except ConfigError as error:
        raise invalid_configuration(configuration_errors(error.problems)) from error


def _files(settings: ServerSettings, pool: str, config: Config) -> tuple[SubmittedFile, ...]:
    """What the pool's nodes on other machines are sent of the job's files. Raises `ApiProblem`."""
    try:
        elsewhere = load_pool(pool_dir(settings, pool) / POOL_CONFIG).joins
        return run_files(config) if elsewhere else ()
    except ConfigError as error:
        raise invalid_configuration(configuration_errors(error.problems)) from error


def _settle_for_quota(state: ServerState, project: str) -> None:
    """Ask what became of the project's jobs, where a quota counts them. Raises `ApiProblem`."""
    with state.store.reading() as connection:
        counted = quotas.quota(connection, project).version
    if counted:
        settle_jobs(state.store, state.settings, project)


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
        refuse_profiles(connection, project, body.config)
        refuse_code(connection, state, project, body.config)
    if row is not None and row["unix_user"] is not None:
        raise ApiProblem(
            "untrusted-neighbours",
            f"runs of this project are processes of {row['unix_user']!r}, a pool's are the server's own",
        )
    raw, section = dict(body.config), body.config.get("job", {})
    if body.slo is not None and isinstance(section, dict):
        raw["job"] = {**section, "slo": body.slo}
    run = Submission(config=raw, providers=body.providers, project=body.project)
    new = checked(state.settings, run, project).new
    own = {"budget_usd": new.budget_usd, "caps": new.caps}  # A hosted run's are the runner's, a job's its own.
    config = new.config
    return project, config.model_copy(update={"run": config.run.model_copy(update=own)}), new.needs


def _pool(settings: ServerSettings, name: str, caller: Caller) -> HostedPool:
    control = control_of(settings, name)
    try:
        status = asked(control.status()).status
    except ApiProblem as problem:
        if problem.kind != "pool-away":
            raise
        return HostedPool(id=name, away=True)
    return as_pool(settings, status, name, caller.project)


def _job(settings: ServerSettings, pool: str, job: str, caller: Caller) -> HostedJob:
    return as_job(settings, pool, _found(settings, pool, job, caller))


def _found(settings: ServerSettings, pool: str, job: str, caller: Caller) -> JobStatus:
    """Return what the pool tells of a job. Raises `ApiProblem` for one that the caller does not see."""
    control = control_of(settings, pool)
    if re.fullmatch(JOB_NAME, job):
        for found in asked(control.jobs(names=[job])).jobs:
            if caller.sees(project_of_job(settings, found)):
                return found
    raise not_found("job", job)
