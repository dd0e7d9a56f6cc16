"""The life of a call: what the client reads, and what the run hears of it."""

import asyncio
import gc
import json
import socket

import httpx
import pytest

from elastic.front.calls import CallTimes, LiveCall
from elastic.front.choices import Choice
from elastic.front.rendering.messages import chain, head_digest
from elastic.protocol.front_messages import (
    AnswerDelivered,
    ClientGone,
    CutTurn,
    Declined,
    LookUp,
    OpenTurns,
    SettleTurn,
    TurnOver,
    TurnSettled,
)
from elastic.protocol.sampled import ids_of
from tests.front.fronted import AGENT, HELLO, fronted, merged, says
from tests.front.modelled_run import TRAJECTORY, logprob_of
from tests.front.small_model import EOS, small_model

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]


async def test_a_whole_chat(served):
    answer = await served.chat(model="small", max_tokens=20, seed=4)
    assert answer.status_code == 200
    body = answer.json()
    assert body["id"] == "chatcmpl-2-5-0-0"
    assert (body["object"], body["model"]) == ("chat.completion", "small")
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "hi there"},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]
    prompt = len("[user:hello][assistant:")
    assert body["usage"] == {"prompt_tokens": prompt, "completion_tokens": 9, "total_tokens": prompt + 9}
    (opened,) = served.run.of(OpenTurns)
    assert bytes(ids_of(opened.ids)) == b"[user:hello][assistant:"
    assert (opened.sampling.max_tokens, opened.sampling.seed, opened.sampling.stop_token_ids) == (20, 4, (EOS,))
    await served.until(lambda: served.run.of(AnswerDelivered))
    assert [type(message) for message in served.run.heard][-3:] == [OpenTurns, SettleTurn, AnswerDelivered]


async def test_a_call_that_is_over_leaves_nothing_for_the_garbage_collector(served):
    gc.collect()
    gc.disable()
    try:
        await served.chat()
        async with served.streamed() as events:
            assert [event async for event in events][-1] == "[DONE]"
        await served.until(lambda: len(served.run.of(AnswerDelivered)) == 2 and not served.front.calls)
        assert not [kept for kept in gc.get_objects() if type(kept) in (LiveCall, Choice)]
    finally:
        gc.enable()


async def test_a_streamed_chat_says_the_same_as_a_whole_one(served):
    wants = {"return_token_ids": True, "logprobs": True, "seed": 1}
    whole = (await served.chat(**wants)).json()
    async with served.streamed(**wants, stream_options={"include_usage": True}) as events:
        *chunks, usage, done = [event async for event in events]
    assert done == "[DONE]"
    assert usage["choices"] == []
    assert usage["usage"] == whole["usage"]
    choices = [chunk["choices"][0] for chunk in chunks]
    assert choices[0]["delta"]["role"] == "assistant"
    assert "".join(choice["delta"]["content"] for choice in choices) == "hi there"
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["stop"]
    (said,) = whole["choices"]
    assert [token for choice in choices for token in choice["token_ids"]] == said["token_ids"]
    assert said["token_ids"] == [*b"hi there", EOS]
    shown = [entry for choice in choices for entry in (choice["logprobs"] or {"content": []})["content"]]
    assert shown == said["logprobs"]["content"]
    assert [entry["logprob"] for entry in shown] == [logprob_of(token) for token in said["token_ids"]]
    assert {(entry["token"], entry["token_id"]) for entry in shown} >= {("h", ord("h")), ("t", ord("t"))}
    assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"] == [*b"[user:hello][assistant:"]
    assert all("prompt_token_ids" not in chunk for chunk in chunks[1:])


async def test_a_chat_goes_on_behind_its_own_tokens(served):
    first = (await served.chat()).json()["choices"][0]["message"]
    more = [*HELLO, first, {"role": "user", "content": "and?"}]
    body = (await served.chat(more, return_token_ids=True)).json()
    opened = served.run.of(OpenTurns)[1]
    assert opened.branch == 0
    assert opened.tokens == len("[user:hello][assistant:hi there") + 1
    assert bytes(ids_of(opened.ids)) == b"][user:and?][assistant:"
    assert body["prompt_token_ids"] == [*b"[user:hello][assistant:hi there", EOS, *b"][user:and?][assistant:"]
    assert body["usage"]["prompt_tokens"] == len(body["prompt_token_ids"])


async def test_an_edited_history_is_rendered_whole(served):
    await served.chat()
    edited = [*HELLO, {"role": "assistant", "content": "no"}, {"role": "user", "content": "and?"}]
    await served.chat(edited)
    opened = served.run.of(OpenTurns)[1]
    assert opened.branch is None
    assert bytes(token % 256 for token in ids_of(opened.ids)).startswith(b"[user:hello][assistant:no")


@pytest.mark.parametrize("stream", [False, True])
async def test_choices_are_each_a_turn(served, stream):
    if stream:
        async with served.streamed(n=3) as events:
            chunks = [event async for event in events][:-1]
        choices = merged(chunks)
        assert {index: choice["message"]["content"] for index, choice in choices.items()} == dict.fromkeys(
            range(3), "hi there"
        )
        assert {choice["finish_reason"] for choice in choices.values()} == {"stop"}
    else:
        body = (await served.chat(n=3)).json()
        assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
        assert body["usage"]["completion_tokens"] == 27
    (opened,) = served.run.of(OpenTurns)
    assert opened.choices == 3
    await served.until(lambda: len(served.run.of(AnswerDelivered)) == 3)


async def test_choices_of_several_prompts_come_prompt_by_prompt(served):
    body = (
        await served.post(
            "/v1/completions",
            prompt=[[1, 2], [3]],
            n=2,
            logprobs=0,
            return_token_ids=True,
            return_tokens_as_token_ids=True,
        )
    ).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert [choice["prompt_token_ids"] for choice in body["choices"]] == [[1, 2], [1, 2], [3], [3]]
    logprobs = body["choices"][0]["logprobs"]
    assert {len(column) for column in logprobs.values()} == {9}
    assert logprobs["tokens"][0] == f"token_id:{ord('h')}"
    assert body["usage"]["prompt_tokens"] == 3
    assert [(o.first_choice, o.choices, ids_of(o.ids)) for o in served.run.of(OpenTurns)] == [
        (0, 2, [1, 2]),
        (2, 2, [3]),
    ]


async def test_more_choices_than_one_message_asks_for(served):
    prompts = [[1]] * 130
    body = (await served.post("/v1/completions", prompt=prompts)).json()
    assert [choice["text"] for choice in body["choices"]] == ["hi there"] * 130


async def test_tokens_in_tokens_out(served):
    body = (
        await served.post(
            "/inference/v1/generate",
            request_id="mine",
            token_ids=[5, 6],
            sampling_params={"max_tokens": 9, "logprobs": 1, "skip_special_tokens": False},
            cache_salt="3",
            priority=7,
        )
    ).json()
    assert (body["request_id"], body["output_mode"]) == ("generate-tokens-mine", "tokens")
    (choice,) = body["choices"]
    assert choice["token_ids"] == [*b"hi there", EOS]
    first = choice["logprobs"]["content"][0]
    assert (first["token"], first["token_id"], first["top_logprobs"]) == (f"token_id:{ord('h')}", ord("h"), [])
    (opened,) = served.run.of(OpenTurns)
    assert (opened.call.route, opened.sampling.max_tokens) == ("/inference/v1/generate", 9)


@pytest.mark.parametrize("piece", [1, 2, 5, 50])
@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_ends_at_a_stop_string_and_its_turn_with_the_token_that_made_it_whole(tmp_path, stream, piece):
    async with fronted(tmp_path, answer=says("one two END three", piece)) as served:
        if stream:
            async with served.streamed(stop=["END", "nothing"], return_token_ids=True) as events:
                chunks = [event async for event in events][:-1]
            text = "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks)
            ids = [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]]
            last = chunks[-1]["choices"][0]
        else:
            (last,) = (await served.chat(stop="END", return_token_ids=True)).json()["choices"]
            text, ids = last["message"]["content"], last["token_ids"]
        assert text == "one two "
        assert bytes(ids) == b"one two END"
        assert last["finish_reason"] == "stop"
        assert last["stop_reason"] == "END"
        (cut,), (settled,) = served.run.of(CutTurn), served.run.of(SettleTurn)
        assert cut.kept == settled.kept == 11


async def test_a_stop_token_is_no_text_and_is_named(tmp_path):
    async def ends(run, turn) -> None:
        run.tokens(turn, [*b"one."])
        run.over(turn, "stop")

    async with fronted(tmp_path, answer=ends) as served:
        (choice,) = (await served.chat(stop_token_ids=[ord(".")], return_token_ids=True)).json()["choices"]
        assert (choice["message"]["content"], choice["stop_reason"]) == ("one", ord("."))
        assert bytes(choice["token_ids"]) == b"one."
        assert served.run.of(OpenTurns)[0].sampling.stop_token_ids == (EOS, ord("."))


async def test_the_end_token_is_passed_over_where_the_client_wants_that(served):
    await served.chat(ignore_eos=True)
    (opened,) = served.run.of(OpenTurns)
    assert (opened.sampling.ignore_eos, opened.sampling.stop_token_ids) == (True, ())


@pytest.mark.parametrize("stream", [False, True])
async def test_calls_of_tools(tmp_path, stream):
    model = small_model(reasons=True)
    async with fronted(tmp_path, model, answer=says('hm|see <look {"a": 1}><look {}>')) as served:
        if stream:
            async with served.streamed(tools=TOOLS) as events:
                *chunks, done = [event async for event in events]
            assert done == "[DONE]"
            choice = merged(chunks)[0]
        else:
            (choice,) = (await served.chat(tools=TOOLS)).json()["choices"]
        message = choice["message"]
        assert choice["finish_reason"] == "tool_calls"
        assert message["reasoning_content"] == "hm"
        assert message["content"] == "see "
        assert [call["function"] for call in message["tool_calls"]] == [
            {"name": "look", "arguments": '{"a": 1}'},
            {"name": "look", "arguments": "{}"},
        ]
        assert len({call["id"] for call in message["tool_calls"]}) == 2
        # What the client sends back is what the run was told.
        said = {"role": "assistant", "content": message["content"], "tool_calls": message["tool_calls"]}
        (settled,) = served.run.of(SettleTurn)
        assert settled.answer == chain(head_digest(TOOLS, {}), [*HELLO, said])[-1]


async def test_one_call_of_a_tool_where_one_is_wanted(tmp_path):
    async with fronted(tmp_path, answer=says("<look {}><look {}>")) as served:
        (choice,) = (await served.chat(tools=TOOLS, parallel_tool_calls=False)).json()["choices"]
        assert len(choice["message"]["tool_calls"]) == 1
        assert choice["message"]["content"] is None
        (unread,) = (await served.chat(tools=TOOLS, tool_choice="none")).json()["choices"]
        assert unread["message"] == {"role": "assistant", "content": "<look {}><look {}>"}
        assert unread["finish_reason"] == "stop"


async def test_the_end_waits_until_it_is_durable(served):
    served.run.settles = False
    async with served.streamed() as events:
        text = ""
        async for event in events:
            text += event["choices"][0]["delta"]["content"]
            assert event["choices"][0]["finish_reason"] is None
            if text == "hi there":
                break
        await served.until(lambda: served.run.of(SettleTurn))
        assert not served.run.of(AnswerDelivered)
        (turn,) = served.run.turns
        served.run.say(turn, TurnSettled(turn.stream))
        *_, last, done = [event async for event in events]
        assert last["choices"][0]["finish_reason"] == "stop"
        assert done == "[DONE]"
    await served.until(lambda: served.run.of(AnswerDelivered))


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_is_told_to_the_run(tmp_path, stream):
    async with fronted(tmp_path) as served:
        asking = asyncio.create_task(served.chat(stream=stream))
        await served.until(lambda: served.run.turns)
        if stream:
            served.run.tokens(served.run.turns[0], [*b"abc"])
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await served.until(lambda: served.run.of(ClientGone))
        assert not served.run.of(AnswerDelivered)


@pytest.mark.parametrize("stream", [False, True])
async def test_no_first_token_in_time_is_a_503_with_a_time_to_come_back(tmp_path, stream):
    async with fronted(tmp_path, times=CallTimes(hold_s=0.2)) as served:
        answer = await served.chat(stream=stream)
        assert answer.status_code == 503
        assert int(answer.headers["retry-after"]) >= 1
        assert answer.json()["error"]["code"] == "overloaded"
        await served.until(lambda: served.run.of(ClientGone))
        # Whoever comes back finds the turn.
        served.run.answer = None
        again = asyncio.create_task(served.chat(stream=stream))
        await served.until(lambda: len(served.run.of(LookUp)) == 2)
        served.run.tokens(served.run.turns[0], [*b"abc"])
        served.run.over(served.run.turns[0], "length")
        assert (await again).status_code == 200
        assert len(served.run.turns) == 1


async def test_a_first_token_ends_the_hold(tmp_path):
    async with fronted(tmp_path, times=CallTimes(hold_s=0.3)) as served:
        asking = asyncio.create_task(served.chat())
        await served.until(lambda: served.run.turns)
        (turn,) = served.run.turns
        served.run.tokens(turn, [*b"a"])
        await asyncio.sleep(0.5)
        served.run.over(turn, "length")
        answer = (await asking).json()
        assert answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_run_that_is_killed_and_comes_back_is_not_noticed(tmp_path, stream):
    async with fronted(tmp_path) as served:
        texts: list[str] = []

        async def read() -> None:
            if not stream:
                texts.append((await served.chat()).json()["choices"][0]["message"]["content"])
                return
            async with served.streamed() as events:
                seen = [event async for event in events]
            assert seen[-1] == "[DONE]"
            assert seen[-2]["choices"][0]["finish_reason"] == "length"
            texts.append("".join(event["choices"][0]["delta"]["content"] for event in seen[:-1]))

        reading = asyncio.create_task(read())
        await served.until(lambda: served.run.turns)
        (turn,) = served.run.turns
        served.run.tokens(turn, [*b"abc"])
        await served.run.restart()
        await served.until(lambda: len(served.run.of(LookUp)) == 2)
        assert served.run.of(LookUp)[1].call.retry
        served.run.tokens(turn, [*b"def"])
        served.run.over(turn, "length")
        await reading
        assert texts == ["abcdef"]
        await served.until(lambda: served.run.of(AnswerDelivered))


async def test_a_call_of_a_tool_goes_on_within_its_arguments_when_the_run_comes_back(tmp_path):
    async with fronted(tmp_path) as served:
        seen, came = [], asyncio.Event()

        async def read() -> None:
            body = {"tools": TOOLS, "parallel_tool_calls": False, "stop": ["END"]}
            async with served.streamed(**body) as events:
                async for event in events:
                    seen.append(event)
                    came.set()

        reading = asyncio.create_task(read())
        await served.until(lambda: served.run.turns)
        (turn,) = served.run.turns
        served.run.tokens(turn, [*b'<look {"a": "E'])
        await came.wait()
        await served.run.restart()
        await served.until(lambda: len(served.run.of(LookUp)) == 2)
        served.run.tokens(turn, [*b'N"}><look {"b": 1}>, and EN'])
        served.run.over(turn, "length")
        await reading
        assert seen.pop() == "[DONE]"
        deltas = [call for event in seen for call in event["choices"][0]["delta"].get("tool_calls", ())]
        assert [(call["index"], "id" in call) for call in deltas] == [(0, True), (0, False)]
        choice = merged(seen)[0]
        (call,) = choice["message"]["tool_calls"]
        assert call["function"] == {"name": "look", "arguments": '{"a": "EN"}'}
        assert (choice["message"]["content"], choice["finish_reason"]) == (", and EN", "length")
        said = {"role": "assistant", "content": ", and EN", "tool_calls": [call]}
        assert served.run.of(SettleTurn)[-1].answer == chain(head_digest(TOOLS, {}), [*HELLO, said])[-1]


async def test_a_run_that_is_killed_before_the_end_is_durable(tmp_path):
    async with fronted(tmp_path, answer=says("abc", finish="length")) as served:
        served.run.settles = False
        asking = asyncio.create_task(served.chat())
        await served.until(lambda: served.run.of(SettleTurn))
        served.run.settles = True
        await served.run.restart()
        assert (await asking).json()["choices"][0]["message"]["content"] == "abc"
        assert len(served.run.of(SettleTurn)) == 2


async def test_a_stream_whose_tokens_come_again_otherwise_is_cut(tmp_path):
    async with fronted(tmp_path) as served:
        seen = []

        async def read() -> None:
            async with served.streamed() as events:
                async for event in events:
                    seen.append(event)  # noqa: PERF401  # what came before the failure counts

        reading = asyncio.create_task(read())
        await served.until(lambda: served.run.turns)
        (turn,) = served.run.turns
        served.run.tokens(turn, [*b"abc"])
        turn.ids = [*b"abX"]
        await served.run.restart()
        with pytest.raises(httpx.RemoteProtocolError):
            await reading
        assert [event["choices"][0]["finish_reason"] for event in seen] == [None]
        await served.until(lambda: served.run.of(ClientGone))


async def test_a_whole_answer_whose_tokens_come_again_otherwise_has_those(tmp_path):
    async with fronted(tmp_path) as served:
        asking = asyncio.create_task(served.chat(return_token_ids=True))
        await served.until(lambda: served.run.turns)
        (turn,) = served.run.turns
        served.run.tokens(turn, [*b"abc"])
        turn.ids = [*b"abXY"]
        await served.run.restart()
        await served.until(lambda: len(served.run.of(LookUp)) == 2)
        served.run.over(turn, "length")
        (choice,) = (await asking).json()["choices"]
        assert choice["message"]["content"] == "abXY"
        assert choice["token_ids"] == [*b"abXY"]


async def test_a_run_that_stays_away_is_a_503(tmp_path):
    async with fronted(tmp_path, times=CallTimes(hold_s=0.3)) as served:
        asking = asyncio.create_task(served.chat())
        await served.until(lambda: served.run.turns)
        await served.run.stop()
        assert (await asking).status_code == 503
        assert (await served.client.get("/health")).status_code == 503
        await served.run.start()
        await served.link.stands()
        assert (await served.client.get("/health")).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_a_turn_that_fails_before_its_first_token_has_a_status(tmp_path, stream):
    async def fails(run, turn) -> None:
        run.over(turn, "", "the group was dropped")

    async with fronted(tmp_path, answer=fails) as served:
        answer = await served.chat(stream=stream)
        assert answer.status_code == 500
        assert "the group was dropped" in answer.json()["error"]["message"]
        assert answer.json()["error"]["type"] == "server_error"


def begins(text: str):
    """A turn that says this and no more."""

    async def answer(run, turn) -> None:
        run.tokens(turn, [*text.encode()])

    return answer


async def test_what_the_run_says_of_a_failed_turn_is_what_its_client_is_told(tmp_path):
    async def leaves(run, turn) -> None:
        turn.cause = "the trajectory is over"
        run.say(turn, TurnOver(turn.stream, "", turn.cause, 410, "trajectory_over", False))

    async with fronted(tmp_path, answer=leaves) as served:
        answer = await served.chat()
        assert (answer.status_code, answer.json()["error"]["code"]) == (410, "trajectory_over")
        assert answer.headers["x-should-retry"] == "false"


async def test_a_branch_that_another_call_has_changed_is_looked_for_again(served):
    refusals = [Declined(0, 409, "branch_gone", "it goes on otherwise")]
    served.run.decline = lambda message: refusals.pop() if isinstance(message, OpenTurns) and refusals else None
    assert (await served.chat()).status_code == 200
    assert len(served.run.of(LookUp)) == 2
    refusals = [Declined(0, 409, "branch_gone", "it goes on otherwise")] * 3
    assert (await served.chat([{"role": "user", "content": "other"}])).status_code == 409


async def test_a_stream_that_fails_ends_with_an_error_and_no_finish_reason(tmp_path):
    async with fronted(tmp_path, answer=begins("ab")) as served, served.streamed() as events:
        first = await anext(events)
        assert first["choices"][0]["finish_reason"] is None
        served.run.over(served.run.turns[0], "", "lost")
        (last,) = [event async for event in events]
        assert "lost" in last["error"]["message"]
        assert isinstance(last["error"]["code"], str)


async def test_a_whole_answer_that_takes_long_is_kept_alive(tmp_path):
    times = CallTimes(hold_s=10, quiet_s=0.1, breath_s=0.05)
    async with fronted(tmp_path, times=times) as served:
        async with served.client.stream("POST", "/v1/chat/completions", json={"messages": HELLO}) as answer:
            assert answer.headers["content-type"] == "application/json"
            text = ""
            async for more in answer.aiter_text():
                text += more
                if text == "   ":
                    served.run.tokens(served.run.turns[0], [*b"abc"])
                    served.run.over(served.run.turns[0], "length")
        assert json.loads(text)["choices"][0]["message"]["content"] == "abc"


async def test_an_answer_that_was_begun_and_fails_is_cut(tmp_path):
    times = CallTimes(hold_s=10, quiet_s=0.05, breath_s=0.05)
    async with fronted(tmp_path, times=times) as served:
        body = {"messages": HELLO}
        async with served.client.stream("POST", "/v1/chat/completions", json=body) as answer:
            spaces = answer.aiter_bytes()
            assert set(await anext(spaces)) == {ord(" ")}
            served.run.over(served.run.turns[0], "", "lost")
            with pytest.raises(httpx.RemoteProtocolError):
                assert not [more async for more in spaces if more.strip()]


async def test_a_quiet_stream_is_pinged(tmp_path):
    times = CallTimes(hold_s=10, breath_s=0.05)
    async with fronted(tmp_path, times=times, answer=begins("abc")) as served:
        body = {"messages": HELLO, "stream": True}
        async with served.client.stream("POST", "/v1/chat/completions", json=body) as answer:
            read = b""
            async for more in answer.aiter_bytes():
                read += more
                if b": ping\n\n: ping\n\n" in read:
                    served.run.over(served.run.turns[0], "length")
        assert read.endswith(b"data: [DONE]\n\n")
        assert b"\r" not in read


async def test_equal_calls_join_until_one_was_delivered(served):
    served.run.answer = None
    first, second = (asyncio.create_task(served.chat()) for _ in range(2))
    await served.until(lambda: len(served.run.of(LookUp)) == 2)
    await served.until(lambda: served.run.turns)
    await asyncio.sleep(0.05)
    for turn in served.run.turns:
        await says("hi")(served.run, turn)
    assert [answer.status_code for answer in await asyncio.gather(first, second)] == [200, 200]
    served.run.answer = says("hi")
    await served.chat()
    turns = len(served.run.turns)
    await served.client.post(
        "/v1/chat/completions", json={"messages": HELLO, "stream": True}, headers={"x-stainless-retry-count": "1"}
    )
    assert len(served.run.turns) == turns
    assert served.run.of(LookUp)[-1].call.retry


@pytest.mark.parametrize("header", ["Idempotency-Key", "X-Idempotency-Key", "x-irid"])
async def test_a_key_of_the_clients_is_told_to_the_run(served, header):
    await served.client.post("/v1/chat/completions", json={"messages": HELLO}, headers={header: "k"})
    assert served.run.of(LookUp)[0].call.key == "k"


async def test_a_client_that_reads_nothing_is_cut_off_and_costs_others_nothing(tmp_path):
    async with fronted(tmp_path, unread_timeout_s=0.3) as served:
        host, port = served.url.removeprefix("http://").split(":")
        body = json.dumps({"messages": HELLO, "stream": True, "logprobs": True}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {AGENT}\r\n"
        with socket.create_connection((host, int(port))) as deaf:
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            deaf.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            await served.until(lambda: served.run.turns)
            (turn,) = served.run.turns
            async with asyncio.timeout(20):
                while not served.run.of(ClientGone):
                    served.run.tokens(turn, [97] * 2000)
                    await asyncio.sleep(0.01)
        served.run.answer = says("hi")
        assert (await served.chat([{"role": "user", "content": "other"}])).status_code == 200


async def test_a_long_chat_is_rendered_while_others_go_on(served):
    long = [{"role": "user", "content": "x" * 3000}] * 10
    answer = await served.chat(long)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert answer.json()["error"]["message"].startswith("This model's maximum context length is 4096 tokens. However, ")


def test_the_trajectory_of_these_tests():
    assert TRAJECTORY == "2/5/0"
