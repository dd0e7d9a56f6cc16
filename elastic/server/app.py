"""The application: routes, problems, the limits on what a request may cost, and a request's id in every log line."""

import contextlib
import importlib.metadata
import re
import time
from collections.abc import AsyncIterator, Callable

import structlog
from fastapi import FastAPI
from fastapi.responses import Response
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from elastic.http_server import BodyLimits, HostCheck
from elastic.server import ids, openapi, problems, routes
from elastic.server.feeds import Feeds
from elastic.server.oidc import IdentityProvider
from elastic.server.problems import MEDIA_TYPE
from elastic.server.settings import ServerSettings
from elastic.server.state import ServerState
from elastic.server.store import Store, StoreUnavailable

log = structlog.get_logger(__name__)

REQUEST_ID = "x-request-id"
_FILE_OF_UPLOAD = re.compile(r"/v1/uploads/[^/]+/files/[^/]+")


def create_app(
    store: Store,
    settings: ServerSettings,
    wake: Callable[[], None] = lambda: None,
    runner_lags: Callable[[], list[str]] = list,
) -> FastAPI:
    """The control API over a store. `runner_lags` says what keeps the runner from its work."""

    def ready() -> list[str]:
        try:
            with store.reading() as connection:
                connection.exec_driver_sql("SELECT 1")
        except StoreUnavailable as error:
            return [f"the database: {error}"]
        return runner_lags()

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield

    app = FastAPI(
        title="Elastic",
        version=importlib.metadata.version("elastic-rl"),
        lifespan=lifespan,
        redirect_slashes=False,
        docs_url=None,
        redoc_url=None,
        separate_input_output_schemas=False,
    )
    provider = None if settings.oidc is None else IdentityProvider(settings.oidc)
    app.state.server = ServerState(store, settings, Feeds(settings.feed_interval_s), wake, provider, ready)
    routes.include(app)
    problems.install(app)
    openapi.install(app)
    app.add_middleware(BodyLimits, bytes_max=settings.body_bytes_max, bytes_max_of=_upload_limit(settings))
    app.add_middleware(HostCheck, names=settings.host_names, refuse=_misdirected)
    app.add_middleware(RequestLog)
    return app


def _upload_limit(settings: ServerSettings) -> Callable[[str, str], int | None]:
    """Files of uploads go to disk as they come, and may be as large as their project's room."""

    def bytes_max(method: str, path: str) -> int | None:
        return settings.project_uploads_bytes_max if method == "PUT" and _FILE_OF_UPLOAD.fullmatch(path) else None

    return bytes_max


def _misdirected(_: int, detail: str) -> Response:
    kind = problems.TYPES["misdirected"]
    body = {
        "type": "/problems/misdirected",
        "title": kind.title,
        "status": kind.status,
        "detail": detail,
        "instance": "",
    }
    return problems.JSONResponse(body, kind.status, media_type=MEDIA_TYPE)


class RequestLog:
    """ASGI middleware: gives every request an id, and logs how it went. What it fails at is told as a problem."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = ids.new_id(ids.REQUEST)
        scope.setdefault("state", {})["request_id"] = request_id
        began_s, status = time.monotonic(), 0

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers[REQUEST_ID] = request_id
                headers.setdefault("x-content-type-options", "nosniff")
                headers.setdefault("cache-control", "no-store")
            await send(message)

        try:
            await self._app(scope, receive, sending)
        except Exception:
            log.exception("request failed", request=request_id, method=scope["method"], path=scope["path"])
            if status:
                raise
            kind = problems.TYPES["internal"]
            body = {
                "type": "/problems/internal",
                "title": kind.title,
                "status": 500,
                "detail": "the server failed",
                "instance": scope["path"],
                "request_id": request_id,
            }
            await problems.JSONResponse(body, 500, media_type=MEDIA_TYPE)(scope, receive, sending)
        finally:
            taken_ms = round(1e3 * (time.monotonic() - began_s), 1)
            log.info(
                "request", request=request_id, method=scope["method"], path=scope["path"], status=status, ms=taken_ms
            )
