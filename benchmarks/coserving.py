"""Rollouts on a live serving device: what they harvest, and what that costs serving's users.

A serving and a rollout model of different shapes, with random weights, share the device of one co-serving executor,
whose thread is bound to core 0; its OpenAI-compatible front, the rollout load and, in a process of its own, the
load generator are on core 1. Serving's load is the Azure conversation and code traces together (2023), lengths
scaled to the host, arrivals so that serving alone keeps the device busy for a fifth of the mean window (density 1);
the pool is so large that serving alone peaks at 60 % of it in the three windows. SLOs are 1.6 × the P99 of serving
alone, as ROSE's are.

Rollouts are a closed loop of multi-turn trajectories with growing prefixes; turns that are given back are sent
again with what was accepted, since here there is no other worker to take them. How many trajectories a device gets
is capped as in ROSE's Appendix A: with twice as many, the memory that a cut leaves them holds half a batch.

A window's harvest is the rollout tokens per second of policy `elastic` over those of the device alone, measured
just before, divided by the share of time that serving alone leaves idle; `harvest_share` is that of the worst window.
It is the product of two: `time`, the rollouts' part of that idle time, and `speed`, tokens per second of their own
time over what it is alone: below 1 where memory or slack allow smaller batches only, and where turns are computed
again; above it where turns that wait for serving make fuller batches. `time` is bounded by 1, but for serving's
batches, which rollouts make fuller and so quicker; of a device of their own, rollouts use `time_alone`: the rest are
the executor's decisions and environments that all rest at once.

`--device cuda` shares a GPU between models of Qwen3's shapes with random weights, for the same requests; this mode has
never been run.

The full mode takes 2.8 hours; `--window-s 15` has all of it in some 30 minutes.
"""

import argparse
import asyncio
import contextlib
import gc
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import numpy as np
from _common import Arguments, emit
from _shapes import SHAPES

from elastic.compose.processes import run_loop
from elastic.engine.coserving.load import RequestRecord, Targets, replay, report, violated_minutes
from elastic.engine.coserving.service import percentile
from elastic.weights.source import TensorSource
from policies.admission import ExclusiveAdmission, NoAdmission, Slo, SloAdmission
from policies.kvmemory import FineGrainedMemory, PreemptiveMemory, StaticPartition
from traces import data_path
from traces.serving import ServingRequest, read_serving_trace
from traces.windows import merged, scaled, typical_windows, window_at

MS = 1_000_000
NS_PER_S = 1_000_000_000
EXECUTOR_CORE, OTHER_CORE = 0, 1
CORES = os.sched_getaffinity(0)
MODEL = "serving"
KEY = "benchmark"
"""The front asks for one."""
SLO_FACTOR = 1.6
BUSY_SHARE, BUSY_TOLERANCE = 0.2, 0.02
PEAK_SHARE = 0.6
PAGE_BYTES = {"cpu": 32 * 1024, "cuda": 2 << 20}
"""Of which a page is a multiple, as large as both models' blocks need."""
MOST_PROMPT, MOST_OUTPUT = 208, 40
LENGTH_SCALE = 1 / 16
CONTEXT = 256
ROOMY_PAGES, LEAST_PAGES = 1024, 2 * CONTEXT // 16
"""For serving's peak to be seen; and so many that both models have room for a whole sequence."""
CHUNK_TOKENS = 512
LEASE_S = 0.5
"""ROSE's 10 s, scaled as the environment's answers below are."""
FRONT_MARGIN = 0.9
"""The part of a target that the executor may use; HTTP and the client's own delay need the rest."""
PACING = {"prefill_tokens_per_s": 6000.0, "decode_step_s": {1: 0.004, 16: 0.005, 32: 0.0065}}
"""The device of `--paced`: prefill and decode stand to each other as on a GPU, for lengths that are scaled down by
`LENGTH_SCALE`, and both take longer than they do here. What else runs on the host then matters less."""
LONGEST_SHARE = 0.75
TRAJECTORIES = 8
TURNS, TURN_TOKENS, OBSERVED_TOKENS = 6, 16, 16
THINK_S = 0.02
RETRY_S = 0.1
RELOADS = 3
STEPS_PER_WINDOW, SHORTEST_STEP_S = 4, 1.5
"""How often the rollout model gets new weights, beside serving and alone alike."""
SETTLE_S = 0.3
VIOLATION_WINDOW_S = 5.0
POLICIES = (
    "serving_alone",
    "elastic",
    "static_partition",
    "no_prefix_cache",
    "no_admission",
    "ttft_only",
    "tpot_only",
    "reload",
)
COMPARED = POLICIES[:2]
"""At every density; the others are baselines."""


@dataclass(frozen=True)
class Plan:
    window_s: float
    calibrations: int
    alone_s: float
    densities: tuple[float, ...]
    windows: tuple[str, ...]
    pool_operations: int
    extras: bool
    baselines_at: tuple[float, ...] | None = None
    """Densities at which the baselines run; None: at all."""
    paced: bool = False
    device: str = "cpu"
    serving_model: str = "tiny-serving"
    rollout_model: str = "tiny-rollouts"

    def policies(self, density: float) -> tuple[str, ...]:
        return POLICIES if self.baselines_at is None or density in self.baselines_at else COMPARED


QUICK = Plan(2.0, 3, 1.2, (1.0,), ("mean",), 60_000, False)
FULL = Plan(120.0, 4, 30.0, (1.0, 1.5, 2.0), ("mean", "burstiest", "median"), 1_000_000, True)


# The load generator's process.


def client() -> None:
    """One replay for each line of standard input; its records are a line of standard output."""
    for line in sys.stdin:
        job = json.loads(line)
        requests = [ServingRequest(*request) for request in job["requests"]]
        records = run_loop(replay(job["url"], MODEL, KEY, requests, job["vocab_size"]))
        print(msgspec.json.encode(records).decode(), flush=True)


class LoadGenerator:
    """The process of `client`, from the outside."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--client"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, url: str, requests: Sequence[ServingRequest], vocab_size: int) -> list[RequestRecord]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        job = {"url": url, "vocab_size": vocab_size, "requests": [msgspec.structs.astuple(r) for r in requests]}
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        return msgspec.json.decode(self._process.stdout.readline(), type=list[RequestRecord])

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()


# Rollouts.


class Rollouts:
    """Trajectories in a closed loop on a rollout engine, which gets a new version of its weights at every step."""

    def __init__(self, engine: Any, weights: Any, vocab_size: int, step_s: float) -> None:
        self.ready = asyncio.Event()
        """The device has the first version, and knows what it costs."""
        self._engine = engine
        self._weights = weights
        self._vocab_size = vocab_size
        self._step_s = step_s
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[str, tuple[list[int], asyncio.Future[str]]] = {}
        self.tokens = 0
        self.given_back = 0

    async def run(self) -> None:
        self._engine.start(self._sink)
        await asyncio.to_thread(self._load, 1)
        self.ready.set()
        async with asyncio.TaskGroup() as tasks:
            for number in range(TRAJECTORIES):
                tasks.create_task(self._trajectories(number))
            tasks.create_task(self._steps())

    async def _steps(self) -> None:
        version = 1
        while True:
            await asyncio.sleep(self._step_s)
            version += 1
            await asyncio.to_thread(self._load, version)

    def _load(self, version: int) -> None:
        from elastic.core.types import WeightMode

        self._engine.load_version(TensorSource(version, self._weights), WeightMode.FINISH)

    async def _trajectories(self, number: int) -> None:
        random = Random(number)
        for episode in range(1_000_000):
            context = [random.randrange(self._vocab_size) for _ in range(32)]
            for turn in range(TURNS):
                context += await self._turn(f"{number}.{episode}.{turn}", context, random.getrandbits(63))
                context += [random.randrange(self._vocab_size) for _ in range(OBSERVED_TOKENS)]
                await asyncio.sleep(random.expovariate(1 / THINK_S))

    async def _turn(self, name: str, context: list[int], seed: int) -> list[int]:
        from elastic.core.types import SamplingParameters
        from elastic.engine.base import GenerateRequest

        accepted: list[int] = []
        attempt = 0
        while True:
            attempt += 1
            done: asyncio.Future[str] = self._loop.create_future()
            self._waiting[name] = (accepted, done)
            request = GenerateRequest(
                request_id=name,
                token_ids=context + accepted,
                start=len(accepted),
                sampling=SamplingParameters(
                    max_new_tokens=TURN_TOKENS, stop_token_ids=(), temperature=1.0, noise_seed=seed
                ),
                recompute=attempt > 1,
            )
            self._engine.submit([request])
            if await done in ("stop", "length"):
                return accepted
            self.given_back += 1
            await asyncio.sleep(RETRY_S)

    def _sink(self, chunks: Sequence[Any]) -> None:
        self._loop.call_soon_threadsafe(self._deliver, chunks)

    def _deliver(self, chunks: Sequence[Any]) -> None:
        for chunk in chunks:
            accepted, done = self._waiting[chunk.request_id]
            if chunk.token_ids and chunk.start != len(accepted):
                raise AssertionError(f"{chunk.request_id}: token {chunk.start} after {len(accepted)}")
            accepted.extend(chunk.token_ids)
            self.tokens += len(chunk.token_ids)
            if chunk.finish is not None and not done.done():
                done.set_result(str(chunk.finish))


# The device.


@dataclass
class Outcome:
    """One policy on one load."""

    records: list[RequestRecord]
    wall_s: float
    serving_busy_s: float
    rollout_busy_s: float
    rollout_tokens: int
    given_back: int
    statistics: Any

    @property
    def serving_busy_share(self) -> float:
        return self.serving_busy_s / self.wall_s

    @property
    def rollout_busy_share(self) -> float:
        return self.rollout_busy_s / self.wall_s

    @property
    def rollout_rate(self) -> float:
        """Tokens per second."""
        return self.rollout_tokens / self.wall_s


@dataclass
class Setting:
    """What decides how the device is shared."""

    admission: Any = field(default_factory=NoAdmission)
    memory: Any = field(default_factory=PreemptiveMemory)
    swapping: Callable[[], Any] | None = None
    rollouts: bool = True
    serving: bool = True


SERVING_ALONE = Setting(rollouts=False)
ROLLOUTS_ALONE = Setting(memory=PreemptiveMemory(headroom_share=0, lease_ns=int(LEASE_S * NS_PER_S)), serving=False)


class Bench:
    def __init__(self, profiles: Path, generator: LoadGenerator, plan: Plan) -> None:
        import torch

        from elastic.config import EngineConfig
        from elastic.engine.coserving.spec import ModelSpec
        from elastic.engine.kv.layout import common_page_bytes
        from elastic.engine.torch.runner import dtype_on
        from elastic.model.checkpoint import model_tensors
        from elastic.model.config import Qwen3Config
        from elastic.model.qwen3 import Qwen3

        torch.set_num_threads(1)
        self._profiles = profiles
        self._generator = generator
        self._device_name = plan.device
        self._step_s = max(SHORTEST_STEP_S, plan.window_s / STEPS_PER_WINDOW)
        settings = EngineConfig.model_validate(
            {
                "device": plan.device,
                "max_context_tokens": CONTEXT,
                "prefill_chunk_tokens": CONTEXT,
                "max_batch": 32,
                "pacing": PACING if plan.paced else None,
            }
        )
        dtype = dtype_on(torch.device(plan.device))
        self.serving = ModelSpec(Qwen3Config(**SHAPES[plan.serving_model]), settings, dtype)
        self.rollout = ModelSpec(
            Qwen3Config(**SHAPES[plan.rollout_model]),
            settings.model_copy(update={"prefill_chunk_tokens": CHUNK_TOKENS, "max_batch": TRAJECTORIES}),
            dtype,
        )
        unit = PAGE_BYTES[plan.device]
        roomy_bytes = 64 * unit
        block_bytes = max(spec.layout(roomy_bytes).block_bytes for spec in (self.serving, self.rollout))
        self._page_bytes = common_page_bytes(block_bytes, unit)

        def weights(config: Qwen3Config) -> dict[str, Any]:
            torch.manual_seed(0)
            with torch.device(plan.device):  # billions of random numbers take minutes on a core
                model = Qwen3(config)
            return {name: tensor.bfloat16().cpu() for name, tensor in model_tensors(model).items()}

        self._serving_weights, self._rollout_weights = weights(self.serving.config), weights(self.rollout.config)
        self.reload_ns = self._measure_reload()

    def _measure_reload(self) -> int:
        """What it takes to bring the rollout model from disk onto the device: the median of several times."""
        import torch

        from elastic.engine.torch.runner import Runner
        from elastic.model.checkpoint import read_tensors, write_checkpoint

        config, device, times_ns = self.rollout.config, torch.device(self._device_name), []
        with tempfile.TemporaryDirectory() as directory:
            write_checkpoint(Path(directory), config, self._rollout_weights)
            for _ in range(RELOADS):
                begun_ns = time.perf_counter_ns()
                tensors = {name: tensor.bfloat16() for name, tensor in read_tensors(Path(directory), config).items()}
                with torch.inference_mode():
                    runner = Runner(config, device, CONTEXT, CONTEXT // 16, 16)
                    runner.load(runner.verify(tensors))
                if device.type == "cuda":
                    torch.cuda.synchronize()
                times_ns.append(time.perf_counter_ns() - begun_ns)
        return int(np.median(times_ns))

    def device(self, plan: Plan) -> dict[str, Any]:
        """What the figures were measured on."""
        import torch

        from elastic.engine.coserving.profiler import device_name
        from elastic.engine.kv.backends import open_backend

        backend = open_backend(1, self._page_bytes, plan.device)
        backend.close()
        return {
            "name": device_name(torch.device(plan.device), self.serving.settings),
            "paced": plan.paced,
            "kv_pages_by": type(backend).__name__,
            "page_bytes": self._page_bytes,
            "serving_model": plan.serving_model,
            "rollout_model": plan.rollout_model,
        }

    async def run(self, setting: Setting, requests: Sequence[ServingRequest], pages: int, wall_s: float) -> Outcome:
        """Replay `requests` while rollouts run, if they do."""
        gc.collect()
        gc.freeze()
        async with self._device(setting, pages) as (executor, url):
            rollouts: Rollouts | None = None
            rolling: asyncio.Task[None] | None = None
            if setting.rollouts:
                engine = executor.attach(self.rollout)
                rollouts = Rollouts(engine, self._rollout_weights, self.rollout.config.vocab_size, self._step_s)
                rolling = asyncio.create_task(rollouts.run())
                ready = asyncio.create_task(rollouts.ready.wait())
                await asyncio.wait({rolling, ready}, return_when=asyncio.FIRST_COMPLETED)
                if rolling.done():
                    rolling.result()
                await asyncio.sleep(SETTLE_S)
            before, tokens = executor.statistics(), rollouts.tokens if rollouts else 0
            started_s = time.monotonic()
            records: list[RequestRecord] = []
            if setting.serving:
                vocab_size = self.serving.config.vocab_size
                records = await asyncio.to_thread(self._generator.run, url, requests, vocab_size)
            await asyncio.sleep(max(0.0, started_s + wall_s - time.monotonic()))
            elapsed_s = time.monotonic() - started_s
            after = executor.statistics()
            outcome = Outcome(
                records=records,
                wall_s=elapsed_s,
                serving_busy_s=(after.usage.serving_ns - before.usage.serving_ns) / NS_PER_S,
                rollout_busy_s=(after.usage.rollout_ns - before.usage.rollout_ns) / NS_PER_S,
                rollout_tokens=(rollouts.tokens if rollouts else 0) - tokens,
                given_back=rollouts.given_back if rollouts else 0,
                statistics=after,
            )
            if rolling is not None:
                failed = rolling.done()
                rolling.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await rolling
                assert not failed
        return outcome

    @contextlib.asynccontextmanager
    async def _device(self, setting: Setting, pages: int) -> AsyncIterator[tuple[Any, str]]:
        from elastic.engine.coserving.executor import CoServing
        from elastic.engine.coserving.front import ModelCard, ServingFront
        from elastic.engine.coserving.memory import SPARE_PAGES
        from elastic.engine.kv.backends import open_backend
        from elastic.http_server import serving

        executor = CoServing(
            self.serving,
            open_backend(pages + SPARE_PAGES, self._page_bytes, self._device_name),
            setting.admission,
            setting.memory,
            profiles=self._profiles,
            cpu=EXECUTOR_CORE if self._device_name == "cpu" and EXECUTOR_CORE in CORES else None,
            swapping=setting.swapping() if setting.swapping else None,
        )
        card = ModelCard.model_validate(
            {"name": MODEL, "vocab_size": self.serving.config.vocab_size, "max_context_tokens": CONTEXT}
        )
        front = ServingFront(card, [KEY])
        listener = socket.create_server(("127.0.0.1", 0))
        async with serving(front.app(), listener) as url:
            try:
                await asyncio.to_thread(executor.start, front.sink, self._serving_weights)
                front.connect(executor.serving, asyncio.get_running_loop())
                yield executor, url
            finally:
                await asyncio.to_thread(executor.close)


# The measurement.


@dataclass(frozen=True)
class Limits:
    """The targets in force, and what serving alone had."""

    targets: Targets
    ttft_alone_ms: float

    def setting(self, policy: str, reload_ns: int) -> Setting:
        """`reload_ns`: what it takes to load the rollout model, for the rival that gives its memory back each time."""
        slo = Slo(
            ttft_ns=int(self.targets.ttft_ms * FRONT_MARGIN * MS), tpot_ns=int(self.targets.tpot_ms * FRONT_MARGIN * MS)
        )
        # A request may come the moment after an iteration has begun: that must not eat up all there is to spare.
        longest_ns = int(LONGEST_SHARE * (self.targets.ttft_ms - self.ttft_alone_ms) * MS)
        dual = SloAdmission(slo=slo, longest_ns=longest_ns)
        memory = PreemptiveMemory(lease_ns=int(LEASE_S * NS_PER_S))
        return {
            "serving_alone": SERVING_ALONE,
            "elastic": Setting(dual, memory),
            "static_partition": Setting(dual, StaticPartition(lease_ns=memory.lease_ns)),
            "no_prefix_cache": Setting(dual, msgspec.structs.replace(memory, lease_ns=0)),
            "no_admission": Setting(NoAdmission(), memory),
            "ttft_only": Setting(msgspec.structs.replace(dual, tpot=False), memory),
            "tpot_only": Setting(msgspec.structs.replace(dual, ttft=False), memory),
            "reload": Setting(ExclusiveAdmission(), memory, partial(_swapping, reload_ns)),
            "fine_grained": Setting(dual, FineGrainedMemory(lease_ns=memory.lease_ns)),
        }[policy]


def _swapping(reload_ns: int) -> Any:
    """Loads the rollout model once serving has rested for as long as loading takes: who does not know for how long it
    will rest does at most twice the work of who does."""
    from elastic.engine.coserving.swapping import Swapping

    return Swapping(idle_ns=reload_ns, boot_ns=reload_ns)


async def measure(plan: Plan, chatty: bool) -> dict[str, Any]:
    if plan.device == "cpu" and OTHER_CORE in CORES:
        os.sched_setaffinity(0, {OTHER_CORE})  # the load generator inherits it
    sys.setswitchinterval(0.0005)
    generator = LoadGenerator()
    try:
        with tempfile.TemporaryDirectory() as profiles:
            bench = Bench(Path(profiles), generator, plan)
            return await _measure(bench, plan, chatty)
    finally:
        generator.close()


async def _measure(bench: Bench, plan: Plan, chatty: bool) -> dict[str, Any]:
    replay = Replay(plan.window_s)
    busy_share = await _calibrate(bench, plan, replay, chatty)
    # With more memory than it needs: in the pool that is sized by it, serving alone does no otherwise.
    alone = [
        await bench.run(SERVING_ALONE, replay.requests(window, 1.0), ROOMY_PAGES, plan.window_s)
        for window in plan.windows
    ]
    limits = _limits([record for outcome in alone for record in outcome.records])
    peak_pages = max(outcome.statistics.serving_peak_pages for outcome in alone)
    pages = max(round(peak_pages / PEAK_SHARE), LEAST_PAGES)
    _say(chatty, f"{pages} pages, of which serving alone takes {peak_pages} at its peak")

    figures: dict[str, Any] = {
        "slo": {"ttft_p99_ms": limits.targets.ttft_ms, "tpot_p99_ms": limits.targets.tpot_ms},
        "density": {},
        "reclaim_ms_p99": None,
    }
    reclaims_ns: list[int] = []
    activations_s: list[float] = []
    for density in plan.densities:
        by_policy: dict[str, list[Outcome]] = {"serving_alone": alone} if density == 1 else {}
        rollouts_alone: list[Outcome] = []
        for policy in plan.policies(density):
            outcomes = by_policy.setdefault(policy, [])
            for window in plan.windows[len(outcomes) :]:
                if policy == "elastic":
                    rollouts_alone.append(await bench.run(ROLLOUTS_ALONE, [], pages, plan.alone_s))
                requests = replay.requests(window, density)
                outcomes.append(
                    await bench.run(limits.setting(policy, bench.reload_ns), requests, pages, plan.window_s)
                )
            _say(chatty, _summary(density, policy, outcomes, limits.targets))
        reclaims_ns += [ns for outcome in by_policy["elastic"] for ns in outcome.statistics.reclaims_ns]
        activations_s += [outcome.statistics.activation_s for outcome in by_policy["elastic"]]
        figures["density"][f"{density:g}"] = found = _density(by_policy, limits.targets, rollouts_alone)
        _say(chatty, f"density {density:g}: harvested {', '.join(_shares(found['harvest_by_window']))}")
    if plan.extras:
        figures |= await _extras(bench, plan, limits, replay.requests("burstiest", 2.0), pages)
    provoked_ns = [] if reclaims_ns else await _provoked_reclaims(bench, limits)
    figures["provoked_reclaim_ms_p50"] = _ms(percentile(provoked_ns, 50))
    figures["reload_ms"] = _ms(bench.reload_ns)
    figures["reclaim_ms_p50"] = _ms(percentile(reclaims_ns, 50))
    figures["reclaim_ms_p99"] = _ms(percentile(reclaims_ns, 99))
    figures["reclaims"] = len(reclaims_ns)
    figures["activation_ms"] = 1e3 * float(np.median(activations_s))
    figures |= pool_figures(plan.pool_operations)
    figures["calibration"] = {
        "speed": replay.speed,
        "busy_share": busy_share,
        "peak_pages": peak_pages,
        "pages": pages,
    }
    figures["device"] = bench.device(plan)
    figures["windows"] = {"seconds": plan.window_s, "start_s": replay.starts}
    return figures


async def _calibrate(bench: Bench, plan: Plan, replay: "Replay", chatty: bool) -> float:
    """Set the replay's speed such that serving alone is busy for `BUSY_SHARE`; how much of the time it is at that."""
    tried: list[tuple[float, float]] = []
    for _ in range(plan.calibrations):
        outcome = await bench.run(SERVING_ALONE, replay.requests("mean", 1.0), ROOMY_PAGES, plan.window_s)
        busy_share = outcome.serving_busy_share
        _say(chatty, f"speed {replay.speed:.3f}: serving alone is busy {busy_share:.1%}")
        tried.append((replay.speed, busy_share))
        if abs(busy_share - BUSY_SHARE) <= BUSY_TOLERANCE:
            break
        # How many requests a short window holds is not in proportion to how much of the trace it takes.
        replay.speed *= min(2.0, max(0.5, BUSY_SHARE / busy_share if busy_share else 2.0))
    replay.speed, busy_share = min(tried, key=lambda pair: abs(pair[1] - BUSY_SHARE))
    return busy_share


class Replay:
    """The trace at a speed, in windows of `window_s`. They begin where the rule says for the trace's own speed, so that
    they are the same however fast the host turns out to be."""

    def __init__(self, window_s: float) -> None:
        self.speed = 1.0
        self._window_s = window_s
        self._trace = merged(*(read_serving_trace(data_path(name)) for name in ("azure-conversation", "azure-code")))
        self.starts = typical_windows(self._trace, window_s)

    def requests(self, window: str, density: float) -> list[ServingRequest]:
        """What arrives in a window: at a higher density more of the trace, from the same start on."""
        speed = self.speed * density
        cut = window_at(self._trace, self.starts[window], self._window_s * speed)
        return scaled(cut, speed=speed, length=LENGTH_SCALE, most_prompt=MOST_PROMPT, most_output=MOST_OUTPUT)


def _limits(records: Sequence[RequestRecord]) -> Limits:
    result = report(records)
    assert result.ttft_ms.p99 is not None
    assert result.tpot_ms.p99 is not None
    return Limits(
        Targets(ttft_ms=SLO_FACTOR * result.ttft_ms.p99, tpot_ms=SLO_FACTOR * result.tpot_ms.p99), result.ttft_ms.p99
    )


def _density(
    by_policy: dict[str, list[Outcome]], targets: Targets, rollouts_alone: Sequence[Outcome]
) -> dict[str, Any]:
    serving_alone = by_policy["serving_alone"]
    harvests = [
        _harvest(*outcomes)
        for outcomes in zip(by_policy["elastic"], serving_alone, rollouts_alone, strict=True)
        if outcomes[-1].rollout_tokens
    ]
    return {
        "policies": {policy: _policy(outcomes, targets) for policy, outcomes in by_policy.items()},
        "harvest_share": min((harvest["share"] for harvest in harvests), default=None),
        "harvest_by_window": harvests,
        "serving_alone_busy_share": [outcome.serving_busy_share for outcome in serving_alone],
        "rollout_alone_tokens_per_s": [outcome.rollout_rate for outcome in rollouts_alone],
    }


def _harvest(shared: Outcome, serving_alone: Outcome, rollouts_alone: Outcome) -> dict[str, float]:
    idle_share = 1 - serving_alone.serving_busy_share
    time = shared.rollout_busy_share / idle_share
    share = shared.rollout_rate / rollouts_alone.rollout_rate / idle_share
    return {
        "share": share,
        "time": time,
        "speed": share / time if time else 0.0,
        "time_alone": rollouts_alone.rollout_busy_share,
    }


def _shares(harvests: Sequence[dict[str, float]]) -> list[str]:
    return [f"{h['share']:.0%} (time {h['time']:.2f} × speed {h['speed']:.2f})" for h in harvests]


def _policy(outcomes: Sequence[Outcome], targets: Targets) -> dict[str, Any]:
    """The worst window's latencies, all windows' minutes, the mean rate."""
    reports = [report(outcome.records, targets) for outcome in outcomes]
    return {
        "ttft_p99_ms": _worst([result.ttft_ms.p99 for result in reports]),
        "tpot_p99_ms": _worst([result.tpot_ms.p99 for result in reports]),
        "itl_p99_ms": _worst([result.itl_ms.p99 for result in reports]),
        "violated_minutes": sum(violated_minutes(o.records, targets, VIOLATION_WINDOW_S) for o in outcomes),
        "rollout_tokens_per_s": float(np.mean([o.rollout_rate for o in outcomes])),
        "goodput_share": sum(record.meets(targets) for o in outcomes for record in o.records)
        / max(1, sum(len(o.records) for o in outcomes)),
        "turns_given_back": sum(outcome.given_back for outcome in outcomes),
        "failed": sum(result.failed for result in reports),
    }


async def _extras(
    bench: Bench, plan: Plan, limits: Limits, requests: list[ServingRequest], pages: int
) -> dict[str, Any]:
    """The one-time cut against fine-grained ones, and the lease sweep of ROSE's Table 4, on the burstiest load."""
    cuts: dict[str, Any] = {}
    for name, policy in (("one_time", "elastic"), ("fine_grained", "fine_grained")):
        outcome = await bench.run(limits.setting(policy, bench.reload_ns), requests, pages, plan.window_s)
        cuts[name] = {
            "reclaims": len(outcome.statistics.reclaims_ns),
            "reclaim_ms_p50": _ms(percentile(outcome.statistics.reclaims_ns, 50)),
            "reclaim_ms_p99": _ms(percentile(outcome.statistics.reclaims_ns, 99)),
            **_policy([outcome], limits.targets),
        }
    leases: dict[str, Any] = {}
    for factor in (1, 2, 5, 10):
        setting = limits.setting("elastic", bench.reload_ns)
        setting.memory = msgspec.structs.replace(setting.memory, lease_ns=int(factor * LEASE_S * NS_PER_S))
        outcome = await bench.run(setting, requests, pages, plan.window_s)
        leases[f"{factor * LEASE_S:g}"] = _policy([outcome], limits.targets)
    return {"cuts": cuts, "lease_s": leases}


async def _provoked_reclaims(bench: Bench, limits: Limits) -> list[int]:
    """Where the load was too tame for any pressure: one burst on a pool that is just large enough for it. These stand
    apart, since no trace has that burst."""
    burst = [ServingRequest(0.8, MOST_PROMPT, 8) for _ in range(6)]
    setting = limits.setting("elastic", bench.reload_ns)
    outcome = await bench.run(setting, burst, 100, 1.5)
    return list(outcome.statistics.reclaims_ns)


def pool_figures(operations: int) -> dict[str, Any]:
    """Pages of one buffer mapped and taken back per second, and what mapped pages of two layouts hold nothing in, at
    random: free blocks, and tails that no block fits into."""
    from elastic.engine.coserving.blocks import LeasedBlocks
    from elastic.engine.kv import KvLayout, PagePool
    from elastic.engine.kv.slab import SlabBackend

    total, page_bytes = 512, 4096
    pool = PagePool(SlabBackend(total, page_bytes))
    space = pool.space()
    started_s = time.perf_counter()
    for _ in range(operations // (2 * total)):
        pages = [space.map()[0] for _ in range(total)]
        for page in pages:
            space.unmap(page)
    elapsed_s = time.perf_counter() - started_s
    done = operations // (2 * total) * 2 * total

    pool = PagePool(SlabBackend(total, page_bytes))
    random = Random(0)
    layouts = [
        KvLayout(page_bytes=page_bytes, slot_bytes=slot_bytes, layers=layers, block_tokens=4)
        for layers, slot_bytes in ((3, 64), (2, 128))
    ]
    models = [
        LeasedBlocks(
            pool.space(),
            layout,
            total,
            0,
            lambda: 0,
            lambda: pool.free,
            lambda count: contextlib.nullcontext(),
            lambda page, index: None,
        )
        for layout in layouts
    ]
    held: list[tuple[LeasedBlocks, list[int]]] = []
    moved = 0
    free_shares: list[float] = []
    while moved < operations:
        model = random.choice(models)
        count = random.randint(1, 40)
        if held and (random.random() < 0.45 or count > model.available):
            owner, blocks = held.pop(random.randrange(len(held)))
            owner.release(blocks)
            owner.trim()
            moved += len(blocks)
        elif count <= model.available:
            held.append((model, model.allocate(count)))
            moved += count
        mapped_bytes = sum(model.pages for model in models) * page_bytes
        used_bytes = sum(model.used * layout.block_bytes for model, layout in zip(models, layouts, strict=True))
        free_shares.append(1 - used_bytes / mapped_bytes if mapped_bytes else 0.0)
    pool.check()
    for model in models:
        model.check()
    return {
        "pool_ops_per_s": done / elapsed_s,
        "fragmentation_share": float(np.mean(free_shares[len(free_shares) // 2 :])),
        "fragmentation_block_operations": moved,
    }


def _summary(density: float, policy: str, outcomes: Sequence[Outcome], targets: Targets) -> str:
    figures = _policy(outcomes, targets)
    return (
        f"density {density:g} {policy:<17} TTFT {figures['ttft_p99_ms'] or 0:7.1f} ms  TPOT "
        f"{figures['tpot_p99_ms'] or 0:6.2f} ms  violated {figures['violated_minutes']:.2f} min  "
        f"rollouts {figures['rollout_tokens_per_s']:7,.0f} tokens/s  given back {figures['turns_given_back']}"
    )


def _worst(values: Sequence[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _ms(nanoseconds: float | None) -> float | None:
    return None if nanoseconds is None else nanoseconds / MS


def _say(chatty: bool, line: str) -> None:
    if chatty:
        print(line, file=sys.stderr, flush=True)


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def replaced(plan: Plan, parsed: argparse.Namespace) -> Plan:
    """The plan with what the command line changes."""
    if parsed.window_s:
        shorter = parsed.window_s / plan.window_s
        plan = replace(plan, window_s=parsed.window_s, alone_s=max(2.0, plan.alone_s * shorter))
    return replace(
        plan,
        densities=tuple(parsed.densities or plan.densities),
        windows=tuple(parsed.windows or plan.windows),
        baselines_at=None if parsed.baselines_at is None else tuple(parsed.baselines_at),
        extras=plan.extras and not parsed.no_extras,
        paced=parsed.paced,
        device=parsed.device,
        serving_model=parsed.serving_model or ("tiny-serving" if parsed.device == "cpu" else "qwen3-1.7b"),
        rollout_model=parsed.rollout_model or ("tiny-rollouts" if parsed.device == "cpu" else "qwen3-0.6b"),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="under 50 s on two cores; what does not fit is null")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line of standard output")
    parser.add_argument("--window-s", type=float, help="length of each window (default: 120, quick 2)")
    parser.add_argument("--densities", type=float, nargs="+", help="of arrivals (default: 1 1.5 2, quick 1)")
    parser.add_argument(
        "--baselines-at", type=float, nargs="*", help="densities at which the baselines run, too (default: all)"
    )
    parser.add_argument("--windows", nargs="+", choices=FULL.windows, help="which windows of the trace (default: all)")
    parser.add_argument("--no-extras", action="store_true", help="without the kinds of cuts and the lease sweep")
    parser.add_argument("--paced", action="store_true", help="a modelled device: iterations take at least its time")
    parser.add_argument("--device", choices=PAGE_BYTES, default="cpu")
    for model in ("serving", "rollout"):
        parser.add_argument(f"--{model}-model", choices=SHAPES, help="its shape (default: tiny; on a GPU Qwen3's)")
    parser.add_argument("--client", action="store_true", help=argparse.SUPPRESS)
    parsed = parser.parse_args()
    if parsed.client:
        client()
        return
    if parsed.device == "cuda" and not _has_cuda():
        parser.error("--device: cuda: there is none here")
    plan = replaced(QUICK if parsed.quick else FULL, parsed)
    figures = run_loop(measure(plan, chatty=not (parsed.quick and parsed.json)))
    emit(figures, Arguments(quick=parsed.quick, json=parsed.json))


if __name__ == "__main__":
    main()
