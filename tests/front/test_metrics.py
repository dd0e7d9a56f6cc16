"""What a front tells of its run to whoever scrapes it."""

import msgspec

from elastic.front.calls import CallTimes
from elastic.protocol import metrics
from elastic.protocol.front_messages import AskMetrics, EngineFigures, MetricsTold
from elastic.protocol.metrics import Buckets
from tests.front.exposed import exposed
from tests.front.fronted import AGENT, DRIVER, bearer, fronted
from tests.front.test_app import assert_error

ENGINE_METRICS = {
    "gauge": (
        "num_requests_running num_requests_waiting num_requests_waiting_by_reason kv_cache_usage_perc cache_config_info"
    ),
    "counter": (
        "prompt_tokens_total generation_tokens_total request_success_total num_preemptions_total "
        "prefix_cache_queries_total prefix_cache_hits_total prompt_tokens_cached_total admission_rejections_total"
    ),
    "histogram": (
        "time_to_first_token_seconds inter_token_latency_seconds e2e_request_latency_seconds "
        "request_queue_time_seconds request_prefill_time_seconds request_decode_time_seconds "
        "request_inference_time_seconds request_prompt_tokens request_generation_tokens request_params_n "
        "request_params_max_tokens"
    ),
}
"""As vLLM 0.32 has them."""


def engine(name: str, **figures) -> EngineFigures:
    told = EngineFigures(name, histograms=[Buckets.of(family) for family in metrics.HISTOGRAMS], **figures)
    told.histograms[0].note(metrics.FIRST_TOKEN.bounds, 0.3)
    told.histograms[0].note(metrics.FIRST_TOKEN.bounds, 1e9)
    return told


RUN = {"step": 3, "tokens_per_s": 120.5, "queued_turns": 4}
TOLD = MetricsTold(
    0,
    RUN,
    {"spot": {"ready": 2, "usd": 0.25}},
    [engine("spot-1", running=3, waiting=1, finished={"stop": 7, "length": 2}), engine("spot-2", kv_used_share=0.5)],
    {"under_way": 1, "turns": 9, "tokens": 300, "gpu_s": 1.5},
    5,
)


async def test_engines_are_told_as_vllm_tells_them(served):
    served.run.told = TOLD
    answer = await served.client.get("/metrics", headers=bearer(DRIVER))
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    told = exposed(answer.text)
    for kind, names in ENGINE_METRICS.items():
        for name in names.split():
            assert told[f"vllm:{name}"].kind == kind
            for sample in told[f"vllm:{name}"].samples:
                assert sample.labels["model_name"] == "small"
                assert sample.labels["engine"] in ("spot-1", "spot-2", "queue")
    assert told["vllm:num_requests_running"].of(engine="spot-1") == [3]
    assert told["vllm:num_requests_waiting"].of(engine="queue") == [4]
    assert told["vllm:kv_cache_usage_perc"].of(engine="spot-2") == [0.5]
    assert told["vllm:request_success_total"].of(engine="spot-1", finished_reason="length") == [2]
    assert told["vllm:admission_rejections_total"].of() == [5]
    assert told["elastic_run_tokens_per_second"].of(run="run") == [120.5]
    assert told["elastic_provider_workers_ready"].of(provider="spot") == [2]
    assert told["elastic_chat_gpu_seconds_total"].of(run="run") == [1.5]
    first = told["vllm:time_to_first_token_seconds"]
    assert first.of(engine="spot-1", le="0.25") == [0]
    assert first.of(engine="spot-1", le="0.5") == [1]
    assert first.of(engine="spot-1", le="+Inf") == [2]


async def test_series_of_workers_that_ended_leave(served):
    served.run.told = TOLD
    await served.client.get("/metrics", headers=bearer(DRIVER))
    served.run.told = msgspec.structs.replace(TOLD, engines=TOLD.engines[1:])
    text = (await served.client.get("/metrics", headers=bearer(DRIVER))).text
    assert "spot-1" not in text
    assert "spot-2" in text


async def test_metrics_are_for_drivers(served):
    for key, status, code in (("x", 401, "invalid_api_key"), (AGENT, 403, "permission_denied")):
        assert_error(await served.client.get("/metrics", headers=bearer(key)), status, code)
    assert not served.run.of(AskMetrics)


async def test_what_has_no_value_is_not_told(served):
    served.run.told = MetricsTold(0, {}, {}, [])
    told = exposed((await served.client.get("/metrics", headers=bearer(DRIVER))).text)
    assert "elastic_run_mean_reward" not in told
    assert "vllm:num_requests_running" not in told


async def test_a_scrape_waits_for_no_run_that_is_away(tmp_path):
    async with fronted(tmp_path, times=CallTimes(hold_s=0.05)) as served:
        served.run.mute = True
        answer = await served.client.get("/metrics", headers=bearer(DRIVER))
        assert_error(answer, 503, answer.json()["error"]["code"], "nothing came from the run")
