"""The routes of a front, in the shapes that clients branch on."""

import asyncio
import json

import httpx
import pytest

from elastic.protocol.front_messages import (
    BeginTrajectory,
    BindSession,
    Declined,
    EndTrajectory,
    GiveReward,
    LookUp,
    OpenTurns,
)
from tests.front.fronted import AGENT, DRIVER, HELLO, SECRETS, bearer, fronted, says
from tests.front.modelled_run import TRAJECTORY
from tests.front.small_model import small_model

CHAT = "/v1/chat/completions"
TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    410: "gone_error",
    429: "rate_limit_error",
}


def assert_error(answer: httpx.Response, status: int, code: str, said: str = "") -> dict:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code
    assert error["message"]
    assert said in error["message"]
    assert error["type"] == TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return error


async def test_the_models_are_the_policy_alone(served):
    for path in ("/v1/models", "/v1/models/", "/t/2-5-0/v1/models"):
        listed = (await served.client.get(path)).json()
        assert [(card["id"], card["max_model_len"]) for card in listed["data"]] == [("small", 4096)]
    assert_error(await served.client.get("/v1/models", headers=bearer("x")), 401, "invalid_api_key")
    assert (await served.client.get("/v1/models/small")).json() == listed["data"][0]
    assert_error(await served.client.get("/v1/models/org/other"), 404, "model_not_found")


async def test_health_asks_for_no_key(served):
    answer = await served.client.get("/health", headers={"authorization": ""})
    assert (answer.status_code, answer.content) == (200, b"")


@pytest.mark.parametrize("prefix", ["", "/t/2-5-0", "/sessions/any/thing", f"/t/{AGENT}"])
@pytest.mark.parametrize("end", ["", "/"])
async def test_agents_routes_have_prefixes_and_slashes(served, prefix, end):
    answer = await served.post(f"{prefix}{CHAT}{end}", messages=HELLO)
    assert answer.status_code == 200
    assert served.run.of(LookUp)[0].caller.trajectory == TRAJECTORY


@pytest.mark.parametrize(
    ("path", "headers", "body", "named"),
    [
        (f"/t/2-5-0{CHAT}", {"x-session-id": "h"}, {"session_id": "b"}, "2-5-0"),
        (f"/sessions/s{CHAT}", {"x-session-id": "h"}, {"session_id": "b"}, "s"),
        (CHAT, {"x-session-id": "h"}, {"session_id": "b"}, "h"),
        (CHAT, {}, {"session_id": "b"}, "b"),
    ],
)
async def test_a_driver_says_which_trajectory(served, path, headers, body, named):
    answer = await served.client.post(path, json={"messages": HELLO, **body}, headers=bearer(DRIVER) | headers)
    assert answer.status_code == 200
    caller = served.run.of(LookUp)[0].caller
    assert (caller.driver, caller.named, caller.trajectory) == ("tests", named, "")


async def test_a_driver_that_names_no_trajectory_is_told_how(served):
    answer = await served.client.post(CHAT, json={"messages": HELLO}, headers=bearer(DRIVER))
    assert_error(answer, 400, "no_trajectory", "X-Session-ID")


async def test_no_key_is_told_before_the_body_is_read(served):
    answer = await served.client.post(CHAT, content=b"x" * 100, headers=bearer("wrong"))
    assert_error(answer, 401, "invalid_api_key")
    assert not served.run.heard[1:]


@pytest.mark.parametrize(
    ("method", "path", "status", "code", "allowed"),
    [
        ("POST", "/v1/nothing", 404, "not_found", {""}),
        ("POST", "/chat/completions", 404, "not_found", {""}),
        ("GET", CHAT, 405, "method_not_allowed", {"POST"}),
        ("DELETE", "/trajectories", 405, "method_not_allowed", {"POST"}),
        ("TRACE", "/health", 405, "method_not_allowed", {"GET", "HEAD"}),
    ],
)
async def test_what_is_no_route(served, method, path, status, code, allowed):
    answer = await served.client.request(method, path)
    assert_error(answer, status, code)
    assert set(answer.headers.get("allow", "").split(", ")) == allowed


@pytest.mark.parametrize(
    ("path", "body", "status", "code", "param"),
    [
        (CHAT, {"messages": HELLO, "model": "other"}, 404, "model_not_found", "model"),
        (CHAT, {"messages": []}, 400, "invalid_value", "messages"),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 5000}]}, 400, "context_length_exceeded", None),
        (CHAT, {"messages": [{"role": "user", "content": ""}] * 5000}, 400, "context_length_exceeded", None),
        (CHAT, {"messages": HELLO, "stop_token_ids": [300]}, 400, "invalid_request", "stop_token_ids"),
        ("/v1/completions", {"prompt": []}, 400, "invalid_request", "prompt"),
        ("/v1/completions", {"prompt": [1, 300]}, 400, "invalid_request", "prompt"),
        ("/v1/completions", {"prompt": [1] * 4096}, 400, "context_length_exceeded", None),
        ("/v1/completions", {"prompt": "x" * 1_000_000}, 400, "context_length_exceeded", None),
        ("/v1/completions", {"prompt": "é" * 500_000}, 400, "context_length_exceeded", None),
        ("/v1/completions", {"prompt": [[1]] * 4000, "n": 2}, 400, "invalid_request", "prompt"),
        ("/inference/v1/generate", {"token_ids": [300]}, 400, "invalid_request", "token_ids"),
    ],
)
async def test_bad_calls_are_told_what_is_wrong(served, path, body, status, code, param):
    error = assert_error(await served.post(path, **body), status, code)
    assert error["param"] == param
    assert not served.run.of(OpenTurns)


async def test_what_is_too_long_is_not_rendered(tmp_path):
    model = small_model()._replace(context_tokens=16)
    tool = {"function": {"name": "f", "description": "x" * 5000}}
    async with fronted(tmp_path, model) as served:
        answer = await served.post(CHAT, messages=HELLO, tools=[tool], tool_choice="none")
        assert_error(answer, 400, "context_length_exceeded")
        assert not served.run.of(LookUp)


async def test_a_message_that_the_template_refuses(tmp_path):
    model = small_model()

    def refuse(*_):
        raise ValueError("roles must alternate")

    model.renderer.prompt = refuse  # type: ignore[method-assign]
    async with fronted(tmp_path, model) as served:
        assert_error(await served.chat(), 400, "invalid_messages", "roles must alternate")


async def test_tools_without_a_parser_are_refused(tmp_path):
    tools = [{"type": "function", "function": {"name": "f"}}]
    async with fronted(tmp_path, small_model(reads_calls=False), answer=says("hi")) as served:
        assert_error(await served.chat(tools=tools), 400, "unsupported_parameter", "front.tool_parser")
        assert (await served.chat(tools=tools, tool_choice="none")).status_code == 200


@pytest.mark.parametrize("body", [b"", b"{", b'{"messages": "\xff"}', b'{"reward": NaN}', b"[" * 50_000])
async def test_what_is_no_json(served, body):
    for path in (CHAT, "/v1/completions", "/inference/v1/generate", "/trajectories/2-5-0/reward"):
        answer = await served.client.post(path, content=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["message"]


async def test_a_body_beyond_the_bound_is_not_read(served):
    async def chunks():
        for _ in range(100):
            yield b"x" * 65_536

    for content in (b"x" * 2_000_000, chunks()):
        assert_error(await served.client.post(CHAT, content=content), 413, "request_too_large")


async def test_what_the_run_declines_is_told_as_it_says(served):
    served.run.decline = lambda message: Declined(
        0, 410, "trajectory_over", "the trajectory is finished", retry=False, param="x"
    )
    answer = await served.chat()
    error = assert_error(answer, 410, "trajectory_over", "is finished")
    assert error["param"] == "x"
    assert answer.headers["x-should-retry"] == "false"
    served.run.decline = lambda message: Declined(0, 429, "too_many_turns", "later", retry_after_s=1.5)
    answer = await served.chat()
    assert_error(answer, 429, "too_many_turns")
    assert answer.headers["retry-after"] == "2"


async def test_answers_bear_the_id_of_their_request(served):
    answer = await served.client.get("/v1/models", headers={"x-request-id": "mine"})
    assert answer.headers["x-request-id"] == "mine"
    others = [(await served.chat()).headers["x-request-id"] for _ in range(2)]
    assert len(set(others)) == 2
    refused = await served.client.get("/nothing", headers={"x-request-id": "x" * 1000})
    assert 0 < len(refused.headers["x-request-id"]) < 100


# Trajectories.


async def test_a_driver_opens_a_trajectory_rewards_and_ends_it(served):
    served.client.headers = httpx.Headers(bearer(DRIVER))
    begun = await served.client.post(
        "/trajectories",
        json={"task": {"n": [1, None]}, "group": "g", "session_ids": ["a", "b", "a"]},
        headers={"Idempotency-Key": "k"},
    )
    assert begun.status_code == 200
    given = begun.json()
    assert given == {
        "id": "2-5-0",
        "key": SECRETS.agent_key(TRAJECTORY, 1),
        "base_url": "http://agents.example/v1",
    }
    (message,) = served.run.of(BeginTrajectory)
    assert json.loads(message.task) == {"n": [1, None]}
    assert (message.group, message.key, message.sessions) == ("g", "k", ["a", "b"])
    shown = (await served.client.get("/trajectories/2-5-0")).json()
    assert (shown["id"], shown["group"], shown["state"], shown["reward"]) == ("2-5-0", "g", "open", None)
    assert (await served.post("/trajectories/2-5-0/reward", reward=0.5)).json()["reward"] == 0.5
    bound = await served.post("/trajectories/2-5-0/sessions/", session_id="c")
    assert bound.json()["id"] == "2-5-0"
    assert served.run.of(BindSession)[0].session == "c"
    assert (await served.client.post("/trajectories/2-5-0/end")).json()["state"] == "finished"
    described = (await served.client.get("/openapi.json")).json()["paths"]
    needs_body = {
        path: described[f"/trajectories/{{id}}/{path}"]["post"]["requestBody"]["required"] for path in ("end", "reward")
    }
    assert needs_body == {"end": False, "reward": True}
    assert served.run.of(EndTrajectory)[0].caller.named == "2-5-0"


async def test_a_repeated_opening_says_so(served):
    headers = bearer(DRIVER) | {"Idempotency-Key": "k"}
    answers = [await served.client.post("/trajectories", json={"group": "g"}, headers=headers) for _ in range(2)]
    assert answers[0].json() == answers[1].json()
    assert ["idempotent-replayed" in answer.headers for answer in answers] == [False, True]


async def test_openings_without_a_key_are_each_a_trajectory(served):
    for _ in range(2):
        await served.client.post("/trajectories", json={"group": "g"}, headers=bearer(DRIVER))
    assert len({message.key for message in served.run.of(BeginTrajectory)}) == 2


async def test_an_agent_speaks_of_its_own_trajectory_alone(served):
    assert (await served.post("/trajectories/2-5-0/reward", reward=1)).status_code == 200
    assert served.run.of(GiveReward)[0].caller.trajectory == TRAJECTORY
    assert_error(await served.post("/trajectories/2-5-1/reward", reward=1), 403, "permission_denied")
    assert_error(await served.client.get("/trajectories/2-5-1"), 403, "permission_denied")
    assert_error(await served.post("/trajectories", group="g"), 403, "permission_denied")


async def test_an_unknown_session_is_a_404(served):
    answer = await served.client.get("/trajectories/nobody", headers=bearer(DRIVER))
    assert_error(answer, 404, "session_not_found")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/trajectories", {}, "group"),
        ("/trajectories", {"group": ""}, "group"),
        ("/trajectories", {"group": "g", "session_ids": "a"}, "session_ids"),
        ("/trajectories", {"group": "g" * 1000}, "group"),
        ("/trajectories/2-5-0/reward", {}, "reward"),
        ("/trajectories/2-5-0/reward", {"reward": "much"}, "reward"),
        ("/trajectories/2-5-0/reward", {"reward": True}, "reward"),
        ("/trajectories/2-5-0/end", {"cause": "x" * 5000}, "cause"),
        ("/trajectories/2-5-0/sessions", {"session_id": ""}, "session_id"),
    ],
)
async def test_bad_words_of_a_driver(served, path, body, param):
    error = assert_error(await served.client.post(path, json=body, headers=bearer(DRIVER)), 400, "invalid_value")
    assert error["param"] == param


async def test_a_task_that_nobody_could_keep(tmp_path):
    async with fronted(tmp_path, body_bytes_max=1 << 23) as served:
        body = {"group": "g", "task": "x" * (1 << 20)}
        answer = await served.client.post("/trajectories", json=body, headers=bearer(DRIVER))
        assert_error(answer, 413, "request_too_large", "task")
        assert not served.run.of(BeginTrajectory)


async def test_a_reward_is_asked_again_where_the_run_was_killed(tmp_path):
    async with fronted(tmp_path) as served:
        await served.run.stop()
        asking = asyncio.create_task(served.post("/trajectories/2-5-0/reward", reward=2))
        await asyncio.sleep(0)
        await served.run.start()
        assert (await asking).json()["reward"] == 2


# Its end.


async def test_a_front_that_ends_finishes_what_is_in_work_and_takes_no_more(tmp_path):
    async with fronted(tmp_path) as served:
        asking = asyncio.create_task(served.chat())
        await served.until(lambda: served.run.turns)
        draining = asyncio.create_task(served.front.drained(20))
        await asyncio.sleep(0)
        late = await served.chat()
        assert_error(late, 503, "overloaded")
        assert late.headers["connection"] == "close"
        await says("hi")(served.run, served.run.turns[0])
        assert (await asking).json()["choices"][0]["message"]["content"] == "hi"
        await draining


async def test_a_call_that_outlasts_the_end_of_its_front_is_cut(tmp_path):
    async with fronted(tmp_path) as served:
        asking = asyncio.create_task(served.chat())
        await served.until(lambda: served.run.turns)
        await served.front.drained(0.05)
        with pytest.raises(httpx.RemoteProtocolError):
            await asking
        await served.until(lambda: served.run.turns[0].gone)
