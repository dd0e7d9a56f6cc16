"""What Anthropic's client makes of the Messages API, in its own types, and of a live run whose processes are killed."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from elastic.protocol.front_messages import Declined
from tests.clients.conftest import LiveRun, Trajectory
from tests.front.dialects import events_of
from tests.front.fronted import AGENT, Served, fronted, says
from tests.front.small_model import small_model

pytestmark = pytest.mark.clients

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
TOOLS: list[Any] = [{"name": "look", "input_schema": {"type": "object", "properties": {}}}]
LONG: dict[str, Any] = {"extra_body": {"ignore_eos": True}, "max_tokens": 30}


def client_of(anthropic: Any, served: Served, **settings: Any) -> Any:
    return anthropic.AsyncAnthropic(base_url=served.url, api_key=AGENT, timeout=30, **settings)


async def test_answers_and_events_are_of_the_clients_types(anthropic: Any, tmp_path: Path) -> None:
    from pydantic import TypeAdapter

    event = TypeAdapter(anthropic.types.RawMessageStreamEvent)
    body = {"messages": HELLO, "max_tokens": 50, "tools": TOOLS}
    async with fronted(tmp_path, small_model(reasons=True), answer=says('hm|see <look {"a": 1}>')) as served:
        whole = await served.post("/v1/messages", **body)
        anthropic.types.Message.model_validate(whole.json())
        async with served.client.stream("POST", "/v1/messages", json={**body, "stream": True}) as answer:
            events = events_of(await answer.aread())
        for one in events:
            assert event.validate_python(one).type == one["type"]


@pytest.mark.parametrize("thoughts", [False, True])
async def test_a_stream_is_followed(anthropic: Any, tmp_path: Path, thoughts: bool) -> None:
    answer = says('hm|see <look {"a": 1}>')
    async with (
        fronted(tmp_path, small_model(reasons=True), answer=answer) as served,
        client_of(anthropic, served) as client,
    ):
        async with client.messages.stream(model="small", messages=HELLO, max_tokens=50, tools=TOOLS) as stream:
            texts = [text async for text in stream.text_stream]
            final = await stream.get_final_message()
        assert "".join(texts) == "see "
        assert [block.type for block in final.content] == ["thinking", "text", "tool_use"]
        assert final.content[0].thinking == "hm"
        assert final.content[2].input == {"a": 1}
        assert (final.stop_reason, final.usage.output_tokens) == ("tool_use", 23)
        # What the client sends back goes on behind the same tokens.
        results = [{"type": "tool_result", "tool_use_id": final.content[2].id, "content": "seen"}]
        own = {"role": "assistant", "content": final.content[not thoughts :]}
        more = [*HELLO, own, {"role": "user", "content": results}]
        counted = await client.messages.count_tokens(model="small", messages=more, tools=TOOLS)
        second = await client.messages.create(model="small", messages=more, max_tokens=50, tools=TOOLS)
        assert served.run.turns[1].call.branch == 0
        assert counted.input_tokens == second.usage.input_tokens == len(served.run.turns[1].prompt)


async def test_a_stream_that_cannot_go_on_raises(anthropic: Any, tmp_path: Path) -> None:
    async def begins(run: Any, turn: Any) -> None:
        run.tokens(turn, [*b"abc"])

    async with fronted(tmp_path, answer=begins) as served, client_of(anthropic, served) as client:
        stream = await client.messages.create(model="small", messages=HELLO, max_tokens=9, stream=True)
        heard = [await anext(stream) for _ in range(3)]
        assert heard[-1].type == "content_block_delta"
        served.run.over(served.run.turns[0], "", "no capacity")
        with pytest.raises(anthropic.APIStatusError, match="no capacity"):
            await anext(stream)


@pytest.mark.parametrize(
    ("status", "raised"),
    [
        (400, "BadRequestError"),
        (404, "NotFoundError"),
        (409, "ConflictError"),
        (410, "APIStatusError"),
        (429, "RateLimitError"),
        (500, "InternalServerError"),
        (503, "OverloadedError"),
    ],
)
async def test_errors_are_the_clients_own(anthropic: Any, served: Served, status: int, raised: str) -> None:
    served.run.decline = lambda message: Declined(0, status, "code", "not now")
    async with client_of(anthropic, served, max_retries=0) as client:
        with pytest.raises(anthropic.APIStatusError) as refused:
            await client.messages.create(model="small", messages=HELLO, max_tokens=9)
    assert type(refused.value).__name__ == raised
    assert "not now" in str(refused.value)
    assert refused.value.request_id == refused.value.body["request_id"]


async def test_what_is_refused_is_asked_again_and_joins(anthropic: Any, served: Served) -> None:
    declines = iter([Declined(0, 503, "no_capacity", "no worker came", retry_after_s=0.01)])
    served.run.decline = lambda message: next(declines, None)
    async with client_of(anthropic, served) as client:
        answer = await client.messages.create(model="small", messages=HELLO, max_tokens=9)
    assert answer.content[0].text == "hi there"
    assert len(served.run.turns) == 1


async def test_a_wrong_key_and_a_wrong_field(anthropic: Any, served: Served) -> None:
    formatted = {"format": {"type": "json_schema", "schema": {}}}
    async with client_of(anthropic, served) as client:
        with pytest.raises(anthropic.AuthenticationError):
            await client.with_options(api_key="wrong").messages.create(model="small", messages=HELLO, max_tokens=9)
        with pytest.raises(anthropic.BadRequestError, match=r"output_config\.format"):
            await client.messages.create(model="small", messages=HELLO, max_tokens=9, output_config=formatted)


def test_a_conversation(trajectory: Trajectory) -> None:
    create = trajectory.anthropic.messages.create
    messages = [*HELLO]
    answers: list[Any] = []
    for _ in range(3):
        answer = create(model="tiny", system="Be brief.", messages=messages, **LONG)
        answers.append(answer)
        messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": "And?"}]
    for answer in answers:
        ids = trajectory.run.answer(answer.id).ids
        assert "".join(block.text for block in answer.content) == trajectory.run.text(ids)
        assert answer.usage.output_tokens == len(ids)
        assert answer.stop_reason == "max_tokens"
    status = trajectory.status()
    assert (status["turns"], status["branches"]) == (3, 1)


def test_too_long_a_prompt(anthropic: Any, trajectory: Trajectory) -> None:
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        trajectory.anthropic.messages.create(
            model="tiny", messages=[{"role": "user", "content": "1 2 3 " * 2048}], max_tokens=5
        )


def streamed(trajectory: Trajectory, strike: Callable[[], None], messages: list[Any]) -> tuple[Any, int]:
    """The message that is streamed, at whose first text something is struck; and how many streams broke before."""
    anthropic = __import__("anthropic")
    struck = False
    for torn in range(20):
        try:
            body: dict[str, Any] = {**LONG, "max_tokens": 200}
            with trajectory.anthropic.messages.stream(model="tiny", messages=messages, **body) as stream:
                for event in stream:
                    if event.type == "text" and not struck:
                        struck = True
                        strike()
                return stream.get_final_message(), torn
        except (anthropic.APIConnectionError, anthropic.InternalServerError, OSError):
            continue
        except Exception as error:
            # The client hands on what its HTTP library raises where a stream breaks.
            if not isinstance(error, httpx.TransportError) and "httpx2" not in type(error).__module__:
                raise
    raise AssertionError("no stream was whole")


def test_a_front_and_a_worker_are_killed_under_streams(killable: LiveRun) -> None:
    run = killable.run
    messages = [*HELLO]
    answers: list[Any] = []
    breaks: list[int] = []
    strikes = (lambda: run.kill_processes("front", run.fronts()), lambda: run.kill_processes("worker", run.workers()))
    with contextlib.closing(killable.begin()) as trajectory:
        for strike in strikes:
            answer, torn = streamed(trajectory, strike, messages)
            answers.append(answer)
            breaks.append(torn)
            messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": "And?"}]
    assert run.kills == {"front": 2, "worker": 1}
    assert breaks[0] > 0
    assert breaks[1] == 0
    for answer in answers:
        said = "".join(block.text for block in answer.content)
        assert said == killable.text(killable.answer(answer.id).ids)
    status = trajectory.status()
    assert (status["turns"], status["branches"]) == (2, 1)
