"""A serving host with a real serving model: requests of its own and of clients, and a part of it for a run."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
import torch

from elastic.compose.device_sharing import sharing_policies
from elastic.config import ConfigError, EngineConfig
from elastic.core.types import SamplingParameters, WeightMode
from elastic.engine.base import GenerateRequest
from elastic.engine.model.checkpoint import model_tensors, write_checkpoint
from elastic.engine.model.config import Qwen3Config
from elastic.engine.model.qwen3 import Qwen3
from elastic.protocol import wire
from elastic.testing.recorder import Recorder
from elastic.weights.source import TensorSource
from elastic.worker.serving_executor import ExecutorDevice, ExecutorShare, open_device
from providers.serving_messages import ExecutorSettings, HostSettings
from traces.serving import ServingRequest

POLICY = Qwen3Config(num_hidden_layers=2)
SMALL = {"max_context_tokens": 128, "max_batch": 4, "kv_pages": 40, "page_kib": 64, "length_scale": 1.0}


def make(profiles: Path, lending: dict[str, float] | None = None, **executor: object) -> ExecutorDevice:
    settings = HostSettings.model_validate(
        {"token": "t", "executor": {**SMALL, "profiles": profiles, **executor}, "lending": lending or {}}
    )
    assert settings.executor is not None
    return open_device(settings, settings.executor, sharing_policies(settings.executor, "the test"))


@asynccontextmanager
async def lent(profiles: Path) -> AsyncIterator[tuple[ExecutorDevice, ExecutorShare]]:
    """A device without a load, and a part of it."""
    device = make(profiles)
    async with device.running(iter([])):
        yield device, device.lend()


@pytest.fixture(scope="module")
def profiles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("profiles")


def welcome() -> wire.Welcome:
    engine = EngineConfig.model_validate({"device": "cpu", "max_context_tokens": 128, "max_batch": 4})
    fields = dict.fromkeys(wire.Welcome.__struct_fields__)
    return wire.Welcome(**{**fields, "model": POLICY.to_dict(), "engine": engine.model_dump(mode="json")})


async def until(condition) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110  # the executor is asked, it does not tell
            await asyncio.sleep(0.01)


def client_of(device: ExecutorDevice) -> httpx.AsyncClient:
    """One that has the host's token."""
    transport = httpx.ASGITransport(device.front.app(["host"]))
    return httpx.AsyncClient(transport=transport, base_url="http://host", headers={"authorization": "Bearer t"})


async def test_the_hosts_trace_is_served_and_so_are_its_clients(profiles: Path) -> None:
    device = make(profiles)
    async with device.running(iter([ServingRequest(0.01 * i, 20, 5) for i in range(4)])):
        async with client_of(device) as http:
            answer = await http.post("/v1/completions", json={"prompt": "hello", "max_tokens": 3})
        assert answer.json()["usage"]["completion_tokens"] == 3
        await until(lambda: device.served == 4)
        report = device.report()
        assert (report.active_requests, report.pressed) == (0, False)
        assert 0 <= report.busy_share <= 1
        service = report.service
        assert (service.requests, service.failed, service.ttft_slo_ms) == (4, 0, 500)
        assert 0 < service.tpot_p50_ms <= service.tpot_p99_ms
        assert 0 < service.ttft_p50_ms <= service.ttft_p99_ms
        assert (service.lent_s, service.rollout_s, service.idle_utilisation) == (0, 0, None)


@pytest.mark.alone
async def test_a_request_that_is_not_served_counts_as_failed(profiles: Path) -> None:
    device = make(profiles)
    async with device.running(iter([ServingRequest(0.0, 20, 5), ServingRequest(2.0, 20, 5)])):
        await until(lambda: device.served == 1)
        assert not device.report().pressed
        await asyncio.to_thread(device.executor.close)
        assert device.report().pressed
        await until(lambda: device.report().service.requests == 2)
        assert (device.report().service.failed, device.served) == (1, 1)


async def test_a_run_gets_a_part_of_the_device_and_gives_it_back(profiles: Path) -> None:
    async with lent(profiles) as (device, share):
        engine = await asyncio.to_thread(share.build_engine, welcome())
        assert engine.settings.prefill_chunk_tokens == 512
        recorder = Recorder(engine)
        torch.manual_seed(1)
        weights = model_tensors(Qwen3(POLICY))
        await asyncio.to_thread(engine.load_version, TensorSource(1, weights), WeightMode.FINISH)
        assert share.capacity_turns(engine.statistics().capacity_turns) > 0
        turn = GenerateRequest(
            request_id="t",
            token_ids=[1, 2, 3],
            start=0,
            sampling=SamplingParameters(max_new_tokens=4, noise_seed=1),
        )
        await asyncio.to_thread(recorder.run, turn)
        recorder.check(turn)
        service = device.report().service
        assert 0 < service.rollout_s < service.lent_s
        with pytest.raises(RuntimeError, match="lent to another run"):
            device.lend().build_engine(welcome())
        share.reclaim()
        assert share.hold_back()
        assert share.capacity_turns(4) == 0
        await asyncio.to_thread(engine.close)
        given_back = device.report().service
        assert given_back.lent_s >= service.lent_s
        assert device.report().service.lent_s == given_back.lent_s
        again = await asyncio.to_thread(device.lend().build_engine, welcome())
        await asyncio.to_thread(again.close)


async def test_no_credit_is_announced_while_turns_would_be_declined(profiles: Path) -> None:
    async with lent(profiles) as (device, share):
        assert (share.hold_back(), share.capacity_turns(4)) == (False, 4)
        device.lending = device.lending.model_copy(update={"kv_high_share": 0.0, "kv_low_share": 0.0})
        assert (share.hold_back(), share.capacity_turns(4)) == (True, 0)
        device.lending = device.lending.model_copy(update={"kv_high_share": 0.9, "kv_low_share": 0.5})
        assert (share.hold_back(), share.capacity_turns(4)) == (False, 4)


async def test_an_engine_that_its_worker_did_not_live_to_see_is_taken_back(profiles: Path) -> None:
    """A worker may be cut short while its engine is being set up: that must not keep the device from the next."""
    async with lent(profiles) as (device, share):
        await asyncio.to_thread(share.build_engine, welcome())
        share.end()
        await until(lambda: device.executor.rollout is None)
        early = device.lend()
        early.end()
        with pytest.raises(ValueError, match="taken back"):
            early.build_engine(welcome())
        again = await asyncio.to_thread(device.lend().build_engine, welcome())
        await asyncio.to_thread(again.close)


async def test_rollouts_leave_a_host_whose_serving_needs_its_memory_and_may_return(profiles: Path) -> None:
    device = make(profiles, lending={"kv_high_share": 0.15, "kv_low_share": 0.05})
    async with device.running(iter([ServingRequest(0.2, 90, 30) for _ in range(12)])):
        share = device.lend()
        assert not share.hold_back()
        await until(share.hold_back)
        assert device.report().pressed
        await until(lambda: device.served == 12)
        await until(lambda: not share.hold_back())


async def test_a_lent_host_whose_executor_ends_is_lost(profiles: Path) -> None:
    async with lent(profiles) as (device, share):
        await asyncio.to_thread(device.executor.close)
        with pytest.raises(RuntimeError, match="executor has ended"):
            share.hold_back()


async def test_a_checkpoint_ends_where_its_model_does_and_takes_token_ids(profiles: Path, tmp_path: Path) -> None:
    """Without a tokenizer text would be taken for something else."""
    config = Qwen3Config(num_hidden_layers=2, eos_token_id=tuple(range(32)))
    write_checkpoint(tmp_path / "model", config, model_tensors(Qwen3(config)))
    device = make(profiles, checkpoint=tmp_path / "model", prefill_chunk_tokens=16)
    async with device.running(iter([])), client_of(device) as http:
        refused = await http.post("/v1/completions", json={"prompt": "hello", "max_tokens": 3})
        assert refused.status_code == 400
        assert "send token ids" in refused.json()["error"]["message"]
        answer = (await http.post("/v1/completions", json={"prompt": [1] * 40, "max_tokens": 9})).json()
    assert (answer["choices"][0]["finish_reason"], answer["usage"]["completion_tokens"]) == ("stop", 1)


@pytest.mark.alone
async def test_a_host_that_is_in_use_says_so(profiles: Path) -> None:
    device = make(profiles)
    async with device.running(iter([ServingRequest(0.0, 60, 30) for _ in range(12)])):
        await until(lambda: device.report().kv_used_share > 0)
        assert device.report().active_requests > 0
        await until(lambda: device.served == 12)
        assert 0 < device.report().busy_share <= 1


@pytest.mark.parametrize(
    ("executor", "said"),
    [
        ({"kv_pages": 1}, "the serving model does not fit: 128 tokens of KV"),
        ({"page_kib": 1}, "page_bytes: 1024 hold no block"),
        ({"checkpoint": "/nowhere"}, "/nowhere"),
    ],
)
def test_a_serving_model_that_cannot_be_used_is_said_to_be(
    profiles: Path, executor: dict[str, object], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        make(profiles, **executor)


def test_unknown_keys_are_refused() -> None:
    with pytest.raises(ValueError, match="kv_pagse"):
        ExecutorSettings.model_validate({"kv_pagse": 3})
