"""Kind `openenv` beside a package that stands in for OpenEnv's: its servers, and the steps of its sessions."""

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from elastic.environments.agent import EpisodeTask, Outcome, PlayedTrajectory
from elastic.environments.from_openenv import OpenEnvSettings, Server, container_name, load_openenv
from elastic.environments.kinds import KindMeans

ENGINE = """#!/bin/sh
# The containers that it has are files of their names; where each serves stands beside it.
cd "$(dirname "$0")"
echo "$*" >> asked
case "$1" in
    run) [ -e "$4.container" ] && echo "the name $4 is in use" >&2 && exit 125; touch "$4.container" ;;
    port) cat where ;;
    rm) rm -f "$3.container" ;;
esac
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


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of an engine that stands in for docker."""
    folder = tmp_path / "engine"
    folder.mkdir()
    (folder / "docker").write_text(ENGINE)
    (folder / "docker").chmod(0o755)
    (folder / "where").write_text("127.0.0.1:9\n")
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    return folder


def containers(engine: Path) -> list[str]:
    return [path.stem for path in engine.glob("*.container")]


IMAGE = OpenEnvSettings.model_validate({"image": "mine:1", "start_s": 0.2})


async def test_a_server_that_does_not_become_ready_is_ended(engine: Path) -> None:
    server = Server(IMAGE, "mine")
    for _ in range(2):
        with pytest.raises(TimeoutError, match=r"http://127.0.0.1:9 has not become ready within 0.2 s"):
            await server.url()
        assert containers(engine) == []
    assert "run --detach --name mine --publish 127.0.0.1::8000 mine:1" in (engine / "asked").read_text()


async def test_the_container_of_an_env_worker_that_was_killed_is_ended_by_the_next(engine: Path) -> None:
    name = container_name("driver.lake_0.secret")
    assert "secret" not in name
    assert name != container_name("driver.lake_1.secret")
    async with await asyncio.start_server(well, "127.0.0.1", 0) as serving:
        port = serving.sockets[0].getsockname()[1]
        (engine / "where").write_text(f"127.0.0.1:{port}\n")
        killed, following = (Server(IMAGE.model_copy(update={"start_s": 30.0}), name) for _ in range(2))
        for server in (killed, following):
            assert await server.url() == f"http://127.0.0.1:{port}"
            assert containers(engine) == [name]
        await following.stop()
    assert containers(engine) == []


async def well(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
    await writer.drain()
    writer.close()


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


def test_a_server_is_started_within_an_env_workers_start_only_if_its_tools_are_asked_for() -> None:
    own = {"image": "mine:1", "start_s": 30.0}
    given = (own, own | {"field": "message"}, {"url": "http://127.0.0.1:9", "start_s": 30.0})
    assert [OpenEnvSettings.model_validate(one).load_s for one in given] == [30.0, 0.0, 0.0]
