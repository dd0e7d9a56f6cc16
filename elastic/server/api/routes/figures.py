"""A run's figures as a stream: as they stand, and whenever they change."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request, Response

from elastic.server.api.routes.common import RunDep, StateDep
from elastic.server.api.routes.events import Follow, look_at, stream_rules, streamed
from elastic.server.api.routes.model_route import ModelRoute
from elastic.server.api.routes.runs import RunId
from elastic.server.api.state import ServerState
from elastic.server.store import runs

router = APIRouter(prefix="/v1/runs", tags=["streams"], route_class=ModelRoute)
_EXAMPLE = 'event: run\ndata: {"id":"run_01JD3K5T7WQ8M2N4P6R8S0V2X4","phase":"running","figures":{"step":41}}\n\n'
_RULES: dict[str, Any] = stream_rules(_EXAMPLE)


@router.get("/{run}/figures", **_RULES)
async def figures(run: RunId, request: Request, found: RunDep, state: StateDep, follow: Follow = True) -> Response:
    """Stream a run as `GET /v1/runs/{run}` lists it, whenever its phase or figures have changed.

    Events have no ids: a new connection begins with the present figures. A `run.ended` event ends the stream.
    """
    return streamed(state, request, found.project, _changes(state, run, follow=follow))


async def _changes(state: ServerState, run: str, *, follow: bool) -> AsyncIterator[bytes]:
    last, quiet_s, interval_s = b"", 0.0, state.settings.observe_s
    while True:
        found = await look_at(state, run)
        now = None if found is None else runs.as_run(found)
        told = b"" if now is None else now.model_dump_json().encode()
        if told != last:
            last, quiet_s = told, 0.0
            yield b"event: run\ndata: %s\n\n" % told
        if follow and (now is None or now.ended_at is not None):
            yield b"event: run.ended\ndata: {}\n\n"
        if now is None or now.ended_at is not None or not follow:
            return
        if quiet_s >= state.settings.ping_s:
            quiet_s = 0.0
            yield b": ping\n\n"
        await asyncio.sleep(interval_s)
        quiet_s += interval_s
