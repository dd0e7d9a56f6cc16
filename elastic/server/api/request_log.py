"""Gives every request an id, a log line and a place in the histograms; turns failures into problems.

- The id is in the answer's `x-request-id`, in a problem's `request_id`, in the audit log, and in every log line written
  meanwhile, together with the run of the request.
- Histograms are by method, route and status class. Routes are the API's own (`/v1/runs/{run}`), so their number does
  not depend on the requests.
"""

import threading
import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import structlog
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from elastic.server import ids
from elastic.server.problems import ApiProblem, early_response

log = structlog.get_logger(__name__)

REQUEST_ID = "x-request-id"
BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
OTHER, UNMATCHED = "other", "unmatched"


class RequestKind(NamedTuple):
    """The labels of a histogram."""

    method: str
    route: str
    status: str
    """The status class: `2xx` and so on."""


class _Histogram:
    def __init__(self) -> None:
        self.counts = [0] * (len(BUCKETS_S) + 1)
        self.sum_s = 0.0


class RequestFigures:
    """Durations of requests. A stream counts until it begins, any other request until it is answered."""

    def __init__(self) -> None:
        self._histograms: dict[RequestKind, _Histogram] = {}
        self._lock = threading.Lock()
        self.under_way = 0
        self.streams = 0

    def note(self, kind: RequestKind, taken_s: float) -> None:
        with self._lock:
            histogram = self._histograms.setdefault(kind, _Histogram())
            histogram.counts[bisect_left(BUCKETS_S, taken_s)] += 1
            histogram.sum_s += taken_s

    def exposition(self) -> Iterator[str]:
        """Yield the lines of Prometheus' text format."""
        with self._lock:
            copied = [(kind, list(one.counts), one.sum_s) for kind, one in sorted(self._histograms.items())]
        name = "elastic_http_request_duration_seconds"
        yield f"# HELP {name} time until requests were answered, or their streams began"
        yield f"# TYPE {name} histogram"
        for kind, counts, sum_s in copied:
            labels = f'method="{kind.method}",route="{kind.route}",status="{kind.status}"'
            total = 0
            for bound, count in zip((*(f"{one:g}" for one in BUCKETS_S), "+Inf"), counts, strict=True):
                total += count
                yield f'{name}_bucket{{{labels},le="{bound}"}} {total}'
            yield f"{name}_sum{{{labels}}} {sum_s:.6f}"
            yield f"{name}_count{{{labels}}} {total}"
        for gauge, words, value in (
            ("elastic_http_requests_under_way", "requests that are being answered, streams included", self.under_way),
            ("elastic_http_streams_open", "streams that somebody follows", self.streams),
        ):
            yield f"# HELP {gauge} {words}"
            yield f"# TYPE {gauge} gauge"
            yield f"{gauge} {value}"


class RequestLog:
    """ASGI middleware: see the module."""

    def __init__(self, app: ASGIApp, figures: RequestFigures) -> None:
        self._app = app
        self._figures = figures

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = ids.new_id(ids.REQUEST)
        scope.setdefault("state", {})["request_id"] = request_id
        answer = _SentAnswer(request_id, send, self._figures)
        self._figures.under_way += 1
        with structlog.contextvars.bound_contextvars(request=request_id):
            try:
                await self._app(scope, receive, answer.send)
            except Exception:
                log.exception("request failed", method=scope["method"], path=scope["path"], **_run_of(scope))
                if answer.status:
                    raise
                failed = ApiProblem("internal", "the server failed")
                await early_response(failed, scope["path"], request_id)(scope, receive, answer.send)
            finally:
                self._figures.under_way -= 1
                self._figures.streams -= answer.streams
                taken_s = time.monotonic() - answer.began_s
                kind = _kind(scope, answer.status)
                self._figures.note(kind, answer.waited_s if answer.streams else taken_s)
                log.info(
                    "request",
                    method=scope["method"],
                    path=scope["path"],
                    status=answer.status,
                    ms=round(1e3 * taken_s, 1),
                    **_run_of(scope),
                )


class _SentAnswer:
    """The part of an answer that was sent."""

    def __init__(self, request_id: str, send: Send, figures: RequestFigures) -> None:
        self.began_s = time.monotonic()
        self.status = 0
        self.streams = False
        self.waited_s = 0.0
        """Until its head was sent."""
        self._request_id = request_id
        self._send = send
        self._figures = figures

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.waited_s = time.monotonic() - self.began_s
            headers = MutableHeaders(scope=message)
            headers[REQUEST_ID] = self._request_id
            headers.setdefault("x-content-type-options", "nosniff")
            headers.setdefault("cache-control", "no-store")
            self.streams = headers.get("content-type", "").startswith("text/event-stream")
            self._figures.streams += self.streams
        await self._send(message)


def _kind(scope: Scope, status: int) -> RequestKind:
    method: str = scope["method"]
    route: Any = scope.get("route")
    path: str = getattr(route, "path_format", UNMATCHED)
    # A client that went away has no status.
    return RequestKind(method if method in METHODS else OTHER, path, f"{status // 100}xx" if status else "none")


def _run_of(scope: Scope) -> Mapping[str, str]:
    """Return the run in the request's path."""
    run = scope.get("path_params", {}).get("run")
    return {"run": run} if isinstance(run, str) else {}
