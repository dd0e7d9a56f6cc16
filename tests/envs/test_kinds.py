"""The kinds that env workers play pass the conformance suite of environments, each with its package."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from elastic.front.tiny import write_tokenizer
from elastic.testing.environment_conformance import *  # noqa: F403
from elastic.testing.environment_conformance import over
from elastic.testing.environments import EnvironmentUnderTest, EnvWorkerUnderTest, StandInRun
from elastic.testing.misbehaviour import BIG_CHARACTERS
from tests.envs.installed_environment import install_environment

pytestmark = pytest.mark.environments

CACHE = Path(__file__).resolve().parents[2] / ".cache"


def python_of(package: str) -> Path:
    """The interpreter of the virtual environment that `make test-environments` makes for a package."""
    return CACHE / f"environments-{package}" / "bin" / "python"


FUNCTION = """
import httpx

from elastic.environments.agent import Outcome
from elastic.testing.misbehaviour import BIG_CHARACTERS, behave


async def play(task, client, trajectory):
    messages = [{"role": "user", "content": "x" * BIG_CHARACTERS if BIG else "Say something."}]
    body = {"model": trajectory.model, "messages": messages}
    key = {"authorization": f"Bearer {trajectory.key}"}
    async with httpx.AsyncClient(base_url=trajectory.base_url, headers=key, timeout=60, trust_env=False) as calls:
        answer = await calls.post("/chat/completions", json=body)
    answer.raise_for_status()
    choice = answer.json()["choices"][0]
    return Outcome(reward=behave(choice["message"]["content"]), truncated=choice["finish_reason"] == "length")
"""


def write_function(folder: Path, big: bool) -> Mapping[str, Any]:
    (folder / "mine.py").write_text(f"BIG = {big}\n{FUNCTION}")
    return {"settings": {"rollout": f"{folder}/mine.py:play", "client": "none"}}


REWARD = """
from elastic.testing.misbehaviour import behave


def worth(completions, **columns):
    return [behave(completions[0])]
"""


def write_reward(folder: Path, big: bool) -> Mapping[str, Any]:
    (folder / "mine.py").write_text(REWARD)
    rows = folder / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "x" * BIG_CHARACTERS if big else "Say something."}))
    return {"settings": {"rewards": [f"{folder}/mine.py:worth"]}, "data": {"source": str(rows)}}


GYMNASIUM = '''
import gymnasium

from elastic.testing.misbehaviour import BIG_CHARACTERS, behave


class Saying(gymnasium.Env):
    """One step, whose action is a text."""

    letters = "abcdefghijklmnopqrstuvwxyz"
    action_space = gymnasium.spaces.Text(32, charset=letters)
    observation_space = gymnasium.spaces.Text(BIG_CHARACTERS, charset=letters)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return "x" * BIG_CHARACTERS if BIG else "say", {}

    def step(self, action):
        cut = action == "truncate"
        return "done", behave(action), not cut, cut, {}
'''


def write_gymnasium(folder: Path, big: bool) -> Mapping[str, Any]:
    (folder / "mine.py").write_text(f"BIG = {big}\n{GYMNASIUM}")
    return {"settings": {"id": f"{folder}/mine.py:Saying"}}


REASONING = """
from reasoning_gym.factory import ProceduralDataset

from elastic.testing.misbehaviour import BIG_CHARACTERS, behave


class Saying(ProceduralDataset):
    def __init__(self, seed, size):
        super().__init__(config=None, seed=seed, size=size)

    def __getitem__(self, place):
        return {"question": "x" * BIG_CHARACTERS if BIG else f"Say {place}.", "answer": "good", "metadata": {}}

    def score_answer(self, answer, entry):
        return behave(answer)
"""


def write_reasoning(folder: Path, big: bool) -> Mapping[str, Any]:
    (folder / "mine.py").write_text(f"BIG = {big}\n{REASONING}")
    return {"settings": {"dataset": f"{folder}/mine.py:Saying", "answer": "whole"}}


VERIFIERS = """
from collections.abc import Iterable

import verifiers.v1 as vf
from openai import AsyncOpenAI

from elastic.testing.misbehaviour import BIG_CHARACTERS, behave


class SayTask(vf.Task[vf.TaskData, vf.State]):
    @vf.reward
    async def worth(self, trace):
        return behave(trace.last_reply)


class SayTaskset(vf.Taskset[SayTask]):
    def load(self) -> Iterable[SayTask]:
        for number in range(3):
            # Its renderer makes tokens of a task here, for a second of CPU a MB; as many tokens are as large by far.
            big = "x" * (BIG_CHARACTERS // 5)
            yield SayTask(vf.TaskData(prompt=big if BIG else f"Say {number}."), self.config.task)


class AskingHarness(vf.Harness[vf.HarnessConfig]):
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        client = AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0)
        await client.chat.completions.create(model="m", messages=[{"role": "user", "content": data.prompt}])
        return vf.ProgramResult(0, "", "")


__all__ = ["AskingHarness", "SayTaskset"]
"""


def write_verifiers(folder: Path, big: bool) -> Mapping[str, Any]:
    (folder / "saying.py").write_text(f"BIG = {big}\n{VERIFIERS}")
    agent = {"harness": {"id": "saying"}, "runtime": {"type": "subprocess"}}
    return {"settings": {"id": "saying", "config": {"agent": agent}}}


VERIFIERS_OLD = """
import verifiers as vf
from datasets import Dataset

from elastic.testing.misbehaviour import BIG_CHARACTERS, behave


def worth(completion, **_):
    return behave(completion[-1]["content"])


def load_environment():
    prompt = [{"role": "user", "content": "x" * BIG_CHARACTERS if BIG else "Say something."}]
    rows = Dataset.from_list([{"prompt": prompt, "answer": ""}])
    return vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric(funcs=[worth]))
"""


def write_verifiers_old(folder: Path, big: bool) -> Mapping[str, Any]:
    (folder / "saying.py").write_text(f"BIG = {big}\n{VERIFIERS_OLD}")
    return {"settings": {"id": "saying"}}


OPENENV = """
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

from elastic.testing.misbehaviour import BIG_CHARACTERS, behave


class Say(Action):
    said: str


class Heard(Observation):
    told: str = ""


class Saying(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, big=False):
        return Heard(told="x" * BIG_CHARACTERS if big else "Say something.")

    def step(self, action):
        return Heard(told="Done.", done=True, reward=behave(action.said))

    @property
    def state(self):
        return State()


app = create_fastapi_app(Saying, Say, Heard, max_concurrent_envs=64)
"""
OPENENV_TOOLS = '''
from fastmcp import FastMCP
from openenv.core.env_server import Action, MCPEnvironment, Observation, State, create_fastapi_app


class Adding(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        tools = FastMCP("sums")
        self._sum = 0

        @tools.tool
        def add(a: int, b: int) -> int:
            """Adds two numbers."""
            self._sum = a + b
            return self._sum

        super().__init__(tools)

    def reset(self, seed=None, episode_id=None, **more):
        return Observation(metadata={"told": "What is 3 + 4?"})

    async def step_async(self, action, timeout_s=None, **more):
        observation = await super().step_async(action, timeout_s=timeout_s, **more)
        observation.reward = float(self._sum == 7) if self._sum else None
        return observation

    def _step_impl(self, action, timeout_s=None, **more):
        raise ValueError("there are tools alone")

    @property
    def state(self):
        return State()


app = create_fastapi_app(Adding, Action, Observation, max_concurrent_envs=64)
'''


@contextlib.contextmanager
def openenv_server(folder: Path, code: str) -> Iterator[str]:
    """Serves an OpenEnv environment, also after it has ended itself."""
    (folder / "serving.py").write_text(code)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    serve = f"{python_of('openenv')} -m uvicorn serving:app --host 127.0.0.1 --port {port}"
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    again = ["bash", "-c", f"while :; do {serve} > /dev/null 2>> {folder}/server.log; sleep 0.2; done"]
    process = subprocess.Popen(again, env=environment, start_new_session=True)
    try:
        until = time.monotonic() + 60
        while True:
            with contextlib.suppress(httpx.TransportError):
                httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False).raise_for_status()
                break
            assert time.monotonic() < until, (folder / "server.log").read_text()
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


TOKEN_LEVEL = """
from pydantic import BaseModel

from elastic.environments.base import StepResult
from elastic.testing.misbehaviour import BIG_CHARACTERS, behave


class Saying:
    class Settings(BaseModel):
        pass

    vocabulary = tuple(map(chr, range(128)))
    stop_token_ids = (10,)

    def __init__(self, settings):
        pass

    async def reset(self, seed):
        return [32] * (BIG_CHARACTERS if BIG else 3)

    async def step(self, token_ids):
        said = bytes(token_ids).decode()
        return StepResult([], said != "truncate", behave(said))

    async def truncate(self):
        return 1.0

    async def aclose(self):
        raise RuntimeError("it does not like to be closed")
"""


def write_token_level(folder: Path, big: bool) -> Mapping[str, Any]:
    install_environment(folder, "saying", f"BIG = {big}\n{TOKEN_LEVEL}")
    return {}


KINDS = [
    EnvironmentUnderTest(name="saying", write=write_token_level, label="token-level", token_level=True),
    EnvironmentUnderTest(name="agent", write=write_function),
    EnvironmentUnderTest(name="chat", write=write_reward),
    EnvironmentUnderTest(name="gymnasium", write=write_gymnasium),
    EnvironmentUnderTest(name="reasoning-gym", write=write_reasoning, python=python_of("reasoning-gym")),
    EnvironmentUnderTest(name="openenv", write=lambda *_: {}, python=python_of("openenv")),
    EnvironmentUnderTest(name="verifiers", write=write_verifiers, python=python_of("verifiers")),
    EnvironmentUnderTest(
        name="verifiers", label="verifiers of before 0.4", write=write_verifiers_old, python=python_of("verifiers-old")
    ),
]


@pytest.fixture(params=KINDS, ids=str)
def a_kind(request: pytest.FixtureRequest) -> EnvironmentUnderTest:
    if not request.param.python.exists():
        pytest.skip(f"{request.param.python} is not there: `make test-environments` makes it")
    return request.param


@pytest.fixture
def environment_under_test(
    a_kind: EnvironmentUnderTest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EnvironmentUnderTest]:
    if a_kind.name != "openenv":
        yield a_kind
        return
    with openenv_server(tmp_path_factory.mktemp("server"), OPENENV) as url:
        settings = {"url": url, "field": "said", "observation": "told"}
        yield replace(a_kind, write=lambda _, big: {"settings": {**settings, "reset": {"big": big}}})


async def test_the_tools_of_an_openenv_server_are_the_models(tmp_path: Path) -> None:
    kind = next(kind for kind in KINDS if kind.name == "openenv")
    if not kind.python.exists():
        pytest.skip(f"{kind.python} is not there: `make test-environments` makes it")
    write_tokenizer(tmp_path / "policy")
    with openenv_server(tmp_path, OPENENV_TOOLS) as url:
        section = {"name": "openenv", "settings": {"url": url, "observation": "metadata.told"}}
        run = StandInRun(tmp_path / "run", tmp_path / "policy", section)
        async with run.serving():
            worker = EnvWorkerUnderTest(run, kind)
            try:
                right = run.play("It is 7.", tool=("add", '{"a": 3, "b": 4}'))
                odd = run.play("It is 7.", tool=("add", "3, 4"))
                for heard in (right, odd):
                    await over(heard, worker)
            finally:
                worker.kill()
    (tool,) = run.tools[run.named(right)]
    assert tool["function"]["name"] == "add"
    assert tool["function"]["description"] == "Adds two numbers."
    assert set(tool["function"]["parameters"]["properties"]) == {"a", "b"}
    first, second = run.prompts[run.named(right)]
    assert first == [{"role": "user", "content": "What is 3 + 4?"}]
    assert second[-1] == {"role": "tool", "tool_call_id": "call_0", "content": "7"}
    assert (right.rewards, right.cause) == ([1.0], "")
    assert run.prompts[run.named(odd)][1][-1]["content"].startswith("Error: the arguments are no JSON")
    assert (odd.rewards, odd.cause) == ([], "the server has given no reward")
