"""Providers: which kinds are installed, what can be said of them, and how they do in the runs that go on."""

import functools
import json
from importlib.metadata import EntryPoint
from typing import Any

import sqlalchemy as sa
from fastapi import APIRouter, Request, Response

from elastic.compose.plan import kind_of
from elastic.protocol.api import ENDED, Listed, ProviderChange, ProviderFigures, ProviderKind, RunFigures
from elastic.server.api.routes.common import CallerDep, IfMatch, StateDep, check_etag, etag_of, rules
from elastic.server.api.routes.model_route import ModelRoute
from elastic.server.api.writes import WriteDep, WriteResult, edited
from elastic.server.permissions import Action
from elastic.server.problems import not_found
from elastic.server.store import quotas
from elastic.server.store.tables import runs
from elastic.system.installed import installed

router = APIRouter(prefix="/v1/providers", tags=["providers"], route_class=ModelRoute)


@router.get("", **rules(Action.RUNS_READ))
def list_providers(request: Request, caller: CallerDep, state: StateDep) -> Listed[ProviderKind]:
    """List the kinds of providers that are installed, with what the caller's living runs have of each."""
    return Listed(url=request.url.path, data=_kinds(caller, state), has_more=False)


@router.get("/{provider}", **rules(Action.RUNS_READ, "not-found"))
def show(provider: str, caller: CallerDep, state: StateDep, response: Response) -> ProviderKind:
    """Show one kind of provider."""
    with state.store.reading() as connection:
        response.headers["etag"] = etag_of(quotas.capacity(connection, provider)[1])
    for kind in _kinds(caller, state):
        if kind.id == provider:
            return kind
    raise not_found("provider", provider)


@router.patch(
    "/{provider}",
    response_model=ProviderKind,
    **rules(Action.SERVER_WRITE, "not-found", "precondition-failed", "precondition-required"),
)
def change(
    provider: str, body: ProviderChange, write: WriteDep, tx: sa.Connection, if_match: IfMatch = None
) -> WriteResult:
    """Say how many GPUs of this kind there are for all runs together; they share them by their projects' weights."""
    kind = show(provider, write.caller, write.state, Response())
    check_etag(if_match, quotas.capacity(tx, provider)[1])
    quotas.change_capacity(tx, provider, body.gpus)
    return edited(kind.model_copy(update={"gpus": body.gpus}), quotas.capacity(tx, provider)[1])


def _kinds(caller: CallerDep, state: StateDep) -> list[ProviderKind]:
    living = sa.select(runs.c.config, runs.c.figures).where(runs.c.phase.not_in([phase.value for phase in ENDED]))
    if caller.project is not None:
        living = living.where(runs.c.project == caller.project)
    with state.store.reading() as connection:
        rows = list(connection.execute(living))
        shared = quotas.all_capacities(connection)
    points = sorted(installed("elastic.providers").items())
    held: dict[str, list[ProviderFigures]] = {}
    for config, figures in rows:
        sections = _providers(config)
        for name, one in RunFigures.model_validate(figures).providers.items():
            held.setdefault(kind_of(sections, name), []).append(one)
    return [_kind(name, _settings(point), shared.get(name), held.get(name, [])) for name, point in points]


def _providers(config: str) -> dict[str, dict[str, Any]]:
    return json.loads(config).get("providers", {})


@functools.lru_cache(64)
def _settings(point: EntryPoint) -> dict[str, Any]:
    """The JSON schema of its settings, which takes milliseconds; empty where what it needs is not installed here."""
    try:
        return point.load().Settings.model_json_schema()
    except ImportError:
        return {}


def _kind(name: str, settings: dict[str, Any], gpus: int | None, held: list[ProviderFigures]) -> ProviderKind:
    return ProviderKind(
        id=name,
        settings=settings,
        gpus=gpus,
        runs=len(held),
        ready=sum(one.ready for one in held),
        booting=sum(one.booting for one in held),
        preemptions=sum(one.preemptions for one in held),
        usd_per_hour=sum(one.usd_per_hour for one in held),
    )
