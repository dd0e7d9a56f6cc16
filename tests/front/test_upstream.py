"""Calls of models elsewhere: passed on and back as they are, metered, and never a secret or half an answer."""

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.front.asked import ServedModel
from elastic.front.upstream import StreamedUsage, UpstreamSettings, UsedTokens, most_tokens, usage_of
from elastic.protocol.front_messages import AskUpstream, Declined, GiveReward, LookUp, OpenTurns, UpstreamOver
from elastic.protocol.openai.bodies import parsed
from elastic.protocol.tls import run_certificate
from tests.front.fronted import AGENT, DRIVER, HELLO, Served, bearer, fronted, says
from tests.front.modelled_run import TRAJECTORY
from tests.front.small_model import small_model
from tests.front.upstream_server import Answers, Exchange, UpstreamServer, says_json, upstream_server

CHAT = "/v1/chat/completions"
KEY = "sk-the-runs-own"
ANSWER = {
    "id": "x",
    "choices": [{"message": {"content": "seven"}}],
    "usage": {"prompt_tokens": 9, "completion_tokens": 4},
}
MODEL = small_model(policies=("solver", "critic"), upstream=True)


@contextlib.asynccontextmanager
async def proxied(
    directory: Path, answers: Answers, model: ServedModel = MODEL, **changed: Any
) -> AsyncIterator[tuple[Served, UpstreamServer]]:
    async with upstream_server(answers) as server:
        own = {"key": KEY, "timeout_s": 20.0, "hold_s": 20.0, "concurrency": 8, "answer_bytes_max": 1 << 20}
        settings = UpstreamSettings(**{"url": server.url, **own, **changed})
        async with fronted(directory, model, answer=says("hi"), upstream=settings) as served:
            yield served, server


async def told(served: Served) -> UpstreamOver:
    await served.until(lambda: served.run.of(UpstreamOver))
    (over,) = served.run.of(UpstreamOver)
    return over


def refused(answer: httpx.Response, status: int, code: str, said: str = "") -> None:
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (status, code), answer.text
    assert said in error["message"]
    assert KEY not in answer.text


async def test_an_answer_comes_back_byte_for_byte(tmp_path):
    body = json.dumps(ANSWER, indent=3).encode() + b"\n"

    async def answers(exchange: Exchange) -> None:
        more = {"x_ratelimit_remaining": "3", "x_request_id": "theirs", "set_cookie": "a=b", "server": "s"}
        await exchange.answer(200, body, **more)

    async with proxied(tmp_path, answers) as (served, server):
        sent = b'{"model": "judge",  "messages": [{"role": "user", "content": "\\u00e9"}], "max_tokens": 5}'
        headers = {"content-type": "application/json", "x-session-id": "s", "cookie": "key=1", "openai-beta": "b"}
        answer = await served.client.post(f"/t/{AGENT}{CHAT}?key=1", content=sent, headers=headers)
        assert (answer.status_code, answer.content) == (200, body)
        (asked,) = server.asked
        assert (asked.line, asked.body) == (f"POST {CHAT} HTTP/1.1", sent)
        assert asked.headers["authorization"] == f"Bearer {KEY}"
        assert set(asked.headers) <= {
            *("host", "authorization", "content-type", "content-length", "accept", "accept-encoding", "user-agent"),
            *("connection", "openai-beta"),
        }
        assert AGENT not in str(asked.headers)
        assert (answer.headers["x-ratelimit-remaining"], answer.headers["x-upstream-request-id"]) == ("3", "theirs")
        assert answer.headers["x-elastic-trained"] == "false"
        assert ("set-cookie" in answer.headers, answer.headers["server"]) == (False, "uvicorn")
        (ask,), over = served.run.of(AskUpstream), await told(served)
        assert (ask.model, ask.route, ask.answer_tokens, ask.caller.trajectory) == ("judge", CHAT, 5, TRAJECTORY)
        assert (over.call, over.status, over.prompt_tokens, over.answer_tokens) == (1, 200, 9, 4)
        assert not served.run.of(LookUp), "the run has opened a turn for it"


async def test_a_stream_comes_as_it_is_and_as_it_comes(tmp_path):
    events = [
        b'data: {"choices": [{"delta": {"content": "sev"}}], "usage": null}\n\n',
        b': quiet\n\ndata: {"choices": [], "usage": {"prompt_tokens": 9, "comple',
        b'tion_tokens": 4}}\n\ndata: [DONE]\n\n',
    ]
    shown = asyncio.Event()

    async def answers(exchange: Exchange) -> None:
        await exchange.begin_stream()
        for event in events:
            await exchange.chunk(event)
            await shown.wait()
        await exchange.chunk(b"")

    async with proxied(tmp_path, answers) as (served, _):
        body = {"model": "judge", "messages": HELLO, "stream": True}
        async with served.client.stream("POST", CHAT, json=body) as answer:
            assert answer.headers["content-type"] == "text/event-stream"
            pieces = answer.aiter_raw()
            assert await anext(pieces) == events[0]
            shown.set()
            assert events[0] + b"".join([piece async for piece in pieces]) == b"".join(events)
        over = await told(served)
        assert (over.status, over.prompt_tokens, over.answer_tokens) == (200, 9, 4)


async def test_tokens_of_another_models_prompt_are_counted_there(tmp_path):
    async with proxied(tmp_path, says_json(200, {"input_tokens": 7})) as (served, server):
        path = "/v1/messages/count_tokens"
        answer = await served.post(path, model="judge", messages=HELLO)
        assert answer.json() == {"input_tokens": 7}
        assert server.asked[0].line.startswith(f"POST {path}")
        assert (await served.post(path, model="critic", messages=HELLO)).json()["input_tokens"] > 7
        assert len(server.asked) == 1


async def test_the_upstream_gets_the_key_where_the_client_shows_its_own(tmp_path):
    async with proxied(tmp_path, says_json(answer={"usage": {"input_tokens": 3, "output_tokens": 1}})) as (
        served,
        server,
    ):
        body = {"model": "claude", "messages": HELLO, "max_tokens": 5}
        headers = {"x-api-key": AGENT, "authorization": "", "anthropic-version": "2023-06-01"}
        del served.client.headers["authorization"]
        answer = await served.client.post("/v1/messages", json=body, headers=headers | {"authorization": ""})
        assert answer.status_code == 200, answer.text
        sent = server.asked[0].headers
        assert (sent["anthropic-version"], sent.get("authorization", "")) in (("2023-06-01", f"Bearer {KEY}"),)
        async with httpx.AsyncClient(base_url=served.url, trust_env=False) as plain:
            del headers["authorization"]
            assert (await plain.post("/v1/messages", json=body, headers=headers)).status_code == 200
        sent = server.asked[1].headers
        assert (sent["x-api-key"], "authorization" in sent) == (KEY, False)


async def test_an_upstream_without_a_key_gets_none(tmp_path):
    async with proxied(tmp_path, says_json(answer=ANSWER), key="") as (served, server):
        assert (await served.post(CHAT, model="judge", messages=HELLO)).status_code == 200
        assert not {"authorization", "x-api-key"} & set(server.asked[0].headers)


async def test_calls_need_a_key_and_a_driver_may_make_its_own(tmp_path):
    async with proxied(tmp_path, says_json(answer=ANSWER)) as (served, server):
        body = {"model": "judge", "messages": HELLO}
        refused(await served.client.post(CHAT, json=body, headers=bearer("sk-x")), 401, "invalid_api_key")
        viewer = bearer(served.front.secrets.viewer_key("main"))
        refused(await served.client.post(CHAT, json=body, headers=viewer), 404, "model_not_found")
        assert not server.asked
        assert (await served.client.post(CHAT, json=body, headers=bearer(DRIVER))).status_code == 200
        assert served.run.of(AskUpstream)[0].caller.driver == "tests"


async def test_the_models_own_names_are_not_passed_on(tmp_path):
    async with proxied(tmp_path, says_json(answer=ANSWER)) as (served, server):
        for name in ("small", "solver", "critic"):
            answer = (await served.post(CHAT, model=name, messages=HELLO)).json()
            assert answer["model"] == name
        assert [ask.call.policy for ask in served.run.of(OpenTurns)] == ["", "solver", "critic"]
        assert not server.asked
        listed = (await served.client.get("/v1/models")).json()["data"]
        assert [(card["id"], card["root"], card["parent"]) for card in listed] == [
            ("small", "small", None),
            ("solver", "small", "small"),
            ("critic", "small", "small"),
        ]
        assert (await served.client.get("/v1/models/critic")).json()["id"] == "critic"
        refused(await served.post("/v1/embeddings", model="small", input="x"), 404, "not_found")
        answer = await served.post(f"/trajectories/{TRAJECTORY.replace('/', '-')}/reward", reward=1, policy="solver")
        assert answer.status_code == 200
        assert [(ask.reward, ask.policy) for ask in served.run.of(GiveReward)] == [(1.0, "solver")]
        for odd in ("", 7, ["solver"]):
            answer = await served.post(f"/trajectories/{TRAJECTORY.replace('/', '-')}/reward", reward=1, policy=odd)
            refused(answer, 400, "invalid_value", "policy")


@pytest.mark.parametrize(
    ("status", "answered", "code"),
    [(500, 502, "upstream_failed"), (503, 502, "upstream_failed"), (401, 502, "upstream_denied"),
     (403, 502, "upstream_denied"), (302, 502, "upstream_redirects"), (400, 400, None), (429, 429, None)],
)  # fmt: skip
async def test_what_the_upstream_refuses(tmp_path, status, answered, code):
    said = {"error": {"message": f"no, {KEY}", "code": "theirs"}}
    shown = {"error": {"message": "no, …", "code": "theirs"}}
    elsewhere = {"location": "http://127.0.0.1:1/", "retry_after": "7"}
    async with proxied(tmp_path, says_json(status, said, **elsewhere)) as (served, server):
        answer = await served.post(CHAT, model="judge", messages=HELLO)
        assert answer.status_code == answered
        if code is None:
            assert (answer.json(), answer.headers["retry-after"]) == (shown, "7")
        else:
            refused(answer, answered, code, "model 'judge' of the upstream")
        assert len(server.asked) == 1
        over = await told(served)
        assert (over.status, over.prompt_tokens, over.answer_tokens) == (answered, 0, 0), "what is refused is free"


async def test_an_upstream_that_is_not_there(tmp_path):
    async with proxied(tmp_path, says_json(), url="http://127.0.0.1:1") as (served, _):
        refused(await served.post(CHAT, model="judge", messages=HELLO), 502, "upstream_unreachable")
        assert (await told(served)).prompt_tokens == 0


async def test_an_upstream_that_nobody_vouches_for(tmp_path):
    certificate = run_certificate(tmp_path, ["127.0.0.1"])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate.chain, certificate.key)
    listening = await asyncio.start_server(UpstreamServer(says_json()).serve, "127.0.0.1", 0, ssl=context)
    url = f"https://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    async with proxied(tmp_path, says_json(), url=url) as (served, _):
        refused(await served.post(CHAT, model="judge", messages=HELLO), 502, "upstream_unreachable", "certificate")
    listening.close()


async def test_an_upstream_that_stalls(tmp_path):
    async def answers(exchange: Exchange) -> None:
        await asyncio.Event().wait()

    async with proxied(tmp_path, answers, timeout_s=0.2) as (served, server):
        refused(await served.post(CHAT, model="judge", messages=HELLO), 504, "upstream_timeout", "0.2 s")
        over = await told(served)
        assert (over.status, over.prompt_tokens, over.answer_tokens) == (504, None, None)
        await server.until(lambda: server.gone)


@pytest.mark.parametrize("how", ["cut", "stalls", "too long", "closed"])
async def test_a_stream_that_breaks_is_torn_and_never_ended(tmp_path, how):
    async def answers(exchange: Exchange) -> None:
        part = b'data: {"choices": [{"delta": {"content": "sev"}}]}\n\n'
        if how == "closed":
            await exchange.send(
                b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n" + part
            )
            exchange.writer.close()
            return
        await exchange.begin_stream()
        await exchange.chunk(part)
        if how == "cut":
            exchange.cut()
        elif how == "stalls":
            await asyncio.Event().wait()
        else:
            await exchange.chunk(b"data: %b\n\n" % (b"x" * 5000))
            await exchange.chunk(b"")

    async with proxied(tmp_path, answers, timeout_s=0.5, answer_bytes_max=4000) as (served, _):
        body = {"model": "judge", "messages": HELLO, "stream": True}
        async with served.client.stream("POST", CHAT, json=body) as answer:
            assert answer.status_code == 200
            with pytest.raises(httpx.RemoteProtocolError):
                await answer.aread()
        assert (await told(served)).answer_tokens is None


async def test_a_stream_whose_end_is_told_may_end_with_its_connection(tmp_path):
    whole = b'data: {"choices": [{"delta": {}, "finish_reason": "stop"}]}\n\ndata: [DONE]\n\n'

    async def answers(exchange: Exchange) -> None:
        await exchange.send(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n" + whole)
        exchange.writer.close()

    async with proxied(tmp_path, answers) as (served, _):
        answer = await served.post(CHAT, model="judge", messages=HELLO, stream=True)
        assert (answer.status_code, answer.content) == (200, whole)


async def test_nothing_of_one_call_goes_on_with_another(tmp_path):
    async with proxied(tmp_path, says_json(200, ANSWER, set_cookie="a=b; path=/")) as (served, server):
        for _ in range(2):
            assert (await served.post(CHAT, model="judge", messages=HELLO)).status_code == 200
        assert all("cookie" not in exchange.headers for exchange in server.asked)


async def test_headers_that_cannot_be_sent_are_left_out(tmp_path):
    async with proxied(tmp_path, says_json(200, ANSWER)) as (served, server):
        headers = {"user-agent": b"caf\xc3\xa9", "openai-beta": b"plain"}
        answer = await served.client.post(CHAT, json={"model": "judge", "messages": HELLO}, headers=headers)
        assert answer.status_code == 200
        assert server.asked[0].headers["openai-beta"] == "plain"


async def test_an_answer_that_cannot_be_read_is_none(tmp_path):
    async with proxied(tmp_path, says_json(200, ANSWER, content_encoding="br")) as (served, _):
        refused(await served.post(CHAT, model="judge", messages=HELLO), 502, "upstream_broken", "br")


@pytest.mark.parametrize("how", ["cut", "too long"])
async def test_a_whole_answer_that_breaks_is_an_error(tmp_path, how):
    async def answers(exchange: Exchange) -> None:
        if how == "cut":
            await exchange.send(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{")
            exchange.cut()
        else:
            await exchange.answer(200, b"x" * 5000)

    async with proxied(tmp_path, answers, answer_bytes_max=4000) as (served, _):
        answer = await served.post(CHAT, model="judge", messages=HELLO)
        refused(answer, 502, "upstream_broken" if how == "cut" else "upstream_too_large")
        assert (await told(served)).prompt_tokens is None


async def test_a_client_that_leaves_ends_its_call(tmp_path):
    async def answers(exchange: Exchange) -> None:
        await asyncio.Event().wait()

    async with proxied(tmp_path, answers) as (served, server):
        asking = asyncio.create_task(served.post(CHAT, model="judge", messages=HELLO))
        await server.until(lambda: server.asked)
        asking.cancel()
        await server.until(lambda: server.gone)
        over = await told(served)
        assert (over.status, over.prompt_tokens) == (499, None)


async def test_beyond_the_runs_bounds_nothing_is_asked(tmp_path):
    async with proxied(tmp_path, says_json(answer=ANSWER)) as (served, server):
        served.run.decline = lambda message: (
            Declined(0, 402, "upstream_usd_max", "it has cost enough", retry=False)
            if isinstance(message, AskUpstream)
            else None
        )
        answer = await served.post(CHAT, model="judge", messages=HELLO)
        refused(answer, 402, "upstream_usd_max")
        assert answer.headers["x-should-retry"] == "false"
        assert not server.asked


async def test_a_call_that_waits_too_long_for_others_comes_again(tmp_path):
    async with proxied(tmp_path, says_json(answer=ANSWER), hold_s=0.2) as (served, server):
        served.run.mute = True
        answer = await served.post(CHAT, model="judge", messages=HELLO)
        refused(answer, 429, "upstream_busy")
        assert answer.headers["retry-after"]
        assert not server.asked


async def test_what_a_call_came_to_is_told_to_the_runs_next_process(tmp_path):
    answered = asyncio.Event()

    async def answers(exchange: Exchange) -> None:
        await answered.wait()
        await exchange.answer(200, json.dumps(ANSWER).encode())

    async with proxied(tmp_path, answers) as (served, server):
        asking = asyncio.create_task(served.post(CHAT, model="judge", messages=HELLO))
        await server.until(lambda: server.asked)
        await served.run.stop()
        answered.set()
        assert (await asking).status_code == 200
        await served.run.start()
        assert (await told(served)).prompt_tokens == 9


# What calls come to


def test_usage_is_read_in_every_dialect():
    for answer, used in (
        ({"usage": {"prompt_tokens": 9, "completion_tokens": 4, "total_tokens": 13}}, (9, 4)),
        ({"usage": {"prompt_tokens": 9, "total_tokens": 9}}, (9, 0)),
        ({"usage": {"input_tokens": 3, "output_tokens": 2, "cache_read_input_tokens": 5}}, (8, 2)),
        ({"type": "response.completed", "response": {"usage": {"input_tokens": 3, "output_tokens": 2}}}, (3, 2)),
        ({"usage": None}, (None, None)),
        ({"usage": {"prompt_tokens": -9, "completion_tokens": 4}}, (None, None)),
        ({"usage": {"prompt_tokens": "9", "completion_tokens": 4}}, (None, None)),
        ({"choices": []}, (None, None)),
        ([], (None, None)),
    ):
        assert usage_of(json.dumps(answer).encode()) == UsedTokens(*used), answer
    assert usage_of(b"<html>") == UsedTokens()
    assert usage_of(b"[" * 100_000) == UsedTokens()


def test_names_in_escapes_are_names():
    sent = b'{"input": "x", "previous_response\\u005fid": "r"}'
    assert most_tokens("/v1/responses", parsed(sent), sent)[0] is None


@given(st.data())
def test_usage_of_a_stream_does_not_depend_on_its_pieces(data: st.DataObject):
    events = [
        {"type": "message_start", "message": {"usage": {"input_tokens": 10, "output_tokens": 1}}},
        {"type": "content_block_delta", "delta": {"text": '"usage": {"output_tokens": 99}'}},
        {"type": "message_delta", "usage": {"output_tokens": 42}},
    ]
    stream = "".join(f"event: {event['type']}\r\ndata: {json.dumps(event)}\r\n\r\n" for event in events).encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=20)))
    usage = StreamedUsage()
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        usage.feed(stream[start:end])
    assert usage.told == UsedTokens(10, 42)


@pytest.mark.parametrize(
    ("route", "body", "answer", "choices", "bounded"),
    [
        (CHAT, {"messages": HELLO, "max_tokens": 9, "max_completion_tokens": 5, "n": 3}, 9, 3, True),
        (CHAT, {"messages": HELLO}, None, 1, True),
        (CHAT, {"messages": [{"content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, None, 1, False),
        ("/v1/responses", {"input": "x", "max_output_tokens": 7, "previous_response_id": "r"}, 7, 1, False),
        ("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 2, "n": 2, "best_of": 4}, 2, 8, True),
        ("/v1/messages", {"messages": HELLO, "max_completion_tokens": 1, "max_tokens": 5000.0}, None, 1, True),
        (CHAT, {"messages": HELLO, "max_tokens": 5, "n": 64.0}, 5, 4096, True),
        ("/v1/embeddings", {"input": "x"}, 0, 1, True),
        ("/v1/messages/count_tokens", {"messages": HELLO}, 0, 1, True),
        (CHAT, {"messages": HELLO, "max_tokens": "many", "n": "three"}, None, 4096, True),
        (CHAT, {"messages": HELLO, "max_tokens": -4, "n": -4}, None, 1, True),
        (CHAT, {"messages": HELLO, "tools": [{"type": "function", "function": {"name": "f"}}]}, None, 1, True),
        ("/v1/messages", {"messages": HELLO, "tools": [{"name": "f"}, {"type": "custom"}]}, None, 1, True),
        ("/v1/messages", {"messages": [], "tools": [{"name": "f"}, {"type": "web_search_20250305"}]}, None, 1, False),
        ("/v1/responses", {"input": "x", "tools": [{"type": "file_search"}]}, None, 1, False),
        (CHAT, {"messages": HELLO, "web_search_options": {}, "tools": None}, None, 1, False),
    ],
)  # fmt: skip
def test_the_most_that_a_body_can_lead_to(route, body, answer, choices, bounded):
    sent = json.dumps(body).encode()
    prompt_tokens, answer_tokens, times = most_tokens(route, parsed(sent), sent)
    assert (answer_tokens, times, prompt_tokens is not None) == (answer, choices, bounded)
    assert prompt_tokens is None or route.endswith("count_tokens") or prompt_tokens >= len(sent)
