"""All runs of a caller as one stream: each run whenever it changes."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request, Response

from elastic.server.api.auth import credentials_of
from elastic.server.api.routes.common import CallerDep, StateDep
from elastic.server.api.routes.events import After, Follow, LastEventId, stream_rules
from elastic.server.api.routes.model_route import ModelRoute
from elastic.server.api.run_changes import ChangedRun
from elastic.server.api.state import ServerState
from elastic.server.api.streams import EventStreamResponse
from elastic.server.permissions import Action
from elastic.server.store import StoreUnavailable

router = APIRouter(prefix="/v1/changes", tags=["streams"], route_class=ModelRoute)
_EXAMPLE = 'id: 5f0c-4712\nevent: run\ndata: {"id":"run_01JD3K5T7WQ8M2N4P6R8S0V2X4","phase":"running"}\n\n'
_RULES: dict[str, Any] = stream_rules(_EXAMPLE)


@router.get("", **_RULES)
async def changes(
    request: Request,
    caller: CallerDep,
    state: StateDep,
    last_event_id: LastEventId = None,
    after: After = None,
    follow: Follow = True,
) -> Response:
    """Stream runs as `GET /v1/runs` lists them, each whenever its phase or figures have changed.

    The stream begins with what changes from now on, or behind an id. A `begin` event comes first; where its data has
    `"anew": true` the id is not known any more, and the list is to be read once more. A run that was deleted is a
    `deleted` event.
    """
    body = _changes(state, caller.project, last_event_id or after or "", follow=follow)
    whole = EventStreamResponse(body)
    return state.streams.while_admitted(request, credentials_of(request), Action.RUNS_READ, caller.project or "", whole)


async def _changes(state: ServerState, project: str | None, begin: str, *, follow: bool) -> AsyncIterator[bytes]:
    found, interval_s, quiet_s = state.run_changes, state.settings.observe_s, 0.0
    await _look(state)
    known = found.number_of(begin)
    number = found.last if known is None else known
    anew = b"true" if begin and known is None else b"false"
    yield b'id: %s\nevent: begin\ndata: {"anew":%s}\n\n' % (found.id_of(number).encode(), anew)
    while True:
        number, told = found.behind(number, project)
        if told:
            quiet_s = 0.0
            yield b"".join(_as_sent(change, found.id_of(change.number)) for change in told)
        elif quiet_s >= state.settings.ping_s:
            quiet_s = 0.0
            yield b": ping\n\n"
        if not follow:
            return
        await asyncio.sleep(interval_s)
        quiet_s += interval_s
        await _look(state)


async def _look(state: ServerState) -> None:
    """While the store does not answer, nothing changes."""
    fresh_s = max(state.settings.feed_interval_s, state.settings.observe_s / 2)
    try:
        await state.looks.at("changes", state.run_changes.look, fresh_s=fresh_s)
    except StoreUnavailable:
        return


def _as_sent(change: ChangedRun, id_: str) -> bytes:
    kind, data = ("deleted", json.dumps({"id": change.id})) if change.told is None else ("run", change.told)
    return f"id: {id_}\nevent: {kind}\ndata: {data}\n\n".encode()
