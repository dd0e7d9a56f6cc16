"""A device that a serving and a rollout model share: its front, a load generator, and rollouts that never end."""

import asyncio
import contextlib
import gc
import os
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import torch

from benchmarks._processes import uninterrupted
from benchmarks._shapes import SHAPES, random_weights
from elastic.compose.processes import run_loop
from elastic.config import EngineConfig
from elastic.core.types import NS_PER_S, SamplingParameters, WeightMode
from elastic.engine.base import GenerateRequest, RolloutEngine, TokenChunk
from elastic.engine.coserving.executor import CoServing
from elastic.engine.coserving.front import ModelCard, ServingFront
from elastic.engine.coserving.load import RequestRecord, replay
from elastic.engine.coserving.memory import SPARE_PAGES
from elastic.engine.coserving.profiler import device_name
from elastic.engine.coserving.spec import ModelSpec
from elastic.engine.kv.backends import open_backend
from elastic.engine.kv.layout import common_page_bytes
from elastic.engine.model.checkpoint import read_tensors, write_checkpoint
from elastic.engine.model.config import Qwen3Config
from elastic.engine.torch.runner import Runner, dtype_on
from elastic.protocol.http_server import serving
from elastic.weights.source import TensorSource
from policies.admission import NoAdmission
from policies.kvmemory import PreemptiveMemory
from traces.serving import ServingRequest

EXECUTOR_CORE, OTHER_CORE = 0, 1
CORES = os.sched_getaffinity(0)
MODEL = "serving"
KEY = "benchmark"
"""The front asks for one."""
PAGE_BYTES = {"cpu": 32 * 1024, "cuda": 2 << 20}
"""Of which a page is a multiple, as large as both models' blocks need."""
CONTEXT = 256
CHUNK_TOKENS = 512
LEASE_S = 0.5
"""ROSE's 10 s, scaled as the environment's answers below are."""
PACING = {"prefill_tokens_per_s": 6000.0, "decode_step_s": {1: 0.004, 16: 0.005, 32: 0.0065}}
"""The device of `--paced`: prefill and decode stand to each other as on a GPU, for lengths that are scaled down, and
both take longer than they do here. What else runs on the host then matters less."""
TRAJECTORIES = 8
TURNS, TURN_TOKENS, OBSERVED_TOKENS = 6, 16, 16
THINK_S = 0.02
RETRY_S = 0.1
RELOADS = 3
STEPS_PER_WINDOW, SHORTEST_STEP_S = 4, 1.5
"""How often the rollout model gets new weights, beside serving and alone alike."""
SETTLE_S = 0.3


class ClosedLoop:
    """Trajectories without end on a rollout engine, which gets a new version of its weights at every step."""

    def __init__(self, weights: dict[str, Any], vocab_size: int, step_s: float) -> None:
        self.ready = asyncio.Event()
        """The device has the first version, and knows what it costs."""
        self.tokens = 0
        self.given_back = 0
        self._weights = weights
        self._vocab_size = vocab_size
        self._step_s = step_s
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[str, tuple[list[int], asyncio.Future[str]]] = {}

    async def run(self, engine: RolloutEngine) -> None:
        engine.start(self._sink)
        async with asyncio.TaskGroup() as tasks:
            for version in range(1, 1_000_000):
                source = TensorSource(version, self._weights)
                await asyncio.to_thread(engine.load_version, source, WeightMode.FINISH)
                if version == 1:
                    self.ready.set()
                    for number in range(TRAJECTORIES):
                        tasks.create_task(self._trajectories(engine, number))
                await asyncio.sleep(self._step_s)

    async def _trajectories(self, engine: RolloutEngine, number: int) -> None:
        random = Random(number)
        for episode in range(1_000_000):
            context = [random.randrange(self._vocab_size) for _ in range(32)]
            for turn in range(TURNS):
                context += await self._turn(engine, f"{number}.{episode}.{turn}", context, random.getrandbits(63))
                context += [random.randrange(self._vocab_size) for _ in range(OBSERVED_TOKENS)]
                await asyncio.sleep(random.expovariate(1 / THINK_S))

    async def _turn(self, engine: RolloutEngine, name: str, context: list[int], seed: int) -> list[int]:
        accepted: list[int] = []
        again = False
        while True:
            done: asyncio.Future[str] = self._loop.create_future()
            self._waiting[name] = (accepted, done)
            request = GenerateRequest(
                request_id=name,
                token_ids=context + accepted,
                start=len(accepted),
                sampling=SamplingParameters(max_new_tokens=TURN_TOKENS, noise_seed=seed),
                recompute=again,
            )
            engine.submit([request])
            if await done in ("stop", "length"):
                return accepted
            again = True
            self.given_back += 1
            await asyncio.sleep(RETRY_S)

    def _sink(self, chunks: Sequence[TokenChunk]) -> None:
        self._loop.call_soon_threadsafe(self._deliver, chunks)

    def _deliver(self, chunks: Sequence[TokenChunk]) -> None:
        for chunk in chunks:
            accepted, done = self._waiting[chunk.request_id]
            if chunk.token_ids and chunk.start != len(accepted):
                raise AssertionError(f"{chunk.request_id}: token {chunk.start} after {len(accepted)}")
            accepted.extend(chunk.token_ids)
            self.tokens += len(chunk.token_ids)
            if chunk.finish is not None and not done.done():
                done.set_result(str(chunk.finish))


@dataclass
class DeviceUse:
    """One policy on one load: what serving's users saw, the shares of time that either model computed, and what was
    rolled out. `statistics` are the executor's at the end."""

    records: list[RequestRecord]
    serving_busy_share: float
    rollout_busy_share: float
    rollout_rate: float
    """Tokens per second."""
    given_back: int
    statistics: Any


@dataclass
class Sharing:
    """What decides how the device is shared."""

    admission: Any = field(default_factory=NoAdmission)
    memory: Any = field(default_factory=PreemptiveMemory)
    swapping: Callable[[], Any] | None = None
    rollouts: bool = True
    serving: bool = True


SERVING_ALONE = Sharing(rollouts=False)
ROLLOUTS_ALONE = Sharing(memory=PreemptiveMemory(headroom_share=0, lease_ns=int(LEASE_S * NS_PER_S)), serving=False)


class DeviceOfTwo:
    """Two models of these shapes, whose rollouts get new weights four times a window. `generator` sends the load."""

    def __init__(
        self,
        profiles: Path,
        generator: ProcessPoolExecutor,
        device: str,
        serving_model: str,
        rollout_model: str,
        *,
        window_s: float,
        paced: bool,
    ) -> None:
        torch.set_num_threads(1)
        self._profiles = profiles
        self._generator = generator
        self._device = device
        self._step_s = max(SHORTEST_STEP_S, window_s / STEPS_PER_WINDOW)
        settings = EngineConfig.model_validate(
            {
                "device": device,
                "max_context_tokens": CONTEXT,
                "prefill_chunk_tokens": CONTEXT,
                "max_batch": 32,
                "pacing": PACING if paced else None,
            }
        )
        dtype = dtype_on(torch.device(device))
        self.serving = ModelSpec(Qwen3Config(**SHAPES[serving_model]), settings, dtype)
        self.rollout = ModelSpec(
            Qwen3Config(**SHAPES[rollout_model]),
            settings.model_copy(update={"prefill_chunk_tokens": CHUNK_TOKENS, "max_batch": TRAJECTORIES}),
            dtype,
        )
        unit = PAGE_BYTES[device]
        block_bytes = max(spec.layout(64 * unit).block_bytes for spec in (self.serving, self.rollout))
        self._page_bytes = common_page_bytes(block_bytes, unit)
        self._serving_weights = random_weights(serving_model, device)
        self._rollout_weights = random_weights(rollout_model, device)
        self.reload_ns = self._measure_reload()
        backend = open_backend(1, self._page_bytes, device)
        backend.close()
        self.description = {
            "name": device_name(torch.device(device), self.serving.settings),
            "paced": paced,
            "kv_pages_by": type(backend).__name__,
            "page_bytes": self._page_bytes,
            "serving_model": serving_model,
            "rollout_model": rollout_model,
        }

    def _measure_reload(self) -> int:
        """What it takes to bring the rollout model from disk onto the device: the median of several times."""
        config, device, times_ns = self.rollout.config, torch.device(self._device), list[int]()
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
        return int(median(times_ns))

    async def use(self, sharing: Sharing, requests: Sequence[ServingRequest], pages: int, wall_s: float) -> DeviceUse:
        """Replay `requests` while rollouts run, if they do."""
        gc.collect()
        gc.freeze()
        loop = asyncio.get_running_loop()
        rollouts = ClosedLoop(self._rollout_weights, self.rollout.config.vocab_size, self._step_s)
        async with self._opened(sharing, pages) as (executor, url), asyncio.TaskGroup() as tasks:
            rolling: asyncio.Task[None] | None = None
            if sharing.rollouts:
                rolling = tasks.create_task(rollouts.run(executor.attach(self.rollout)))
                await rollouts.ready.wait()
                await asyncio.sleep(SETTLE_S)
            before, tokens = executor.statistics(), rollouts.tokens
            started_s = time.monotonic()
            records: list[RequestRecord] = []
            if sharing.serving:
                vocab_size = self.serving.config.vocab_size
                with uninterrupted():
                    sending = loop.run_in_executor(self._generator, replayed, url, requests, vocab_size)
                records = await sending
            await asyncio.sleep(max(0.0, started_s + wall_s - time.monotonic()))
            elapsed_s = time.monotonic() - started_s
            after = executor.statistics()
            if rolling is not None:
                rolling.cancel()
        busy_ns = elapsed_s * NS_PER_S
        return DeviceUse(
            records=records,
            serving_busy_share=(after.usage.serving_ns - before.usage.serving_ns) / busy_ns,
            rollout_busy_share=(after.usage.rollout_ns - before.usage.rollout_ns) / busy_ns,
            rollout_rate=(rollouts.tokens - tokens) / elapsed_s,
            given_back=rollouts.given_back,
            statistics=after,
        )

    @contextlib.asynccontextmanager
    async def _opened(self, sharing: Sharing, pages: int) -> AsyncIterator[tuple[CoServing, str]]:
        executor = CoServing(
            self.serving,
            open_backend(pages + SPARE_PAGES, self._page_bytes, self._device),
            sharing.admission,
            sharing.memory,
            profiles=self._profiles,
            cpu=EXECUTOR_CORE if self._device == "cpu" and EXECUTOR_CORE in CORES else None,
            swapping=sharing.swapping() if sharing.swapping else None,
        )
        card = ModelCard.model_validate(
            {"name": MODEL, "vocab_size": self.serving.config.vocab_size, "max_context_tokens": CONTEXT}
        )
        front = ServingFront(card, [KEY])
        async with serving(front.app(), socket.create_server(("127.0.0.1", 0))) as url:
            try:
                await asyncio.to_thread(executor.start, front.sink, self._serving_weights)
                front.connect(executor.serving, asyncio.get_running_loop())
                yield executor, url
            finally:
                await asyncio.to_thread(executor.close)


def replayed(url: str, requests: Sequence[ServingRequest], vocab_size: int) -> list[RequestRecord]:
    """In the load generator's process."""
    return run_loop(replay(url, MODEL, KEY, requests, vocab_size))
