"""Projects' quotas: what each may have at once and may spend, and what it uses of that."""

import sqlalchemy as sa
from fastapi import APIRouter, Response

from elastic.core.ledger import NANO_USD_PER_USD
from elastic.protocol.api import ProblemError, ProjectQuota, QuotaChange, QuotaUse
from elastic.server.api.routes.common import CallerDep, IfMatch, StateDep, check_etag, etag_of, project_of, rules
from elastic.server.api.routes.model_route import ModelRoute
from elastic.server.api.writes import WriteDep, WriteResult, edited
from elastic.server.permissions import Action
from elastic.server.problems import ApiProblem
from elastic.server.quotas import budgets
from elastic.server.runner.allotment import ProjectStatus, going
from elastic.server.store import quotas, runs
from elastic.server.store.database import now_us
from elastic.server.store.quotas import TRAINER
from elastic.system.installed import installed

router = APIRouter(prefix="/v1/projects/{project}/quota", tags=["projects"], route_class=ModelRoute)


@router.get("", **rules(Action.PROJECTS_READ, "not-found"))
def show(project: str, caller: CallerDep, state: StateDep, response: Response) -> ProjectQuota:
    """Show what a project may have at once and may spend, what it uses of that, and when its budget ends."""
    with state.store.reading() as connection:
        found = quotas.quota(connection, project_of(connection, caller, project))
        response.headers["etag"] = etag_of(found.version)
        return as_quota(connection, found)


@router.patch(
    "",
    response_model=ProjectQuota,
    **rules(Action.SERVER_WRITE, "not-found", "precondition-failed", "precondition-required"),
)
def change(
    project: str, body: QuotaChange, write: WriteDep, tx: sa.Connection, if_match: IfMatch = None
) -> WriteResult:
    """Set what a project may have at once and may spend. Runs that go on hear of it at once: what is beyond drains."""
    allowed = (TRAINER, *sorted(installed("elastic.providers")))
    if unknown := sorted((body.gpus or {}).keys() - set(allowed)):
        detail = f"{unknown[0]!r} is no kind of provider; allowed: {', '.join(allowed)}"
        raise ApiProblem("invalid-request", detail, [ProblemError(pointer=f"#/gpus/{unknown[0]}", detail=detail)])
    id_ = project_of(tx, write.caller, project)
    check_etag(if_match, quotas.quota(tx, id_).version)
    quotas.change_quota(tx, id_, _columns(body))
    now = quotas.quota(tx, id_)
    return edited(as_quota(tx, now), now.version, id_)


def _columns(body: QuotaChange) -> dict[str, object]:
    said = body.model_dump(exclude_unset=True)
    if "runs" in said:
        said["runs_max"] = said.pop("runs")
    lifted: dict[str, object] = {"gpus": {}, "weight": 1.0}
    return {key: lifted.get(key) if value is None else value for key, value in said.items()}


def as_quota(connection: sa.Connection, row: quotas.QuotaRow) -> ProjectQuota:
    """A quota, with what is used of it now."""
    at_us = now_us()
    day = budgets.day_of(at_us)
    settled, settled_today = quotas.settled_nano_usd(connection, row.project, day)
    status = ProjectStatus(quota=row, settled_nano_usd=settled, settled_today_nano_usd=settled_today)
    its = runs.managed(connection, row.project)
    spent = status.spending(its, day)
    live = [run for run in its if going(run)]
    gpus: dict[str, int] = {}
    for run in live:
        for kind, held in gpus_of(run).items():
            gpus[kind] = gpus.get(kind, 0) + held
    account = quotas.account(connection, row.project)
    rate = budgets.usd_per_hour(account.marks, at_us, spent.total)
    usd, usd_today = spent.total / NANO_USD_PER_USD, spent.today / NANO_USD_PER_USD
    return ProjectQuota(
        project=row.project,
        gpus=dict(row.gpus),
        runs=row.runs_max,
        usd_per_day=row.usd_per_day,
        budget_usd=row.budget_usd,
        weight=row.weight,
        use=QuotaUse(
            runs=len(live),
            gpus=gpus,
            usd=usd,
            allotted_usd=spent.allotted / NANO_USD_PER_USD,
            usd_today=usd_today,
            allotted_today_usd=spent.allotted_today / NANO_USD_PER_USD,
            usd_per_hour=rate,
            budget_ends_in_s=budgets.ends_in_s(row.budget_usd, usd, rate),
            day_ends_in_s=budgets.ends_in_s(row.usd_per_day, usd_today, rate),
            warned=account.warned,
        ),
    )


def gpus_of(run: runs.HostedRunRow) -> dict[str, int]:
    """Return the GPUs that a run held when it was last seen, by kind of provider."""
    needs = run.needs
    held = {TRAINER: needs.trainer_gpus}
    for name, one in needs.providers.items():
        if name in run.figures.providers:
            held[one.kind] = held.get(one.kind, 0) + run.figures.providers[name].gpus
    return held
