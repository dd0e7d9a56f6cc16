"""Who is let in, what is refused and in which shape, and what a door makes of paths."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.front.doors.access import read_network
from elastic.front.doors.base import DoorRefused, PauseMode, TokenAnswer, TokenChoice, VersionRun
from elastic.front.doors.doors import DOORS
from elastic.front.doors.refused import REFUSED, ShutRoute
from elastic.front.doors.requests import spans_of
from elastic.front.doors.roots import WeightsRoot, WeightsRoots, read_root
from elastic.front.doors.sglang import told
from elastic.protocol.front_messages import NAME_MAX
from elastic.protocol.openai.errors import FrontError
from elastic.protocol.tls import run_certificate
from tests.doors.memory_run import CONTEXT_TOKENS, TURNS_MAX, offered
from tests.doors.served import CONTROL, REQUESTS, SECRETS, THEIRS, ServedDoors, served_doors

ROUTES = {(route.method, route.path): route for name in DOORS for route in DOORS[name]}
GENERATE = "/inference/v1/generate"
TOKENS = {"token_ids": [1, 2], "sampling_params": {"max_tokens": 2}}


@contextlib.asynccontextmanager
async def client_of(served: ServedDoors, key: str = CONTROL) -> AsyncIterator[httpx.AsyncClient]:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with httpx.AsyncClient(
        base_url=served.url, headers=headers, timeout=30, trust_env=False, verify=False
    ) as client:
        yield client


def test_doors_that_open_the_same_route_open_it_to_the_same() -> None:
    for one, other in itertools.combinations([*REFUSED, *(route for name in DOORS for route in DOORS[name])], 2):
        assert (one.method, one.path) != (other.method, other.path) or one == other


async def test_control_takes_another_key_than_requests(served: ServedDoors) -> None:
    async def status(key: str, method: str, path: str) -> int:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        at = path.replace("{id}", "front")
        return (await client.request(method, at, json={} if method == "POST" else None, headers=headers)).status_code

    async with client_of(served, "") as client:
        for (method, path), route in ROUTES.items():
            for key in ("", "no-key", SECRETS.viewer_key(), SECRETS.driver_key("main")):
                assert await status(key, method, path) == 401, path
            assert (await status(REQUESTS, method, path) == 403) == route.control, path
    assert served.run.offers == []
    assert served.run.pauses == []


async def test_a_key_may_come_in_the_url_and_as_an_api_key(served: ServedDoors) -> None:
    async with httpx.AsyncClient(trust_env=False, verify=False) as client:
        for headers, url in (({"x-api-key": CONTROL}, served.url), ({}, served.with_key(CONTROL))):
            assert (await client.post(f"{url}/pause?mode=keep", headers=headers)).json() == {"status": "paused"}


async def test_only_peers_of_a_plain_network_need_no_key(tmp_path: Path) -> None:
    async with served_doors(tmp_path, plain=["10.0.0.0/8", "::1"]) as served, client_of(served, "") as client:
        assert (await client.post("/pause")).status_code == 401
    async with served_doors(tmp_path, plain=["127.0.0.0/8"]) as served, client_of(served, "") as client:
        assert (await client.post("/pause")).status_code == 200


async def test_beyond_a_plain_network_everybody_speaks_tls(tmp_path: Path) -> None:
    certificate = run_certificate(tmp_path, ["127.0.0.1"])
    async with httpx.AsyncClient(trust_env=False, verify=False) as client:
        async with served_doors(tmp_path, plain=["127.0.0.0/8"], certificate=certificate) as served:
            assert served.url.startswith("https://")
            for url in (served.url, served.url.replace("https://", "http://")):
                assert (await client.post(f"{url}/pause")).status_code == 200
        async with served_doors(tmp_path, plain=["10.0.0.0/8"], certificate=certificate) as served:
            assert (await client.post(f"{served.url}/pause")).status_code == 401
            with pytest.raises(httpx.TransportError):
                await client.post(f"{served.url.replace('https://', 'http://')}/pause")


async def test_a_peer_of_a_plain_network_that_says_nothing_is_hung_up_on(tmp_path: Path) -> None:
    certificate = run_certificate(tmp_path, ["127.0.0.1"])
    async with served_doors(tmp_path, plain=["127.0.0.1"], certificate=certificate, head_timeout_s=0.1) as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", httpx.URL(served.url).port)
        assert await asyncio.wait_for(reader.read(), 30) == b""
        writer.close()


@pytest.mark.parametrize("said", ["10.0.0.1/8", "host", "", "10.0.0.0/33"])
def test_what_is_no_network_is_named(said: str) -> None:
    with pytest.raises(ValueError, match=r"found .*; allowed: a network such as 10\.0\.0\.0/8, or an address"):
        read_network(said)


async def test_a_door_that_is_shut_says_which_would_open_it(tmp_path: Path) -> None:
    async with served_doors(tmp_path, opened=["trl"]) as served, client_of(served) as client:
        shut = await client.post("/generate", json={"input_ids": [1]})
        assert shut.status_code == 404
        assert "open it with --doors (slime, areal)" in shut.json()["error"]["message"]
        assert (await client.post("/v1/completions", json={"prompt": [1], "max_tokens": 1})).status_code == 200
        assert (await client.get("/health")).status_code == 200


async def test_what_is_refused_says_what_to_set(served: ServedDoors) -> None:
    async with client_of(served) as client:
        for route in REFUSED:
            refused = await client.post(route.path, json={"names": [], "update_info": {}})
            assert refused.status_code == 400
            assert isinstance(route.answer, ShutRoute)
            said = refused.json()
            assert route.answer.reason == (said["message"] if "success" in said else said["error"]["message"])
            assert any(word in route.answer.reason for word in ("set ", "give ", "leave out ", "train "))


BAD_BODIES: Sequence[tuple[str, Any, str, str]] = (
    (GENERATE, {**TOKENS, "features": {"mm_hashes": {}}}, "features", "text alone"),
    (GENERATE, {"token_ids": [1], "sampling_params": {"prompt_logprobs": 0}}, "prompt_logprobs", "algo.teacher"),
    (GENERATE, {"token_ids": [1], "stream": True}, "stream", "send false"),
    (GENERATE, {"token_ids": []}, "token_ids", ""),
    (GENERATE, {"token_ids": [1], "sampling_params": {"temperature": -1}}, "sampling_params.temperature", ""),
    (GENERATE, {"token_ids": [1], "sampling_params": {"min_p": 0.5}}, "sampling_params.min_p", "distribution"),
    ("/v1/completions", {"prompt": "text"}, "prompt", "allowed: token ids"),
    ("/v1/completions", {"prompt": [[1], []]}, "prompt", "allowed: token ids"),
    ("/v1/completions", {"prompt": [1], "n": 0}, "n", ""),
    ("/v1/completions", {"prompt": [1], "n": True}, "n", "bool"),
    ("/v1/completions", {"prompt": [1], "n": TURNS_MAX + 1}, "n", f"allowed: {TURNS_MAX} choices at once"),
    ("/v1/completions", {"prompt": [[1]] * 9, "n": 2}, "prompt", f"allowed: {TURNS_MAX} choices at once"),
    ("/v1/completions", {"prompt": [1], "stop_token_ids": [1] * 65}, "stop_token_ids", "64"),
    ("/v1/completions", {"prompt": [1], "min_p": False}, "min_p", "distribution"),
    (
        GENERATE,
        {"token_ids": [1], "sampling_params": {"stop_token_ids": [1] * 65}},
        "sampling_params.stop_token_ids",
        "",
    ),
    (GENERATE, {"token_ids": [1], "sampling_params": {"best_of": True}}, "sampling_params.best_of", "not supported"),
    (
        "/generate",
        {"input_ids": [1], "sampling_params": {"stop_token_ids": [1] * 65}},
        "sampling_params.stop_token_ids",
        "64",
    ),
    ("/generate", {"input_ids": [1], "sampling_params": {"n": True}}, "sampling_params.n", "not supported"),
    ("/generate", {"input_ids": [1], "sampling_params": {"top_k": 2**31}}, "sampling_params.top_k", ""),
    ("/generate", {"input_ids": [True]}, "input_ids.0", "bool"),
    ("/generate", {"text": "hello"}, "text", "not supported"),
    ("/generate", {"input_ids": [[1], [2]]}, "input_ids.0", ""),
    ("/generate", {"input_ids": [1], "image_data": ["x"]}, "image_data", "text alone"),
    ("/generate", {"input_ids": [1], "return_routed_experts": True}, "return_routed_experts", "routing-replay"),
    ("/generate", {"input_ids": [1], "logprob_start_len": 0}, "logprob_start_len", ""),
    ("/generate", {"input_ids": [1], "sampling_params": {"n": 2}}, "sampling_params.n", "not supported"),
    (
        "/generate",
        {"input_ids": [1], "sampling_params": {"max_new_tokens": 0}},
        "sampling_params.max_new_tokens",
        "",
    ),
    (
        "/generate",
        {"input_ids": [1], "sampling_params": {"custom_params": {"return_top_p_token_ids": True}}},
        "sampling_params.custom_params",
        "--rollout-top-p",
    ),
    ("/pause?mode=now", {}, "mode", "keep, wait, abort"),
    ("/update_weights", {"weight_dir": None}, "weight_dir", "'filesystem'"),
    ("/update_weights", {"update_info": {"names": []}}, "weight_dir", "ElasticWeights"),
    ("/update_weights", {"weight_dir": "/elsewhere"}, "weight_dir", THEIRS),
    ("/update_weights", {"weight_dir": f"{THEIRS}/../secret"}, "weight_dir", THEIRS),
    ("/update_weights", {"weight_dir": 7}, "weight_dir", ""),
    ("/load_lora_adapter", {"lora_name": "", "lora_path": THEIRS}, "lora_name", ""),
    ("/detokenize", {"tokens": [1000]}, "tokens", "vocabulary"),
    ("/abort_request", {"rid": "7"}, "abort_all", "true"),
    ("/workers", {"url": "http://10.1.1.1:7"}, "url", "--sglang-router-ip"),
)
"""Each with the field that is named, and a part of what is said."""


async def test_bad_bodies_are_named_in_the_shape_of_vllm_and_sglang(served: ServedDoors) -> None:
    async with client_of(served) as client:
        for path, body, param, said in BAD_BODIES:
            refused = await client.post(path, json=body)
            assert refused.status_code == 400, refused.text
            error = refused.json()["error"]
            assert (error["param"], error["message"].startswith(f"{param}: ")) == (param, True), error
            assert said in error["message"]
    assert served.run.offers == []
    assert served.run.requests == []


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/update_weights_from_disk", {"model_path": "relative"}, "model_path: found 'relative'"),
        ("/update_weights_from_disk", {}, "model_path: is missing"),
        ("/update_weights_from_disk", {"model_path": THEIRS, "load_format": "delta"}, "load_format: "),
        ("/pause_generation", {"mode": "keep"}, "mode: "),
        ("/areal_update_weights", {"model_path": f"{THEIRS}/none"}, "has no weights"),
    ],
)
async def test_bad_control_is_told_in_the_shape_of_sglang(served: ServedDoors, path: str, body: Any, said: str) -> None:
    async with client_of(served) as client:
        refused = await client.post(path, json=body)
    assert 400 <= refused.status_code < 500
    assert refused.json()["success"] is False
    assert said in refused.json()["message"]


@pytest.mark.parametrize("path", ["/load_lora_adapter", "/v1/load_lora_adapter", "/skyrl/v1/load_lora_adapter"])
async def test_an_adapter_that_is_not_there_is_told_in_both_shapes(served: ServedDoors, path: str) -> None:
    async with client_of(served) as client:
        refused = await client.post(path, json={"lora_name": "a", "lora_path": f"{THEIRS}/none"})
    assert refused.status_code == 404
    assert refused.json()["error_message"] == refused.json()["error"]["message"]


@pytest.mark.parametrize("content", [b"", b"[1]", b"{", b'{"token_ids": [1], "token_ids"}'])
async def test_a_body_that_is_no_object_is_a_400(served: ServedDoors, content: bytes) -> None:
    async with client_of(served) as client:
        assert (await client.post(GENERATE, content=content)).status_code == 400


async def test_what_can_help_later_is_a_503_and_what_cannot_is_not(served: ServedDoors) -> None:
    served.run.refuses = DoorRefused("no worker took the turn in time", again=True, retry_after_s=7)
    async with client_of(served) as client:
        for path, body in ((GENERATE, TOKENS), ("/pause", {}), ("/update_weights", {"weight_dir": THEIRS})):
            refused = await client.post(path, json=body)
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "7")
        served.run.refuses = None
        too_long = await client.post(GENERATE, json={"token_ids": [1] * CONTEXT_TOKENS})
        assert too_long.json()["error"]["message"].startswith("This model's maximum context length is 256 tokens.")
        unknown = await client.post(GENERATE, json={**TOKENS, "model": "nobody"})
        assert (unknown.status_code, unknown.json()["error"]["param"]) == (404, "model")


async def test_several_prompts_are_answered_in_their_order(served: ServedDoors) -> None:
    async with client_of(served) as client:
        body = {"prompt": [[1], [1, 2]], "n": 2, "max_tokens": 1, "return_token_ids": True, "logprobs": 0}
        answer = (await client.post("/v1/completions", json=body, headers={"idempotency-key": "k"})).json()
        assert [choice["token_ids"] for choice in answer["choices"]] == [[1], [1], [2], [2]]
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
        assert [request.key for request in served.run.requests] == ["k", "k/1"]
        await client.post("/v1/completions", json=body, headers={"idempotency-key": "k" * NAME_MAX})
        keys = [request.key for request in served.run.requests[2:]]
        assert len({*keys}) == 2
        assert all(len(key) <= NAME_MAX for key in keys)
        refused = await client.post("/v1/completions", json={**body, "prompt": [[1], [1] * CONTEXT_TOKENS]})
        assert refused.status_code == 400


async def test_an_answer_is_given_once_it_was_written(served: ServedDoors) -> None:
    async with client_of(served) as client:
        body = {"prompt": [[1], [1, 2]], "max_tokens": 1}
        assert (await client.post("/v1/completions", json=body)).status_code == 200
        refused = await client.post("/v1/completions", json={**body, "prompt": [[1], [1] * CONTEXT_TOKENS]})
        assert refused.status_code == 400
        assert (served.run.given, served.run.left) == (2, 1)


async def test_a_client_that_leaves_leaves_its_request(served: ServedDoors) -> None:
    served.run.gate = 0
    async with client_of(served) as client:
        asked = asyncio.create_task(client.post(GENERATE, json=TOKENS))
        await served.run.until(lambda: served.run.reached == 1)
        asked.cancel()
        await served.run.until(lambda: served.run.left == 1)


async def test_a_pause_holds_new_turns_and_waits_for_running_ones_where_it_says_so(served: ServedDoors) -> None:
    served.run.gate = 1
    async with client_of(served) as client:
        running = asyncio.create_task(client.post(GENERATE, json=TOKENS))
        await served.run.until(lambda: served.run.reached == 1)
        pausing = asyncio.create_task(client.post("/pause?mode=wait"))
        await served.run.until(lambda: served.run.pauses == [PauseMode.WAIT])
        assert not pausing.done()
        await served.run.open_gate()
        assert (await pausing).status_code == (await running).status_code == 200
        assert (await client.get("/is_paused")).json() == {"is_paused": True}
        held = asyncio.create_task(client.post(GENERATE, json=TOKENS))
        await served.run.until(lambda: len(served.run.requests) == 2)
        offered(served.root, "step_1")
        assert (await client.post("/update_weights", json={"weight_dir": f"{THEIRS}/step_1"})).status_code == 200
        assert (await client.post("/resume")).json() == {"status": "resumed"}
        [choice] = (await held).json()["choices"]
        assert choice["weight_versions"] == [{"version": "step_1", "start": 0, "end": 2}]


# Pure.


@given(st.lists(st.sampled_from(["a", "b", "..", ".", "c d", "é"]), max_size=6))
def test_no_path_leads_out_of_its_root(parts: list[str]) -> None:
    roots = WeightsRoots([read_root("/theirs=/ours"), read_root("/theirs/a=/inner")])
    try:
        found = roots.ours("/".join(["/theirs", *parts]), "weight_dir")
    except DoorRefused:
        assert ".." in parts
        return
    below = PurePosixPath(*(part for part in parts if part != "."))
    inner = below.parts[:1] == ("a",)
    assert found == (Path("/inner") / below.relative_to("a") if inner else Path("/ours") / below)


@pytest.mark.parametrize("said", ["", "weights", "/a=b", "a=/b", "/a/../b", "/a=/b/../c"])
def test_what_is_no_root_is_named(said: str) -> None:
    with pytest.raises(ValueError, match="allowed: an absolute path, or THEIRS=OURS of two"):
        read_root(said)


def test_a_root_alone_is_the_same_on_both_sides() -> None:
    assert read_root("/shared/weights") == WeightsRoot(PurePosixPath("/shared/weights"), Path("/shared/weights"))


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9)), max_size=5))
def test_spans_cover_the_tokens_in_their_order(runs: list[tuple[int, int]]) -> None:
    spans = spans_of([VersionRun(version=version, tokens=tokens) for version, tokens in runs])
    assert [(span.version, span.end - span.start) for span in spans] == [(str(v), tokens) for v, tokens in runs]
    assert [0, *(span.end for span in spans)] == [*(span.start for span in spans), sum(n for _, n in runs)]


@given(
    st.lists(st.tuples(st.integers(0, 2**31 - 1), st.floats(-1e4, 0, width=32)), max_size=8),
    st.sampled_from(["stop", "length", "abort"]),
    st.sampled_from([None, "END", 7]),
    st.booleans(),
)
def test_an_answer_of_sglang_has_each_token_with_its_logprob(
    tokens: list[tuple[int, float]], finish: str, stopped_by: Any, keeps_stop: bool
) -> None:
    runs = (VersionRun(version=4, tokens=len(tokens), label="step-4"),) if tokens else ()
    choice = TokenChoice(
        ids=[token for token, _ in tokens],
        logprobs=[logprob for _, logprob in tokens],
        text="said",
        finish=finish,
        runs=runs,
        stopped_by=stopped_by,
    )
    answer = TokenAnswer(id="1/0", choices=[choice], prompt_tokens=3, now=VersionRun(version=5, tokens=0))
    meta = (said := told(answer, shows_logprobs=True, keeps_stop=keeps_stop))["meta_info"]
    assert [(token, logprob) for logprob, token, _ in meta["output_token_logprobs"]] == tokens
    assert meta["completion_tokens"] == len(tokens)
    assert meta["finish_reason"]["type"] == finish
    assert meta["weight_version"] == ("step-4" if tokens else "5")
    assert said["text"] == ("saidEND" if keeps_stop and stopped_by == "END" else "said")


@pytest.mark.parametrize("logprobs", [[], [float("nan")], [float("-inf")], [-1.0, -1.0]])
def test_a_token_without_a_logprob_is_no_answer(logprobs: list[float]) -> None:
    choice = TokenChoice(ids=[1], logprobs=logprobs, text="", finish="stop")
    answer = TokenAnswer(id="1/0", choices=[choice], prompt_tokens=1, now=VersionRun(version=0, tokens=0))
    with pytest.raises(FrontError, match="a log-probability is missing, or no number"):
        told(answer, shows_logprobs=True, keeps_stop=False)
