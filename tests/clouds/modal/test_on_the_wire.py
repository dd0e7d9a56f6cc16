"""That what is configured and deployed arrives as Modal's protocol has it. What comes of it there is Modal's."""

from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from elastic.core.types import LeaseId
from elastic.testing.providers import (
    ProviderRecorder,
    eventually,
    lease_request,
    make_context,
    processes_with,
    recorder,
)
from functions.modal import ModalFunctionPool
from providers.base import ProviderContext
from providers.modal import ModalProvider
from tests.clouds.modal.conftest import APP
from tests.clouds.modal.test_provider_conformance import modal_provider
from tests.clouds.modal_server import Bench

__all__ = ["make_context", "recorder"]

pytestmark = [pytest.mark.clouds]

Leased = Callable[..., Any]


@pytest.fixture
async def leased(
    platform: Bench, make_context: Callable[..., ProviderContext], recorder: ProviderRecorder
) -> AsyncIterator[Leased]:
    """Have a provider of these settings grant a lease; gives its run's variant of the class, as it was asked for."""
    providers: list[ModalProvider] = []

    async def leased(**settings: Any) -> Mapping[str, Any]:
        context = make_context()
        providers.append(modal_provider(context, **settings))
        await providers[-1].adopt([], recorder.emit)
        await providers[-1].start(recorder.emit)
        await providers[-1].acquire(lease_request(1))
        await recorder.answered(LeaseId("lease-1"))
        (found,) = [
            one
            for one in platform.app(APP)["variants"]
            if one["of"] == "Rollout.*" and one["parameters"]["run"] == f"{context.tag('modal provider')}/provider"
        ]
        return found["options"]

    yield leased
    for provider in providers:
        await provider.aclose()


async def test_a_rollout_worker_has_its_gpus_cores_memory_place_and_time(platform: Bench, leased: Leased) -> None:
    options = await leased(
        gpu="H100", gpus_per_worker=2, cores=4.0, memory_mb=16384, region="us-east", lease_s=100.2, ask_s=20.0
    )
    resources = options["resources"]
    assert (resources["milliCpu"], resources["memoryMb"]) == (4000, 16384)
    assert (resources["gpuConfig"]["gpuType"], resources["gpuConfig"]["count"]) == ("H100", 2)
    assert options["schedulerPlacement"]["regions"] == ["us-east"]
    assert options["timeoutSecs"] == 121
    (container,) = (one for one in platform.running() if one["gpus"] == 2)
    assert container["usd_per_s"] == pytest.approx(2 * 0.001097 + 4 * 0.0000131 + 16 * 0.00000222)


async def test_a_worker_without_a_gpu_asks_for_none(platform: Bench, leased: Leased) -> None:
    options = await leased()
    assert options["resources"].get("gpuConfig", {}).get("count", 0) == 0
    assert "volumeMounts" not in options


async def test_a_volume_is_mounted_and_its_workers_keep_weights_and_compiled_code_there(
    platform: Bench, leased: Leased, tmp_path: Path
) -> None:
    where = str(tmp_path / "volume")
    options = await leased(volume="elastic-weights", volume_path=where)
    (mount,) = options["volumeMounts"]
    assert mount["mountPath"] == where
    assert mount["volumeId"] == platform.app(APP)["volumes"]["elastic-weights"]
    await eventually(lambda: processes_with(ELASTIC_SITE=where, NUMBA_CACHE_DIR=f"{where}/compiled"))


def test_reward_functions_start_from_a_snapshot_and_workers_do_not(platform: Bench) -> None:
    functions = platform.app(APP)["functions"]
    assert {name: one.get("checkpointingEnabled", False) for name, one in functions.items()} == {
        "function": True,
        "batch": True,
        "Rollout.*": False,
    }
    assert functions["Rollout.*"]["singleUseContainers"]


def test_the_image_has_vllm_and_knows_it_as_an_engine(platform: Bench) -> None:
    """A worker is told its engine as it joins; all that its container needs is to have it."""
    app = platform.app(APP)
    commands = " ".join(command for image in app["images"] for command in image)
    assert "vllm==" in commands
    (entry_points,) = [file for file in app["files"] if file.endswith("entry_points.txt")]
    assert entry_points.startswith("/root/elastic_rl-")


async def test_rewards_have_their_cores_memory_batches_and_bounds(
    platform: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_REWARDS_KEY", "its value")
    settings = {"cores": 0.5, "memory_mb": 1024, "batch": 7, "batch_wait_s": 0.25}
    pool = ModalFunctionPool(
        "tests.functions.samples:environment", concurrency=3, idle_s=4.0, pass_env=["A_REWARDS_KEY"], settings=settings
    )
    try:
        assert (await pool.invoke("key", None, 20.0))["A_REWARDS_KEY"] == "its value"
    finally:
        await pool.aclose()
    options = platform.app(APP)["variants"][-1]["options"]
    assert (options["resources"]["milliCpu"], options["resources"]["memoryMb"]) == (500, 1024)
    assert (options["batchMaxSize"], options["batchLingerMs"]) == (7, "250")
    assert (options["concurrencyLimit"], options["taskIdleTimeoutSecs"]) == (3, 4)
