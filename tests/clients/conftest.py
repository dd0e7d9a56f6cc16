"""OpenAI's or Anthropic's own client, whichever this interpreter has, as an agent's: `make test-clients`."""

import contextlib
import importlib
import re
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks import _agents
from benchmarks._agents import AgentsRun
from elastic.core.ids import parse_agent_id, turn_of
from elastic.core.types import TrajectoryId
from elastic.front.rendering.tokenizer import Tokenizer
from tests.front.fronted import Served, fronted, says
from tests.front.live import bearer

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

    def text(self, ids: Sequence[int]) -> str:
        """What tokens of an answer say; the one that ends it says nothing."""
        tokenizer = Tokenizer(Path(self.run.run_dir).parents[1] / _agents.MODEL)
        decoder = tokenizer.decoder()
        return decoder.feed([token for token in ids if token not in tokenizer.eos_token_ids]) + decoder.finish()

    def answer(self, id: str, choice: int = 0) -> Any:
        """The tokens of a turn as the journal has them, by the id of its answer."""
        turn = turn_of(re.sub(r"^[a-z]+[-_]", "", id))
        trajectory, _, number = turn.rpartition("/")
        return _agents.played(_agents.RunDirectory(Path(self.run.run_dir))).answers[
            f"{trajectory}/{int(number) + choice}"
        ]


class Trajectory:
    def __init__(self, run: LiveRun, id: str, key: str, base_url: str) -> None:
        self.run, self.id, self.key = run, id, key
        assert base_url == f"{run.url}/v1"

    @cached_property
    def client(self) -> Any:
        return self.run.client(self.key)

    @cached_property
    def anthropic(self) -> Any:
        made = importlib.import_module("anthropic").Anthropic
        return made(base_url=self.run.url, api_key=self.key, timeout=60)

    def close(self) -> None:
        for name in ("client", "anthropic"):
            if (client := self.__dict__.get(name)) is not None:
                client.close()

    @property
    def name(self) -> TrajectoryId:
        return parse_agent_id(self.id)

    def status(self) -> dict[str, Any]:
        answer = httpx.get(f"{self.run.url}/trajectories/{self.id}", headers=bearer(self.key), timeout=60)
        return answer.json()

    def told(self, what: str, **body: Any) -> httpx.Response:
        return httpx.post(
            f"{self.run.url}/trajectories/{self.id}/{what}", json=body, headers=bearer(self.key), timeout=60
        )


@pytest.fixture(scope="session")
def openai() -> Any:
    """The client's module; `make test-clients` sets up the environments that have it."""
    return importlib.import_module("openai")


@pytest.fixture(scope="session")
def anthropic() -> Any:
    return importlib.import_module("anthropic")


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
    with AgentsRun(tmp_path_factory.mktemp("live"), *settings) as under_way:
        yield LiveRun(under_way)


@pytest.fixture
def killable(tmp_path: Path) -> Iterator[LiveRun]:
    """A run with a worker that can be killed, and the trainer's device while there is no other."""
    settings = ("run.steps=1", "rollout.groups=1", "rollout.group_size=2", "front.tool_parser=hermes")
    seeding = ("seeding.policy=fixed", "seeding.window_s=0")
    with AgentsRun(tmp_path, *settings, *seeding) as under_way:
        yield LiveRun(under_way)


@pytest.fixture
def trajectory(live: LiveRun) -> Iterator[Trajectory]:
    with contextlib.closing(live.begin()) as begun:
        yield begun


@pytest.fixture
def journaled(live: LiveRun) -> Callable[[str], Any]:
    """The tokens of a turn as the journal has them, by the id of its answer."""
    return live.answer
