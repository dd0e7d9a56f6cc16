"""Runs: submitted, listed, shown, edited, stopped, resumed, deleted."""

import json
from typing import Annotated, Literal

import sqlalchemy as sa
from fastapi import APIRouter, Depends, Path, Query, Request, Response
from pydantic import Field

from elastic.core.ledger import NANO_USD_PER_USD
from elastic.protocol.api import (
    DryRun,
    HostedRun,
    HostedRunDetail,
    Listed,
    ResumeRequest,
    RunBudget,
    RunChange,
    RunPhase,
    StopRequest,
    Submission,
    SubmissionExample,
)
from elastic.server import ids
from elastic.server.api.routes.common import (
    CallerDep,
    Cursor,
    IfMatch,
    OnlyProject,
    RunDep,
    StateDep,
    check_etag,
    cursor_of,
    etag_of,
    listing,
    project_of,
    refuse_code,
    refuse_gone,
    refuse_profiles,
    refuse_retired,
    rules,
    run_of,
    seen_of,
)
from elastic.server.api.routes.model_route import ModelRoute
from elastic.server.api.writes import WriteDep, WriteResult, created, edited
from elastic.server.intake import submissions
from elastic.server.intake.checking import checked
from elastic.server.permissions import Action
from elastic.server.problems import ApiProblem
from elastic.server.quotas import budgets
from elastic.server.runner import conditions
from elastic.server.store import people, quotas, runs
from elastic.server.store.database import now_us
from elastic.server.store.pages import Order
from elastic.server.store.tables import runs as runs_table

router = APIRouter(prefix="/v1/runs", tags=["runs"], route_class=ModelRoute)
NAMES_FRESH_S = 60.0
LABEL = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}(=.{0,200})?$"
RunId = Annotated[str, Path(max_length=64)]


@router.post(
    "",
    status_code=201,
    response_model=HostedRun,
    **rules(Action.RUNS_WRITE, "invalid-configuration", "not-found", "quota-exceeded"),
)
def submit(body: Submission, write: WriteDep) -> Response:
    """Submit a run. Once this is answered, the run is never lost; the runner starts it soon after."""
    if (former := write.answered(body)) is not None:
        return former
    with write.state.store.reading() as connection:
        project = project_of(connection, write.caller, body.project)
        refuse_profiles(connection, project, body.config)
        refuse_code(connection, write.state, project, body.config)
    new = checked(write.state.settings, body, project).new

    def work(tx: sa.Connection) -> WriteResult:
        submissions.refuse_beyond(quotas.quota(tx, project), new.needs)
        first = conditions.updated([], [conditions.SUBMITTED], now_us(), 1)
        run = runs.insert(tx, new, write.caller.actor, first)
        refuse_gone(tx, project, run.config)
        return created(f"{router.prefix}/{run.id}", runs.as_run(run), project, run.generation)

    return write.carry_out(Action.RUNS_WRITE, body, work)


@router.post(
    "/dry-run",
    response_model=DryRun,
    **rules(Action.RUNS_WRITE, "invalid-configuration", "not-found", "quota-exceeded"),
)
def dry_run(body: Submission, caller: CallerDep, state: StateDep) -> DryRun:
    """Check a submission and say what it would hold and cost at most; nothing is started or kept."""
    with state.store.reading() as connection:
        project = project_of(connection, caller, body.project)
        refuse_profiles(connection, project, body.config)
        refuse_code(connection, state, project, body.config)
    found = checked(state.settings, body, project)
    with state.store.reading() as connection:
        submissions.refuse_beyond(quotas.quota(connection, project), found.new.needs)
    shown = state.settings.shown_config(found.would.config, project)
    return found.would.model_copy(update={"config": shown})


@router.get("", **rules(Action.RUNS_READ, "invalid-cursor", "not-found"))
def list_runs(
    request: Request,
    caller: CallerDep,
    state: StateDep,
    cursor: Annotated[Cursor, Depends(cursor_of(ids.RUN))],
    phase: Annotated[list[RunPhase], Query(max_length=8, description="only runs in these phases")] = [],  # noqa: B006
    label: Annotated[
        list[Annotated[str, Field(pattern=LABEL)]],
        Query(max_length=8, description="NAME=VALUE, or NAME"),
    ] = [],  # noqa: B006
    search: Annotated[str, Query(max_length=100, description="only with this text in name, id or labels")] = "",
    order: Annotated[
        Literal["name", "phase", "step", "success", "reward", "tokens_per_s", "usd", "preemptions"] | None,
        Query(description="the largest first; the newest unless given"),
    ] = None,
    ascending: Annotated[bool, Query(description="with an order: the smallest first")] = False,
    project: OnlyProject = None,
) -> Listed[HostedRun]:
    """List runs, newest first or in an order, by phase, label and text."""
    with state.store.reading() as connection:
        where = [runs_table.c.wanted != runs.DELETE, *seen_of(connection, caller, runs_table, project)]
        if phase:
            where.append(runs_table.c.phase.in_([one.value for one in phase]))
        where += [runs.labelled(one) for one in label]
        if search:
            where.append(runs.matching(search))
        wanted = None if order is None else Order(runs.ORDERS[order], ascending)
        return listing(request, connection, runs_table, where, cursor, runs.as_listed_run, runs.LISTED, wanted)


@router.get("/example", **rules(Action.RUNS_READ))
def show_example(caller: CallerDep, state: StateDep) -> SubmissionExample:
    """Show a submission that this server takes as it is, or how to make the base policy that one needs."""
    return submissions.example(state.settings)


@router.get("/{run}", **rules(Action.RUNS_READ, "not-found"))
async def show(run: RunId, found: RunDep, state: StateDep, response: Response) -> HostedRunDetail:
    """Show a run: its phase, conditions, figures and configuration."""
    response.headers["etag"] = etag_of(found.generation)
    shown = state.shown_config(found.config, found.project)

    def name() -> str:
        with state.store.reading() as connection:
            return people.name_of(connection, found.created_by)

    by = await state.looks.at(("name", found.created_by), name, fresh_s=NAMES_FRESH_S)
    return runs.as_run_detail(found, shown.config, shown.differences, by)


@router.patch(
    "/{run}",
    response_model=HostedRun,
    **rules(Action.RUNS_WRITE, "not-found", "invalid-configuration", "precondition-failed", "precondition-required"),
)
def change(run: RunId, body: RunChange, write: WriteDep, tx: sa.Connection, if_match: IfMatch = None) -> WriteResult:
    """Edit a run's budget, caps or labels. A living run hears of it at once, a stopped one when it is resumed."""
    found = run_of(tx, write.caller, run)
    check_etag(if_match, found.generation)
    if unknown := sorted((body.caps or {}).keys() - set(found.providers)):
        allowed = ", ".join(found.providers) or "none"
        raise ApiProblem("invalid-configuration", f"caps: {unknown[0]!r} is no provider of the run; allowed: {allowed}")
    runs.want(tx, run, **body.model_dump(exclude_unset=True, exclude_none=True))
    return _changed(tx, write.caller, run)


@router.post(
    "/{run}/stop",
    response_model=HostedRun,
    **rules(Action.RUNS_WRITE, "not-found", "run-finished", "run-stopped"),
)
def stop(run: RunId, write: WriteDep, tx: sa.Connection, body: StopRequest | None = None) -> WriteResult:
    """Stop a run: it makes a checkpoint, gives everything back and ends. It can be resumed."""
    force = body is not None and body.force
    found = run_of(tx, write.caller, run)
    _refuse_ended(found)
    if found.wanted != runs.STOP or (force and not found.force):
        # Whatever it was waiting for before it went on: it is stopped at once.
        runs.want(tx, run, wanted=runs.STOP, force=force, not_before_us=0)
    return _changed(tx, write.caller, run)


@router.post(
    "/{run}/resume",
    response_model=HostedRun,
    **rules(Action.RUNS_WRITE, "invalid-configuration", "not-found", "run-active", "run-finished", "run-retired"),
)
def resume(run: RunId, write: WriteDep, tx: sa.Connection, body: ResumeRequest | None = None) -> WriteResult:
    """Go on with a run that has ended, from its journal or its last checkpoint; a finished one with more steps."""
    asked = body or ResumeRequest()
    found = run_of(tx, write.caller, run)
    if not found.ended:
        raise ApiProblem("run-active", f"{run} is {found.phase}", run=run)
    refuse_retired(run, found.retired)
    refuse_gone(tx, found.project, found.config)
    steps = found.figures.steps
    if found.phase is RunPhase.FINISHED and (asked.steps is None or asked.steps <= steps):
        raise ApiProblem("run-finished", f"{run} finished its {steps} steps; `steps` asks for more", run=run)
    config = json.loads(found.config)
    if asked.steps is not None:
        config["run"]["steps"] = asked.steps
    pending = conditions.findings(found, RunPhase.PENDING, "", found.figures)
    runs.want(
        tx,
        run,
        wanted=runs.RUN,
        force=False,
        config=json.dumps(config),
        budget_usd=found.budget_usd if asked.budget_usd is None else asked.budget_usd,
        limits=None,
        phase=RunPhase.PENDING,
        cause="",
        restarts=0,
        not_before_us=0,
        ended_us=None,
        conditions=conditions.updated(found.conditions, pending, now_us(), found.generation + 1),
    )
    return _changed(tx, write.caller, run)


@router.delete("/{run}", status_code=204, **rules(Action.RUNS_WRITE, "not-found", "run-active"))
def delete(run: RunId, write: WriteDep, tx: sa.Connection) -> WriteResult:
    """Delete a run that has ended: its journal, checkpoints and report are gone."""
    found = run_of(tx, write.caller, run)
    if not found.ended:
        raise ApiProblem("run-active", f"{run} is {found.phase}", run=run)
    runs.want(tx, run, wanted=runs.DELETE)
    return WriteResult(204, project=found.project)


@router.get("/{run}/budget", **rules(Action.RUNS_READ, "not-found"))
async def budget(run: RunId, found: RunDep) -> RunBudget:
    """Show what a run may cost, what it has cost, and when the rest is gone with what it holds."""
    figures, own = found.figures, found.budget_usd
    stands, allotted = figures.budget, found.allotted_nano_usd
    rate = 0.0 if found.ended else sum(one.usd_per_hour for one in figures.providers.values())
    ends_in_s = None if stands is None or found.ended or own is None else stands.ends_in_s
    if ends_in_s is not None and own is not None and stands is not None and stands.budget_usd < own:
        # Its core knows no more than its slices.
        ends_in_s = budgets.ends_in_s(own, stands.committed_usd, rate)
    return RunBudget(
        run=found.id,
        budget_usd=found.budget_usd,
        usd=figures.usd,
        allotted_usd=None if allotted is None else allotted / NANO_USD_PER_USD,
        usd_per_hour=rate,
        committed_usd=None if stands is None else stands.committed_usd,
        warned=conditions.budget_nearly_used(own, figures),
        ends_in_s=ends_in_s,
    )


def _refuse_ended(found: runs.HostedRunRow) -> None:
    if not found.ended:
        return
    figures = found.figures
    if found.phase is RunPhase.STOPPED:
        raise ApiProblem("run-stopped", f"{found.id} is stopped at step {figures.step}", run=found.id)
    raise ApiProblem("run-finished", f"{found.id} {found.phase} at step {figures.step}", run=found.id)


def _changed(tx: sa.Connection, caller: CallerDep, run: str) -> WriteResult:
    now = run_of(tx, caller, run)
    return edited(runs.as_run(now), now.generation, now.project)
