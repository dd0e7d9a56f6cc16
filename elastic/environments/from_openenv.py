"""The kind `openenv`: an episode is a session of an OpenEnv server, in which the policy acts turn by turn.

- The server is one that runs, or the env worker starts it: an image by docker, or a project by uv.
- Its MCP tools are the model's tools, and an answer without a call ends the episode. Or a field of the action takes the
  text of an answer.
- The reward is the sum of those that steps have. An episode without any has failed.
"""

import asyncio
import contextlib
import hashlib
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar, cast

import httpx
from pydantic import BaseModel, Field, model_validator

from elastic.environments.agent import BadOutcome, EpisodeTask, Outcome, PlayedTrajectory, Rollout, finite
from elastic.environments.asking import PolicyAnswer, ask_in_turn
from elastic.environments.container import find_engine, remove, start_server
from elastic.environments.kinds import SEEDS, KindMeans, KindSettings, as_text, package, unusable
from elastic.environments.outside import Outside
from elastic.environments.rows import column
from elastic.environments.tools import ERROR, call_arguments
from elastic.protocol.http_clients import sync_client
from elastic.system.host import here
from elastic.system.named_code import NAMES_CODE, CodeUnusable

INSTALL = "pip install openenv"
LOOK_S, LOOK_TIMEOUT_S = 0.5, 2.0
"""Between looks whether a server is ready, and for its answer."""
RETRIES = 2
"""Times that a server is started again for an episode which does not reach it."""


class OpenEnvSettings(KindSettings):
    url: str = Field("", description="of a server that runs", json_schema_extra=NAMES_CODE)
    image: str = Field(
        "",
        description="of a server that docker, or podman, is to start; one for each env worker",
        json_schema_extra=NAMES_CODE,
    )
    project: str = Field(
        "",
        description="directory of a server that uv is to start; one for each env worker",
        json_schema_extra=NAMES_CODE,
    )
    app: str = Field("server.app:app", description="of a project: MODULE:NAME of the server's application")
    start_s: float = Field(90.0, gt=0, description="for a server to start")
    reset: dict[str, Any] = Field(default_factory=dict, description="further arguments of an episode's reset")
    field: str = Field("", description="of the action, which takes an answer's text; without it tools are called")
    action: dict[str, Any] = Field(default_factory=dict, description="with `field`: the action's other fields")
    observation: str = Field(
        "", description="field of the observation that the policy reads; may be dotted; by default all of it"
    )
    system: str = Field("", description="system prompt")
    turns_most: int = Field(50, ge=1, description="answers of the policy after which an episode is truncated")
    step_s: float = Field(60.0, gt=0, description="an episode fails if one of its steps takes longer")

    @model_validator(mode="after")
    def _one_server(self) -> "OpenEnvSettings":
        given = [name for name in ("url", "image", "project") if getattr(self, name)]
        if len(given) != 1:
            raise ValueError(f"one of url, image and project must be given (found {', '.join(given) or 'none'})")
        if self.action and not self.field:
            raise ValueError("action has the other fields of an action whose `field` takes the text; field is missing")
        return self

    @property
    def offers_tools(self) -> bool:
        return not self.field

    @property
    def load_s(self) -> float:
        """How long loading may take: a server that is to be started is started as its tools are asked for."""
        return self.start_s if self.offers_tools and not self.url else 0.0

    @property
    def server(self) -> tuple[str, str]:
        """The key that says which server it is, and what it says."""
        return next((name, getattr(self, name)) for name in ("url", "image", "project") if getattr(self, name))


class OpenEnv(Outside):
    """Stands for the episodes, which env workers play."""

    Settings: ClassVar[type[BaseModel]] = OpenEnvSettings
    in_workers: ClassVar[bool] = True


async def load_openenv(settings: OpenEnvSettings, means: KindMeans) -> Rollout:
    """What plays an episode. Raises `CodeUnusable` for a server that does not start, cannot be reached, or has neither
    tools nor a field that is named."""
    core: Any = package("openenv.core", "openenv", INSTALL)
    server = Server(settings, container_name(means.key))
    means.lasting.push_async_callback(server.stop)
    opening = [{"role": "system", "content": settings.system}] if settings.system else []

    async def session() -> Any:
        """Connected to the server, which is started again where one of our own is gone. Raises `ConnectionError`."""
        for left in range(RETRIES, -1, -1):
            started = server.starts
            client = core.GenericEnvClient(base_url=await server.url(), message_timeout_s=settings.step_s)
            try:
                return await client.connect()
            except ConnectionError:
                if not left or settings.url:
                    raise
                await server.lost(started)
        raise AssertionError("the last try raises")

    try:
        tools = await _tools(await session()) if not settings.field else []
    except Exception as error:
        raise unusable(*settings.server, error) from error
    if not tools and not settings.field:
        raise CodeUnusable(
            f"environment.settings.field: missing, and the server at {await server.url()} has no tools; allowed: the "
            "field of its action that takes the policy's text"
        )

    async def play(task: EpisodeTask, client: Any, trajectory: PlayedTrajectory) -> Outcome:
        opened = await session()
        try:
            result = await opened.reset(**{"seed": task.seed % SEEDS, **settings.reset})
            episode = _Episode(settings, opened)
            messages = [*opening, {"role": "user", "content": episode.observed(result)}]
            for turn in range(settings.turns_most):
                said = await ask_in_turn(turn, means.http, trajectory, messages, tools)
                if said is None:
                    break
                messages.append(said.message)
                if await episode.act(said, messages):
                    return episode.outcome(truncated=said.cut)
            return episode.outcome(truncated=True)
        finally:
            await opened.close()

    return play


class _Episode:
    """A session as it goes on."""

    def __init__(self, settings: OpenEnvSettings, session: Any) -> None:
        self._settings, self._session = settings, session
        self._rewards: list[float] = []

    async def act(self, said: PolicyAnswer, messages: list[dict[str, Any]]) -> bool:
        """Do what an answer says, and tell what came of it; returns whether the episode is over."""
        if self._settings.field:
            result = await self._step({**self._settings.action, self._settings.field: said.text})
            messages.append({"role": "user", "content": self.observed(result)})
            return bool(result.done)
        calls: list[dict[str, Any]] = said.message.get("tool_calls") or []
        for call in calls:
            content, done = await self._called(call["function"])
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})
            if done:
                return True  # Further calls would be steps of an episode that is over.
        return not calls

    async def _called(self, function: Mapping[str, Any]) -> tuple[str, bool]:
        try:
            arguments = call_arguments(function["arguments"])
        except ValueError as error:
            return f"{ERROR}{error}", False
        result = await self._step({"type": "call_tool", "tool_name": function["name"], "arguments": arguments})
        return _tool_answer(result.observation), bool(result.done)

    async def _step(self, action: Mapping[str, Any]) -> Any:
        """Raises `BadOutcome` for a reward that is no number."""
        result = await self._session.step(action)
        if result.reward is not None:
            self._rewards.append(finite("the server's reward", result.reward))
        return result

    def observed(self, result: Any) -> str:
        """What the policy is told. Raises `BadOutcome` for an observation without the field."""
        if not self._settings.observation:
            return as_text(result.observation)
        try:
            return as_text(column(result.observation, self._settings.observation))
        except (KeyError, TypeError):
            there = ", ".join(map(str, result.observation)) or "nothing"
            raise BadOutcome(f"the observation has no {self._settings.observation!r}; it has {there}") from None

    def outcome(self, *, truncated: bool) -> Outcome:
        if not self._rewards:
            return Outcome(failed="the server has given no reward")
        return Outcome(reward=sum(self._rewards), truncated=truncated)


def container_name(key: str) -> str:
    """The same for every env worker that shows this driver's key: one finds the container that the one before has left,
    as it was killed."""
    return f"elastic-openenv-{hashlib.blake2b(key.encode(), digest_size=10).hexdigest()}"


class Server:
    """The server that the settings name. One that is to be started is started as it is first asked for, and again where
    it was lost; what starts it blocks, and has a thread. `starts` says how often it was. An image's has a container of
    this name."""

    def __init__(self, settings: OpenEnvSettings, container: str) -> None:
        self.starts = 0
        self._container = container
        self._settings = settings
        self._stop: Callable[[], None] | None = None
        self._url = settings.url
        self._lock = asyncio.Lock()

    async def url(self) -> str:
        async with self._lock:
            if not self._url:
                self._url = await asyncio.to_thread(self._started)
                self.starts += 1
            return self._url

    async def lost(self, start: int) -> None:
        """The server of this start cannot be reached."""
        async with self._lock:
            if start == self.starts and not self._settings.url:
                await asyncio.to_thread(self._end)
                self._url = ""

    async def stop(self) -> None:
        async with self._lock:
            await asyncio.to_thread(self._end)

    def _started(self) -> str:
        """Its URL. One that does not become ready is ended: nobody else would."""
        try:
            return self._start()
        except BaseException:
            self._end()
            raise

    def _start(self) -> str:
        settings = self._settings
        if settings.image:
            engine = find_engine()
            self._stop = partial(remove, engine, self._container)
            until_s = here().monotonic() + settings.start_s
            url = f"http://{start_server(engine, self._container, settings.image, settings.start_s)}"
            _wait_until_ready(url, settings.start_s, until_s)
            return url
        runtime: Any = package("openenv.core.containers.runtime", "openenv", INSTALL)
        project = runtime.UVProvider(project_path=settings.project, app=settings.app, host="127.0.0.1")
        self._stop = project.stop
        url = project.start()
        project.wait_for_ready(settings.start_s)
        return url

    def _end(self) -> None:
        stop, self._stop = self._stop, None
        if stop is not None:
            stop()


def _wait_until_ready(url: str, limit_s: float, until_s: float) -> None:
    """Raises `TimeoutError` where a server does not say in time that it is well, which is until then."""
    with sync_client(url, by_proxy=False, timeout=LOOK_TIMEOUT_S) as client:
        while here().monotonic() < until_s:
            with contextlib.suppress(httpx.HTTPError):
                if client.get(f"{url}/health").is_success:
                    return
            time.sleep(LOOK_S)
    raise TimeoutError(f"the server at {url} has not become ready within {limit_s:g} s")


async def _tools(session: Any) -> list[dict[str, Any]]:
    """The server's tools, as OpenAI's APIs have them."""
    try:
        await session.reset()
        result = await session.step({"type": "list_tools"})
    except RuntimeError:  # The server says that it knows no such action.
        return []
    finally:
        await session.close()
    listed = cast("Mapping[str, Any]", result.observation).get("tools") or []
    return [
        {
            "type": "function",
            "function": {
                "name": tool["name"],
                "description": tool.get("description") or "",
                "parameters": tool.get("input_schema") or tool.get("inputSchema") or {"type": "object"},
            },
        }
        for tool in listed
    ]


def _tool_answer(observation: Mapping[str, Any]) -> str:
    """What the policy is told that a tool has answered."""
    if (error := observation.get("error")) is not None:
        return f"{ERROR}{error.get('message', error) if isinstance(error, Mapping) else error}"
    result = observation.get("result")
    if isinstance(result, Mapping) and "content" in result:  # As MCP has it.
        found = cast("Mapping[str, Any]", result)
        if found.get("data") is not None:
            return as_text(found["data"])
        return "\n".join(one["text"] for one in found["content"] if isinstance(one, Mapping) and "text" in one)
    return as_text(result)
