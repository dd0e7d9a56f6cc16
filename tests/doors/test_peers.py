"""Each peer's calls, in the order in which its sources make them, by the HTTP library that it uses: three updates."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import pytest

from elastic.front.doors.base import PauseMode
from tests.doors.memory_run import LOGPROB_OF, offered
from tests.doors.served import CONTROL, METRICS, REQUESTS, THEIRS, ServedDoors, served_doors

PROMPT = [5, 6, 7]
UPDATES = 3


def expected(tokens: int, prompt: list[int] = PROMPT) -> tuple[list[int], list[float]]:
    ids = [len(prompt) + number for number in range(tokens)]
    return ids, [LOGPROB_OF * token for token in ids]


@pytest.fixture
async def prime_rl(served: ServedDoors) -> AsyncIterator[httpx.AsyncClient]:
    """prime-rl's admin client: one key for all, at the root."""
    headers = {"Authorization": f"Bearer {CONTROL}"}
    async with httpx.AsyncClient(
        base_url=served.url, headers=headers, timeout=None, trust_env=False, verify=False
    ) as client:
        yield client


async def test_prime_rl(served: ServedDoors, prime_rl: httpx.AsyncClient) -> None:
    assert (await prime_rl.get("/health")).status_code == 200
    models = (await prime_rl.get("/v1/models")).json()["data"]
    assert [(model["id"], model["max_model_len"]) for model in models] == [("policy", 256)]
    assert (await prime_rl.get("/metrics")).text == METRICS
    for update in range(1, UPDATES + 1):
        directory = offered(served.root, f"step_{update}")
        paused = await prime_rl.post("/pause", params={"mode": "keep", "clear_cache": "false"})
        paused.raise_for_status()
        body = {"weight_dir": f"{THEIRS}/step_{update}"}
        (await prime_rl.post("/update_weights", json=body)).raise_for_status()
        (await prime_rl.post("/resume")).raise_for_status()
        assert served.run.offers[-1].directory == directory
        body = {
            "model": "policy",
            "token_ids": PROMPT,
            "sampling_params": {
                "max_tokens": 4,
                "temperature": 1.0,
                "stop_token_ids": [900],
                "logprobs": 1,
                "skip_special_tokens": False,
                "routed_experts_prompt_start": 2,
            },
            "cache_salt": str(update),
            "priority": 0,
        }
        answer = await prime_rl.post("/inference/v1/generate", json=body, headers={"X-Session-ID": "trace-1"})
        answer.raise_for_status()
        [choice] = answer.json()["choices"]
        ids, logprobs = expected(4)
        assert (choice["token_ids"], choice["finish_reason"]) == (ids, "length")
        assert [one["logprob"] for one in choice["logprobs"]["content"]] == logprobs
        assert [one["token"] for one in choice["logprobs"]["content"]] == [f"token_id:{token}" for token in ids]
        assert choice["weight_versions"] == [{"version": f"step_{update}", "start": 0, "end": 4}]
        assert answer.json()["usage"] == {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
    assert served.run.pauses == [PauseMode.KEEP] * UPDATES
    assert not served.run.paused
    assert {request.session for request in served.run.requests} == {"trace-1"}


async def test_prime_rl_with_an_adapter(served: ServedDoors, prime_rl: httpx.AsyncClient) -> None:
    """Its name stays, the path changes; requests name the adapter from then on."""
    for update in range(1, UPDATES + 1):
        offered(served.root, f"step_{update}")
        body = {"lora_name": "run-lora", "lora_path": f"{THEIRS}/step_{update}"}
        (await prime_rl.post("/load_lora_adapter", json=body)).raise_for_status()
    assert [(offer.adapter, offer.directory.name) for offer in served.run.offers] == [
        ("run-lora", f"step_{update}") for update in range(1, UPDATES + 1)
    ]
    models = [model["id"] for model in (await prime_rl.get("/v1/models")).json()["data"]]
    assert models == ["policy", "run-lora"]
    body = {"model": "run-lora", "token_ids": PROMPT, "sampling_params": {"max_tokens": 1}}
    assert (await prime_rl.post("/inference/v1/generate", json=body)).json()["model"] == "run-lora"


async def test_trl(served: ServedDoors) -> None:
    """The turns of AsyncGRPOTrainer's rollout worker, whose key is in its URL; its weights come as prime-rl's do."""
    url = served.with_key(REQUESTS)
    async with aiohttp.ClientSession() as session:
        async with session.get(f"{url}/v1/models") as models:
            assert (await models.json())["data"][0]["max_model_len"] == 256
        async with session.get(f"{url}/server_info", params={"config_format": "json"}) as info:
            config = (await info.json())["vllm_config"]
        assert config["model_config"]["dtype"] == "torch.bfloat16"
        for seed in range(UPDATES):
            payload = {
                "model": "policy",
                "prompt": PROMPT,
                "max_tokens": 4,
                "temperature": 1.0,
                "top_p": 1.0,
                "top_k": 0,
                "repetition_penalty": 1.0,
                "n": 1,
                "return_token_ids": True,
                "logprobs": 0,
                "seed": 2**62 + seed,
            }
            async with session.post(f"{url}/v1/completions", json=payload) as answer:
                answer.raise_for_status()
                [choice] = (await answer.json())["choices"]
            assert (choice["token_ids"], choice["logprobs"]["token_logprobs"]) == expected(4)
            assert choice["prompt_token_ids"] == PROMPT
    assert [request.seed for request in served.run.requests] == [2**62 + seed for seed in range(UPDATES)]


async def slime_post(client: httpx.AsyncClient, path: str, payload: dict[str, Any]) -> Any:
    answer = await client.post(path, json=payload or {})
    answer.raise_for_status()
    content = await answer.aread()
    return answer.json() if content else ""


async def test_slime(tmp_path: Path) -> None:
    """It sends no key; its router is the front. (Its control is by requests, whose bytes are the same.)"""
    async with (
        served_doors(tmp_path, plain=["127.0.0.1"]) as served,
        httpx.AsyncClient(base_url=served.url, timeout=None, trust_env=False, verify=False) as client,
    ):
        info = (await client.get("/server_info")).json()
        assert info["enable_memory_saver"] is False
        assert (info["tp_size"], info["pp_size"], info["num_gpus"], info["disaggregation_mode"]) == (1, 1, 1, "null")
        assert (await client.get("/get_server_info")).json() == info
        await slime_post(client, "/workers", {"url": served.url, "worker_type": "regular"})
        [worker] = (await client.get("/workers")).json()["workers"]
        assert worker["url"] == served.url
        for update in range(1, UPDATES + 1):
            offered(served.root, f"weight_v{update:06d}")
            await slime_post(client, "/pause_generation", {})
            assert (await client.get("/flush_cache")).status_code == 200
            body = {"model_path": f"{THEIRS}/weight_v{update:06d}", "weight_version": str(update)}
            updated = await slime_post(client, "/update_weights_from_disk", body)
            assert updated["success"] is True
            version = (await client.get("/get_weight_version")).json()["weight_version"]
            assert version == str(update)
            await slime_post(client, "/continue_generation", {})
            sampling = {
                "temperature": 1.0,
                "top_p": 1.0,
                "top_k": -1,
                "max_new_tokens": 4,
                "stop": None,
                "stop_token_ids": None,
                "skip_special_tokens": False,
                "no_stop_trim": True,
                "spaces_between_special_tokens": False,
            }
            payload = {"sampling_params": sampling, "return_logprob": True, "input_ids": PROMPT}
            output = await slime_post(client, "/generate", payload)
            meta, (ids, logprobs) = output["meta_info"], expected(4)
            assert meta["output_token_logprobs"] == [[p, t, None] for p, t in zip(logprobs, ids, strict=True)]
            assert meta["finish_reason"] == {"type": "length", "length": 4}
            assert meta["weight_version"] == str(update)
            assert (meta["prompt_tokens"], meta["cached_tokens"], meta["completion_tokens"]) == (3, 2, 4)
            assert output["text"] == "3 4 5 6"
        assert (await client.delete(f"/workers/{worker['id']}")).status_code == 200
        assert (await client.get("/health_generate")).status_code == 200


async def test_slime_ends_a_partial_rollout(tmp_path: Path) -> None:
    """It aborts until nothing is left, and takes what the requests had."""
    async with (
        served_doors(tmp_path, plain=["127.0.0.1"]) as served,
        httpx.AsyncClient(base_url=served.url, timeout=None, trust_env=False, verify=False) as client,
    ):
        served.run.gate = 2
        payload = {"sampling_params": {"max_new_tokens": 9}, "return_logprob": True, "input_ids": PROMPT}
        asked = asyncio.create_task(slime_post(client, "/generate", payload))
        await served.run.until(lambda: served.run.reached == 1)
        loads = (await client.get("/v1/loads", params={"include": "core"})).json()["loads"]
        assert [load["num_total_reqs"] for load in loads] == [1]
        await slime_post(client, "/abort_request", {"abort_all": True})
        meta = (await asked)["meta_info"]
        assert meta["finish_reason"]["type"] == "abort"
        assert [token for _, token, _ in meta["output_token_logprobs"]] == [3, 4]
        loads = (await client.get("/v1/loads", params={"include": "core"})).json()["loads"]
        assert [load["num_total_reqs"] for load in loads] == [0]


async def areal_request(session: aiohttp.ClientSession, url: str, payload: dict[str, Any]) -> Any:
    async with session.post(url, json=payload) as answer:
        answer.raise_for_status()
        assert answer.content_type == "application/json"
        return await answer.json()


@pytest.mark.parametrize("backend", ["sglang", "vllm"])
async def test_areal(tmp_path: Path, backend: str) -> None:
    """A request under way at an update comes back aborted, with what it had, and is asked again with that."""
    pause, update, resume = {
        "sglang": ("/pause_generation", "/update_weights_from_disk", "/continue_generation"),
        "vllm": ("/areal_pause_generation", "/areal_update_weights", "/areal_continue_generation"),
    }[backend]
    async with served_doors(tmp_path, plain=["127.0.0.0/8"]) as served, aiohttp.ClientSession() as session:
        async with session.get(f"{served.url}/health", json={}) as health:
            assert health.status == 200
        for number in range(1, UPDATES + 1):
            served.run.gate = 2
            asked = asyncio.create_task(areal_turn(session, served.url, backend, PROMPT, 6))
            await served.run.until(lambda: served.run.reached == 1)
            assert "success" in await areal_request(session, f"{served.url}{pause}", {}) or backend == "sglang"
            assert (await asked) == (*expected(2), "abort")
            directory = offered(served.root, f"update_{number}")
            body: dict[str, Any] = {"model_path": f"{THEIRS}/{directory.name}"}
            body |= {"abort_all_requests": True} if backend == "sglang" else {}
            updated = await areal_request(session, f"{served.url}{update}", body)
            assert updated["success"] is True
            await areal_request(session, f"{served.url}{resume}", {})
            await served.run.open_gate()
            prompt = [*PROMPT, *expected(2)[0]]
            assert await areal_turn(session, served.url, backend, prompt, 4) == (*expected(4, prompt), "length")
    assert all(offer.abort_running for offer in served.run.offers)


async def areal_turn(
    session: aiohttp.ClientSession, url: str, backend: str, prompt: list[int], tokens: int
) -> tuple[list[int], list[float], str]:
    """The ids, log-probabilities and reason that AReaL's client reads of an answer."""
    shared = {"top_p": 1.0, "top_k": int(1e8), "temperature": 1.0, "stop_token_ids": [], "ignore_eos": False}
    shared |= {"skip_special_tokens": True}
    if backend == "sglang":
        sampling = {**shared, "max_new_tokens": tokens, "frequency_penalty": 0.0}
        payload = {"input_ids": prompt, "image_data": None, "sampling_params": sampling}
        payload |= {"return_logprob": True, "stream": False}
        meta = (await areal_request(session, f"{url}/generate", payload))["meta_info"]
        told = meta["output_token_logprobs"]
        return [one[1] for one in told], [one[0] for one in told], meta["finish_reason"]["type"]
    payload = {**shared, "max_tokens": tokens, "return_tokens_as_token_ids": True, "logprobs": 0}
    payload |= {"use_beam_search": False, "stream": False, "prompt": prompt}
    [choice] = (await areal_request(session, f"{url}/v1/completions", payload))["choices"]
    ids = [int(token.split(":")[1]) for token in choice["logprobs"]["tokens"]]
    return ids, choice["logprobs"]["token_logprobs"], choice["finish_reason"]


@pytest.mark.parametrize("path", ["/load_lora_adapter", "/v1/load_lora_adapter"])
async def test_areal_with_an_adapter(tmp_path: Path, path: str) -> None:
    """Each version has a name of its own, which requests name."""
    async with served_doors(tmp_path, plain=["127.0.0.0/8"]) as served, aiohttp.ClientSession() as session:
        for version in range(1, UPDATES + 1):
            directory = offered(served.root, f"lora_{version}")
            body = {"lora_name": f"lora-v{version}", "lora_path": f"{THEIRS}/{directory.name}"}
            assert (await areal_request(session, f"{served.url}{path}", body))["success"] is True
            body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 2}, "lora_path": f"lora-v{version}"}
            assert (await areal_request(session, f"{served.url}/generate", body))["output_ids"] == [3, 4]
    assert [request.model for request in served.run.requests] == ["lora-v1", "lora-v2", "lora-v3"]


async def test_skyrl(served: ServedDoors) -> None:
    """Its client's calls of 0.4: the same adapter's name and path each time, between a pause and a resume."""
    control, data = served.with_key(CONTROL), served.with_key(REQUESTS)
    async with aiohttp.ClientSession() as session:
        async with session.get(f"{control}/get_world_size", json={}) as size:
            assert (await size.json()) == {"world_size": 1}
        for update in range(1, UPDATES + 1):
            offered(served.root, "lora", update)
            async with session.post(f"{control}/pause", params={"mode": "keep", "clear_cache": "false"}) as paused:
                assert paused.status == 200
            body = {"lora_name": "skyrl-lora", "lora_path": f"{THEIRS}/lora"}
            async with session.post(f"{control}/skyrl/v1/load_lora_adapter", json=body) as loaded:
                assert loaded.status == 200
            async with session.post(f"{control}/reset_prefix_cache", json={"reset_running_requests": False}) as reset:
                assert reset.status == 200
            async with session.post(f"{control}/resume") as resumed:
                assert resumed.status == 200
            payload = {
                "sampling_params": {"max_tokens": 4, "logprobs": 0},
                "model": "skyrl-lora",
                "token_ids": PROMPT,
                "cache_salt": str(update),
            }
            async with session.post(
                f"{data}/inference/v1/generate", json=payload, headers={"X-Session-ID": "7"}
            ) as answer:
                [choice] = (await answer.json())["choices"]
            assert choice["token_ids"] == expected(4)[0]
            assert [one["logprob"] for one in choice["logprobs"]["content"]] == expected(4)[1]
            async with session.post(f"{data}/detokenize", json={"model": "policy", "tokens": [3, 4]}) as text:
                assert await text.json() == {"prompt": "3 4"}
            async with session.post(f"{data}/finish_session", params={"session_id": "7"}) as finished:
                assert finished.status == 200
    assert [offer.adapter for offer in served.run.offers] == ["skyrl-lora"] * UPDATES
    assert [tensors["weight"][0, 0].item() for tensors in served.run.taken] == [1, 2, 3]
