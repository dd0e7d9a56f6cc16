"""Replays a serving trace against an OpenAI-compatible endpoint and reports latencies as `vllm bench serve` does.

Open loop: every request is sent at its time, however slow the answers to the ones before it are, and its
latency counts from that time on. Token times are those at which the client got them. The server's key comes from the
environment, as for `vllm bench serve`, where no process list shows it.

    OPENAI_API_KEY=… python -m elastic.engine.coserving.load http://127.0.0.1:8077 --model serving --seconds 60
"""

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence
from random import Random

import httpx
import msgspec
import numpy as np

import traces
from elastic.engine.coserving.service import percentile
from elastic.protocol.http_clients import async_client
from traces.errors import TraceError
from traces.serving import ServingRequest, read_serving_trace, scaled, window_at

REQUEST_TIMEOUT_S = 120.0
KEY_VARIABLE = "OPENAI_API_KEY"


class Targets(msgspec.Struct, frozen=True, kw_only=True):
    """A request is good if it meets both (`--goodput` of `vllm bench serve`)."""

    ttft_ms: float
    tpot_ms: float


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One request. Times count from the replay's start; `token_times_s` is empty where it failed."""

    arrival_s: float
    prompt_tokens: int
    token_times_s: list[float]
    error: str = ""

    @property
    def ttft_ms(self) -> float:
        return 1e3 * (self.token_times_s[0] - self.arrival_s)

    @property
    def tpot_ms(self) -> float | None:
        """Time per output token after the first; a request of one token has none."""
        times = self.token_times_s
        return 1e3 * (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None

    def meets(self, targets: Targets) -> bool:
        return not self.error and self.ttft_ms <= targets.ttft_ms and (self.tpot_ms or 0.0) <= targets.tpot_ms


class Latency(msgspec.Struct, frozen=True, kw_only=True):
    mean: float | None
    median: float | None
    p90: float | None
    p95: float | None
    p99: float | None


class ServingReport(msgspec.Struct, frozen=True, kw_only=True):
    """Names are those of `vllm bench serve`; latencies in milliseconds."""

    completed: int
    failed: int
    duration_s: float
    total_input_tokens: int
    total_output_tokens: int
    request_throughput: float
    output_throughput: float
    request_goodput: float | None
    ttft_ms: Latency
    tpot_ms: Latency
    itl_ms: Latency
    e2el_ms: Latency


async def replay(
    base_url: str, model: str, key: str, requests: Sequence[ServingRequest], vocab_size: int, seed: int = 0
) -> list[RequestRecord]:
    """Send every request at its `arrival_s`, with made-up prompts of its length, and wait for all answers."""
    headers = {"authorization": f"Bearer {key}"}
    random = Random(seed)
    prompts = [[random.randrange(vocab_size) for _ in range(request.prompt_tokens)] for request in requests]
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
    timeout = httpx.Timeout(REQUEST_TIMEOUT_S)
    async with async_client(base_url=base_url, headers=headers, limits=limits, timeout=timeout) as client:
        started_s = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            sent = [
                tasks.create_task(_send(client, model, request, prompt, started_s))
                for request, prompt in zip(requests, prompts, strict=True)
            ]
    return [task.result() for task in sent]


def report(records: Sequence[RequestRecord], targets: Targets | None = None) -> ServingReport:
    good = [record for record in records if not record.error]
    ends = [record.token_times_s[-1] for record in good]
    duration_s = max(ends, default=0.0) or 1e-9
    tokens = sum(len(record.token_times_s) for record in good)
    gaps = [1e3 * gap for record in good for gap in np.diff(record.token_times_s).tolist()]
    return ServingReport(
        completed=len(good),
        failed=len(records) - len(good),
        duration_s=duration_s,
        total_input_tokens=sum(record.prompt_tokens for record in good),
        total_output_tokens=tokens,
        request_throughput=len(good) / duration_s,
        output_throughput=tokens / duration_s,
        request_goodput=sum(record.meets(targets) for record in records) / duration_s if targets else None,
        ttft_ms=_latency([record.ttft_ms for record in good]),
        tpot_ms=_latency([tpot for record in good if (tpot := record.tpot_ms) is not None]),
        itl_ms=_latency(gaps),
        e2el_ms=_latency([1e3 * (end - record.arrival_s) for record, end in zip(good, ends, strict=True)]),
    )


def violated_minutes(records: Sequence[RequestRecord], targets: Targets, window_s: float) -> float:
    """How long, in windows of `window_s`, the P99 of requests that arrived then was above a target."""
    windows: dict[int, list[RequestRecord]] = {}
    for record in records:
        windows.setdefault(int(record.arrival_s / window_s), []).append(record)
    return sum(_violated(window, targets) for window in windows.values()) * window_s / 60


def table(result: ServingReport) -> str:
    """The report as `vllm bench serve` prints it."""
    lines = [
        f"{' Serving Benchmark Result ':=^50}",
        _line("Successful requests:", result.completed),
        _line("Failed requests:", result.failed),
        _line("Benchmark duration (s):", result.duration_s),
        _line("Total input tokens:", result.total_input_tokens),
        _line("Total generated tokens:", result.total_output_tokens),
        _line("Request throughput (req/s):", result.request_throughput),
    ]
    if result.request_goodput is not None:
        lines.append(_line("Request goodput (req/s):", result.request_goodput))
    lines.append(_line("Output token throughput (tok/s):", result.output_throughput))
    for short, name, latency in (
        ("TTFT", "Time to First Token", result.ttft_ms),
        ("TPOT", "Time per Output Token (excl. 1st token)", result.tpot_ms),
        ("ITL", "Inter-token Latency", result.itl_ms),
        ("E2EL", "End-to-end Latency", result.e2el_ms),
    ):
        lines.append(f"{name:-^50}")
        values = msgspec.structs.asdict(latency)
        lines += [_line(f"{kind.capitalize()} {short} (ms):", value) for kind, value in values.items()]
    return "\n".join([*lines, "=" * 50])


async def _send(
    client: httpx.AsyncClient, model: str, request: ServingRequest, prompt: list[int], started_s: float
) -> RequestRecord:
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": request.output_tokens,
        "stream": True,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    times: list[float] = []
    error = ""
    await asyncio.sleep(started_s + request.arrival_s - time.monotonic())
    try:
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            if answer.is_success:
                async for line in answer.aiter_lines():
                    times += [time.monotonic() - started_s] * _tokens_in(line)
            else:
                error = f"{answer.status_code}: {(await answer.aread()).decode(errors='replace')}"
    except httpx.HTTPError as failure:
        error = repr(failure)
    if not error and len(times) != request.output_tokens:
        error = f"{len(times)} tokens of {request.output_tokens}"
    return RequestRecord(
        arrival_s=request.arrival_s,
        prompt_tokens=request.prompt_tokens,
        token_times_s=[] if error else times,
        error=error,
    )


def _tokens_in(line: str) -> int:
    if not line.startswith("data: {"):
        return 0
    return sum(len(choice["token_ids"]) for choice in json.loads(line[6:])["choices"])


def _violated(records: Sequence[RequestRecord], targets: Targets) -> bool:
    good = [record for record in records if not record.error]
    ttft = percentile([record.ttft_ms for record in good], 99)
    tpot = percentile([tpot for record in good if (tpot := record.tpot_ms) is not None], 99)
    return len(good) < len(records) or (ttft or 0.0) > targets.ttft_ms or (tpot or 0.0) > targets.tpot_ms


def _latency(values: Sequence[float]) -> Latency:
    mean = float(np.mean(values)) if values else None
    return Latency(mean=mean, **{name: percentile(values, percent) for name, percent in _PERCENTILES.items()})


_PERCENTILES = {"median": 50, "p90": 90, "p95": 95, "p99": 99}


def _line(label: str, value: float | None) -> str:
    shown = "–" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{label:<40} {shown:>9}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m elastic.engine.coserving.load",
        description="Replay a serving trace against an OpenAI-compatible server and report as `vllm bench serve` does.",
        epilog=f"The server's key, if it asks for one, is read from the environment variable {KEY_VARIABLE}.",
    )
    parser.add_argument("url", help="the server's, without /v1")
    parser.add_argument("--model", required=True, help="its name there")
    parser.add_argument("--trace", default="azure-conversation", help="a shipped trace's name, or a path")
    parser.add_argument("--start", type=float, default=0.0, help="second of the trace to begin at")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long requests are sent")
    parser.add_argument("--speed", type=float, default=1.0, help="seconds of the trace in a second")
    parser.add_argument("--length", type=float, default=1.0, help="by which prompts and answers are scaled")
    parser.add_argument("--most-prompt", type=int, default=8192, help="tokens that longer prompts are cut to")
    parser.add_argument("--most-output", type=int, default=1024, help="and longer answers")
    parser.add_argument("--vocab-size", type=int, default=256, help="prompts are of random ids below it")
    parser.add_argument("--goodput", type=float, nargs=2, metavar=("TTFT_MS", "TPOT_MS"), help="a good request's most")
    parsed = parser.parse_args(arguments)
    if min(parsed.seconds, parsed.speed, parsed.length, parsed.vocab_size) <= 0:
        parser.error("--seconds, --speed, --length and --vocab-size must be positive")
    try:
        trace = read_serving_trace(traces.find(parsed.trace))
    except TraceError as error:
        parser.error(str(error))
    requests = scaled(
        window_at(trace, parsed.start, parsed.seconds * parsed.speed),
        speed=parsed.speed,
        length=parsed.length,
        most_prompt=parsed.most_prompt,
        most_output=parsed.most_output,
    )
    if not requests:
        parser.error(f"--start: no request of the trace comes within {parsed.seconds:g} s of {parsed.start:g}")
    targets = Targets(ttft_ms=parsed.goodput[0], tpot_ms=parsed.goodput[1]) if parsed.goodput else None
    key = os.environ.get(KEY_VARIABLE, "none")
    records = asyncio.run(replay(parsed.url, parsed.model, key, requests, parsed.vocab_size))
    print(table(report(records, targets)))
    first = next((record.error for record in records if record.error), None)
    if first is not None:
        print(f"the first failure: {first}", file=sys.stderr)


if __name__ == "__main__":
    main()
