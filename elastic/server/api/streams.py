"""Open streams and downloads of callers: each ends soon after its caller may not have it any more."""

import asyncio
import contextlib
import hashlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager
from typing import NamedTuple

import sqlalchemy as sa
import structlog
from fastapi import Request, Response
from starlette.types import Receive, Scope, Send

from elastic.server.permissions import Action
from elastic.server.problems import ApiProblem
from elastic.server.store import Store, StoreUnavailable
from elastic.system.isolation import IsolatedLoop, LoopFaults

log = structlog.get_logger(__name__)

LOOK_S = 0.4
"""How often it is looked whether streams may go on."""


class _Claim(NamedTuple):
    """What streams are of: who asks, by the digest of its credentials, for what, in which project."""

    credentials: bytes
    action: Action
    project: str


Admits = Callable[[sa.Connection, Request, Action, str], bool]
"""Says whether a request's caller may do this in this project now."""


def _claimed(credentials: str, action: Action, project: str) -> _Claim:
    return _Claim(hashlib.sha256(credentials.encode()).digest(), action, project)


class WatchedDownload(Response):
    """A response that is sent only while a watch holds: the connection is closed where it does not."""

    def __init__(self, whole: Response, watched: Callable[[], AbstractContextManager[asyncio.Event]]) -> None:
        super().__init__()
        self._whole, self._watched = whole, watched

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._watched() as lost:
            losing = asyncio.ensure_future(lost.wait())
            sending = asyncio.ensure_future(self._whole(scope, receive, send))
            try:
                await asyncio.wait((losing, sending), return_when=asyncio.FIRST_COMPLETED)
            finally:
                losing.cancel()
                if not sending.done():
                    sending.cancel()
                await asyncio.wait({sending})
            if not sending.cancelled():
                sending.result()


class OpenStreams:
    """Looks again and again whether the callers of open streams may still have them: once for all streams of a caller.

    While the database does not answer, streams go on.
    """

    def __init__(self, store: Store, admits: Admits, faults: LoopFaults, look_s: float = LOOK_S) -> None:
        self._store, self._admits, self._look_s = store, admits, look_s
        self._isolated = IsolatedLoop("streams", faults, passes=(StoreUnavailable,))
        self._open: Counter[_Claim] = Counter()
        self._requests: dict[_Claim, Request] = {}
        self._lost: dict[_Claim, asyncio.Event] = {}
        self._looking: asyncio.Task[None] | None = None

    async def while_admitted(
        self, request: Request, credentials: str, action: Action, project: str, body: AsyncIterator[bytes]
    ) -> AsyncIterator[bytes]:
        """Yield what `body` does, until the caller may not have it any more."""
        with self._watched(_claimed(credentials, action, project), request) as lost:
            losing = asyncio.ensure_future(lost.wait())
            following: asyncio.Future[bytes] | None = None
            try:
                while not lost.is_set():
                    following = asyncio.ensure_future(anext(body))
                    await asyncio.wait((losing, following), return_when=asyncio.FIRST_COMPLETED)
                    if not following.done():
                        return
                    try:
                        found = following.result()
                    except StopAsyncIteration:
                        return
                    yield found
            finally:
                losing.cancel()
                if following is not None and not following.done():
                    following.cancel()
                    await asyncio.wait({following})
                with contextlib.suppress(RuntimeError):
                    await body.aclose()  # type: ignore[attr-defined]

    def download(
        self, request: Request, credentials: str, action: Action, project: str, whole: Response
    ) -> "WatchedDownload":
        """Return the response `whole`, which is cut off once the caller may not have it any more."""
        return WatchedDownload(whole, lambda: self._watched(_claimed(credentials, action, project), request))

    @contextlib.contextmanager
    def _watched(self, claim: _Claim, request: Request) -> Iterator[asyncio.Event]:
        self._open[claim] += 1
        self._requests.setdefault(claim, request)
        lost = self._lost.setdefault(claim, asyncio.Event())
        if self._looking is None:
            self._looking = asyncio.create_task(self._look(), name="open streams")
        try:
            yield lost
        finally:
            self._open[claim] -= 1
            if not self._open[claim]:
                for kept in (self._open, self._requests, self._lost):
                    kept.pop(claim, None)
            if not self._open and self._looking is not None:
                self._looking.cancel()
                self._looking = None

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(max(self._look_s, self._isolated.wait_s()))
            try:
                with self._isolated.attempt():
                    for claim in await asyncio.to_thread(self._no_more, dict(self._requests)):
                        if claim in self._lost:
                            self._lost.pop(claim).set()
                            self._requests.pop(claim, None)
            except StoreUnavailable as error:
                log.warning("the database does not answer; streams go on", error=str(error))

    def _no_more(self, requests: dict[_Claim, Request]) -> list[_Claim]:
        lost: list[_Claim] = []
        with self._store.reading() as connection:
            for claim, request in requests.items():
                try:
                    admitted = self._admits(connection, request, claim.action, claim.project)
                except ApiProblem:
                    admitted = False
                if not admitted:
                    lost.append(claim)
        return lost
