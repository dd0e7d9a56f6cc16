"""The kind `chat`: prompts of rows, answers and tools, and rewards that are called as TRL's or verl's."""

import contextlib
import json
from collections.abc import AsyncIterator, Sequence
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

def own(task, messages, trajectory, scale=0.5):
    return scale * (len(messages) + task.number) * (trajectory.key == "key")

def takes_what_it_names(completions, level):
    return [float(level[0])]

def both(solution_str, messages):
    return len(messages)

def slow(task):
    import time
    time.sleep(20)

def odd(task, colour):
    return 1.0

def used_the_tool(messages):
    return float(any(one["role"] == "tool" and one["content"] == "4" for one in messages))

def add(a: int, b: int) -> int:
    return a + b

number = 3
"""
ROW = {"prompt": "2+2=", "level": 10, "data_source": "sums", "extra_info": {"n": 1}}


ANSWER = {"message": {"role": "assistant", "content": "four"}, "finish_reason": "length"}
BUSY = {"error": {"message": "busy", "code": None}}


def calls(*given: tuple[str, str]) -> dict[str, Any]:
    """An answer that calls tools."""
    made = [
        {"id": f"call_{place}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for place, (name, arguments) in enumerate(given)
    ]
    message = {"role": "assistant", "content": None, "tool_calls": made}
    return {"message": message, "finish_reason": "tool_calls"}


def refused(status: int, code: str) -> tuple[int, dict[str, Any]]:
    return status, {"error": {"message": "no more", "code": code}}


@contextlib.asynccontextmanager
async def model(*says: dict[str, Any] | tuple[int, dict[str, Any]]) -> AsyncIterator[tuple[str, list[Any]]]:
    """A model that says this, one after the other, and then the last again; with what it was asked."""
    asked: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        body = b""
        while (message := await receive()).get("more_body"):
            body += message["body"]
        said = says[min(len(asked), len(says) - 1)]
        asked.append(json.loads(body + message["body"]))
        status, answer = said if isinstance(said, tuple) else (200, {"choices": [said]})
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": json.dumps(answer).encode()})

    async with serving(app, listening_socket("127.0.0.1", 0, 8)) as served:
        yield f"{served}/v1", asked


@pytest.fixture
async def url() -> AsyncIterator[str]:
    """A model that says `four`, after it has been too busy once."""
    async with model((503, BUSY), ANSWER) as (served, _):
        yield served


def settings(folder: Path, *names: str, tools: Sequence[str] = (), **more: Any) -> RowChatSettings:
    (folder / "mine.py").write_text(REWARDS)
    rewards, offered = ([f"{folder}/mine.py:{name}" for name in of] for of in (names, tools))
    return RowChatSettings.model_validate({"rewards": rewards, "tools": offered, **more})


async def played(url: str, of: RowChatSettings, prompt: Any = "2+2=") -> Outcome:
    task = EpisodeTask(number=0, seed=0, row=ROW, prompt=prompt, answer="four")
    trajectory = PlayedTrajectory(id="0-0-0", base_url=url, key="key", model="tiny", member=0)
    async with httpx.AsyncClient(trust_env=False) as http:
        outcome = await load_chat(of, http)(task, None, trajectory)
    assert isinstance(outcome, Outcome)
    return outcome


async def test_rewards_are_called_as_trls_and_verls_and_weighed(url: str, tmp_path: Path) -> None:
    found = await played(url, settings(tmp_path, "trl", "verl", "none", weights=[1, 0.5, 7]))
    assert found == Outcome(reward=14 + 0.5, truncated=True, metrics={"rewards/trl": 14.0, "rewards/verl": 1.0})
    conversation = [{"role": "user", "content": "2+2="}]
    assert (await played(url, settings(tmp_path, "trl"), conversation)).reward == 14


async def test_what_no_function_judges_has_failed(url: str, tmp_path: Path) -> None:
    assert (await played(url, settings(tmp_path, "none"))).failed == "no reward function has judged the answer"


@pytest.mark.parametrize(
    ("name", "told"), [("two", "one reward"), ("text", "a finite number"), ("slow", "no answer within 0.1 s")]
)
async def test_what_is_no_reward_is_told(url: str, tmp_path: Path, name: str, told: str) -> None:
    with pytest.raises(BadOutcome, match=told):
        await played(url, settings(tmp_path, name, reward_timeout_s=0.1))


async def test_a_prompt_is_a_text_or_messages(url: str, tmp_path: Path) -> None:
    with pytest.raises(BadOutcome, match="prompt: found 3"):
        await played(url, settings(tmp_path, "trl"), 3)


async def test_what_is_no_function_is_told_as_it_is_loaded(tmp_path: Path) -> None:
    async with httpx.AsyncClient() as http:
        with pytest.raises(CodeUnusable, match="found int; allowed: a function"):
            load_chat(settings(tmp_path, "number"), http)
        with pytest.raises(CodeUnusable, match="found a parameter 'colour'; allowed: TRL's `completions`"):
            load_chat(settings(tmp_path, "odd"), http)
    with pytest.raises(ValidationError, match="one for each of 1 rewards"):
        settings(tmp_path, "trl", weights=[1, 2])
    with pytest.raises(ValidationError, match="found 'add' twice"):
        settings(tmp_path, "trl", tools=["add", "add"])


async def test_a_reward_gets_what_it_names_of_the_conversation(url: str, tmp_path: Path) -> None:
    assert (await played(url, settings(tmp_path, "own"))).reward == 1.0
    assert (await played(url, settings(tmp_path, "takes_what_it_names", "both"))).reward == 12.0


SUM = ("add", '{"a": 2, "b": 2}')


async def test_calls_of_tools_are_answered_until_there_are_none(tmp_path: Path) -> None:
    of = settings(tmp_path, "used_the_tool", "own", tools=["add"], system="You can add.")
    async with model(calls(SUM, ("add", "{}")), {**ANSWER, "finish_reason": "stop"}) as (url, asked):
        assert await played(url, of) == Outcome(reward=4.0, metrics={"rewards/used_the_tool": 1.0, "rewards/own": 3.0})
    first, second = asked
    (tool,) = first["tools"]
    assert (tool["function"]["name"], second["tools"]) == ("add", first["tools"])
    assert [one["role"] for one in second["messages"]] == ["system", "user", "assistant", "tool", "tool"]
    assert second["messages"][2] == calls(SUM, ("add", "{}"))["message"]
    assert second["messages"][3] == {"role": "tool", "tool_call_id": "call_0", "content": "4"}
    assert second["messages"][4]["content"].startswith("Error: ValueError: a: Field required")


async def test_an_answer_without_a_call_is_what_the_reward_says(tmp_path: Path) -> None:
    async with model({**ANSWER, "finish_reason": "stop"}) as (url, _):
        assert (await played(url, settings(tmp_path, "used_the_tool", tools=["add"]))).reward == 0.0


@pytest.mark.parametrize("ended", [calls(SUM), refused(410, "max_turns"), refused(400, "context_length_exceeded")])
async def test_tool_turns_are_truncated_by_limits(tmp_path: Path, ended: Any) -> None:
    async with model(calls(SUM), ended) as (url, asked):
        found = await played(url, settings(tmp_path, "used_the_tool", tools=["add"], turns_most=2))
    assert (found.reward, found.truncated, len(asked)) == (1.0, True, 2)


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (refused(400, "context_length_exceeded"), "the prompt was refused: no more"),
        (refused(400, "unsupported_parameter"), r"a call was refused \(400\): no more"),
        ((502, {}), ""),
    ],
)
async def test_what_is_refused_is_no_reward(tmp_path: Path, said: Any, told: str) -> None:
    if not told:  # It is asked again, until there is an answer.
        async with model(said, ANSWER) as (url, asked):
            assert (await played(url, settings(tmp_path, "none", "own"))).reward == 1.0
        assert len(asked) == 2
        return
    async with model(said) as (url, _):
        with pytest.raises(BadOutcome, match=told):
            await played(url, settings(tmp_path, "trl"))
