"""Open streams and downloads of callers: each ends soon after its caller may not have it any more."""

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, cast

import sqlalchemy as sa
from fastapi import Request, Response
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from elastic.protocol.http_server import CONNECTION, ServedConnection
from elastic.server.permissions import Action
from elastic.server.problems import ApiProblem
from elastic.server.store import Store, StoreUnavailable
from elastic.system.isolation import IsolatedLoop, LoopFaults

LOOK_S = 0.4
"""How often it is looked whether streams may go on."""


class _Claim(NamedTuple):
    """What streams are of: who asks, by the digest of its credentials, for what, in which project."""

    credentials: bytes
    action: Action
    project: str


Admits = Callable[[sa.Connection, Request, Action, str], bool]
"""Says whether a request's caller may do this in this project now."""


class EventStreamResponse(StreamingResponse):
    """Server-sent events. What is yielded goes past all that is between the application and the socket: many streams
    wait for the same."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes]) -> None:
        super().__init__(events, headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        self._connection: ServedConnection | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._connection = scope.get("extensions", {}).get(CONNECTION)
        await super().__call__(scope, receive, send)

    async def stream_response(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        connection = self._connection
        async for events in self.body_iterator:
            if connection is None or not connection.chunked:
                await send({"type": "http.response.body", "body": events, "more_body": True})
            elif events:
                await connection.write_chunk(cast(bytes, events))
        await send({"type": "http.response.body", "body": b""})


class _WatchedResponse(Response):
    """Sends `whole` for as long as its caller may have it: a stream ends then, a download is cut off."""

    def __init__(self, whole: Response, watched: Callable[[asyncio.Timeout], AbstractContextManager[None]]) -> None:
        super().__init__()
        self._whole, self._watched = whole, watched

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.timeout(None)
        try:
            async with sending:
                with self._watched(sending):
                    await self._whole(scope, receive, send)
        except TimeoutError:
            if not sending.expired():
                raise
            if isinstance(self._whole, StreamingResponse):
                await send({"type": "http.response.body", "body": b""})


class OpenStreams:
    """Looks again and again whether the callers of open streams may still have them: once for all streams of a caller.

    While the database does not answer, streams go on.
    """

    def __init__(self, store: Store, admits: Admits, faults: LoopFaults, look_s: float = LOOK_S) -> None:
        self._store, self._admits, self._look_s = store, admits, look_s
        self._isolated = IsolatedLoop("streams", faults, outages=(StoreUnavailable,))
        self._open: dict[_Claim, tuple[Request, set[asyncio.Timeout]]] = {}
        self._looking: asyncio.Task[None] | None = None
        self._endless: set[asyncio.Timeout] = set()
        """Streams, which do not end by themselves as downloads do."""

    async def end(self) -> None:
        """End all streams: their server stops. Their callers resume them at the next one."""
        for sending in self._endless:
            sending.reschedule(0.0)

    def while_admitted(
        self, request: Request, credentials: str, action: Action, project: str, whole: Response
    ) -> Response:
        """Return the response `whole`, which ends once the caller may not have it any more."""
        claim = _Claim(hashlib.sha256(credentials.encode()).digest(), action, project)
        endless = isinstance(whole, StreamingResponse)
        return _WatchedResponse(whole, lambda sending: self._watched(claim, request, sending, endless))

    @contextlib.contextmanager
    def _watched(self, claim: _Claim, request: Request, sending: asyncio.Timeout, endless: bool) -> Iterator[None]:
        _, open_now = self._open.setdefault(claim, (request, set()))
        open_now.add(sending)
        if endless:
            self._endless.add(sending)
        if self._looking is None:
            self._looking = asyncio.create_task(self._isolated.repeat(self._look, self._look_s), name="open streams")
        try:
            yield
        finally:
            open_now.discard(sending)
            self._endless.discard(sending)
            if not open_now and self._open.get(claim, (None, None))[1] is open_now:
                del self._open[claim]
            if not self._open and self._looking is not None:
                self._looking.cancel()
                self._looking = None

    async def _look(self) -> None:
        for claim in await asyncio.to_thread(self._no_more, list(self._open.items())):
            _, lost = self._open.pop(claim, (None, ()))
            for sending in lost:
                sending.reschedule(0.0)

    def _no_more(self, open_now: Sequence[tuple[_Claim, tuple[Request, object]]]) -> list[_Claim]:
        lost: list[_Claim] = []
        with self._store.reading() as connection:
            for claim, (request, _) in open_now:
                item = f"{claim.credentials.hex()[:16]}: {claim.action} in {claim.project}"
                if self._isolated.wait_s(item):
                    continue
                with self._isolated.attempt(item):
                    try:
                        admitted = self._admits(connection, request, claim.action, claim.project)
                    except ApiProblem:
                        admitted = False
                    if not admitted:
                        lost.append(claim)
        return lost
