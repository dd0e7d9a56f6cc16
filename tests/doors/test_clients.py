"""Peers' own clients, as they were released, against the doors: `make test-clients`."""

import asyncio
import importlib
import importlib.util
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import aiohttp
import pytest

from tests.doors.memory_run import LOGPROB_OF, offered
from tests.doors.served import CONTROL, REQUESTS, THEIRS, ServedDoors, served_doors

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]
"""What clients are warned of is their own matter."""

UPDATES = 3


@pytest.fixture
def skyrl_client() -> Any:
    """The module of SkyRL's client, without the packages around it: those ask for more than the client needs."""
    spec = importlib.util.find_spec("skyrl")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("skyrl is not installed")
    place = Path(spec.submodule_search_locations[0])
    for name in ("backends", "backends.skyrl_train", "backends.skyrl_train.inference_servers"):
        package = sys.modules.setdefault(f"skyrl.{name}", ModuleType(f"skyrl.{name}"))
        package.__path__ = [str(place.joinpath(*name.split(".")))]
    return importlib.import_module("skyrl.backends.skyrl_train.inference_servers.remote_inference_client")


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[ServedDoors]:
    async with served_doors(tmp_path) as under_test:
        yield under_test


async def test_skyrls_client_generates_and_syncs_an_adapter(served: ServedDoors, skyrl_client: Any) -> None:
    client = skyrl_client.RemoteInferenceClient(
        proxy_url=served.with_key(REQUESTS),
        server_urls=[served.with_key(CONTROL)],
        data_parallel_size=1,
        model_name="policy",
        uses_lora_weight_sync=True,
    )
    asked = {
        "prompt_token_ids": [[1, 2], [1, 2, 3]],
        "sampling_params": {"max_tokens": 3, "logprobs": 0},
        "session_ids": ["a", "b"],
    }
    try:
        assert await client.get_world_size() == (1, 1)
        for update in range(1, UPDATES + 1):
            offered(served.root, "lora", update)
            await client.pause_generation()
            await client.load_lora_adapter("skyrl-lora", f"{THEIRS}/lora")
            await client.reset_prefix_cache()
            await client.resume_generation()
            answer = await client.generate(asked, model="skyrl-lora")
            assert answer["response_ids"] == [[2, 3, 4], [3, 4, 5]]
            assert answer["response_logprobs"] == [
                [LOGPROB_OF * token for token in ids] for ids in ([2, 3, 4], [3, 4, 5])
            ]
            assert answer["stop_reasons"] == ["length", "length"]
            assert answer["responses"] == ["2 3 4", "3 4 5"]
        await client.finish_session("a")
        with pytest.raises(aiohttp.ClientResponseError, match="nobody"):
            await client.generate(asked, model="nobody")
        with pytest.raises(aiohttp.ClientResponseError, match="no weights are taken by NCCL"):
            await client.start_weight_update()
    finally:
        await client.teardown()
    assert [tensors["weight"][0, 0].item() for tensors in served.run.taken] == [1, 2, 3]
    assert {request.session for request in served.run.requests} == {"a", "b"}


async def test_slimes_control_by_requests(tmp_path: Path) -> None:
    """The calls of its `SGLangEngine`, which has no release without Ray and SGLang."""
    requests: Any = importlib.import_module("requests")

    def play(url: str) -> None:
        def post(path: str, body: dict[str, Any]) -> Any:
            answer = requests.post(f"{url}/{path}", json=body, timeout=30)
            answer.raise_for_status()
            return answer

        info = requests.get(f"{url}/server_info", timeout=30).json()
        assert info["enable_memory_saver"] is False
        post("workers", {"url": url, "worker_type": "regular"})
        for update in range(1, UPDATES + 1):
            post("pause_generation", {})
            assert requests.get(f"{url}/flush_cache", timeout=30).status_code == 200
            body = {"model_path": f"{THEIRS}/weight_v{update:06d}", "weight_version": str(update)}
            assert post("update_weights_from_disk", body).json()["success"]
            assert requests.get(f"{url}/get_weight_version", timeout=30).json()["weight_version"] == str(update)
            post("continue_generation", {})
        refused = requests.post(f"{url}/pull_weights", json={"target_version": 4}, timeout=30)
        assert "--update-weight-local-checkpoint-dir" in refused.json()["message"]

    async with served_doors(tmp_path, plain=["127.0.0.1"]) as served:
        for update in range(1, UPDATES + 1):
            offered(served.root, f"weight_v{update:06d}", update)
        await asyncio.to_thread(play, served.url)
    assert [tensors["weight"][0, 0].item() for tensors in served.run.taken] == [1, 2, 3]


class NumberRenderer:
    """Of a model whose tokens say their numbers."""

    supports_tools = False

    def get_stop_token_ids(self) -> list[int]:
        return [900]

    def parse_response(self, ids: list[int], **_: Any) -> Any:
        return SimpleNamespace(
            content=" ".join(map(str, ids)), reasoning_content=None, tool_calls=[], reasoning_complete=True
        )


async def test_renderers_client_generates(served: ServedDoors) -> None:
    """What prime-rl and verifiers sample with: it knows the context's length of /v1/models."""
    asked: Any = importlib.import_module("renderers.client")
    openai: Any = importlib.import_module("openai")
    async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key=REQUESTS, max_retries=0) as client:
        answer = await asked.generate(
            client=client,
            renderer=NumberRenderer(),
            messages=[],
            model="policy",
            prompt_ids=[1, 2, 3],
            sampling_params={"max_tokens": 4},
            cache_salt="1",
            extra_headers={"X-Session-ID": "trace"},
        )
        assert answer["completion_ids"] == [3, 4, 5, 6]
        assert answer["completion_logprobs"] == [LOGPROB_OF * token for token in (3, 4, 5, 6)]
        with pytest.raises(asked.OverlongPromptError):
            await asked.generate(
                client=client,
                renderer=NumberRenderer(),
                messages=[],
                model="policy",
                prompt_ids=[1] * 300,
                sampling_params={"max_tokens": 4},
            )
    assert [(request.session, request.stop_token_ids) for request in served.run.requests] == [("trace", (900,))]
