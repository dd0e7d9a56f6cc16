"""OpenAI's own client, of the version that this interpreter has, as an agent's: `make test-clients`."""

import contextlib
import importlib
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from elastic.core.ids import parse_agent_id
from elastic.core.types import TrajectoryId
from tests.front.fronted import Served, fronted, says
from tests.front.live import agents_run, bearer, benchmark

GROUP_SIZE = 32
CONTEXT_TOKENS = 2048


class LiveRun:
    """A run that agents drive, and the driver that opens its trajectories."""

    def __init__(self, run: Any) -> None:
        self.run, self.url = run, run.url()
        self.driver_key = run.driver_key()

    def begin(self) -> "Trajectory":
        def begun() -> Any:
            with contextlib.suppress(httpx.TransportError):
                answer = httpx.post(
                    f"{self.url}/trajectories", json={"group": "all"}, headers=bearer(self.driver_key), timeout=60
                )
                return answer.json() if answer.status_code == 200 else None

        return Trajectory(self, **self.run.until("a trajectory", begun))

    def client(self, key: str, path: str = "/v1", **settings: Any) -> Any:
        return importlib.import_module("openai").OpenAI(base_url=self.url + path, api_key=key, timeout=60, **settings)


class Trajectory:
    def __init__(self, run: LiveRun, id: str, key: str, base_url: str) -> None:
        self.run, self.id, self.key = run, id, key
        assert base_url == f"{run.url}/v1"
        self.client = run.client(key)

    @property
    def name(self) -> TrajectoryId:
        return parse_agent_id(self.id)

    def told(self, what: str, **body: Any) -> httpx.Response:
        return httpx.post(
            f"{self.run.url}/trajectories/{self.id}/{what}", json=body, headers=bearer(self.key), timeout=60
        )


@pytest.fixture(scope="session")
def openai() -> Any:
    """The client's module; `make test-clients` sets up the environments that have it."""
    return importlib.import_module("openai")


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    """A front whose run is modelled; its turns all say `hi there`."""
    async with fronted(tmp_path, answer=says("hi there")) as under_test:
        yield under_test


@pytest.fixture(scope="session")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveRun]:
    settings = (
        "run.steps=1",
        "rollout.groups=1",
        f"rollout.group_size={GROUP_SIZE}",
        "front.tool_parser=hermes",
        f"engine.max_context_tokens={CONTEXT_TOKENS}",
        "providers.reserved.max_workers=0",
        "rollout.max_turns=40",
    )
    with agents_run(tmp_path_factory.mktemp("live"), *settings) as under_way:
        yield LiveRun(under_way)


@pytest.fixture
def trajectory(live: LiveRun) -> Trajectory:
    return live.begin()


@pytest.fixture
def journaled(live: LiveRun) -> Callable[[str], Any]:
    """The tokens of a turn as the journal has them, by the id of its answer."""

    def answer(id: str, choice: int = 0) -> Any:
        trajectory, _, number = id.partition("-")[2].rpartition("-")
        turn = f"{parse_agent_id(trajectory)}/{int(number) + choice}"
        with benchmark("_agents") as module:
            return module.played(module.RunDirectory(Path(live.run.run_dir))).answers[turn]

    return answer
