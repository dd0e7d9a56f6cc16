"""The application: routes, problems, and the limits on what a request may cost."""

import contextlib
import importlib.metadata
import re
from collections.abc import AsyncIterator, Callable

import sqlalchemy as sa
from fastapi import FastAPI
from fastapi.responses import Response

from elastic.protocol.http_server import BodyLimits, CallerLimits, HostCheck, PeerLimits
from elastic.server import problems
from elastic.server.api import openapi, routes
from elastic.server.api.auth import COOKIE, admits
from elastic.server.api.request_log import RequestFigures, RequestLog
from elastic.server.api.run_changes import RunChanges
from elastic.server.api.state import ServerState
from elastic.server.api.streams import OpenStreams
from elastic.server.history.feeds import Feeds
from elastic.server.history.looks import SharedLooks
from elastic.server.identity.oidc import IdentityProvider
from elastic.server.problems import ApiProblem
from elastic.server.settings import ServerSettings
from elastic.server.store import Store, StoreUnavailable
from elastic.server.store.tables import server as server_table
from elastic.system.isolation import LoopFaults

CONNECTIONS_MAX = 512
_FILE_OF_UPLOAD = re.compile(r"/v1/uploads/[^/]+/files/[^/]+")


def create_app(
    store: Store,
    settings: ServerSettings,
    wake: Callable[[], None] = lambda: None,
    runner_lags: Callable[[], list[str]] = list,
    faults: LoopFaults | None = None,
) -> FastAPI:
    """The control API over a store. `runner_lags` says what keeps the runner from its work; `faults` are counted by the
    loops beside it."""

    def ready() -> list[str]:
        try:
            with store.reading() as connection:
                # SQLite makes an empty database where there is none: that one answers, too, but has no tables.
                connection.execute(sa.select(server_table.c.key).limit(1)).all()
        except StoreUnavailable as error:
            return [f"the database: {error}"]
        return runner_lags()

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield

    app = FastAPI(
        title="Elastic",
        version=importlib.metadata.version("elastic-rl"),
        routes=routes.all_routes(),
        lifespan=lifespan,
        redirect_slashes=False,
        docs_url=None,
        redoc_url=None,
        separate_input_output_schemas=False,
    )
    requests = RequestFigures()
    provider = None if settings.oidc is None else IdentityProvider(settings.oidc)
    faults = faults or LoopFaults()
    streams = OpenStreams(store, admits, faults)
    feeds, looks = Feeds(settings.feed_interval_s, faults), SharedLooks(settings.feed_interval_s)
    changes = RunChanges(store)
    app.state.server = ServerState(
        store, settings, feeds, looks, streams, changes, wake, provider, ready, requests, faults
    )
    problems.install(app)
    openapi.install(app)
    app.add_middleware(BodyLimits, bytes_max=settings.body_bytes_max, bytes_max_of=_upload_limit(settings))
    limits = peer_limits(settings)
    app.add_middleware(CallerLimits, refuse=_too_many, limits=limits, health=("/healthz", "/readyz"), cookie=COOKIE)
    app.add_middleware(HostCheck, names=settings.host_names, refuse=_misdirected)
    app.add_middleware(RequestLog, figures=requests)
    return app


def peer_limits(settings: ServerSettings) -> PeerLimits:
    """Return what one server's callers may hold."""
    return PeerLimits(connections_max=CONNECTIONS_MAX, proxies=settings.trusted_proxies)


def _upload_limit(settings: ServerSettings) -> Callable[[str, str], int | None]:
    """Files of uploads go to disk as they come, and may be as large as their project's room."""

    def bytes_max(method: str, path: str) -> int | None:
        return settings.project_uploads_bytes_max if method == "PUT" and _FILE_OF_UPLOAD.fullmatch(path) else None

    return bytes_max


def _too_many(_: int, detail: str) -> Response:
    return problems.early_response(ApiProblem("too-many-requests", detail))


def _misdirected(_: int, detail: str) -> Response:
    return problems.early_response(ApiProblem("misdirected", detail))
