"""The relay of a run's orchestrator, with faults: it answers late, with errors, in part, or with wrong bytes."""

from collections.abc import Callable
from enum import StrEnum
from random import Random
from typing import Any

import httpx
import msgspec

from elastic.core.types import NS_PER_S, Nanoseconds
from elastic.system.host import here
from elastic.weights.relay import REQUESTS
from elastic.weights.rights import RelayRights

LATE_MAX_S = 2.0
SILENCE_S = 10.0
"""Time after which `HttpRelay` gives up an answer."""
AWAY_MAX_S = 9.0
"""Longest sequence of troubles. With the last silence it ends before any client gives up."""


class RelayTrouble(StrEnum):
    REFUSES = "refuses"
    FAILS = "fails"
    SILENT = "silent"
    LATE = "late"
    BREAKS_OFF = "breaks off"
    """The connection breaks within the answer; the request is carried out."""
    CUTS_SHORT = "cuts short"
    """A blob is cut short without an error."""
    GARBLES = "garbles"
    """A byte of a blob is wrong."""


OF_THE_LINK = tuple(RelayTrouble)[:5]
OF_THE_BYTES = tuple(RelayTrouble)[5:]
"""Troubles that only workers meet, since the publisher reads back nothing that it relies on."""


class RelayStore:
    """Blobs in memory. `url` is the relay's address, empty while no process serves it; `rights` are the server's.

    `troubles` affect every other request until their time is over. `asked` is told of every request.
    """

    def __init__(self, chance: Random, now_ns: Callable[[], Nanoseconds]) -> None:
        self.url = ""
        self.rights = RelayRights("nobody's")
        self.chance = chance
        self.asked: Callable[[str], None] = lambda _: None
        self._blobs: dict[str, bytes] = {}
        self._now_ns = now_ns
        self._troubles: dict[RelayTrouble, Nanoseconds] = {}
        self._away_since_ns = self._away_until_ns = 0

    def ails(self, trouble: RelayTrouble, for_s: float) -> None:
        until_ns = self._now_ns() + round(for_s * NS_PER_S)
        if trouble in OF_THE_LINK:
            if self._now_ns() > self._away_until_ns + SILENCE_S * NS_PER_S:
                self._away_since_ns = self._now_ns()
            until_ns = min(until_ns, self._away_since_ns + round(AWAY_MAX_S * NS_PER_S))
            self._away_until_ns = max(until_ns, self._away_until_ns)
        self._troubles[trouble] = max(until_ns, self._troubles.get(trouble, 0))

    def transport(self, url: str) -> httpx.BaseTransport:
        """Return what carries a client's requests to this store."""
        return _ModelTransport(self, url)

    def trouble(self) -> RelayTrouble | None:
        """Return the trouble of the next request, if any."""
        there = [trouble for trouble, until_ns in self._troubles.items() if until_ns > self._now_ns()]
        return self.chance.choice(there) if there and self.chance.random() < 1 / 2 else None

    def answer(self, method: str, request: httpx.Request, trouble: RelayTrouble | None) -> tuple[int, bytes]:
        """Answer a request as `elastic.weights.server` does."""
        bearer = self.rights.bearer(request.headers.get("authorization", "").removeprefix("Bearer "))
        if bearer is None:
            return 401, b"wrong or missing bearer token"
        path = request.url.path
        if path == "/blobs":
            prefix = request.url.params.get("prefix", "")
            return 200, msgspec.json.encode(sorted(key for key in self._blobs if key.startswith(prefix)))
        key = path.removeprefix("/blobs/")
        match method:
            case "GET":
                return self._get(key, request.headers["range"], None if bearer.owner else trouble)
            case "PUT" if bearer.owner or key.startswith(REQUESTS):
                content = request.read()
                same = self._blobs.setdefault(key, content) == content
                return (204, b"") if same else (409, b"it holds other content")
            case "DELETE" if bearer.owner:
                self._blobs.pop(key, None)
                return 204, b""
            case _:
                return 403, b"not with a worker's token"

    def _get(self, key: str, wanted: str, trouble: RelayTrouble | None) -> tuple[int, bytes]:
        blob = self._blobs.get(key)
        if blob is None:
            return 404, b"no such blob"
        begin, _, last = wanted.removeprefix("bytes=").partition("-")
        found = blob[int(begin) : int(last) + 1 if last else None]
        if not found:
            return 416, b"nothing there"
        if trouble is RelayTrouble.CUTS_SHORT:
            found = found[: self.chance.randrange(1, len(found) + 1)]
        elif trouble is RelayTrouble.GARBLES:
            at = self.chance.randrange(len(found))
            found = found[:at] + bytes([found[at] ^ 1 << self.chance.randrange(8)]) + found[at + 1 :]
        return 206, found


class _ModelTransport(httpx.BaseTransport):
    """Carries a client's requests to the store, in the time of the requesting thread."""

    def __init__(self, store: RelayStore, url: str) -> None:
        self._store = store
        self._url = url

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        store, chance = self._store, self._store.chance
        store.asked(self._url)
        here().sleep(chance.uniform(0.0005, 0.004))
        trouble = store.trouble()
        if store.url != self._url or trouble is RelayTrouble.REFUSES:
            raise httpx.ConnectError("[Errno 111] Connection refused", request=request)
        if trouble is RelayTrouble.FAILS:
            return httpx.Response(chance.choice((429, 500, 502, 503, 504)), content=b"not now")
        if trouble is RelayTrouble.SILENT:
            here().sleep(SILENCE_S)
            raise httpx.ReadTimeout("timed out", request=request)
        if trouble is RelayTrouble.LATE:
            here().sleep(chance.uniform(0, LATE_MAX_S))
        status, content = store.answer(request.method, request, trouble)
        here().sleep(chance.uniform(0.0002, 0.002))
        if trouble is RelayTrouble.BREAKS_OFF:
            return httpx.Response(status, stream=_BrokenOff(content[: chance.randint(0, len(content))]))
        return httpx.Response(status, content=content)


class _BrokenOff(httpx.SyncByteStream):
    def __init__(self, content: bytes) -> None:
        self._content = content

    def __iter__(self) -> Any:
        yield self._content
        raise httpx.RemoteProtocolError("peer closed connection without sending complete message body")
