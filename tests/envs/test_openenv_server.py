"""Kind `openenv` beside a package that stands in for OpenEnv's: its servers, and the steps of its sessions."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from elastic.environments.agent import EpisodeTask, Outcome, PlayedTrajectory
from elastic.environments.from_openenv import OpenEnvSettings, Server, load_openenv
from elastic.environments.kinds import KindMeans

RUNTIME = """
HAPPENED = []


class LocalDockerProvider:
    def start_container(self, image):
        HAPPENED.append("started")
        return "http://127.0.0.1:9"

    def wait_for_ready(self, url, timeout_s):
        raise TimeoutError("not ready")

    def stop_container(self):
        HAPPENED.append("stopped")
"""
CORE = """
from types import SimpleNamespace as Result


class GenericEnvClient:
    def __init__(self, **_):
        pass

    async def connect(self):
        return self

    async def reset(self, **_):
        return Result(observation="What is 3 + 4?")

    async def step(self, action):
        if action["type"] == "list_tools":
            return Result(observation={"tools": [{"name": "say"}]})
        return Result(observation={"result": "right"}, reward=1.0, done=True)

    async def close(self):
        pass
"""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], None]]:
    monkeypatch.syspath_prepend(tmp_path)

    def write(module: str, code: str) -> None:
        path = tmp_path / "openenv" / module
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(code)

    yield write
    for name in [name for name in sys.modules if name.partition(".")[0] == "openenv"]:
        del sys.modules[name]


async def test_a_server_that_does_not_become_ready_is_ended(stand_in: Callable[[str, str], None]) -> None:
    stand_in("core/containers/runtime.py", RUNTIME)
    server = Server(OpenEnvSettings.model_validate({"image": "mine:1"}))
    for _ in range(2):
        with pytest.raises(TimeoutError):
            await server.url()
    await server.stop()
    assert sys.modules["openenv.core.containers.runtime"].HAPPENED == ["started", "stopped"] * 2


async def test_an_episode_that_is_over_has_no_more_steps(stand_in: Callable[[str, str], None]) -> None:
    stand_in("core/__init__.py", CORE)
    calls = [
        {"id": str(number), "type": "function", "function": {"name": "say", "arguments": arguments}}
        for number, arguments in enumerate(["[" * 100_000, "{}", "{}"])
    ]
    message = {"role": "assistant", "content": None, "tool_calls": calls}

    def answer(_: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json={"choices": [{"message": message, "finish_reason": "tool_calls"}]})

    async def bind(*_: Any) -> None:
        raise AssertionError("sessions are verifiers'")

    async with contextlib.AsyncExitStack() as lasting, httpx.AsyncClient(transport=httpx.MockTransport(answer)) as http:
        means = KindMeans(http=http, model="tiny", checkpoint=Path(), seed=0, key="", bind=bind, lasting=lasting)
        play = await load_openenv(OpenEnvSettings.model_validate({"url": "http://127.0.0.1:9"}), means)
        where = PlayedTrajectory(id="0-0-0", base_url="http://here/v1", key="", model="tiny", member=0)
        assert await play(EpisodeTask(number=0, seed=0), None, where) == Outcome(reward=1.0)
