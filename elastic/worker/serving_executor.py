"""A serving host's device as a real one: a serving model on the co-serving executor, with real requests.

The host's trace is replayed on it, and anybody may send requests to its OpenAI-compatible endpoint. A borrowing run's
worker gets the rollout engine, so that its iterations run in serving's slack and its KV in serving's unused memory.
Source: ROSE §4.1.
"""

import asyncio
import secrets
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from statistics import mean
from typing import NamedTuple

import structlog
import torch

from elastic.config import ConfigError, EngineConfig, validate
from elastic.core.device_sharing import SharingPolicies, Slo
from elastic.core.types import NS_PER_S, FinishReason, SamplingParameters
from elastic.engine.base import GenerateRequest, RolloutEngine
from elastic.engine.coserving.executor import CoServing, CoServingStatistics
from elastic.engine.coserving.front import ModelCard, NoTokenizer, ServingFront, Utf8Tokenizer
from elastic.engine.coserving.memory import SPARE_PAGES
from elastic.engine.coserving.rollout import SharedRolloutEngine
from elastic.engine.coserving.service import ServiceLog, milliseconds
from elastic.engine.coserving.spec import ModelSpec
from elastic.engine.kv.backends import mappable_page_bytes, open_backend
from elastic.engine.kv.vmm import VmmError
from elastic.engine.model.checkpoint import CheckpointError, model_tensors, read_config, read_tensors
from elastic.engine.model.config import Qwen3Config
from elastic.engine.model.qwen3 import Qwen3
from elastic.engine.torch.runner import device_named, dtype_on
from elastic.protocol import wire
from elastic.protocol.openai.errors import FrontError
from providers.serving_messages import HOST_VARIABLE, ExecutorSettings, HostSettings, LoadReport, ServiceReport
from traces.serving import ServingRequest

RANDOM_MODEL = Qwen3Config(vocab_size=256, num_hidden_layers=4)
"""The serving model of a host that names no checkpoint: of another shape than the policy that learns FrozenLake."""

log = structlog.get_logger(__name__)


class ExecutorShare:
    """One worker's `DeviceShare`: the executor decides iteration by iteration, and credits are the engine's own."""

    def __init__(self, executor: CoServing, chunk_tokens: int, pressed: Callable[[], bool]) -> None:
        self._executor = executor
        self._chunk_tokens = chunk_tokens
        self._pressed = pressed
        self._reclaimed = threading.Event()
        self._building = threading.Lock()
        self._ended = False
        self._rollouts: SharedRolloutEngine | None = None

    def build_engine(self, welcome: wire.Welcome) -> RolloutEngine:
        """The rollout engine for the run's model. Blocks. Raises `ValueError` where it does not fit."""
        settings = validate(EngineConfig, welcome.engine, "the orchestrator's welcome")
        # Both models are on the host's device, whatever the run's other workers have, and serving bears with chunks.
        device = self._executor.serving.settings.device
        settings = settings.model_copy(update={"device": device, "prefill_chunk_tokens": self._chunk_tokens})
        dtype = dtype_on(torch.device(device))
        with self._building:
            if self._ended:
                raise ValueError("the host was taken back")
            self._rollouts = self._executor.attach(ModelSpec(Qwen3Config.from_dict(welcome.model), settings, dtype))
            return self._rollouts

    def capacity_turns(self, most: int) -> int:
        """0 while turns would be declined, so that none are sent."""
        return 0 if self._reclaimed.is_set() or self._pressed() else most

    def acquire_iteration(self) -> int:
        return 0

    def hold_back(self) -> bool:
        if not self._executor.running:
            raise RuntimeError("the host's co-serving executor has ended")
        return self._reclaimed.is_set() or self._pressed()

    def reclaim(self) -> None:
        self._reclaimed.set()

    def end(self) -> None:
        self.reclaim()
        with self._building:
            self._ended = True
            if self._rollouts is not None:
                self._rollouts.end()


class ExecutorDevice:
    """The host's executor with its endpoint and its load. Raises `ValueError` or `CheckpointError` where the serving
    model cannot be used with these settings."""

    def __init__(self, settings: HostSettings, executor: ExecutorSettings, sharing: SharingPolicies) -> None:
        self.lending = settings.lending
        self._executor_settings = executor
        config, self._tensors = _serving_model(executor)
        device = device_named("auto")
        engine = EngineConfig.model_validate(
            {
                "device": device.type,
                "max_context_tokens": executor.max_context_tokens,
                "prefill_chunk_tokens": executor.prefill_chunk_tokens or executor.max_context_tokens,
                "max_batch": executor.max_batch,
                "max_pending": 0,
            }
        )
        page_bytes = mappable_page_bytes(executor.page_kib * 1024, device)
        slo = Slo(ttft_ns=round(executor.ttft_slo_s * NS_PER_S), tpot_ns=round(executor.tpot_slo_s * NS_PER_S))
        self.executor = CoServing(
            ModelSpec(config, engine, dtype_on(device)),
            open_backend(executor.kv_pages + SPARE_PAGES, page_bytes, device),
            sharing.admission,
            sharing.memory,
            stall_timeout_ns=round(executor.stall_s * NS_PER_S),
            profiles=executor.profiles,
        )
        """Owns the device."""
        card = {
            "name": executor.model_name,
            "vocab_size": config.vocab_size,
            "max_context_tokens": executor.max_context_tokens,
            "eos_token_ids": config.eos_token_ids,
        }
        self._vocab_size = config.vocab_size
        keys = [key.get_secret_value() for key in (settings.token, settings.api_key) if key is not None]
        self.front = ServingFront(
            ModelCard.model_validate(card), keys, Utf8Tokenizer() if executor.checkpoint is None else NoTokenizer()
        )
        """The OpenAI-compatible endpoint."""
        self._pressed = False
        self._looks: deque[_Look] = deque()
        self._service = ServiceLog(slo)

    @property
    def served(self) -> int:
        """Requests of its own load that were answered in full."""
        return self._service.requests - self._service.failed

    def lend(self) -> ExecutorShare:
        return ExecutorShare(self.executor, self._executor_settings.rollout_chunk_tokens, self.pressed)

    def pressed(self) -> bool:
        """Whether serving needs so much of the memory that rollouts must leave."""
        limit = self.lending.kv_low_share if self._pressed else self.lending.kv_high_share
        self._pressed = self.executor.serving_kv_share >= limit
        return self._pressed

    def report(self) -> LoadReport:
        now = self.executor.statistics()
        serving = self.executor.serving.statistics()
        kv_share = self.executor.serving_kv_share
        looks = self._look(now, kv_share)
        span_ns = looks[-1].at_ns - looks[0].at_ns
        return LoadReport(
            active_requests=serving.pending + serving.executing,
            busy_share=min(1.0, (looks[-1].busy_ns - looks[0].busy_ns) / span_ns) if span_ns else 0.0,
            # Whom to borrow from is decided by use over a window, whether to leave by use now (ROSE §4).
            kv_used_share=mean(look.kv_share for look in looks),
            # A host whose executor has failed has nothing to lend.
            pressed=not self.executor.running or self.pressed(),
            service=self._service_report(now),
        )

    def _service_report(self, now: CoServingStatistics) -> ServiceReport:
        service = self._service
        ttft_ms, tpot_ms = service.ttft_ms, service.tpot_ms
        return ServiceReport(
            requests=service.requests,
            failed=service.failed,
            ttft_slo_ms=service.ttft_slo_ms,
            ttft_p50_ms=ttft_ms.p50,
            ttft_p99_ms=ttft_ms.p99,
            tpot_slo_ms=service.tpot_slo_ms,
            tpot_p50_ms=tpot_ms.p50,
            tpot_p99_ms=tpot_ms.p99,
            violated_minutes=service.violated_minutes,
            lent_s=now.usage.lent_ns / NS_PER_S,
            serving_s=now.usage.lent_serving_ns / NS_PER_S,
            rollout_s=now.usage.rollout_ns / NS_PER_S,
            reclaims=len(now.reclaims_ns),
            reclaim_p99_ms=milliseconds(now.reclaims_ns, 99),
        )

    @asynccontextmanager
    async def running(self, requests: Iterator[ServingRequest]) -> AsyncIterator[None]:
        """Serve, and replay the host's load, as long as the context lasts."""
        await asyncio.to_thread(self.executor.start, self.front.sink, self._tensors)
        self.front.connect(self.executor.serving, asyncio.get_running_loop())
        replaying = asyncio.create_task(self._replay(requests), name="serving load")
        try:
            yield
        finally:
            replaying.cancel()
            await asyncio.wait({replaying})
            await asyncio.to_thread(self.executor.close)

    async def _replay(self, requests: Iterator[ServingRequest]) -> None:
        started_s = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            for request in requests:
                due_s = started_s + request.arrival_s
                await asyncio.sleep(due_s - time.monotonic())
                tasks.create_task(self._serve(request, due_s))

    async def _serve(self, request: ServingRequest, due_s: float) -> None:
        scale, most = self._executor_settings.length_scale, self._executor_settings.max_context_tokens
        output_tokens = min(most // 4, max(1, round(request.output_tokens * scale)))
        prompt_tokens = min(most - output_tokens, max(1, round(request.prompt_tokens * scale)))
        name = f"trace-{secrets.token_hex(8)}"
        generate = GenerateRequest(
            request_id=name,
            token_ids=[index % self._vocab_size for index in range(prompt_tokens)],
            start=0,
            sampling=SamplingParameters(
                max_new_tokens=output_tokens, stop_token_ids=(), temperature=1.0, noise_seed=secrets.randbits(63)
            ),
        )
        times_s: list[float] = []
        finish, why = None, ""
        try:
            async for chunk in self.front.generate(generate):
                times_s += [time.monotonic()] * len(chunk.token_ids)
                finish, why = chunk.finish, chunk.detail
        except FrontError as error:
            why = str(error)
        if finish is FinishReason.LENGTH and times_s:
            self._service.served(due_s, times_s)
        else:
            self._service.refused(due_s)
            log.warning("a request of the host's load was not served", reason=why)

    def _look(self, now: CoServingStatistics, kv_share: float) -> deque["_Look"]:
        """The looks of the last `window_s`, with this one."""
        now_ns = time.monotonic_ns()
        self._looks.append(_Look(now_ns, now.usage.serving_ns, kv_share))
        while len(self._looks) > 2 and now_ns - self._looks[1].at_ns >= self.lending.window_s * NS_PER_S:
            self._looks.popleft()
        return self._looks


class _Look(NamedTuple):
    at_ns: int
    busy_ns: int
    kv_share: float


def open_device(settings: HostSettings, executor: ExecutorSettings, sharing: SharingPolicies) -> ExecutorDevice:
    """Raises `ConfigError` where the serving model cannot be used with these settings."""
    try:
        return ExecutorDevice(settings, executor, sharing)
    except (ValueError, CheckpointError, VmmError) as error:
        raise ConfigError(f"{HOST_VARIABLE}: executor: {error}") from error


def _serving_model(settings: ExecutorSettings) -> tuple[Qwen3Config, dict[str, torch.Tensor]]:
    if settings.checkpoint is not None:
        config = read_config(settings.checkpoint)
        tensors = read_tensors(settings.checkpoint, config)
        return config, {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}
    torch.manual_seed(0)
    return RANDOM_MODEL, model_tensors(Qwen3(RANDOM_MODEL))
