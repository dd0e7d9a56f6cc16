"""Which routes each door opens, and the application that serves them."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from elastic.front.calls import ClientLeft, ClientReply
from elastic.front.doors import sglang, vllm
from elastic.front.doors.access import DoorAccess
from elastic.front.doors.base import DoorRefused, ServedRun
from elastic.front.doors.calls import DoorCall, DoorRoute, adapter_refused, refusal, result_refused
from elastic.front.doors.refused import REFUSED, ShutRoute
from elastic.front.doors.roots import WeightsRoots
from elastic.front.readers import READ_HERE_BYTES
from elastic.protocol.metrics import CONTENT_TYPE
from elastic.protocol.openai import answers, bodies
from elastic.protocol.openai.errors import JSON_TYPE, FrontError

_GENERATE = DoorRoute("POST", "/inference/v1/generate", vllm.generate, control=False)
_COMPLETE = DoorRoute("POST", "/v1/completions", vllm.complete, control=False)
_PAUSE = (
    DoorRoute("POST", "/pause", vllm.pause),
    DoorRoute("POST", "/resume", vllm.resume),
    DoorRoute("GET", "/is_paused", vllm.is_paused),
)
_UPDATE = DoorRoute("POST", "/update_weights", vllm.update_weights)
_WORLD_SIZE = DoorRoute("GET", "/get_world_size", vllm.get_world_size, control=False)
_SERVER_INFO = DoorRoute("GET", "/server_info", sglang.server_info, control=False)
_LOAD_AT_ROOT = DoorRoute("POST", "/load_lora_adapter", vllm.load_adapter, adapter_refused)
_LOAD = DoorRoute("POST", "/v1/load_lora_adapter", vllm.load_adapter, adapter_refused)
_UNLOAD = DoorRoute("POST", "/v1/unload_lora_adapter", vllm.unload_adapter, adapter_refused)
_SGLANG = (
    DoorRoute("POST", "/generate", sglang.generate, control=False),
    DoorRoute("POST", "/pause_generation", sglang.pause, result_refused),
    DoorRoute("POST", "/update_weights_from_disk", sglang.update_weights, result_refused),
    DoorRoute("POST", "/continue_generation", sglang.resume, result_refused),
)

DOORS: Mapping[str, tuple[DoorRoute, ...]] = {
    "prime-rl": (_GENERATE, *_PAUSE, _UPDATE, _LOAD_AT_ROOT, _UNLOAD),
    "trl": (_COMPLETE, *_PAUSE, _UPDATE, _SERVER_INFO, _WORLD_SIZE),
    "slime": (
        *_SGLANG,
        _SERVER_INFO,
        DoorRoute("GET", "/get_server_info", sglang.server_info, control=False),
        DoorRoute("GET", "/health_generate", sglang.healthy, control=False),
        DoorRoute("GET", "/workers", sglang.workers, control=False),
        DoorRoute("POST", "/workers", sglang.add_worker),
        DoorRoute("DELETE", "/workers/{id}", sglang.remove_worker),
        DoorRoute("POST", "/abort_request", sglang.abort),
        DoorRoute("GET", "/v1/loads", sglang.loads, control=False),
        DoorRoute("GET", "/flush_cache", sglang.flush_cache),
        DoorRoute("GET", "/get_weight_version", sglang.weight_version, control=False),
    ),
    "areal": (
        *_SGLANG,
        _COMPLETE,
        _LOAD_AT_ROOT,
        _LOAD,
        DoorRoute("POST", "/areal_pause_generation", vllm.areal_pause, result_refused),
        DoorRoute("POST", "/areal_update_weights", vllm.areal_update, result_refused),
        DoorRoute("POST", "/areal_continue_generation", vllm.areal_resume, result_refused),
    ),
    "skyrl": (
        _GENERATE,
        *_PAUSE,
        DoorRoute("POST", "/skyrl/v1/load_lora_adapter", vllm.load_adapter, adapter_refused),
        _UNLOAD,
        DoorRoute("POST", "/reset_prefix_cache", vllm.reset_prefix_cache),
        _WORLD_SIZE,
        DoorRoute("POST", "/detokenize", vllm.detokenize, control=False),
        DoorRoute("POST", "/finish_session", vllm.finish_session, control=False),
    ),
}
"""The routes of each door, by its peer's name. Two doors that open a route open it to the same answers."""
NEED_PLAIN = ("slime", "areal")
"""The doors of peers that speak neither TLS nor send a key."""


@dataclass
class TrainerDoors:
    """The doors that a front opens onto a run, to those who have its keys or come from a network that needs none.

    `alive` says whether the run is there, `metrics` are its metrics in Prometheus' text format, and `decode` makes text
    of token ids. `calls` are those in work.
    """

    run: ServedRun
    roots: WeightsRoots
    access: DoorAccess
    alive: Callable[[], bool]
    metrics: Callable[[], Awaitable[str]]
    decode: Callable[[list[int]], Awaitable[str]]
    opened: Sequence[str] = tuple(DOORS)
    calls: set[asyncio.Task[Any]] = field(default_factory=set)

    def routes(self) -> list[BaseRoute]:
        """The routes of an application that has `elastic.front.errors.ERROR_SHAPES`, to stand before its own."""
        common = (
            DoorRoute("GET", "/v1/models", _models, control=False),
            DoorRoute("GET", "/metrics", self._metrics, control=False),
        )
        opened = [*common, *REFUSED, *(route for name in self.opened for route in DOORS[name])]
        shut = [_shut(route) for routes in DOORS.values() for route in routes]
        by_path = {(route.method, route.path): route for route in (*shut, *opened)}
        served = [Route(route.path, _Endpoint(self, route), methods=[route.method]) for route in by_path.values()]
        return [Route("/health", self._health), *served]

    async def _health(self, _: Request) -> Response:
        return Response(status_code=200 if self.alive() else 503)

    async def _metrics(self, _: DoorCall) -> Response:
        return Response(await self.metrics(), media_type=CONTENT_TYPE)


async def _models(call: DoorCall) -> Response:
    """The policy first, by the name that peers look for; then the adapters that were offered."""
    facts, status = call.run.model, await call.run.status()
    names = list(dict.fromkeys((facts.name, *status.adapters)))
    return Response(answers.models(names, facts.max_model_len, facts.created_s), media_type=JSON_TYPE)


def _shut(route: DoorRoute) -> DoorRoute:
    """The route where no door is open that has it."""
    doors = ", ".join(name for name, routes in DOORS.items() if route in routes)
    said = f"{route.method} {route.path} is of a door that is shut; open it with --doors ({doors})"
    return route._replace(answer=ShutRoute(said, 404))


class _Endpoint:
    """The application for one route."""

    def __init__(self, doors: TrainerDoors, route: DoorRoute) -> None:
        self._doors = doors
        self._route = route

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        doors, route = self._doors, self._route
        request = Request(scope, receive)
        reply = ClientReply(scope, receive, send)
        task = asyncio.current_task()
        assert task is not None
        doors.calls.add(task)
        try:
            address = request.client.host if request.client else ""
            doors.access.check(request.headers, address, control=route.control)
            with ExitStack() as answering:
                call = await self._call(request, answering)
                async with reply.attended():
                    answer = await route.answer(call)
                await answer(scope, receive, send)
                if reply.gone:
                    raise ClientLeft
            return
        except ClientLeft:
            return
        except DoorRefused as refused:
            answer = route.refuse(refusal(refused))
        except FrontError as error:
            answer = route.refuse(error)
        except asyncio.CancelledError:
            # A caller that waits for the answer of a front that ends asks another one.
            await reply.tear()
            return
        finally:
            doors.calls.discard(task)
        await answer(scope, receive, send)

    async def _call(self, request: Request, answering: ExitStack) -> DoorCall:
        doors = self._doors
        own_url = f"{request.url.scheme}://{request.headers.get('host', '')}"
        body = await _fields(request) if self._route.method == "POST" else {}
        query, headers = request.query_params, request.headers
        return DoorCall(doors.run, doors.roots, doors.decode, body, query, headers, own_url, answering)


async def _fields(request: Request) -> Mapping[str, Any]:
    """The fields of a body, which may be empty. A large one is read on a thread, while others go on."""
    body = await request.body()
    if not body:
        return {}
    if len(body) <= READ_HERE_BYTES:
        return bodies.parsed(body)
    return await asyncio.to_thread(bodies.parsed, body)
