"""Calls of the Responses API and of the Messages API, and routes that tell tokens, through a front."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from elastic.front.calls import CallTimes
from elastic.protocol.front_messages import (
    CHAIN_MAX,
    AnswerDelivered,
    ClientGone,
    Declined,
    LookUp,
    OpenTurns,
    RecallHistory,
    SettleTurn,
)
from elastic.protocol.sampled import ids_of
from tests.front.dialects import events_of, read_message, read_response
from tests.front.fronted import DRIVER, HELLO, Served, bearer, fronted, says
from tests.front.small_model import EOS, small_model

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
RESPONSE_TOOLS = [{"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}]
MESSAGE_TOOLS = [{"name": "look", "input_schema": {"type": "object", "properties": {}}}]
ANSWER = 'hm|see <look {"a": 1}>'
PROMPT = b"[user:hello][assistant:"


async def said(served: Served, path: str, stream: bool, **body: Any) -> dict[str, Any]:
    """The answer, whole or as its stream adds up to."""
    if not stream:
        answer = await served.post(path, **body)
        assert answer.status_code == 200, answer.text
        return answer.json()
    async with served.client.stream("POST", path, json={**body, "stream": True}) as answer:
        data = await answer.aread()
        assert answer.status_code == 200, data
        assert answer.headers["content-type"] == "text/event-stream"
    return (read_response if path == RESPONSES else read_message)(events_of(data))


def opened(served: Served, number: int) -> tuple[int | None, int, bytes]:
    """Where a turn goes on, and the tokens that are new."""
    turn = served.run.of(OpenTurns)[number]
    return turn.branch, turn.tokens, bytes(0 if token == EOS else token for token in ids_of(turn.ids))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("thoughts", [False, True])
async def test_responses_go_on_behind_their_own_tokens(tmp_path, stream, thoughts):
    async with fronted(tmp_path, small_model(reasons=True), answer=says(ANSWER)) as served:
        wants = {"instructions": "be", "tools": RESPONSE_TOOLS}
        first = await said(served, RESPONSES, stream, input="hello", **wants)
        assert (first["id"], first["object"], first["status"]) == ("resp_2-5-0-0", "response", "completed")
        thought, text, call = first["output"]
        assert thought["content"] == [{"type": "reasoning_text", "text": "hm"}]
        assert text["content"][0]["text"] == "see "
        assert (call["name"], json.loads(call["arguments"])) == ("look", {"a": 1})
        assert first["usage"]["output_tokens"] == len(ANSWER) + 1
        history = [
            {"role": "user", "content": "hello"},
            *first["output"][not thoughts :],
            {"type": "function_call_output", "call_id": call["call_id"], "output": "seen"},
        ]
        await said(served, RESPONSES, stream, input=history, **wants)
        answered = len("[system:be]" + PROMPT.decode() + ANSWER) + 1
        assert opened(served, 1) == (0, answered, b"][tool:seen][assistant:")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("thoughts", [False, True])
async def test_messages_go_on_behind_their_own_tokens(tmp_path, stream, thoughts):
    async with fronted(tmp_path, small_model(reasons=True), answer=says(ANSWER)) as served:
        asked = {"role": "user", "content": "hello"}
        wants = {"system": "be", "tools": MESSAGE_TOOLS, "max_tokens": 50}
        first = await said(served, MESSAGES, stream, messages=[asked], **wants)
        assert (first["id"], first["role"], first["stop_reason"]) == ("msg_2-5-0-0", "assistant", "tool_use")
        thought, text, use = first["content"]
        assert (thought["thinking"], text["text"], use["input"]) == ("hm", "see ", {"a": 1})
        assert first["usage"]["output_tokens"] == len(ANSWER) + 1
        results = [
            {"type": "tool_result", "tool_use_id": use["id"], "content": "seen"},
            {"type": "text", "text": "and?"},
        ]
        own = {"role": "assistant", "content": first["content"][not thoughts :]}
        system = [{"type": "text", "text": "be", "cache_control": {"type": "ephemeral"}}]
        more = [asked, own, {"role": "user", "content": results}]
        await said(served, MESSAGES, stream, messages=more, **wants | {"system": system})
        answered = len("[system:be]" + PROMPT.decode() + ANSWER) + 1
        assert opened(served, 1) == (0, answered, b"][tool:seen][user:and?][assistant:")


# What was said before, by its name.


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_goes_on_from_a_named_one(tmp_path, stream):
    async with fronted(tmp_path, answer=says("hi")) as served:
        first = await said(served, RESPONSES, stream, input="hello")
        second = await said(served, RESPONSES, stream, input="and?", previous_response_id=first["id"])
        assert second["previous_response_id"] == first["id"]
        await served.run.restart()
        await said(served, RESPONSES, stream, input="so?", previous_response_id=second["id"])
        size = len(PROMPT) + len("hi") + 1
        assert opened(served, 1) == (0, size, b"][user:and?][assistant:")
        assert opened(served, 2) == (0, size + len("][user:and?][assistant:hi") + 1, b"][user:so?][assistant:")
        # Nothing is kept twice.
        behind = [bool(settled.behind) for settled in served.run.of(SettleTurn)]
        assert behind == [False, True, True]
        # All of it sent is the same conversation, and another question to the first answer another branch of it.
        everything = [
            *[{"role": "user", "content": "hello"}, *first["output"]],
            *[{"role": "user", "content": "and?"}, *second["output"], {"role": "user", "content": "so?"}],
        ]
        await said(served, RESPONSES, stream, input=everything)
        assert opened(served, 3) == opened(served, 2)
        await said(served, RESPONSES, stream, input="but?", previous_response_id=first["id"])
        assert opened(served, 4) == (0, size, b"][user:but?][assistant:")


async def test_instructions_are_of_one_response_alone(tmp_path):
    async with fronted(tmp_path, answer=says("hi")) as served:
        first = await said(served, RESPONSES, False, input="hello", instructions="be")
        named = {"previous_response_id": first["id"], "input": "and?"}
        await said(served, RESPONSES, False, instructions="be", **named)
        assert opened(served, 1)[2] == b"][user:and?][assistant:"
        third = await said(served, RESPONSES, False, **named)
        branch, _, ids = opened(served, 2)
        assert (branch, ids) == (None, PROMPT + b"hi\0][user:and?][assistant:")
        await said(served, RESPONSES, False, input="so?", previous_response_id=third["id"])
        assert opened(served, 3)[2] == b"][user:so?][assistant:"


@pytest.mark.parametrize("previous", ["resp_2-5-0-7", "resp_nothing"])
async def test_a_response_that_is_not_there(served, previous):
    answer = await served.post(RESPONSES, input="hello", previous_response_id=previous)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == ("previous_response_not_found", "previous_response_id")


async def test_a_response_that_is_not_stored_is_not_gone_on_from(served):
    first = await said(served, RESPONSES, False, input="hello", store=False)
    assert not served.run.of(SettleTurn)[0].history
    answer = await served.post(RESPONSES, input="and?", previous_response_id=first["id"])
    assert answer.json()["error"]["code"] == "previous_response_not_found"
    # The history that a client keeps by itself is matched all the same.
    await said(served, RESPONSES, False, input=[*HELLO, *first["output"], {"role": "user", "content": "and?"}])
    assert opened(served, 1)[0] == 0


async def test_an_answer_is_asked_for_once_more_behind_a_named_one(served):
    first = await said(served, RESPONSES, False, input="hello")
    await said(served, RESPONSES, False, previous_response_id=first["id"])
    assert opened(served, 1)[2] == b"][assistant:"


@pytest.mark.parametrize(("context_tokens", "said"), [(1 << 20, f"at most {CHAIN_MAX}"), (4096, "maximum context")])
async def test_more_messages_than_there_is_room_for_are_refused(tmp_path, context_tokens, said):
    results = [{"type": "tool_result", "tool_use_id": "t", "content": ""}] * (CHAIN_MAX + 1)
    async with fronted(tmp_path, small_model()._replace(context_tokens=context_tokens)) as served:
        answer = await served.post(MESSAGES, messages=[{"role": "user", "content": results}])
        assert_refused(answer, 400, "invalid_request_error", said)
        assert not served.run.of(LookUp)


# Calls that break.


@pytest.mark.parametrize(("path", "body"), [(RESPONSES, {"input": "hello"}), (MESSAGES, {"messages": HELLO})])
async def test_a_repeated_call_joins(served, path, body):
    first = await said(served, path, False, **body)
    again = await served.client.post(path, json=body, headers={"x-stainless-retry-count": "1"})
    told = {**again.json(), "created_at": first.get("created_at")}
    assert told == {**first, "created_at": first.get("created_at")}
    assert len(served.run.turns) == 1
    # Delivered, and not marked as a repetition, it is another call.
    await said(served, path, False, **body)
    assert len(served.run.turns) == 2


@pytest.mark.parametrize(("path", "body"), [(RESPONSES, {"input": "hello"}), (MESSAGES, {"messages": HELLO})])
async def test_a_stream_goes_on_where_its_run_was_killed(tmp_path, path, body):
    async with fronted(tmp_path) as served:
        reading = asyncio.create_task(said(served, path, True, **body))
        await served.until(lambda: served.run.turns)
        (turn,) = served.run.turns
        served.run.tokens(turn, [*b"abc"])
        await served.run.restart()
        await served.until(lambda: len(served.run.of(LookUp)) == 2)
        served.run.tokens(turn, [*b"def"])
        served.run.over(turn, "length")
        answer = await reading
        content = answer["output"][0]["content"] if path == RESPONSES else answer["content"]
        assert [part["text"] for part in content] == ["abcdef"]
        await served.until(lambda: served.run.of(AnswerDelivered))


@pytest.mark.parametrize(("path", "body"), [(RESPONSES, {"input": "hello"}), (MESSAGES, {"messages": HELLO})])
async def test_a_stream_whose_tokens_come_again_otherwise_is_cut(tmp_path, path, body):
    async with fronted(tmp_path) as served:
        reading = asyncio.create_task(said(served, path, True, **body))
        await served.until(lambda: served.run.turns)
        (turn,) = served.run.turns
        served.run.tokens(turn, [*b"abc"])
        await served.until(lambda: len(served.run.of(LookUp)) == 1)
        turn.ids = [*b"abX"]
        await served.run.restart()
        with pytest.raises(httpx.RemoteProtocolError):
            await reading
        await served.until(lambda: served.run.of(ClientGone))


@pytest.mark.parametrize(
    ("path", "body", "kind"),
    [(RESPONSES, {"input": "hello"}, "server_error"), (MESSAGES, {"messages": HELLO}, "api_error")],
)
async def test_a_turn_that_fails_under_a_stream_is_an_error_event(tmp_path, path, body, kind):
    async def begins(run, turn) -> None:
        run.tokens(turn, [*b"abc"])

    async with fronted(tmp_path, answer=begins) as served:
        async with served.client.stream("POST", path, json={**body, "stream": True}) as answer:
            data = b""
            async for piece in answer.aiter_bytes():
                if not data:
                    served.run.over(served.run.turns[0], "", "no capacity")
                data += piece
        *_, last = events_of(data)
        assert (last["type"], last["error"]["type"]) == ("error", kind)
        assert "no capacity" in last["error"]["message"]


async def test_a_quiet_stream_of_messages_has_pings(tmp_path):
    async def begins(run, turn) -> None:
        run.tokens(turn, [*b"a"])

    async with fronted(tmp_path, answer=begins, times=CallTimes(breath_s=0.05)) as served:
        async with served.client.stream("POST", MESSAGES, json={"messages": HELLO, "stream": True}) as answer:
            text = ""
            async for piece in answer.aiter_text():
                text += piece
                if 'event: ping\ndata: {"type":"ping"}\n\n' in text and not served.run.turns[0].over:
                    served.run.over(served.run.turns[0], "length")
        named = [event["type"] for event in events_of(text.encode()) if event["type"] != "ping"]
        assert named[0] == "message_start"
        assert named[-1] == "message_stop"


# Errors of the Messages API.


def assert_refused(answer: httpx.Response, status: int, kind: str, said: str = "") -> None:
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert set(body) == {"type", "error", "request_id"}
    assert (body["type"], set(body["error"]), body["error"]["type"]) == ("error", {"type", "message"}, kind)
    assert said in body["error"]["message"]
    assert answer.headers["request-id"] == answer.headers["x-request-id"] == body["request_id"]


async def test_errors_have_the_shape_that_anthropics_clients_read(served):
    post = served.client.post
    asked = {"messages": HELLO}
    assert_refused(await post(MESSAGES, json=asked, headers=bearer("x")), 401, "authentication_error")
    assert_refused(
        await post(MESSAGES, json=asked, headers={"authorization": "", "x-api-key": "x"}), 401, "authentication_error"
    )
    other = f"/t/2-5-1{MESSAGES}"
    assert_refused(await post(other, json=asked), 403, "permission_error")
    assert_refused(await post(MESSAGES, json={**asked, "model": "claude"}), 404, "not_found_error", "claude")
    assert_refused(await post(f"{MESSAGES}/batches", json={}), 404, "not_found_error")
    assert_refused(await served.client.get(MESSAGES), 405, "invalid_request_error")
    assert_refused(await post(MESSAGES, content=b"{"), 400, "invalid_request_error", "JSON")
    assert_refused(await post(MESSAGES, json={"messages": []}), 400, "invalid_request_error", "messages:")
    assert_refused(await post(MESSAGES, content=b"x" * 2_000_000), 413, "request_too_large")
    begun = [*HELLO, {"role": "assistant", "content": "I"}]
    assert_refused(await post(MESSAGES, json={"messages": begun}), 400, "invalid_request_error", "not gone on with")
    long = [{"role": "user", "content": "x" * 5000}]
    assert_refused(
        await post(MESSAGES, json={"messages": long}),
        400,
        "invalid_request_error",
        "prompt is too long: This model's maximum context length is 4096 tokens.",
    )
    assert_refused(await post(f"{MESSAGES}/count_tokens", json={"messages": []}), 400, "invalid_request_error")


@pytest.mark.parametrize(
    ("status", "shown", "kind", "again"),
    [
        (503, 529, "overloaded_error", "2"),
        (429, 429, "rate_limit_error", "2"),
        (500, 500, "api_error", "2"),
        (410, 410, "invalid_request_error", None),
    ],
)
async def test_what_the_run_declines_is_told_in_its_clients_words(served, status, shown, kind, again):
    retry = {"retry_after_s": 1.5} if again else {"retry": False}
    served.run.decline = lambda message: Declined(0, status, "code", "no", **retry)
    answer = await served.post(MESSAGES, messages=HELLO)
    assert_refused(answer, shown, kind, "no")
    assert answer.headers.get("retry-after") == again
    assert answer.headers.get("x-should-retry") == (None if again else "false")
    served.run.decline = lambda message: Declined(0, status, "code", "no", **retry)
    answer = await served.post(RESPONSES, input="hello")
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, "code")


# Tokens.


@pytest.mark.parametrize("prefix", ["", "/t/2-5-0", "/sessions/any/thing"])
async def test_tokens_are_told_and_asked_for_none(served, prefix):
    answer = await served.post(f"{prefix}/tokenize", prompt="hé", return_token_strs=True)
    ids = [*"hé".encode()]
    assert answer.json() == {
        "count": 3,
        "max_model_len": 4096,
        "tokens": ids,
        "token_strs": ["h", "\ufffd", "\ufffd"],
    }
    assert (await served.post(f"{prefix}/detokenize/", tokens=ids)).json() == {"prompt": "hé"}
    answer = (await served.post(f"{prefix}/tokenize", messages=HELLO)).json()
    assert (bytes(answer["tokens"]), answer["token_strs"]) == (PROMPT, None)
    counted = await served.post(f"{prefix}{MESSAGES}/count_tokens", messages=HELLO, model="small")
    assert counted.json() == {"input_tokens": len(PROMPT)}
    assert not served.run.turns


async def test_what_was_sampled_counts_as_it_was_sampled(served):
    await said(served, MESSAGES, False, messages=HELLO)
    more = [*HELLO, {"role": "assistant", "content": "hi there"}, {"role": "user", "content": "and?"}]
    counted = (await served.post(f"{MESSAGES}/count_tokens", messages=more)).json()["input_tokens"]
    told = (await served.post("/tokenize", messages=more)).json()
    await said(served, MESSAGES, False, messages=more)
    prompt = served.run.turns[1].prompt
    assert told["tokens"] == prompt
    assert counted == told["count"] == len(prompt)


async def test_a_driver_counts_tokens_without_a_trajectory(served):
    answer = await served.client.post("/tokenize", json={"messages": HELLO}, headers=bearer(DRIVER))
    assert answer.json()["count"] == len(PROMPT)
    assert not served.run.of(LookUp)
    long = [{"role": "user", "content": "x" * 5000}]
    answer = await served.client.post(f"{MESSAGES}/count_tokens", json={"messages": long}, headers=bearer(DRIVER))
    assert answer.json()["input_tokens"] > 5000


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "messages"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "x", "model": "other"}, "model"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [300]}, "tokens"),
        ("/detokenize", {"tokens": [1] * 100_000}, "tokens"),
        ("/detokenize", {"tokens": ["x"]}, "tokens.0"),
    ],
)
async def test_bad_questions_about_tokens(served, path, body, param):
    answer = await served.post(path, **body)
    assert answer.status_code in (400, 404)
    assert answer.json()["error"]["param"] == param
    refused = await served.client.post(path, json=body, headers=bearer("x"))
    assert refused.status_code == 401


async def test_no_history_is_asked_for_where_none_is_named(served):
    await said(served, RESPONSES, False, input="hello")
    await said(served, MESSAGES, False, messages=HELLO)
    assert not served.run.of(RecallHistory)
