"""Metrics in Prometheus' text format: the one table of what they are called, and how they are written.

A server tells of its runs, a front of its own. Labels have few values: never a trajectory or a turn. What is known of
engines stands a second time under vLLM's names, for boards and controllers that look for these.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
GAUGE, COUNTER, HISTOGRAM = "gauge", "counter", "histogram"


class Family(NamedTuple):
    """Samples of one name: how they are to be read, and what they are."""

    name: str
    words: str
    kind: str = GAUGE


class BucketFamily(NamedTuple):
    """A histogram: what was observed is counted by the first of `bounds` that is no less."""

    name: str
    words: str
    bounds: tuple[float, ...]


RUN: Mapping[str, Family] = {
    "step": Family("elastic_run_step", "training step that the run is at"),
    "last_success_rate": Family(
        "elastic_run_success_ratio", "share of the last step's trajectories with a reward above 0"
    ),
    "last_mean_reward": Family("elastic_run_mean_reward", "mean reward of the last step's trajectories"),
    "tokens_per_s": Family("elastic_run_tokens_per_second", "accepted tokens a second"),
    "usd": Family("elastic_run_cost_dollars", "what the run has cost"),
    "queued_turns": Family("elastic_run_queued_turns", "turns that wait for a worker"),
    "trajectories_running": Family("elastic_run_trajectories_running", "trajectories that are under way"),
}
"""The metrics of a run, by the field of its status."""
PROVIDER: Mapping[str, Family] = {
    "ready": Family("elastic_provider_workers_ready", "workers that take turns"),
    "booting": Family("elastic_provider_workers_booting", "workers on their way"),
    "usd": Family("elastic_provider_cost_dollars", "what its leases have cost"),
    "usd_per_hour": Family("elastic_provider_dollars_per_hour", "price of what is held now"),
}
"""The metrics of a run's provider, by the field of its status."""
CHATS: Mapping[str, Family] = {
    "under_way": Family("elastic_chats_under_way", "chats that are answered, or wait for spare credit"),
    "turns": Family("elastic_chat_turns_total", "chats that have ended", COUNTER),
    "tokens": Family("elastic_chat_tokens_total", "their tokens, of which none is trained", COUNTER),
    "gpu_s": Family("elastic_chat_gpu_seconds_total", "time of GPUs that they took", COUNTER),
}
"""The metrics of a run's chats."""

RUNNING = Family("vllm:num_requests_running", "turns in execution")
WAITING = Family("vllm:num_requests_waiting", "turns that wait for a worker, or on one for a place")
WAITING_BY_REASON = Family("vllm:num_requests_waiting_by_reason", "turns that wait, by reason")
KV_USED = Family("vllm:kv_cache_usage_perc", "share of the KV cache that is in use, from 0 to 1")
CACHE_CONFIG = Family("vllm:cache_config_info", "the KV cache of each engine")
PROMPT_TOKENS = Family("vllm:prompt_tokens_total", "tokens of prompts, cached ones included", COUNTER)
GENERATION_TOKENS = Family("vllm:generation_tokens_total", "tokens that were generated", COUNTER)
CACHE_QUERIES = Family(
    "vllm:prefix_cache_queries_total", "tokens of prompts that were looked for in the cache", COUNTER
)
CACHE_HITS = Family("vllm:prefix_cache_hits_total", "tokens of prompts that were found in the cache", COUNTER)
PROMPT_TOKENS_CACHED = Family("vllm:prompt_tokens_cached_total", "tokens of prompts that were not prefilled", COUNTER)
PREEMPTIONS = Family("vllm:num_preemptions_total", "turns that went on elsewhere", COUNTER)
SUCCESSES = Family("vllm:request_success_total", "turns that were finished", COUNTER)
REJECTIONS = Family("vllm:admission_rejections_total", "calls that were refused since too many are open", COUNTER)

_LATENCY_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_FIRST_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
    *(160.0, 640.0, 2560.0),
)
_BETWEEN_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_TOKENS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))
FIRST_TOKEN = BucketFamily("vllm:time_to_first_token_seconds", "time to a turn's first token", _FIRST_S)
BETWEEN_TOKENS = BucketFamily(
    "vllm:inter_token_latency_seconds", "time between a turn's tokens, of each turn the mean", _BETWEEN_S
)
END_TO_END = BucketFamily("vllm:e2e_request_latency_seconds", "time from a turn's request to its end", _LATENCY_S)
QUEUE = BucketFamily("vllm:request_queue_time_seconds", "time for which a turn waited for a worker", _LATENCY_S)
PREFILL = BucketFamily("vllm:request_prefill_time_seconds", "time from a turn's worker to its first token", _LATENCY_S)
DECODE = BucketFamily("vllm:request_decode_time_seconds", "time from a turn's first token to its last", _LATENCY_S)
INFERENCE = BucketFamily("vllm:request_inference_time_seconds", "time from a turn's worker to its end", _LATENCY_S)
TURN_PROMPT = BucketFamily("vllm:request_prompt_tokens", "tokens of a turn's prompt", _TOKENS)
TURN_TOKENS = BucketFamily("vllm:request_generation_tokens", "tokens of a turn", _TOKENS)
CHOICES = BucketFamily("vllm:request_params_n", "choices of a request: each is a turn", (1.0, 2.0, 5.0, 10.0, 20.0))
TURN_LIMIT = BucketFamily("vllm:request_params_max_tokens", "most tokens that a turn may have", _TOKENS)
HISTOGRAMS: tuple[BucketFamily, ...] = (
    *(FIRST_TOKEN, BETWEEN_TOKENS, END_TO_END, QUEUE, PREFILL, DECODE, INFERENCE),
    *(TURN_PROMPT, TURN_TOKENS, CHOICES, TURN_LIMIT),
)
"""The metrics of an engine, in the order in which a run sends them to its fronts."""


class Buckets(msgspec.Struct, array_like=True, gc=False):
    """What was observed of a histogram: `counts` by bucket, the one without a bound last, and the `sum` of all."""

    counts: list[int]
    sum: float = 0.0

    @classmethod
    def of(cls, family: BucketFamily) -> "Buckets":
        return cls([0] * (len(family.bounds) + 1))

    def note(self, bounds: Sequence[float], value: float, times: int = 1) -> None:
        self.counts[bisect_left(bounds, value)] += times
        self.sum += value * times


def family(told: Family, values: Iterable[tuple[str, float | None]]) -> Iterator[str]:
    """The lines of what has a value, each with its labels; none, if nothing has."""
    lines = [f"{told.name}{{{labels}}} {value:.15g}" for labels, value in values if value is not None]
    if lines:
        yield from _head(told.name, told.words, told.kind)
        yield from lines


def histogram(told: BucketFamily, values: Iterable[tuple[str, Buckets]]) -> Iterator[str]:
    """The lines of a histogram for each set of labels."""
    found = list(values)
    if not found:
        return
    yield from _head(told.name, told.words, HISTOGRAM)
    bounds = (*(f"{bound:g}" for bound in told.bounds), "+Inf")
    for labels, buckets in found:
        total = 0
        for bound, count in zip(bounds, buckets.counts, strict=True):
            total += count
            yield f'{told.name}_bucket{{{labels},le="{bound}"}} {total}'
        yield f"{told.name}_sum{{{labels}}} {buckets.sum:.15g}"
        yield f"{told.name}_count{{{labels}}} {total}"


def labelled(**labels: str) -> str:
    """Labels as they stand in a line."""
    return ",".join(f'{name}="{escaped(value)}"' for name, value in labels.items())


def escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _head(name: str, words: str, kind: str) -> Iterator[str]:
    yield f"# HELP {name} {words}"
    yield f"# TYPE {name} {kind}"
