"""A serving host: a process with a load of its own that lends what it does not need, and takes it back.

Control is by HTTP with a bearer token: `GET /load`, `POST /lend` and `POST /return` (see
`providers.serving_messages`). A worker runs inside the host's process, which has imported everything it needs
by then, so that lending takes no boot.
"""

import asyncio
import contextlib
import os
import secrets
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import msgspec
import structlog
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import traces
from elastic.config import ConfigError, ConfigProblem
from elastic.core.device_sharing import SharingPolicies
from elastic.engine.base import DeviceShare, RolloutEngine
from elastic.engine.coserving.front import ServingFront
from elastic.protocol import wire
from elastic.protocol.endpoint import Address
from elastic.protocol.http_server import (
    GRACEFUL_SHUTDOWN_S,
    BodyLimits,
    CallerLimits,
    HostCheck,
    PeerLimits,
    serving,
)
from elastic.protocol.openai.errors import ERROR_HANDLERS, openai_error
from elastic.protocol.sockets import listening_socket
from elastic.system.machine import raise_descriptor_limit
from elastic.system.processes import end_own_kin
from elastic.system.signals import TERMINATION, act_on
from elastic.worker.serving_device import ServingDevice
from providers.serving_load import ServingLoad
from providers.serving_messages import HOST_VARIABLE, HostSettings, LendOrder, LoadReport, ReturnOrder
from traces.serving import read_serving_trace, replay_requests

log = structlog.get_logger(__name__)


class HostShare(DeviceShare, Protocol):
    """A worker's part of a host's device, until it is reclaimed."""

    def build_engine(self, welcome: wire.Welcome) -> RolloutEngine:
        """The engine that the orchestrator asks for, on this part. Blocks."""
        ...

    def reclaim(self) -> None:
        """Everything must leave now."""
        ...

    def end(self) -> None:
        """Ends the worker's part of the device, even where its engine failed."""
        ...


class HostDevice(Protocol):
    """The device that a host lends parts of: modelled (`ServingDevice`) or real (`ExecutorDevice`)."""

    def report(self) -> LoadReport: ...

    def lend(self) -> HostShare: ...


StartAgent = Callable[[LendOrder, HostShare], Coroutine[Any, Any, None]]
"""Runs a worker with its part of the device until it is drained, fails, or is cancelled."""

OrderT = TypeVar("OrderT", LendOrder, ReturnOrder)

MAX_ORDER_BYTES = 16_384
END_TIMEOUT_S = 20.0
"""Longest time that an abandoned host takes to end, its worker included."""
LIMITS = PeerLimits(connections_max=512)


class HostError(Exception):
    """An order that cannot be carried out, with its HTTP status."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


@dataclass(slots=True)
class _Loan:
    order: LendOrder
    share: HostShare
    task: asyncio.Task[None]


class ServingHost:
    """A serving host. At most one worker at a time has a part of the device."""

    def __init__(self, settings: HostSettings, device: HostDevice, start_agent: StartAgent) -> None:
        self._settings = settings
        self._device = device
        self._start_agent = start_agent
        self._loan: _Loan | None = None
        self._ended = ("", "")
        self.heard_s = time.monotonic()
        """When a request with the right token came last (monotonic)."""

    def report(self) -> LoadReport:
        order = self._loan.order if self._loan else None
        return msgspec.structs.replace(
            self._device.report(),
            lent_run=order.run if order else "",
            lent_worker=order.worker if order else "",
            ended_worker=self._ended[0],
            ended_error=self._ended[1],
        )

    def lend(self, order: LendOrder) -> None:
        """Start the order's worker, unless it runs already. Raises `HostError` when the host is lent otherwise."""
        if self._loan is not None:
            if self._loan.order.worker == order.worker:
                return
            raise HostError(409, f"lent to run {self._loan.order.run} already")
        share = self._device.lend()
        task = asyncio.create_task(self._start_agent(order, share), name=f"worker {order.worker}")
        self._loan = _Loan(order, share, task)
        task.add_done_callback(self._agent_ended)

    async def take_back(self, worker: str) -> None:
        """End this worker, if the host is lent to it. Raises `HostError` when it does not go in time."""
        loan = self._loan
        if loan is None or loan.order.worker != worker:
            return
        loan.share.reclaim()
        await asyncio.wait({loan.task}, timeout=self._settings.return_grace_s)
        loan.task.cancel()
        _, left = await asyncio.wait({loan.task}, timeout=self._settings.return_timeout_s)
        if left:
            raise HostError(504, f"worker {worker} did not end within {self._settings.return_timeout_s:g} s")

    async def aclose(self) -> None:
        if self._loan is not None:
            await self.take_back(self._loan.order.worker)

    def _agent_ended(self, task: asyncio.Task[None]) -> None:
        assert self._loan is not None
        worker, error = self._loan.order.worker, None if task.cancelled() else task.exception()
        if error is not None:
            log.error("worker failed", worker=worker, exc_info=error)
        self._loan.share.end()
        self._loan = None
        self._ended = (worker, f"{type(error).__name__}: {error}" if error is not None else "")


def create_app(
    host: ServingHost, token: str, front: ServingFront | None = None, host_names: Sequence[str] = ()
) -> Starlette:
    """The host's control endpoint, beside its model's. It answers with `LoadReport`s, or `{"error": …}` and a status;
    errors outside of it are in OpenAI's shape. `host_names` are what clients may call the host, beside addresses.
    """

    def guarded(act: Callable[[Request], Awaitable[None]] | None) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            shown = request.headers.get("authorization", "")
            if not secrets.compare_digest(shown.encode(), f"Bearer {token}".encode()):
                return _json({"error": "the bearer token is missing or wrong"}, 401)
            host.heard_s = time.monotonic()
            try:
                if act is not None:
                    await act(request)
            except HostError as error:
                return _json({"error": str(error)}, error.status)
            return _json(host.report())

        return endpoint

    async def lend(request: Request) -> None:
        host.lend(await _order(request, LendOrder))

    async def take_back(request: Request) -> None:
        await host.take_back((await _order(request, ReturnOrder)).worker)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        await host.aclose()

    return Starlette(
        routes=[
            Route("/load", guarded(None), methods=["GET"]),
            Route("/lend", guarded(lend), methods=["POST"]),
            Route("/return", guarded(take_back), methods=["POST"]),
            *(front.routes() if front is not None else ()),
        ],
        middleware=[
            Middleware(CallerLimits, openai_error, LIMITS),
            Middleware(HostCheck, host_names, openai_error),
            Middleware(BodyLimits, MAX_ORDER_BYTES if front is None else front.body_bytes_max),
        ],
        exception_handlers=ERROR_HANDLERS,
        lifespan=lifespan,
    )


async def serve_host(settings: HostSettings, start_agent: StartAgent, sharing: SharingPolicies | None = None) -> None:
    """Serve until told to stop by a signal, or nobody has shown the token for `orchestrator_timeout_s`; a worker that
    still runs then is ended first. A real serving model, where the settings have one, shares its device by `sharing`.

    Raises `ConfigError` when the address cannot be listened on, or the serving model cannot be used.
    """
    trace = read_serving_trace(traces.find(settings.load.trace))
    requests = replay_requests(
        trace,
        start_s=settings.load.start_s,
        speed=settings.load.speed,
        share=settings.load.share,
        phase=settings.phase,
    )
    if settings.executor is None:
        await _serve(settings, ServingDevice(ServingLoad(requests, settings.device), settings.lending), start_agent)
        return
    from elastic.worker.serving_executor import open_device

    if sharing is None:
        raise ValueError("a real serving model needs the policies by which rollouts share its device")
    device = open_device(settings, settings.executor, sharing)
    async with device.running(requests):
        await _serve(settings, device, start_agent, device.front)


async def _serve(
    settings: HostSettings, device: HostDevice, start_agent: StartAgent, front: ServingFront | None = None
) -> None:
    host = ServingHost(settings, device, start_agent)
    app = create_app(host, settings.token.get_secret_value(), front, settings.host_names)
    listener = _listen(settings)
    raise_descriptor_limit()
    told = asyncio.Event()
    heed_no_more = act_on(TERMINATION, told.set)
    returns_s = settings.return_grace_s + settings.return_timeout_s
    try:
        async with serving(app, listener, LIMITS, returns_s + GRACEFUL_SHUTDOWN_S) as url:
            log.info("serving host ready", name=settings.name, url=url)
            await _unheard(host, settings.orchestrator_timeout_s, told)
    finally:
        heed_no_more()


async def _unheard(host: ServingHost, timeout_s: float | None, told: asyncio.Event) -> None:
    """Wait until nobody has spoken to the host for this long, or it is `told` to end."""
    while not told.is_set():
        left_s = None if timeout_s is None else host.heard_s + timeout_s - time.monotonic()
        if left_s is not None and left_s <= 0:
            log.warning("nobody has spoken to this host for too long; it ends", timeout_s=timeout_s)
            last_resort = threading.Timer(END_TIMEOUT_S, _leave)
            last_resort.daemon = True
            last_resort.start()
            return
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(told.wait(), left_s)


def _leave() -> None:
    """End this process and everything that it has started, such as a worker that ignored the request to end."""
    end_own_kin()
    os._exit(1)


def parse_settings(settings_json: str) -> HostSettings:
    """A host's settings from its environment. Raises `ConfigError`, which never shows the token."""
    if not settings_json:
        raise ConfigError(f"{HOST_VARIABLE}: not set; allowed: the host's settings as JSON")
    try:
        return HostSettings.model_validate_json(settings_json)
    except ValidationError as error:
        problems = error.errors(include_input=False, include_url=False)
        raise ConfigError(
            *(ConfigProblem(p["msg"], tuple(map(str, p["loc"])) or ("settings",), HOST_VARIABLE) for p in problems)
        ) from None


def _listen(settings: HostSettings) -> socket.socket:
    try:
        if settings.listen_fd is not None:
            os.set_inheritable(settings.listen_fd, False)
            return socket.socket(fileno=settings.listen_fd)
        return listening_socket(settings.address, settings.port)
    except OSError as error:
        where = (
            f"fd {settings.listen_fd}" if settings.listen_fd is not None else Address(settings.address, settings.port)
        )
        raise ConfigError(f"{HOST_VARIABLE}: cannot listen on {where}: {error.strerror}") from error


async def _order(request: Request, kind: type[OrderT]) -> OrderT:
    body = await request.body()
    if len(body) > MAX_ORDER_BYTES:
        raise HostError(413, f"an order has at most {MAX_ORDER_BYTES} bytes")
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise HostError(400, f"not a {kind.__name__}: {error}") from error


def _json(body: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")
