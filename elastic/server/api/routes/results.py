"""What a run has come to: metrics, trajectories, checkpoints, workers, leases, reports."""

import json
from collections.abc import Callable, Sequence
from typing import Annotated, Literal, TypeVar

from fastapi import APIRouter, Depends, Path, Query, Request
from fastapi.responses import FileResponse, HTMLResponse, JSONResponse, Response

from elastic.core.ids import GROUP
from elastic.protocol.api import (
    Checkpoint,
    HostedAgents,
    HostedLease,
    HostedOffers,
    HostedTrajectory,
    HostedTrajectoryDetail,
    HostedWorker,
    Listed,
    ListedOfRun,
    Metrics,
    TrajectorySearch,
)
from elastic.report.history import History
from elastic.report.texts import Reading
from elastic.report.trajectories import NoSuchTrajectory
from elastic.runtime.journal import JournalError, TrajectoryFilter
from elastic.server.api.auth import CallerDep, credentials_of
from elastic.server.api.downloads import Download
from elastic.server.api.routes.common import RunDep, StateDep, rules
from elastic.server.api.routes.events import unreadable
from elastic.server.api.routes.model_route import ModelRoute
from elastic.server.api.routes.runs import RunId
from elastic.server.api.state import ServerState
from elastic.server.history import journals
from elastic.server.history.answers import Entries
from elastic.server.history.trajectories import chosen_of, searched_in, trajectories_of, trajectory_of
from elastic.server.permissions import Action
from elastic.server.problems import ApiProblem, not_found
from elastic.server.store.pages import LIMIT, LIMIT_MAX, Cursor
from elastic.server.store.runs import HostedRunRow
from elastic.system import tenant_files

T = TypeVar("T")
SAMPLES = 1_000
TEXT_CHARACTERS = 200
"""The most characters of a text that is searched for."""

router = APIRouter(prefix="/v1/runs", tags=["results"], route_class=ModelRoute)
CheckpointId = Annotated[str, Path(pattern=f"^{journals.CHECKPOINT_ID}$")]


async def cursor(
    limit: Annotated[int, Query(ge=1, le=LIMIT_MAX)] = LIMIT,
    starting_after: Annotated[str | None, Query(max_length=200, description="an entry's id: what follows it")] = None,
) -> Cursor:
    return Cursor(limit, starting_after or "")


PageDep = Annotated[Cursor, Depends(cursor)]


@router.get("/{run}/metrics", response_model=Metrics, **rules(Action.RUNS_READ, "not-found", "journal-unreadable"))
async def metrics(
    run: RunId,
    found: RunDep,
    state: StateDep,
    samples: Annotated[int, Query(ge=1, le=SAMPLES)] = SAMPLES,
    steps: Annotated[int | None, Query(ge=1, le=SAMPLES, description="of more steps evenly spaced ones")] = None,
    after_step: Annotated[int, Query(ge=-1, le=2**31, description="only later steps")] = -1,
    after_s: Annotated[float, Query(ge=-1, allow_inf_nan=False, description="only later moments")] = -1.0,
) -> Response:
    """Show a run's series: every finished step, and how it stood at up to `samples` moments."""
    run_dir = state.settings.run_dir(run)
    wanted = journals.Wanted(samples, steps or 10**9, after_step, after_s)

    def make() -> Entries:
        return [("", journals.metrics_json(run_dir, run, wanted))]

    ((_, content),) = await _kept(state, found, f"metrics {wanted}", make)
    return Response(content, media_type="application/json")


async def trajectory_filter(
    evaluation: Annotated[bool, Query(description="episodes of evaluations; else none of these")] = False,
    step: Annotated[
        int | None, Query(ge=0, le=2**31, description="only of this step, or of evaluations of this version")
    ] = None,
    reward_min: Annotated[float | None, Query(allow_inf_nan=False)] = None,
    reward_max: Annotated[float | None, Query(allow_inf_nan=False)] = None,
    group: Annotated[
        str | None,
        Query(max_length=200, pattern=f"^{GROUP.pattern}$", description="only of this group, 3/0, or this task, e10/3"),
    ] = None,
    environment: Annotated[str | None, Query(max_length=200, description="only of this environment")] = None,
    truncated: Annotated[bool, Query(description="only those that a limit of turns or tokens ended")] = False,
    failed: Annotated[bool, Query(description="only those without a reward")] = False,
    order: Annotated[
        Literal["newest", "best", "worst", "reward"],
        Query(description="`best` or `worst` by their reward first; `reward` is `best`"),
    ] = "newest",
) -> TrajectoryFilter:
    return TrajectoryFilter(
        evaluation=evaluation,
        step=step,
        group=group,
        environment=environment,
        reward_min=reward_min,
        reward_max=reward_max,
        truncated=truncated,
        failed=failed,
        order="best" if order == "reward" else order,
    )


FilterDep = Annotated[TrajectoryFilter, Depends(trajectory_filter)]


@router.get(
    "/{run}/trajectories",
    response_model=ListedOfRun[HostedTrajectory],
    **rules(Action.RUNS_READ, "not-found", "journal-unreadable", "invalid-cursor"),
)
async def trajectories(
    run: RunId, request: Request, found: RunDep, state: StateDep, page: PageDep, wanted: FilterDep
) -> Response:
    """Browse what the policy has done, by step, group, reward and end."""
    run_dir = state.settings.run_dir(run)

    def make() -> Entries:
        data, has_more, unreadable = trajectories_of(run_dir, wanted, page.starting_after, page.limit)
        told = ListedOfRun(url=request.url.path, data=data, has_more=has_more, unreadable=unreadable)
        return [("", told.model_dump_json().encode())]

    try:
        ((_, content),) = await _kept(state, found, f"trajectories {wanted} {page}", make)
    except NoSuchTrajectory:
        raise _no_entry(page) from None
    return Response(content, media_type="application/json")


@router.get(
    "/{run}/trajectory-search",
    response_model=TrajectorySearch,
    **rules(Action.RUNS_READ, "not-found", "journal-unreadable", "invalid-cursor"),
)
async def search_trajectories(
    run: RunId,
    request: Request,
    found: RunDep,
    state: StateDep,
    page: PageDep,
    wanted: FilterDep,
    text: Annotated[str, Query(min_length=1, max_length=TEXT_CHARACTERS, description="in lower case or upper case")],
) -> Response:
    """Find a text in what trajectories say. For a second or two they are searched; go on after `searched_to`."""
    run_dir, reading = state.settings.run_dir(run), Reading.of(json.loads(found.config))

    def make() -> Entries:
        part = searched_in(run_dir, wanted, text, reading, page.starting_after, page.limit)
        told = TrajectorySearch(
            url=request.url.path,
            data=part.found,
            has_more=part.has_more,
            searched=part.searched,
            textless=part.textless,
            searched_to=part.last,
            no_text=part.no_text,
        )
        return [("", told.model_dump_json().encode())]

    try:
        ((_, content),) = await _kept(state, found, f"search {wanted} {page} {text}", make)
    except NoSuchTrajectory:
        raise _no_entry(page) from None
    return Response(content, media_type="application/json")


@router.get("/{run}/trajectories/{trajectory:path}", **rules(Action.RUNS_READ, "not-found", "journal-unreadable"))
async def trajectory(
    run: RunId, trajectory: Annotated[str, Path(max_length=200)], found: RunDep, state: StateDep
) -> HostedTrajectoryDetail:
    """Show a trajectory: its messages, and its tokens with their texts, versions and log-probabilities."""
    run_dir, reading = state.settings.run_dir(run), Reading.of(json.loads(found.config))
    shown = await _read(state, found, lambda: trajectory_of(run_dir, trajectory, reading))
    if shown is None:
        raise not_found("trajectory", trajectory)
    return shown


@router.get(
    "/{run}/workers",
    response_model=ListedOfRun[HostedWorker],
    **rules(Action.RUNS_READ, "not-found", "journal-unreadable", "invalid-cursor"),
)
async def workers(run: RunId, request: Request, found: RunDep, state: StateDep, page: PageDep) -> Response:
    """List a run's workers, past and present, with their GPU time by account."""
    return _listed(request, await _entries(state, found, "workers", journals.workers_of), page)


@router.get(
    "/{run}/leases",
    response_model=ListedOfRun[HostedLease],
    **rules(Action.RUNS_READ, "not-found", "journal-unreadable", "invalid-cursor"),
)
async def leases(run: RunId, request: Request, found: RunDep, state: StateDep, page: PageDep) -> Response:
    """List a run's leases, past and present, with what they cost and why they ended."""
    return _listed(request, await _entries(state, found, "leases", journals.leases_of), page)


@router.get(
    "/{run}/offers",
    response_model=ListedOfRun[HostedOffers],
    **rules(Action.RUNS_READ, "not-found", "journal-unreadable", "invalid-cursor"),
)
async def offers(run: RunId, request: Request, found: RunDep, state: StateDep, page: PageDep) -> Response:
    """List what providers have offered a run over time: how much they had, and at which price."""
    return _listed(request, await _entries(state, found, "offers", journals.offers_of), page)


@router.get(
    "/{run}/checkpoints",
    response_model=Listed[Checkpoint],
    **rules(Action.RUNS_READ, "not-found", "journal-unreadable", "invalid-cursor"),
)
async def checkpoints(run: RunId, request: Request, found: RunDep, state: StateDep, page: PageDep) -> Response:
    """List the trainer's checkpoints."""
    run_dir = state.settings.run_dir(run)
    there = await _read(state, found, lambda: journals.checkpoints_of(run_dir))
    return _listed(request, [(one.id, one.model_dump_json().encode()) for one in there], page)


@router.get(
    "/{run}/checkpoints/{checkpoint}",
    response_class=FileResponse,
    **rules(Action.RUNS_READ, "not-found", "journal-unreadable", "invalid-range"),
)
async def checkpoint(
    run: RunId, checkpoint: CheckpointId, request: Request, found: RunDep, state: StateDep
) -> Response:
    """Download a checkpoint."""
    name = f"{checkpoint}{journals.SAFETENSORS}"
    place = state.settings.run_dir(run), f"{journals.CHECKPOINTS}/{name}"
    try:
        file = await state.readers.of(found.project)(lambda: tenant_files.opened(*place))
    except FileNotFoundError:
        raise not_found("checkpoint", checkpoint) from None
    whole = Download(file, f"{run}-{name}")
    return state.streams.while_admitted(request, credentials_of(request), Action.RUNS_READ, found.project, whole)


_REPORT = rules(Action.RUNS_READ, "not-found", "journal-unreadable")
_REPORT["responses"][200] = {
    "content": {
        "application/json": {"example": {"run": "run_01JD3K5T7WQ8M2N4P6R8S0V2X4", "outcome": "finished"}},
        "text/html": {"schema": {"type": "string"}, "example": "<!doctype html>"},
        "text/markdown": {"schema": {"type": "string"}, "example": "# frozenlake"},
    }
}


@router.get("/{run}/report", response_class=JSONResponse, **_REPORT)
async def show_report(
    run: RunId,
    found: RunDep,
    state: StateDep,
    as_: Annotated[Literal["json", "html", "markdown"], Query(alias="format")] = "json",
) -> Response:
    """Report on a run: what it cost, what it gained, where every GPU-second went."""

    def make() -> Entries:
        run_dir = state.settings.run_dir(run)
        chosen = chosen_of(run_dir, Reading.of(json.loads(found.config))) if as_ == "html" else None
        content = journals.report_of(run_dir, as_, chosen)
        if content is None:
            raise ApiProblem("not-found", f"{run} has no report yet: its process has not begun")
        return [("", content)]

    ((_, content),) = await _kept(state, found, f"report {as_}", make)
    if as_ == "html":
        policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
        return HTMLResponse(content, headers={"content-security-policy": policy})
    return Response(content, media_type="text/markdown" if as_ == "markdown" else "application/json")


async def _entries(
    state: ServerState, run: HostedRunRow, what: str, read: Callable[[History], Sequence[journals.R]]
) -> Entries:
    return await _kept(state, run, what, lambda: journals.entries_of(state.settings.run_dir(run.id), read))


@router.get("/{run}/agents", **rules(Action.RUNS_READ, "not-found", "journal-unreadable"))
async def agents(
    run: RunId,
    found: RunDep,
    state: StateDep,
    caller: CallerDep,
    driver: Annotated[
        str, Query(pattern="^[A-Za-z0-9_]{1,64}$", description="which program opens trajectories")
    ] = "main",
) -> HostedAgents:
    """Show where agents reach a run that they drive, the key of its viewers and, to a runner, a driver's key."""
    served = None
    if not found.ended:
        served = await _read(state, found, lambda: journals.agents_of(state.settings.run_dir(run), driver))
    if served is None:
        raise not_found("agents of run", run)
    base_url, key, viewer_key = served
    if Action.RUNS_WRITE not in caller.actions:
        return HostedAgents(run=run, base_url=base_url, viewer_key=viewer_key)
    return HostedAgents(run=run, base_url=base_url, driver=driver, key=key, viewer_key=viewer_key)


async def _kept(state: ServerState, run: HostedRunRow, what: str, make: Callable[[], Entries]) -> Entries:
    return await _read(state, run, lambda: state.answers.get(state.settings.run_dir(run.id), what, make))


def _listed(request: Request, entries: Entries, page: Cursor) -> Response:
    """A page of a list that is read whole. Raises `ApiProblem` for a cursor that is not of it."""
    begin, unreadable = 0, b",".join(content for id_, content in entries if not id_)
    entries = [entry for entry in entries if entry[0]]
    if page.starting_after:
        begin = next((place for place, (id_, _) in enumerate(entries, 1) if id_ == page.starting_after), 0)
        if not begin:
            raise _no_entry(page)
    end = begin + page.limit
    data = b",".join(content for _, content in entries[begin:end])
    url, has_more = json.dumps(request.url.path).encode(), b"true" if end < len(entries) else b"false"
    content = b'{"object":"list","url":%s,"data":[%s],"has_more":%s,"unreadable":[%s]}'
    content %= (url, data, has_more, unreadable)
    return Response(content, media_type="application/json")


def _no_entry(page: Cursor) -> ApiProblem:
    return ApiProblem("invalid-cursor", f"starting_after: {page.starting_after!r} is of no entry of this list")


async def _read(state: ServerState, run: HostedRunRow, read: Callable[[], T]) -> T:
    """Return what a run's files say. Raises `ApiProblem` where they cannot be read."""
    try:
        return await state.readers.of(run.project)(read)
    except (JournalError, OSError) as error:
        raise unreadable(error) from error
