"""Whether the server lives and can do its work, what it is, and its metrics."""

import importlib.metadata

from fastapi import APIRouter
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from elastic.protocol.api import ServerInfo
from elastic.server.api.metrics import exposition, loop_faults
from elastic.server.api.routes.common import CallerDep, StateDep, problem_responses, rules
from elastic.server.api.routes.model_route import ModelRoute
from elastic.server.permissions import Action

router = APIRouter(tags=["server"], route_class=ModelRoute)


@router.get("/healthz", response_class=PlainTextResponse, openapi_extra={"security": []})
async def health() -> str:
    """Say that the process lives."""
    return "ok\n"


@router.get(
    "/readyz",
    response_class=JSONResponse,
    responses={
        200: {"content": {"application/json": {"example": {"ready": True, "reasons": []}}}},
        503: {
            "description": "not now, and why",
            "content": {"application/json": {"example": {"ready": False, "reasons": ["the database does not answer"]}}},
        },
    },
    openapi_extra={"security": []},
)
def readiness(state: StateDep) -> Response:
    """Say whether the database answers and the runner looks after its runs."""
    reasons = state.ready()
    return JSONResponse({"ready": not reasons, "reasons": reasons}, status_code=503 if reasons else 200)


@router.get(
    "/v1",
    responses=problem_responses("internal"),
    openapi_extra={"security": []},
)
async def info(state: StateDep) -> ServerInfo:
    """Say which version of the server this is, and whom people sign in with."""
    oidc = state.settings.oidc
    return ServerInfo(version=importlib.metadata.version("elastic-rl"), sign_in=None if oidc is None else oidc.name)


@router.get(
    "/metrics",
    response_class=PlainTextResponse,
    **rules(Action.RUNS_READ),
)
def metrics(caller: CallerDep, state: StateDep) -> Response:
    """Expose metrics for Prometheus: of the server, and of the runs that the key may see."""
    # What others ask for is nothing that a project's key sees.
    requests = [] if caller.project is not None else [*state.requests.exposition(), *loop_faults(state.faults)]
    text = exposition(state.store, caller.project) + "".join(f"{line}\n" for line in requests)
    return Response(text, media_type="text/plain; version=0.0.4")
