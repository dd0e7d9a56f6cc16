"""A device on which one vLLM serves a base and rolls out an adapter to it; used as `_shared_device.DeviceOfTwo` is."""

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from _shapes import SHAPES, random_weights
from _shared_device import (
    CONTEXT,
    CORES,
    EXECUTOR_CORE,
    KEY,
    MODEL,
    SETTLE_S,
    SHORTEST_STEP_S,
    STEPS_PER_WINDOW,
    TRAJECTORIES,
    ClosedLoop,
    DeviceUse,
    Sharing,
    replayed,
)

from elastic.config import EngineConfig
from elastic.core.types import NS_PER_S, Account
from elastic.engine import create_engine
from elastic.engine.base import ChunkSink, TokenChunk
from elastic.engine.coserving.front import ModelCard, ServingFront
from elastic.engine.model.checkpoint import write_checkpoint
from elastic.engine.model.config import Qwen3Config
from elastic.engine.vllm.engine import VllmEngine
from elastic.protocol.http_server import serving
from traces.serving import ServingRequest

SHAPE = "tiny-serving"
RANK = 8
START_TIMEOUT_S = 900.0
KV_BLOCK_TOKENS, KV_BLOCKS = 32, 128
MAX_BATCH = 32
ROLLING = (Account.PREFILL, Account.DECODE, Account.RECOMPUTE)


def random_adapter(config: Qwen3Config) -> dict[str, torch.Tensor]:
    """To the queries and values of every layer."""
    generator = torch.Generator().manual_seed(0)
    rows = {"q_proj": config.num_attention_heads, "v_proj": config.num_key_value_heads}
    found: dict[str, torch.Tensor] = {}
    for layer in range(config.num_hidden_layers):
        for module, heads in rows.items():
            at = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            for part, shape in (("A", (RANK, config.hidden_size)), ("B", (heads * config.head_dim, RANK))):
                found[f"{at}.lora_{part}.weight"] = (0.1 * torch.randn(shape, generator=generator)).bfloat16()
    return found


class _Turns:
    """The rollouts' side, which can be started again and again."""

    def __init__(self, engine: VllmEngine) -> None:
        self._engine = engine
        self._sink: ChunkSink | None = None
        engine.start(self._take)

    def start(self, sink: ChunkSink) -> None:
        self._sink = sink

    def rest(self) -> None:
        self._sink = None
        self._engine.sleep()
        self._engine.wake()

    def _take(self, chunks: Sequence[TokenChunk]) -> None:
        if self._sink is not None:
            self._sink(chunks)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


class VllmDevice:
    """`arguments` are vLLM's. Close it."""

    def __init__(
        self, directory: Path, generator: ProcessPoolExecutor, window_s: float, arguments: dict[str, Any] | None = None
    ) -> None:
        self._config = Qwen3Config(**SHAPES[SHAPE])
        self._generator = generator
        self._step_s = max(SHORTEST_STEP_S, window_s / STEPS_PER_WINDOW)
        base = directory / "base"
        if not base.exists():
            write_checkpoint(base, self._config, random_weights(SHAPE, "cpu"))
        settings = {
            "kind": "vllm",
            "max_context_tokens": CONTEXT,
            "prefill_chunk_tokens": CONTEXT,
            "max_batch": MAX_BATCH,
            "max_pending": TRAJECTORIES,
            "kv_block_tokens": KV_BLOCK_TOKENS,
            "kv_blocks": KV_BLOCKS,
            "vllm": {
                "base": str(base),
                "adapter_rank": RANK,
                "start_timeout_s": START_TIMEOUT_S,
                "arguments": arguments or {},
            },
        }
        engine = create_engine(self._config.to_dict(), EngineConfig.model_validate(settings))
        assert isinstance(engine, VllmEngine)
        if EXECUTOR_CORE in CORES:
            for task in Path(f"/proc/{engine.process_id}/task").iterdir():
                os.sched_setaffinity(int(task.name), {EXECUTOR_CORE})
        self._engine = engine
        self._turns: Any = _Turns(engine)

    def close(self) -> None:
        self._engine.close()

    async def use(self, sharing: Sharing, requests: Sequence[ServingRequest], _pages: int, wall_s: float) -> DeviceUse:
        """Replay `requests` while rollouts run, if they do; what else `sharing` says is the other executor's."""
        loop = asyncio.get_running_loop()
        rollouts = ClosedLoop(random_adapter(self._config), self._config.vocab_size, self._step_s)
        async with self._front() as url, asyncio.TaskGroup() as tasks:
            rolling: asyncio.Task[None] | None = None
            if sharing.rollouts:
                rolling = tasks.create_task(rollouts.run(self._turns))
                await rollouts.ready.wait()
                await asyncio.sleep(SETTLE_S)
            before, tokens = self._engine.statistics().accounts_ns, rollouts.tokens
            started_s = time.monotonic()
            records: list[Any] = []
            if sharing.serving:
                vocab_size = self._config.vocab_size
                records = await loop.run_in_executor(self._generator, replayed, url, requests, vocab_size)
            await asyncio.sleep(max(0.0, started_s + wall_s - time.monotonic()))
            elapsed_ns = (time.monotonic() - started_s) * NS_PER_S
            rolled = rollouts.tokens - tokens
            after = self._engine.statistics().accounts_ns
            if rolling is not None:
                rolling.cancel()
        await asyncio.to_thread(self._turns.rest)

        def share(*accounts: Account) -> float:
            return sum(after.get(each, 0) - before.get(each, 0) for each in accounts) / elapsed_ns

        return DeviceUse(
            records=records,
            serving_busy_share=share(Account.SERVING),
            rollout_busy_share=share(*ROLLING),
            rollout_rate=rolled / elapsed_ns * NS_PER_S,
            given_back=rollouts.given_back,
            statistics=None,
        )

    @contextlib.asynccontextmanager
    async def _front(self) -> AsyncIterator[str]:
        card = {"name": MODEL, "vocab_size": self._config.vocab_size, "max_context_tokens": CONTEXT}
        front = ServingFront(ModelCard.model_validate(card), [KEY])
        async with serving(front.app(), socket.create_server(("127.0.0.1", 0))) as url:
            front.connect(self._engine.serve(front.sink), asyncio.get_running_loop())
            yield url
