"""Errors as OpenAI's client raises them: which class, what is in it, and whether it asks again."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from elastic.protocol.front_messages import Declined, LookUp
from elastic.protocol.run_secrets import RunSecrets
from tests.clients.conftest import CONTEXT_TOKENS, LiveRun, Trajectory
from tests.clients.refusals import OPENAI_KINDS, REFUSALS, TOLD, Refusal, attempts, refuse
from tests.front.fronted import AGENT, HELLO, Served, fronted, says
from tests.front.live import bearer
from tests.front.small_model import small_model

pytestmark = pytest.mark.clients

TOOLS: list[Any] = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]


# Of a live run.


@pytest.mark.parametrize("key", ["nobody's", RunSecrets(b"x" * 32).driver_key("main")], ids=["none", "another run's"])
def test_a_key_that_is_none_of_the_runs(openai: Any, live: LiveRun, key: str) -> None:
    with pytest.raises(openai.AuthenticationError) as refused:
        live.client(key).models.list()
    assert (refused.value.status_code, refused.value.code) == (401, "invalid_api_key")
    assert "the key is missing or none of this run's" in str(refused.value)


def test_another_model_and_another_session_are_not_found(openai: Any, live: LiveRun, trajectory: Trajectory) -> None:
    with pytest.raises(openai.NotFoundError) as refused:
        trajectory.client.chat.completions.create(model="gpt", messages=HELLO)
    assert (refused.value.code, refused.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.NotFoundError) as refused:
        live.client(live.driver_key, "/sessions/unknown/v1").chat.completions.create(model="tiny", messages=HELLO)
    assert refused.value.code == "trajectory_not_found"


def test_anothers_trajectory_is_not_reached(openai: Any, live: LiveRun, trajectory: Trajectory) -> None:
    other = live.begin()
    foreign = live.client(live.run.driver_key("unknown"), f"/t/{trajectory.id}/v1")
    with pytest.raises(openai.PermissionDeniedError):
        live.client(other.key, f"/t/{trajectory.id}/v1").chat.completions.create(model="tiny", messages=HELLO)
    with pytest.raises(openai.NotFoundError):
        foreign.chat.completions.create(model="tiny", messages=HELLO)


def test_too_long_a_prompt_says_how_long_it_may_be(openai: Any, trajectory: Trajectory) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        trajectory.client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "1 2 3 " * CONTEXT_TOKENS}]
        )
    assert refused.value.code == "context_length_exceeded"
    said = f"This model's maximum context length is {CONTEXT_TOKENS} tokens."
    assert refused.value.body["message"].startswith(said)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"logprobs": True, "top_logprobs": 2}, "top_logprobs"),
        ({"tools": [{"type": "function", "function": {"parameters": {}}}]}, "tools"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
)
def test_what_is_not_served_is_refused_by_its_name(openai: Any, trajectory: Trajectory, body: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        trajectory.client.chat.completions.create(**{"model": "tiny", "messages": HELLO, **body})
    assert param in (refused.value.param or "")


def test_a_trajectory_that_is_over_is_gone_and_not_asked_again(openai: Any, trajectory: Trajectory) -> None:
    trajectory.client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=2)
    assert trajectory.told("reward", reward=1).status_code == 200
    assert trajectory.told("end").json()["state"] == "finished"
    with pytest.raises(openai.APIStatusError) as refused:
        trajectory.client.chat.completions.create(model="tiny", messages=HELLO)
    assert (refused.value.status_code, refused.value.code) == (410, "trajectory_over")
    assert refused.value.response.headers["x-should-retry"] == "false"
    assert refused.value.request_id


@pytest.mark.parametrize("reward", ["NaN", "1e999", '"much"'])
def test_a_reward_is_a_finite_number_and_comes_once(trajectory: Trajectory, reward: str) -> None:
    path, headers = f"{trajectory.run.url}/trajectories/{trajectory.id}/reward", bearer(trajectory.key)
    assert httpx.post(path, content=f'{{"reward": {reward}}}', headers=headers).status_code == 400
    assert [trajectory.told("reward", reward=value).status_code for value in (0.5, 0.5, 0.25)] == [200, 200, 409]


# Of a front whose run is modelled, so that it can be told to fail.


async def test_a_body_that_is_too_large_is_refused(openai: Any, tmp_path: Path) -> None:
    async with (
        fronted(tmp_path, body_bytes_max=100_000) as served,
        openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key=AGENT, timeout=30) as client,
    ):
        with pytest.raises(openai.APIStatusError) as refused:
            await client.chat.completions.create(model="small", messages=[{"role": "user", "content": "x" * 200_000}])
        assert (refused.value.status_code, refused.value.code) == (413, "request_too_large")
        assert not served.run.of(LookUp)


async def test_tools_need_what_reads_their_calls(openai: Any, tmp_path: Path) -> None:
    async with (
        fronted(tmp_path, small_model(reads_calls=False)) as served,
        openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key=AGENT, timeout=30) as client,
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(model="small", messages=HELLO, tools=TOOLS)
        assert (refused.value.code, refused.value.param) == ("unsupported_parameter", "tools")
        assert "front.tool_parser" in str(refused.value)


@pytest.fixture
async def agent(openai: Any, served: Served) -> AsyncIterator[Any]:
    async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key=AGENT, timeout=30) as client:
        yield client


@pytest.mark.parametrize(("status", "kind"), [(429, "RateLimitError"), (503, "InternalServerError")])
async def test_what_is_busy_says_when_to_come_again(
    openai: Any, served: Served, agent: Any, status: int, kind: str
) -> None:
    busy = Declined(0, status, "busy", "come again", retry_after_s=1.0)
    served.run.decline = lambda message: busy if isinstance(message, LookUp) else None
    with pytest.raises(getattr(openai, kind)) as refused:
        await agent.with_options(max_retries=0).chat.completions.create(model="small", messages=HELLO)
    assert refused.value.response.headers["retry-after"] == "1"
    assert refused.value.code == "busy"

    began_s = time.monotonic()
    served.run.heard.clear()
    served.run.decline = lambda message: busy if len(served.run.of(LookUp)) == 1 else None
    answer = await agent.chat.completions.create(model="small", messages=HELLO)
    assert answer.choices[0].message.content == "hi there"
    assert time.monotonic() - began_s >= 1
    assert [look.call.retry for look in served.run.of(LookUp)] == [False, True]


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: str(refusal.status))
async def test_refusals(openai: Any, served: Served, agent: Any, refusal: Refusal) -> None:
    refuse(served, refusal)
    with pytest.raises(getattr(openai, OPENAI_KINDS[refusal.status])) as refused:
        await agent.with_options(max_retries=1).chat.completions.create(model="small", messages=HELLO)
    assert (refused.value.status_code, refused.value.code) == (refusal.status, f"code_{refusal.status}")
    assert TOLD in str(refused.value)
    assert attempts(served) == refusal.attempts


async def test_a_stream_whose_tokens_come_otherwise_is_torn(openai: Any, served: Served, agent: Any) -> None:
    async with begun(served, agent) as stream:
        served.run.turns[0].ids = [*b"x"]
        await served.run.restart()
        # As openai 3 and openai 2 tell of it.
        with pytest.raises((openai.APIConnectionError, httpx.RemoteProtocolError)):
            await read(stream)


async def test_a_stream_whose_turn_fails_is_an_error_and_no_answer(openai: Any, served: Served, agent: Any) -> None:
    async with begun(served, agent) as stream:
        served.run.over(served.run.turns[0], "", "the engine broke")
        with pytest.raises(openai.APIError, match="the engine broke"):
            await read(stream)


async def read(stream: Any) -> None:
    async for _ in stream:
        pass


@asynccontextmanager
async def begun(served: Served, agent: Any) -> AsyncIterator[Any]:
    """A stream of which one token has come."""

    async def answer(run: Any, turn: Any) -> None:
        run.tokens(turn, [*b"."])

    served.run.answer = answer
    async with await agent.chat.completions.create(model="small", messages=HELLO, stream=True) as stream:
        assert (await anext(stream)).choices[0].delta.content == "."
        yield stream


@pytest.mark.parametrize("stream", [False, True])
async def test_calls_of_tools_are_the_clients_own(served: Served, agent: Any, stream: bool) -> None:
    served.run.answer = says('see <look {"a": 1}><look {}>')
    answer = await agent.chat.completions.create(model="small", messages=HELLO, tools=TOOLS, stream=stream)
    if stream:
        choices = [chunk.choices[0] async for chunk in answer]
        pieces = [call for choice in choices for call in choice.delta.tool_calls or ()]
        named = [piece for piece in pieces if piece.function.name]
        assert [piece.index for piece in named] == [0, 1]
        told = {piece.index: "" for piece in named}
        for piece in pieces:
            told[piece.index] += piece.function.arguments or ""
        calls = [(piece.id, piece.function.name, told[piece.index]) for piece in named]
        finish = choices[-1].finish_reason
    else:
        (choice,) = answer.choices
        calls = [(call.id, call.function.name, call.function.arguments) for call in choice.message.tool_calls]
        finish = choice.finish_reason
    assert finish == "tool_calls"
    assert [call[1:] for call in calls] == [("look", '{"a": 1}'), ("look", "{}")]
    assert all(call[0] for call in calls)
