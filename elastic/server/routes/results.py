"""What a run has come to: metrics, trajectories, checkpoints, workers, leases, reports."""

from collections.abc import Callable, Sequence
from typing import Annotated, Literal, TypeVar

from fastapi import APIRouter, Depends, Path, Query, Request
from fastapi.responses import FileResponse, HTMLResponse, JSONResponse, Response

from elastic import report
from elastic.resources import (
    Checkpoint,
    HostedLease,
    HostedTrajectory,
    HostedTrajectoryDetail,
    HostedWorker,
    Listed,
    Metrics,
)
from elastic.runtime.journal import JournalError, RunDirectory
from elastic.server import journals
from elastic.server.permissions import Action
from elastic.server.problems import ApiProblem, not_found
from elastic.server.routes.common import RunDep, StateDep, rules
from elastic.server.routes.runs import RunId
from elastic.server.store.pages import LIMIT, LIMIT_MAX, Cursor

R = TypeVar("R", HostedTrajectory, HostedWorker, HostedLease, Checkpoint)
T = TypeVar("T")
SAMPLES = 1_000

router = APIRouter(prefix="/v1/runs", tags=["results"])
CheckpointId = Annotated[str, Path(pattern=r"^[0-9]{1,12}$")]


def cursor(
    limit: Annotated[int, Query(ge=1, le=LIMIT_MAX)] = LIMIT,
    starting_after: Annotated[str | None, Query(max_length=200, description="an entry's id: what follows it")] = None,
) -> Cursor:
    return Cursor(limit, starting_after or "")


PageDep = Annotated[Cursor, Depends(cursor)]


@router.get("/{run}/metrics", **rules(Action.RUNS_READ, "not-found"))
def metrics(
    run: RunId, found: RunDep, state: StateDep, samples: Annotated[int, Query(ge=1, le=SAMPLES)] = SAMPLES
) -> Metrics:
    """Show a run's series: every finished step, and how it stood at up to `samples` moments."""
    return _read(lambda: journals.metrics_of(run, state.settings.run_dir(run), samples))


@router.get("/{run}/trajectories", **rules(Action.RUNS_READ, "not-found", "invalid-cursor"))
def trajectories(
    run: RunId,
    request: Request,
    found: RunDep,
    state: StateDep,
    page: PageDep,
    step: Annotated[int | None, Query(ge=0, le=2**31, description="only of this step")] = None,
    reward_min: Annotated[float | None, Query(allow_inf_nan=False)] = None,
    reward_max: Annotated[float | None, Query(allow_inf_nan=False)] = None,
    order: Annotated[Literal["newest", "reward"], Query(description="`reward`: the highest first")] = "newest",
) -> Listed[HostedTrajectory]:
    """Browse what the policy has done, by step and reward."""
    rows = _read(lambda: journals.trajectories_of(state.settings.run_dir(run)))
    rows = [row for row in rows if _wanted(row, step, reward_min, reward_max)]
    if order == "reward":
        rows.sort(key=lambda row: float("-inf") if row.reward is None else row.reward, reverse=True)
    return _listed(request, rows, page)


@router.get("/{run}/trajectories/{trajectory}", **rules(Action.RUNS_READ, "not-found"))
def trajectory(
    run: RunId, trajectory: Annotated[str, Path(max_length=200)], found: RunDep, state: StateDep
) -> HostedTrajectoryDetail:
    """Show a trajectory with its tokens, and its text where the environment has words for them."""
    run_dir, environment = state.settings.run_dir(run), journals.environment_of(found.config)
    shown = _read(lambda: journals.trajectory_of(run_dir, trajectory, environment))
    if shown is None:
        raise not_found("trajectory", trajectory)
    return shown


@router.get("/{run}/workers", **rules(Action.RUNS_READ, "not-found", "invalid-cursor"))
def workers(run: RunId, request: Request, found: RunDep, state: StateDep, page: PageDep) -> Listed[HostedWorker]:
    """List a run's workers, past and present, with their GPU time by account."""
    return _listed(request, _read(lambda: journals.workers_of(state.settings.run_dir(run))), page)


@router.get("/{run}/leases", **rules(Action.RUNS_READ, "not-found", "invalid-cursor"))
def leases(run: RunId, request: Request, found: RunDep, state: StateDep, page: PageDep) -> Listed[HostedLease]:
    """List a run's leases, past and present, with what they cost and why they ended."""
    return _listed(request, _read(lambda: journals.leases_of(state.settings.run_dir(run))), page)


@router.get("/{run}/checkpoints", **rules(Action.RUNS_READ, "not-found", "invalid-cursor"))
def checkpoints(run: RunId, request: Request, found: RunDep, state: StateDep, page: PageDep) -> Listed[Checkpoint]:
    """List the trainer's checkpoints."""
    return _listed(request, journals.checkpoints_of(state.settings.run_dir(run)), page)


@router.get(
    "/{run}/checkpoints/{checkpoint}",
    response_class=FileResponse,
    **rules(Action.RUNS_READ, "not-found"),
)
def checkpoint(run: RunId, checkpoint: CheckpointId, found: RunDep, state: StateDep) -> FileResponse:
    """Download a checkpoint."""
    path = state.settings.run_dir(run) / journals.CHECKPOINTS / f"{checkpoint}.safetensors"
    if not path.is_file():
        raise not_found("checkpoint", checkpoint)
    return FileResponse(path, media_type="application/octet-stream", filename=f"{run}-{path.name}")


@router.get(
    "/{run}/report",
    response_class=JSONResponse,
    **rules(Action.RUNS_READ, "not-found"),
)
def show_report(
    run: RunId,
    found: RunDep,
    state: StateDep,
    as_: Annotated[Literal["json", "html", "markdown"], Query(alias="format")] = "json",
) -> Response:
    """Report on a run: what it cost, what it gained, where every GPU-second went."""
    directory = RunDirectory(state.settings.run_dir(run))
    if not directory.journal_paths():
        raise ApiProblem("not-found", f"{run} has no report yet: its process has not begun")
    summary = _read(lambda: report.summarise(directory))
    if as_ == "html":
        policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
        return HTMLResponse(report.as_html(summary), headers={"content-security-policy": policy})
    if as_ == "markdown":
        return Response(report.as_markdown(summary), media_type="text/markdown")
    return JSONResponse(report.as_json(summary))


def _wanted(row: HostedTrajectory, step: int | None, reward_min: float | None, reward_max: float | None) -> bool:
    if step is not None and row.step != step:
        return False
    if reward_min is None and reward_max is None:
        return True
    if row.reward is None:
        return False
    return (reward_min is None or row.reward >= reward_min) and (reward_max is None or row.reward <= reward_max)


def _listed(request: Request, rows: Sequence[R], page: Cursor) -> Listed[R]:
    """A page of a list that is read whole. Raises `ApiProblem` for a cursor that is not of it."""
    begin = 0
    if page.starting_after:
        places = {row.id: place for place, row in enumerate(rows)}
        if page.starting_after not in places:
            raise ApiProblem("invalid-cursor", f"starting_after: {page.starting_after!r} is of no entry of this list")
        begin = places[page.starting_after] + 1
    end = begin + page.limit
    return Listed(url=request.url.path, data=list(rows[begin:end]), has_more=end < len(rows))


def _read(read: Callable[[], T]) -> T:
    try:
        return read()
    except (JournalError, OSError) as error:
        raise ApiProblem("unavailable", f"the run's journal cannot be read now: {type(error).__name__}") from error
