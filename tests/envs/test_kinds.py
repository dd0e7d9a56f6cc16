"""The kinds that env workers play pass the conformance suite of environments, each with its package."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from elastic.testing.environment_conformance import *  # noqa: F403
from elastic.testing.environments import EnvironmentUnderTest
from elastic.testing.misbehaviour import BIG_CHARACTERS

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
            yield SayTask(vf.TaskData(prompt="x" * BIG_CHARACTERS if BIG else f"Say {number}."), self.config.task)


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


KINDS = [
    EnvironmentUnderTest(name="agent", write=write_function),
    EnvironmentUnderTest(name="chat", write=write_reward),
    EnvironmentUnderTest(name="gymnasium", write=write_gymnasium),
    EnvironmentUnderTest(name="reasoning-gym", write=write_reasoning, python=python_of("reasoning-gym")),
    EnvironmentUnderTest(name="verifiers", write=write_verifiers, python=python_of("verifiers")),
    EnvironmentUnderTest(
        name="verifiers", label="verifiers of before 0.4", write=write_verifiers_old, python=python_of("verifiers-old")
    ),
]


@pytest.fixture(params=KINDS, ids=str)
def environment_under_test(request: pytest.FixtureRequest) -> EnvironmentUnderTest:
    if not request.param.python.exists():
        pytest.skip(f"{request.param.python} is not there: `make test-environments` makes it")
    return request.param
