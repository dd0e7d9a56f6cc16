"""The kind `chat`: prompts of rows, one answer, and rewards that are called as TRL's or verl's."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from elastic.environments.agent import BadOutcome, EpisodeTask, Outcome, PlayedTrajectory
from elastic.environments.chat import RowChatSettings, load_chat
from elastic.protocol.http_server import serving
from elastic.protocol.sockets import listening_socket
from elastic.system.named_code import CodeUnusable

REWARDS = """
def trl(prompts, completions, level, **columns):
    said = [one if isinstance(one, str) else one[0]["content"] for one in completions]
    assert "prompt" not in columns
    return [len(one) + of for one, of in zip(said, level, strict=True)]

async def verl(data_source, solution_str, ground_truth, extra_info):
    return {"score": float(solution_str == ground_truth), "source": data_source, "of": extra_info}

def none(completions, **columns):
    return [None]

def two(completions, **columns):
    return [1.0, 2.0]

def text(solution_str, **columns):
    return "good"

number = 3
"""
ROW = {"prompt": "2+2=", "level": 10, "data_source": "sums", "extra_info": {"n": 1}}


@pytest.fixture
async def url() -> AsyncIterator[str]:
    """A model that says `four`, after it has been too busy once."""
    asked: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        body = b""
        while (message := await receive()).get("more_body"):
            body += message["body"]
        asked.append(json.loads(body + message["body"]))
        status = 503 if len(asked) == 1 else 200
        said = {"choices": [{"message": {"role": "assistant", "content": "four"}, "finish_reason": "length"}]}
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": json.dumps(said).encode()})

    async with serving(app, listening_socket("127.0.0.1", 0, 8)) as served:
        yield f"{served}/v1"


def settings(folder: Path, *names: str, **more: Any) -> RowChatSettings:
    (folder / "mine.py").write_text(REWARDS)
    rewards = [f"{folder}/mine.py:{name}" for name in names]
    return RowChatSettings.model_validate({"rewards": rewards, **more})


async def played(url: str, of: RowChatSettings, prompt: Any = "2+2=") -> Outcome:
    task = EpisodeTask(number=0, seed=0, row=ROW, prompt=prompt, answer="four")
    trajectory = PlayedTrajectory(id="0-0-0", base_url=url, key="key", model="tiny", member=0)
    async with httpx.AsyncClient(trust_env=False) as http:
        outcome = await load_chat(of, http)(task, None, trajectory)
    assert isinstance(outcome, Outcome)
    return outcome


async def test_rewards_are_called_as_trls_and_verls_and_weighed(url: str, tmp_path: Path) -> None:
    found = await played(url, settings(tmp_path, "trl", "verl", "none", weights=[1, 0.5, 7]))
    assert found == Outcome(reward=14 + 0.5, truncated=True)
    conversation = [{"role": "user", "content": "2+2="}]
    assert (await played(url, settings(tmp_path, "trl"), conversation)).reward == 14


async def test_what_no_function_judges_has_failed(url: str, tmp_path: Path) -> None:
    assert (await played(url, settings(tmp_path, "none"))).failed == "no reward function has judged the answer"


@pytest.mark.parametrize(("name", "told"), [("two", "one reward"), ("text", "a finite number")])
async def test_what_is_no_reward_is_told(url: str, tmp_path: Path, name: str, told: str) -> None:
    with pytest.raises(BadOutcome, match=told):
        await played(url, settings(tmp_path, name))


async def test_a_prompt_is_a_text_or_messages(url: str, tmp_path: Path) -> None:
    with pytest.raises(BadOutcome, match="prompt: found 3"):
        await played(url, settings(tmp_path, "trl"), 3)


async def test_what_is_no_function_is_told_as_it_is_loaded(tmp_path: Path) -> None:
    async with httpx.AsyncClient() as http:
        with pytest.raises(CodeUnusable, match="found int; allowed: a function"):
            load_chat(settings(tmp_path, "number"), http)
    with pytest.raises(ValidationError, match="one for each of 1 rewards"):
        settings(tmp_path, "trl", weights=[1, 2])
