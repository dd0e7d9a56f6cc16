"""What OpenAI's client makes of the Responses API, in its own types, and of a live run whose processes are killed."""

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.clients.conftest import LiveRun, Trajectory
from tests.front.dialects import events_of, read_response
from tests.front.fronted import AGENT, Served, fronted, says
from tests.front.small_model import small_model

pytestmark = pytest.mark.clients

TOOLS: list[Any] = [{"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}]
LONG: dict[str, Any] = {"extra_body": {"ignore_eos": True}}


def client_of(openai: Any, served: Served) -> Any:
    return openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key=AGENT, timeout=30)


async def test_answers_and_events_are_of_the_clients_types(openai: Any, tmp_path: Path) -> None:
    from pydantic import TypeAdapter

    types = openai.types.responses
    event = TypeAdapter(types.ResponseStreamEvent)
    async with fronted(tmp_path, small_model(reasons=True), answer=says('hm|see <look {"a": 1}>')) as served:
        whole = await served.post("/v1/responses", input="hello", instructions="be", tools=TOOLS)
        types.Response.model_validate(whole.json())
        async with served.client.stream(
            "POST", "/v1/responses", json={"input": "hello", "tools": TOOLS, "stream": True}
        ) as answer:
            events = events_of(await answer.aread())
        for one in events:
            assert event.validate_python(one).type == one["type"]
        assert read_response(events)["output"][2]["name"] == "look"


async def test_a_stream_is_followed(openai: Any, tmp_path: Path) -> None:
    answer = says('hm|see <look {"a": 1}>')
    async with (
        fronted(tmp_path, small_model(reasons=True), answer=answer) as served,
        client_of(openai, served) as client,
    ):
        async with client.responses.stream(model="small", input="hello", tools=TOOLS) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_response()
        assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
        assert final.output_text == "see "
        assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
        call = final.output[2]
        assert json.loads(call.arguments) == {"a": 1}
        # What the client sends back goes on behind the same tokens.
        back = [item.model_dump(exclude_unset=True) for item in final.output]
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "seen"}
        history = [{"role": "user", "content": "hello"}, *back, result]
        await client.responses.create(model="small", input=history, tools=TOOLS)
        assert served.run.turns[1].call.branch == 0


async def test_a_stream_that_cannot_go_on_raises(openai: Any, tmp_path: Path) -> None:
    async def begins(run: Any, turn: Any) -> None:
        run.tokens(turn, [*b"abc"])

    async with fronted(tmp_path, answer=begins) as served, client_of(openai, served) as client:
        stream = await client.responses.create(model="small", input="hello", stream=True)
        heard = [await anext(stream) for _ in range(5)]
        assert heard[-1].type == "response.output_text.delta"
        served.run.over(served.run.turns[0], "", "no capacity")
        assert (await anext(stream)).type == "response.failed"
        with pytest.raises(openai.APIError, match="no capacity"):
            await anext(stream)


async def test_what_is_not_served_is_refused_by_its_name(openai: Any, served: Served) -> None:
    async with client_of(openai, served) as client:
        with pytest.raises(openai.BadRequestError) as refused:
            await client.responses.create(model="small", input="x", text={"format": {"type": "json_object"}})
        assert refused.value.param == "text.format"
        with pytest.raises(openai.BadRequestError) as refused:
            await client.responses.create(model="small", input="x", previous_response_id="resp_none")
        assert refused.value.code == "previous_response_not_found"


def test_a_conversation_by_name(trajectory: Trajectory, journaled: Callable[..., Any]) -> None:
    create = trajectory.client.responses.create
    first = create(model="tiny", input="What is 1 + 1?", instructions="Be brief.", max_output_tokens=8, **LONG)
    second = create(model="tiny", input="And?", instructions="Be brief.", previous_response_id=first.id, **LONG)
    assert (first.status, first.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    for answer in (first, second):
        ids = journaled(answer.id).ids
        assert answer.output_text == trajectory.run.text(ids)
        assert answer.usage.output_tokens == len(ids)
    assert second.usage.input_tokens > first.usage.input_tokens + 8
    assert trajectory.status()["branches"] == 1


def streamed(trajectory: Trajectory, strike: Callable[[], None], **body: Any) -> tuple[Any, int]:
    """The response that is streamed, at whose first text something is struck; and how many streams broke before."""
    openai = __import__("openai")
    struck = False
    for torn in range(20):
        try:
            last: Any = None
            with trajectory.client.responses.create(model="tiny", stream=True, **body, **LONG) as stream:
                for event in stream:
                    if event.type == "response.output_text.delta" and not struck:
                        struck = True
                        strike()
                    last = event
            assert last.type in ("response.completed", "response.incomplete")
            return last.response, torn
        except (openai.APIConnectionError, openai.InternalServerError, httpx.TransportError):
            continue
    raise AssertionError("no stream was whole")


def test_a_front_a_worker_and_the_orchestrator_are_killed_under_streams(killable: LiveRun) -> None:
    run = killable.run

    def orchestrator() -> None:
        run.kill("orchestrator")
        run.resume()

    strikes = (
        lambda: run.kill_processes("front", run.fronts()),
        lambda: run.kill_processes("worker", run.workers()),
        orchestrator,
    )
    answers: list[Any] = []
    breaks: list[int] = []
    with contextlib.closing(killable.begin()) as trajectory:
        for strike in strikes:
            previous = {"previous_response_id": answers[-1].id} if answers else {}
            answer, torn = streamed(trajectory, strike, input=f"What is {len(answers)}?", **previous)
            answers.append(answer)
            breaks.append(torn)
    assert run.kills == {"front": 2, "worker": 1, "orchestrator": 1}
    assert breaks[0] > 0
    assert breaks[1] == 0
    for answer in answers:
        assert answer.output[0].content[0].text == killable.text(killable.answer(answer.id).ids)
    status = trajectory.status()
    assert (status["turns"], status["branches"]) == (3, 1)
