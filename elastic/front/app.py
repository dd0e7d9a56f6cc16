"""The routes of a front: answers in the shapes of OpenAI's API and of vLLM's, and trajectories for drivers.

Routes for agents are served at the root, below `/t/{trajectory or key}` and below `/sessions/{session}`, with and
without a slash at the end.
"""

import asyncio
import contextlib
import math
import secrets
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from elastic.core.ids import agent_id
from elastic.front.asked import Asked, CountCall, ServedModel
from elastic.front.calls import NO_HEADERS, CallTimes, ClientLeft, ClientReply, LiveCall, declined
from elastic.front.doors.doors import TrainerDoors
from elastic.front.errors import ERROR_SHAPES, REQUEST_ID
from elastic.front.keys import TRAJECTORY, NamedInPath, NamesInPaths, find_caller, named_in_path
from elastic.front.link import Answer, LinkLost, RunLink
from elastic.front.metrics import exposition
from elastic.front.openapi import description
from elastic.front.readers import READERS, idempotency_key, read_body, reader_of
from elastic.front.token_routes import TokenRoutes
from elastic.front.upstream import COUNT_TOKENS, EMBEDDINGS, Upstream, UpstreamCall
from elastic.protocol.front_messages import (
    AgentCaller,
    AskMetrics,
    BeginTrajectory,
    BindSession,
    Declined,
    EndTrajectory,
    FromFront,
    GiveReward,
    MetricsTold,
    ShowTrajectory,
    TrajectoryBegun,
    TrajectoryShown,
)
from elastic.protocol.http_server import BodyLimits
from elastic.protocol.metrics import CONTENT_TYPE
from elastic.protocol.openai import answers, bodies
from elastic.protocol.openai.bodies import EndRequest, RewardRequest, SessionRequest, TrajectoryRequest
from elastic.protocol.openai.errors import JSON_TYPE, FrontError, no_such_model
from elastic.protocol.run_secrets import RunSecrets

REQUEST_ID_HEADERS = ("x-request-id", "request-id")
"""In which clients look for the id of a request: OpenAI's, and Anthropic's."""
REQUEST_ID_CHARS_MAX = 128
UNTRAINED = {"x-elastic-trained": "false"}
"""The header of answers to viewers."""
METRICS_WAIT_S = 5.0
"""For the run to tell its metrics: the scraper comes again soon."""
TASK_BYTES_MAX = 1024 * 1024
"""The most bytes of a driver's task, which the run journals."""

RequestT = TypeVar("RequestT", bound=msgspec.Struct)


@dataclass
class AgentFront:
    """What one front process serves: the run at the other end of `link`, as `model`, to those who have its keys.

    `base_url` is what agents take of it.
    """

    link: RunLink
    model: ServedModel
    secrets: RunSecrets
    base_url: str
    times: CallTimes
    body_bytes_max: int
    renders: Executor
    cache: dict[str, str] = field(default_factory=dict[str, str])
    """What metrics say of each engine's KV cache."""
    doors: TrainerDoors | None = None
    """Set where others train: then their routes are all there are."""
    upstream: Upstream | None = None
    """Set where the model's names say that there is one."""
    calls: set[asyncio.Task[Any]] = field(default_factory=set)
    """The calls that are in work."""
    draining: bool = False
    """Whether no more calls are taken."""

    def app(self) -> Starlette:
        return Starlette(
            routes=self._routes() if self.doors is None else self.doors.routes(),
            middleware=[
                Middleware(RequestIds),
                Middleware(NamesInPaths),
                Middleware(BodyLimits, self.body_bytes_max),
            ],
            exception_handlers=ERROR_SHAPES,
        )

    def _routes(self) -> list[BaseRoute]:
        control = {
            ("POST", "/trajectories"): self._begin,
            ("GET", "/trajectories/{id}"): self._show,
            ("POST", "/trajectories/{id}/reward"): self._reward,
            ("POST", "/trajectories/{id}/end"): self._end,
            ("POST", "/trajectories/{id}/sessions"): self._bind,
        }
        return [
            *(Route(path, _Answers(self, path), methods=["POST"]) for path in (*READERS, COUNT_TOKENS, EMBEDDINGS)),
            *self.tokens.routes(),
            Route("/v1/models", self._models),
            Route("/v1/models/{name:path}", self._one_model),
            Route("/health", self._health),
            Route("/metrics", self._metrics),
            Route("/openapi.json", self._described),
            *(Route(path, endpoint, methods=[method]) for (method, path), endpoint in control.items()),
        ]

    @property
    def tokens(self) -> TokenRoutes:
        return TokenRoutes(self.model, self.renders, self.caller, self.told)

    async def drained(self, timeout_s: float) -> None:
        """Take no more calls, and wait for those in work; those that take longer are cut."""
        self.draining = True
        calls = self.calls if self.doors is None else self.doors.calls
        if calls:
            await asyncio.wait(calls, timeout=timeout_s)
        for call in list(calls):
            call.cancel()
        if calls:
            await asyncio.wait(calls)

    def caller(self, request: Request, named: NamedInPath | None = None) -> AgentCaller:
        return find_caller(self.secrets, request.headers, named or named_in_path(request.scope))

    async def asked(self, route: str, request: Request) -> tuple[AgentCaller, Asked | CountCall | UpstreamCall]:
        """Return the caller and what it asks for. A caller without a key is told so before anything of the body is
        read."""
        caller = self.caller(request)
        asked = await read_body(reader_of(route), self.model, request, self.renders)
        if isinstance(asked, UpstreamCall):
            if caller.viewer:  # What models elsewhere cost is for the run's own agents.
                raise no_such_model(asked.model, *self.model.names.served)
            asked = asked._replace(body=await request.body())
        if caller.driver and not caller.named:
            # A driver may ask a model elsewhere for itself, a judge for instance.
            if not asked.session and isinstance(asked, Asked):
                raise FrontError(
                    400,
                    "the call names no trajectory: use the key of one, or say which in the path (/t/ID/v1), in the "
                    "header X-Session-ID or in the body's session_id",
                    "session_id",
                    "no_trajectory",
                )
            caller = msgspec.structs.replace(caller, named=asked.session)
        return caller, asked

    async def answer(self, caller: AgentCaller, asked: Asked | CountCall | UpstreamCall, reply: ClientReply) -> None:
        """Raises `FrontError` if nothing was sent by then, and `ClientLeft`."""
        if isinstance(asked, UpstreamCall):
            assert self.upstream is not None
            await self.upstream.forward(caller, asked, reply)
        elif isinstance(asked, CountCall):
            counted = await self.tokens.count(caller, asked)
            await reply.start(JSON_TYPE)
            await reply.end(counted)
        else:
            await LiveCall(self.link, self.model, caller, asked, self.times, self.renders).answer(reply)

    async def _models(self, request: Request) -> Response:
        self.caller(request)
        model = self.model
        return Response(answers.models(model.names.served, model.context_tokens, model.created_s), media_type=JSON_TYPE)

    async def _one_model(self, request: Request) -> Response:
        listed, name = await self._models(request), request.path_params["name"]
        cards = {card["id"]: card for card in msgspec.json.decode(listed.body)["data"]}
        if name not in cards:
            raise no_such_model(name, *cards)
        return _json(cards[name])

    async def _health(self, _: Request) -> Response:
        return Response(status_code=200 if self.link.up else 503)

    async def _metrics(self, request: Request) -> Response:
        if self.caller(request).trajectory:
            raise FrontError(403, "a trajectory's key reads no metrics, which are of all; use a driver's or a viewer's")
        return Response(await self.exposed(), media_type=CONTENT_TYPE)

    async def exposed(self) -> str:
        """The run's metrics, in Prometheus' text format. Raises `FrontError`."""
        told = await self.told(AskMetrics(0), MetricsTold, METRICS_WAIT_S)
        return await asyncio.get_running_loop().run_in_executor(
            self.renders, exposition, told, self.link.run_name, self.model.name, self.cache
        )

    async def _described(self, _: Request) -> Response:
        return Response(description(), media_type=JSON_TYPE)

    # Trajectories.

    async def _begin(self, request: Request) -> Response:
        caller = self.caller(request)
        if not caller.driver:
            raise FrontError(403, "a trajectory's own key opens no other; use a driver's")
        body = await self._body(request, TrajectoryRequest)
        # A key of the client's, or of our own: the run may be asked more than once.
        key = idempotency_key(request.headers) or secrets.token_hex(16)
        task = msgspec.json.encode(body.task)
        if len(task) > TASK_BYTES_MAX:
            raise FrontError(413, f"task: has {len(task)} bytes; at most {TASK_BYTES_MAX} are kept", "task")
        begin = BeginTrajectory(0, caller, task, body.group, key, list(dict.fromkeys(body.session_ids)))
        begun = await self.told(begin, TrajectoryBegun)
        answer = {
            "id": agent_id(begun.trajectory),
            "key": self.secrets.agent_key(begun.trajectory, begun.restart),
            "base_url": self.base_url,
        }
        return _json(answer, {"idempotent-replayed": "true"} if begun.again else {})

    async def _show(self, request: Request) -> Response:
        return await self._shown(ShowTrajectory(0, self._of(request)))

    async def _reward(self, request: Request) -> Response:
        caller = self._of(request)
        body = await self._body(request, RewardRequest)
        if not math.isfinite(body.reward):
            raise FrontError(400, f"reward: found {body.reward}; allowed: a finite number", "reward", "invalid_value")
        return await self._shown(GiveReward(0, caller, body.reward, body.policy or ""))

    async def _end(self, request: Request) -> Response:
        caller = self._of(request)
        body = await self._body(request, EndRequest)
        return await self._shown(EndTrajectory(0, caller, body.cause or "", metrics=body.metrics))

    async def _bind(self, request: Request) -> Response:
        caller = self._of(request)
        return await self._shown(BindSession(0, caller, (await self._body(request, SessionRequest)).session_id))

    def _of(self, request: Request) -> AgentCaller:
        return self.caller(request, NamedInPath(TRAJECTORY, request.path_params["id"]))

    async def _body(self, request: Request, kind: type[RequestT]) -> RequestT:
        body = await request.body()
        return bodies.read(kind, bodies.parsed(body) if body else {}, bodies.CONTROL)

    async def _shown(self, message: FromFront) -> Response:
        shown = (await self.told(message, TrajectoryShown)).status
        fields = msgspec.to_builtins(shown)
        return _json({"id": agent_id(fields.pop("trajectory")), **fields})

    async def told(self, message: Any, kind: type[Any], within_s: float = math.inf) -> Any:
        """The run's answer to a message, which may be asked more than once while the run is started again."""
        hold_s = min(within_s, self.times.hold_s)
        try:
            async with asyncio.timeout(hold_s):
                answer = await self._until_answered(message)
        except TimeoutError:
            raise FrontError(503, f"nothing came from the run for {hold_s:g} s") from None
        if isinstance(answer, Declined):
            raise declined(answer)
        assert isinstance(answer, kind)
        return answer

    async def _until_answered(self, message: Any) -> Answer:
        while True:
            await self.link.stands()
            with contextlib.suppress(LinkLost):
                return await self.link.ask(lambda number: msgspec.structs.replace(message, request=number))


class _Answers:
    """The application for one route that answers."""

    def __init__(self, front: AgentFront, route: str) -> None:
        self._front = front
        self._route = route

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        front = self._front
        if front.draining:
            raise FrontError(503, "this front is ending; another one takes the call", closes=True)
        caller, asked = await front.asked(self._route, Request(scope, receive))
        task = asyncio.current_task()
        assert task is not None
        front.calls.add(task)
        is_trained = not caller.viewer and not isinstance(asked, UpstreamCall)
        reply = ClientReply(scope, receive, send, NO_HEADERS if is_trained else UNTRAINED)
        try:
            async with reply.attended():
                await front.answer(caller, asked, reply)
        except ClientLeft:
            pass
        except asyncio.CancelledError:
            # A caller that waits for the answer of a front that ends asks another one.
            await reply.tear()
        finally:
            front.calls.discard(task)


class RequestIds:
    """ASGI middleware: each answer bears the id that its request has in `x-request-id`, or one of ours."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = next((value for name, value in scope.get("headers", ()) if name == b"x-request-id"), b"")
        identifier = given if 0 < len(given) <= REQUEST_ID_CHARS_MAX else secrets.token_hex(16).encode()
        scope.setdefault("state", {})[REQUEST_ID] = identifier.decode("latin-1")

        async def marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                marks = ((name.encode(), identifier) for name in REQUEST_ID_HEADERS)
                message["headers"] = [*message.get("headers", ()), *marks]
            await send(message)

        await self._app(scope, receive, marked)


def _json(answer: Any, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(answer), headers=headers, media_type=JSON_TYPE)
