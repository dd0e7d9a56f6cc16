"""The calls of other people's trainers, in the order in which their sources make them, by the HTTP library of each.

A peer offers a directory, and asks for a turn then; what it was told of the turn's version is what is judged.
"""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import httpx
import torch

from elastic.integrations.trl import ElasticWeights

PROMPT = [5, 6, 7]
TOKENS = 8
TIMEOUT_S = 240.0
CONNECT_S = 10.0


class CallFailed(Exception):
    """A call was not answered as its peer needs it."""


class FrontSeen(NamedTuple):
    """Where a run's doors are, how its model is called there, and its keys. Its peers are of a plain network, too."""

    url: str
    model: str
    control_key: str
    requests_key: str

    def with_key(self, key: str) -> str:
        return self.url.replace("://", f"://run:{key}@")


class PeerTurn(NamedTuple):
    """A turn's answer. `versions` are those of its tokens, by name; None where the protocol tells none."""

    ids: list[int]
    logprobs: list[float]
    versions: list[str] | None


class PeerCalls:
    """Counts the calls of one peer. `call` raises `CallFailed` for a status that is not 200."""

    def __init__(self, session: aiohttp.ClientSession | httpx.AsyncClient, front: FrontSeen, key: str = "") -> None:
        self._session = session
        self._base = front.with_key(key) if key else front.url
        self.calls = 0

    async def call(self, method: str, path: str, **what: Any) -> Any:
        self.calls += 1
        session = self._session
        if isinstance(session, httpx.AsyncClient):
            answer = await session.request(method, self._base + path, **what)
            status, content = answer.status_code, answer.content
        else:
            async with session.request(method, self._base + path, **what) as response:
                status, content = response.status, await response.read()
        if status != 200:
            raise CallFailed(f"{method} {path}: {status} {content[:300].decode(errors='replace')}")
        return json.loads(content) if content[:1] in (b"{", b"[") else content


Play = Callable[[FrontSeen, list[Path]], Coroutine[Any, Any, tuple[int, list[PeerTurn]]]]
"""Plays a peer's start, and an update and a turn for each directory; tells how many calls it made, and the turns."""


@asynccontextmanager
async def _by_httpx() -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Timeout(TIMEOUT_S, connect=CONNECT_S)
    async with httpx.AsyncClient(timeout=limits, trust_env=False, verify=False) as client:
        yield client


@asynccontextmanager
async def _by_aiohttp() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S)) as session:
        yield session


def _spans(choice: Mapping[str, Any]) -> list[str]:
    return [span["version"] for span in choice["weight_versions"] for _ in range(span["start"], span["end"])]


async def prime_rl(front: FrontSeen, directories: list[Path]) -> tuple[int, list[PeerTurn]]:
    async with _by_httpx() as client:
        client.headers["Authorization"] = f"Bearer {front.control_key}"
        caller = PeerCalls(client, front)
        await caller.call("GET", "/health")
        models = await caller.call("GET", "/v1/models")
        if not any(model["id"] == front.model for model in models["data"]):
            raise CallFailed(f"/v1/models: {front.model} is missing")
        await caller.call("GET", "/metrics")
        told: list[PeerTurn] = []
        for directory in directories:
            await caller.call("POST", "/pause", params={"mode": "keep", "clear_cache": "false"})
            await caller.call("POST", "/update_weights", json={"weight_dir": directory.as_posix()})
            await caller.call("POST", "/resume")
            sampling = {"max_tokens": TOKENS, "logprobs": 1, "skip_special_tokens": False, "ignore_eos": True}
            body = {"model": front.model, "token_ids": PROMPT, "sampling_params": sampling}
            answer = await caller.call(
                "POST",
                "/inference/v1/generate",
                json={**body, "cache_salt": directory.name},
                headers={"X-Session-ID": "one"},
            )
            [choice] = answer["choices"]
            logprobs = [one["logprob"] for one in choice["logprobs"]["content"]]
            told.append(PeerTurn(choice["token_ids"], logprobs, _spans(choice)))
        return caller.calls, told


async def trl(front: FrontSeen, directories: list[Path]) -> tuple[int, list[PeerTurn]]:
    """Its rollout worker's turns; `ElasticWeights` writes the tensors of each directory anew."""
    from safetensors.torch import load_file

    root = directories[0].parent
    weights = ElasticWeights(front.url, root, key=front.control_key, timeout_s=TIMEOUT_S)
    try:
        async with _by_aiohttp() as session:
            caller = PeerCalls(session, front, front.requests_key)
            length = (await caller.call("GET", "/v1/models"))["data"][0]["max_model_len"]
            if not isinstance(length, int):
                raise CallFailed(f"/v1/models: max_model_len is {length!r}")
            await asyncio.to_thread(weights.init_weight_transfer)
            told: list[PeerTurn] = []
            for directory in directories:
                tensors: dict[str, torch.Tensor] = load_file(directory / "model.safetensors")
                await asyncio.to_thread(weights.pause)
                await asyncio.to_thread(weights.send_weights, iter(tensors.items()))
                await asyncio.to_thread(weights.resume)
                body = {"model": front.model, "prompt": PROMPT, "max_tokens": TOKENS, "n": 1, "top_k": 0}
                body |= {"temperature": 1.0, "top_p": 1.0, "repetition_penalty": 1.0, "ignore_eos": True}
                answer = await caller.call(
                    "POST", "/v1/completions", json={**body, "return_token_ids": True, "logprobs": 0}
                )
                [choice] = answer["choices"]
                told.append(PeerTurn(choice["token_ids"], choice["logprobs"]["token_logprobs"], _spans(choice)))
            return caller.calls + 2 + 3 * len(directories), told
    finally:
        weights.destroy()


async def slime(front: FrontSeen, directories: list[Path]) -> tuple[int, list[PeerTurn]]:
    async with _by_httpx() as client:
        caller = PeerCalls(client, front)
        info = await caller.call("GET", "/server_info")
        if info["enable_memory_saver"] is not False or info["disaggregation_mode"] in ("prefill", "decode"):
            raise CallFailed(f"/server_info: {info}")
        await caller.call("POST", "/workers", json={"url": front.url, "worker_type": "regular"})
        workers = await caller.call("GET", "/workers")
        told: list[PeerTurn] = []
        for number, directory in enumerate(directories, 1):
            await caller.call("POST", "/pause_generation", json={})
            await caller.call("GET", "/flush_cache")
            body = {"model_path": directory.as_posix(), "weight_version": str(number)}
            await caller.call("POST", "/update_weights_from_disk", json=body)
            version = (await caller.call("GET", "/get_weight_version"))["weight_version"]
            if version != str(number):
                raise CallFailed(f"/get_weight_version: {version}, not {number}")
            await caller.call("POST", "/continue_generation", json={})
            told.append(await _sglang_turn(caller))
        for worker in workers["workers"]:
            await caller.call("POST", "/abort_request", json={"abort_all": True})
            loads = await caller.call("GET", "/v1/loads", params={"include": "core"})
            if any(load["num_total_reqs"] for load in loads["loads"]):
                raise CallFailed(f"/v1/loads: {loads}")
            await caller.call("DELETE", f"/workers/{worker['id']}")
        return caller.calls, told


async def _sglang_turn(caller: PeerCalls, **more: Any) -> PeerTurn:
    sampling = {"max_new_tokens": TOKENS, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "ignore_eos": True}
    body = {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True, **more}
    meta = (await caller.call("POST", "/generate", json=body))["meta_info"]
    tokens = meta["output_token_logprobs"]
    versions = [meta["weight_version"]] * len(tokens)
    return PeerTurn([one[1] for one in tokens], [one[0] for one in tokens], versions)


def _areal(
    way: str,
    offer: Callable[[Path], tuple[str, Mapping[str, Any]]],
    turn: Callable[[PeerCalls, Path, Path], Coroutine[Any, Any, PeerTurn]],
    *,
    asks_health: bool = True,
) -> Play:
    """Between a pause and a resumption, whose routes begin this `way`, it makes the call of an offer; then it asks for
    a turn, which is told the directory and the first one."""

    async def play(front: FrontSeen, directories: list[Path]) -> tuple[int, list[PeerTurn]]:
        async with _by_aiohttp() as session:
            caller = PeerCalls(session, front)
            if asks_health:
                await caller.call("GET", "/health", json={})
            told: list[PeerTurn] = []
            for directory in directories:
                await caller.call("POST", f"/{way}pause_generation", json={})
                path, body = offer(directory)
                await caller.call("POST", path, json=body)
                await caller.call("POST", f"/{way}continue_generation", json={})
                told.append(await turn(caller, directory, directories[0]))
            return caller.calls, told

    return play


def _adapter(directory: Path) -> Mapping[str, Any]:
    """A name for each version."""
    return {"lora_name": f"lora-{directory.name}", "lora_path": directory.as_posix()}


async def _areal_turn(caller: PeerCalls, **more: Any) -> PeerTurn:
    body = {"prompt": PROMPT, "max_tokens": TOKENS, "ignore_eos": True, "return_tokens_as_token_ids": True}
    body |= {"logprobs": 0, "use_beam_search": False, "stream": False, **more}
    [choice] = (await caller.call("POST", "/v1/completions", json=body))["choices"]
    ids = [int(name.split(":")[1]) for name in choice["logprobs"]["tokens"]]
    return PeerTurn(ids, choice["logprobs"]["token_logprobs"], _spans(choice))


PEERS: Mapping[str, Play] = {
    "prime-rl": prime_rl,
    "trl": trl,
    "slime": slime,
    "areal, sglang": _areal(
        "",
        lambda directory: (
            "/update_weights_from_disk",
            {"model_path": directory.as_posix(), "abort_all_requests": True},
        ),
        lambda caller, *_: _sglang_turn(caller),
    ),
    "areal, vllm": _areal(
        "areal_",
        lambda directory: ("/areal_update_weights", {"model_path": directory.as_posix()}),
        lambda caller, *_: _areal_turn(caller, temperature=1.0, top_p=1.0, top_k=100_000_000),
    ),
}


async def prime_rl_adapters(front: FrontSeen, directories: list[Path]) -> tuple[int, list[PeerTurn]]:
    """One name, whose directory changes."""
    async with _by_httpx() as client:
        client.headers["Authorization"] = f"Bearer {front.control_key}"
        caller = PeerCalls(client, front)
        await caller.call("GET", "/health")
        told: list[PeerTurn] = []
        for directory in directories:
            body = {"lora_name": "policy-lora", "lora_path": directory.as_posix()}
            await caller.call("POST", "/load_lora_adapter", json=body)
            told.append(await _token_turn(caller, "policy-lora"))
        models = await caller.call("GET", "/v1/models")
        if not any(model["id"] == "policy-lora" for model in models["data"]):
            raise CallFailed(f"/v1/models: policy-lora is missing in {models}")
        return caller.calls, told


async def skyrl(front: FrontSeen, directories: list[Path]) -> tuple[int, list[PeerTurn]]:
    """Its client's calls: one name and one path, whose files are written again each time."""
    path = directories[0].with_name("skyrl-lora")
    async with _by_aiohttp() as session:
        control, data = PeerCalls(session, front, front.control_key), PeerCalls(session, front, front.requests_key)
        await control.call("GET", "/get_world_size")
        told: list[PeerTurn] = []
        for directory in directories:
            shutil.copytree(directory, path, dirs_exist_ok=True)
            await control.call("POST", "/pause", params={"mode": "keep", "clear_cache": "false"})
            body = {"lora_name": "skyrl-lora", "lora_path": path.as_posix()}
            await control.call("POST", "/skyrl/v1/load_lora_adapter", json=body)
            await control.call("POST", "/reset_prefix_cache", json={"reset_running_requests": False})
            await control.call("POST", "/resume")
            told.append(await _token_turn(data, "skyrl-lora"))
        return control.calls + data.calls, told


async def _token_turn(caller: PeerCalls, model: str) -> PeerTurn:
    sampling = {"max_tokens": TOKENS, "logprobs": 0, "ignore_eos": True}
    body = {"model": model, "token_ids": PROMPT, "sampling_params": sampling}
    headers = {"X-Session-ID": "one"}
    [choice] = (await caller.call("POST", "/inference/v1/generate", json=body, headers=headers))["choices"]
    logprobs = [one["logprob"] for one in choice["logprobs"]["content"]]
    return PeerTurn(choice["token_ids"], logprobs, _spans(choice))


WITH_ADAPTERS: Mapping[str, Play] = {
    "skyrl": skyrl,
    "prime-rl, adapters": prime_rl_adapters,
    "areal, sglang, adapters": _areal(
        "",
        lambda directory: ("/load_lora_adapter", _adapter(directory)),
        lambda caller, _, first: _sglang_turn(caller, lora_path=f"lora-{first.name}"),
        asks_health=False,
    ),
    "areal, vllm, adapters": _areal(
        "areal_",
        lambda directory: ("/v1/load_lora_adapter", _adapter(directory)),
        lambda caller, directory, _: _areal_turn(caller, model=f"lora-{directory.name}"),
        asks_health=False,
    ),
}
"""Peers that offer adapters to the base. By sglang AReaL asks for the first version, too, once there are others."""
