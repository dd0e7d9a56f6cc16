"""The embedded rollout engine: one thread that plans, computes, paces and reports an iteration at a time.

Callers only leave wishes under the lock (requests, aborts, weights, sleep); the thread takes them between
iterations. `_next_step` decides under the lock what to do next, and the step itself runs without it.
"""

import math
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple

import structlog
import torch
from torch import Tensor

from elastic.config import EngineConfig
from elastic.core.types import NS_PER_S, Account, Capabilities, FinishReason, WeightMode
from elastic.engine import validation
from elastic.engine.base import (
    NO_VERSION,
    ChunkSink,
    DeviceShare,
    EngineStatistics,
    GenerateRequest,
    TokenChunk,
)
from elastic.engine.meter import AccountMeter
from elastic.engine.torch import pacing, sampling
from elastic.engine.torch.costs import LearnedCosts
from elastic.engine.torch.runner import Patch, Runner
from elastic.engine.torch.scheduler import BatchScheduler, Work, load_of
from elastic.engine.torch.scheduler import Sequence as Running
from elastic.model.config import Qwen3Config
from elastic.weights.client import WeightsClient
from elastic.weights.errors import VersionSuperseded
from elastic.weights.source import PullReport, RelaySource, TensorSource, WeightsSource

CLOSE_TIMEOUT_S = 10.0
SMALLEST_COST = 1e-9
"""A curve that falls, as noise makes it, would have some work cost nothing, and an iteration be in no account."""

_log = structlog.get_logger(__name__)
_Step = Callable[[], None]


class _WeightsOrder(NamedTuple):
    version: int
    tensors: dict[str, Tensor]
    mode: WeightMode
    applied: Future[None]
    patch: Patch | None = None
    """What takes the weights of `patch.base` to these."""


class TorchEngine:
    """`elastic.engine.base.RolloutEngine` on one device, in plain torch.

    Requests wait until the first `load_version`, and while the engine sleeps. A request whose id is still alive
    is the same one again: it is joined, not started twice. On one CPU thread the engine is replayable: a turn
    that is cut at any token and continued elsewhere gives bit-identical tokens and log-probabilities. A
    temperature of zero decodes greedily.

    With a `share` the engine borrows its device, and asks for it before each iteration.

    `load_version` and `sleep` wait for the engine's thread, so `sink` must not call them. Raises `ValueError`
    when the KV cache cannot hold one sequence of `max_context_tokens`, or the device is not there.
    """

    def __init__(self, config: Qwen3Config, settings: EngineConfig, share: DeviceShare | None = None) -> None:
        kv_tokens = settings.kv_blocks * settings.kv_block_tokens
        if kv_tokens < settings.max_context_tokens:
            raise ValueError(
                f"engine.kv_blocks: {settings.kv_blocks} blocks of {settings.kv_block_tokens} tokens hold less than "
                f"max_context_tokens={settings.max_context_tokens}"
            )
        self._config = config
        self._settings = settings
        self._share = share
        self._device = _device(settings.device)
        self._runner = Runner(
            config, self._device, settings.max_context_tokens, settings.kv_blocks, settings.kv_block_tokens
        )
        self._scheduler = BatchScheduler(settings)
        self._weights = WeightsClient()
        self._sink: ChunkSink | None = None
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()
        # Wishes.
        self._inbox: list[GenerateRequest] = []
        self._aborting: set[str] = set()
        self._orders: deque[_WeightsOrder] = deque()
        self._asleep = False
        self._closed = False
        # State.
        self._alive: dict[str, Running | None] = {}
        self._version: int | None = None
        self._resting = False
        self._idle_account = Account.IDLE
        self._learned = LearnedCosts()
        self._meter = AccountMeter(time.monotonic_ns(), Account.IDLE)
        self._iterations = 0
        self._pieces_applied = 0
        self._decoded_tokens = 0

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            engine="torch",
            # Several threads cut element-wise work at places that depend on its size.
            replayable_sampling=self._device.type == "cpu" and self._settings.threads == 1,
            max_context_tokens=self._settings.max_context_tokens,
            device=str(self._device),
            tflops=self._settings.tflops,
            memory_gb_per_s=self._settings.memory_gb_per_s,
            max_batch=self._settings.max_batch,
        )

    def start(self, sink: ChunkSink) -> None:
        if self._thread is not None or self._closed:
            raise RuntimeError("the engine was started before")
        self._sink = sink
        self._thread = threading.Thread(target=self._run, name="torch-engine", daemon=True)
        self._thread.start()

    def submit(self, requests: Sequence[GenerateRequest]) -> None:
        with self._changed:
            self._refuse_closed()
            for request in requests:
                if request.request_id not in self._alive:
                    self._alive[request.request_id] = None
                    self._inbox.append(request)
            self._changed.notify_all()

    def abort(self, request_ids: Sequence[str]) -> None:
        """In force at once: of each request that is still alive, the next chunk is the last."""
        with self._changed:
            self._aborting.update(request_id for request_id in request_ids if request_id in self._alive)
            self._changed.notify_all()

    def prefetch(self, source: RelaySource, timeout_s: float) -> PullReport:
        return self._weights.stage(source, timeout_s)

    def load_version(self, source: WeightsSource, mode: WeightMode) -> float:
        begun_s = time.monotonic()
        try:
            weights = source if isinstance(source, TensorSource) else self._weights.apply(source)
        except VersionSuperseded:
            # What was staged goes as the engine is closed, which is what the caller is to hear.
            with self._changed:
                self._refuse_closed()
            raise
        written_s = time.monotonic() - begun_s
        self._load(weights, mode)
        return written_s

    def audit(self) -> bool:
        return self._weights.audit()

    def _load(self, weights: TensorSource, mode: WeightMode) -> None:
        # Everything that can be done beforehand is done on the caller's time, while the engine goes on.
        verified, changes = self._runner.verify(weights.tensors), weights.changes
        patch = self._runner.patch_of(changes) if changes is not None and changes.base == self._version else None
        order = _WeightsOrder(weights.version, verified, mode, Future(), patch)
        with self._changed:
            self._require_thread()
            self._refuse_closed()
            self._orders.append(order)
            self._changed.notify_all()
        order.applied.result()

    def sleep(self) -> None:
        with self._changed:
            self._require_thread()
            self._refuse_closed()
            self._asleep = True
            self._resting = False
            self._aborting.update(self._alive)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._resting or self._closed or not self._asleep)

    def wake(self) -> None:
        with self._changed:
            self._asleep = False
            self._changed.notify_all()

    def set_idle_account(self, account: Account) -> None:
        with self._changed:
            self._idle_account = account
            self._changed.notify_all()
            if self._thread is None:
                self._charge({account: 1.0})

    def statistics(self) -> EngineStatistics:
        with self._changed:
            scheduler = self._scheduler
            return EngineStatistics(
                pending=len(self._inbox) + len(scheduler.waiting),
                executing=len(scheduler.running),
                capacity_turns=0
                if self._asleep or self._closed
                else self._settings.max_batch + self._settings.max_pending,
                kv_blocks_used=scheduler.pool.used,
                kv_blocks_total=scheduler.pool.total,
                prefix_hit_tokens=scheduler.prefix_hit_tokens,
                prompt_tokens=scheduler.prompt_tokens,
                decoded_tokens=self._decoded_tokens,
                progress=self._iterations,
                accounts_ns=self._meter.read(time.monotonic_ns()),
                weights_version=self._version,
                asleep=self._asleep,
                waits_to_apply=bool(self._orders) and not self._may_apply(self._orders[0]),
                load_progress=self._pieces_applied,
                received_bytes=self._weights.received_bytes,
            )

    def close(self) -> None:
        """End every live request with ABORTED, and the thread. Safe to call twice."""
        with self._changed:
            self._closed = True
            self._aborting.update(self._alive)
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(CLOSE_TIMEOUT_S)
        self._weights.close()

    # The engine's thread.

    def _run(self) -> None:
        torch.set_num_threads(self._settings.threads)
        with torch.inference_mode():
            while (step := self._next_step()) is not None:
                step()
        self._runner.free_cache()

    def _next_step(self) -> _Step | None:
        """Wait until there is something to do, charge its account, and say what; None at the end."""
        with self._changed:
            while True:
                chunks = self._take_wishes()
                if chunks:
                    return partial(self._emit, chunks)
                if self._closed:
                    self._fail_orders()
                    self._charge({self._idle_account: 1.0})
                    return None
                if self._orders and self._may_apply(self._orders[0]):
                    self._charge({Account.APPLYING: 1.0})
                    return partial(self._apply, self._orders.popleft())
                if work := self._plan():
                    return partial(self._iterate, work)
                self._rest()

    def _take_wishes(self) -> list[TokenChunk]:
        """Take in new requests and end those that are refused or aborted."""
        chunks: list[TokenChunk] = []
        for request in self._inbox:
            limit = self._settings.max_context_tokens
            if (why := validation.refusal(request, self._config.vocab_size, limit)) is not None:
                chunks.append(self._end(request, FinishReason.ERROR, why))
            elif validation.is_complete(request, limit):
                chunks.append(self._end(request, FinishReason.LENGTH))
            elif request.request_id in self._aborting:
                chunks.append(self._end(request, FinishReason.ABORTED))
            else:
                self._alive[request.request_id] = self._scheduler.add(request)
        self._inbox.clear()
        aborted = [sequence for request_id in self._aborting if (sequence := self._alive[request_id])]
        chunks.extend(self._end(sequence.request, FinishReason.ABORTED) for sequence in aborted)
        return chunks

    def _plan(self) -> list[Work]:
        if self._version is None or self._asleep:
            return []
        return self._scheduler.plan(admit_new=not self._orders)

    def _rest(self) -> None:
        self._charge({Account.ASLEEP if self._asleep else self._idle_account: 1.0})
        if self._asleep and not self._resting:
            self._scheduler.pool.forget()
            self._runner.free_cache()
            self._resting = True
            self._changed.notify_all()
        self._changed.wait()

    def _may_apply(self, order: _WeightsOrder) -> bool:
        return order.mode is not WeightMode.FINISH or not self._scheduler.has_started

    def _apply(self, order: _WeightsOrder) -> None:
        """Put new weights in force; after a failure half-way nothing is served until the next load."""
        keep = order.mode is WeightMode.KEEP and self._version is not None
        try:
            if order.patch is not None and order.patch.base == self._version:
                self._runner.apply(order.patch)
            else:
                self._runner.load(order.tensors)
            self._runner.scrub_cache(keep)
            with self._changed:
                self._scheduler.use_version(order.version, keep_kv=keep)
                self._version = order.version
                self._pieces_applied += 1
        except Exception as error:
            self._version = None
            order.applied.set_exception(error)
        else:
            order.applied.set_result(None)

    def _iterate(self, work: list[Work]) -> None:
        if not self._got_device():
            return
        load = load_of(work)
        with self._changed:
            started_ns, modelled_s = time.monotonic_ns(), self._charge_iteration(work)
        try:
            token_ids, logprobs = self._compute(work)
        except Exception as error:
            _log.error("engine iteration failed", trace=traceback.format_exc())
            self._emit(self._give_up(work, f"{type(error).__name__}: {error}"))
            return
        self._learned.observe(load, (time.monotonic_ns() - started_ns) / NS_PER_S)
        self._pace(started_ns, modelled_s)
        with self._changed:
            chunks = self._commit(work, token_ids, logprobs)
            self._iterations += 1
        self._emit(chunks)

    def _got_device(self) -> bool:
        """Wait for a borrowed device; False where whoever lends it still needs it."""
        if self._share is None:
            return True
        with self._changed:
            self._charge({Account.SERVING: 1.0})
        self._share.acquire_iteration()
        return not self._share.hold_back()

    def _compute(self, work: list[Work]) -> tuple[list[int], list[float]]:
        """The next token, and its log-probability, of each item that samples, in order."""
        logits = self._runner.forward(work)
        samplers = [item.sequence for item in work if item.samples]
        if not samplers:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)  # nothing else waits for it, and its time is measured
            return [], []
        wanted = [sequence.request.sampling for sequence in samplers]
        token_ids, logprobs = sampling.sample(
            logits,
            torch.tensor([s.temperature for s in wanted], dtype=torch.float32, device=self._device),
            torch.tensor([sampling.signed_seed(s.noise_seed) for s in wanted], device=self._device),
            torch.tensor([s.position for s in samplers], device=self._device),
            sampling.Truncation.of(wanted, self._device),
        )
        return token_ids.tolist(), logprobs.tolist()

    def _pace(self, started_ns: int, modelled_s: float) -> None:
        """Wait until the modelled time of a paced engine is over, or the engine is told to stop."""
        if self._settings.pacing is None:
            return
        left_s = modelled_s - (time.monotonic_ns() - started_ns) / NS_PER_S
        if left_s > 0:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._asleep, left_s)

    def _commit(self, work: list[Work], token_ids: list[int], logprobs: list[float]) -> list[TokenChunk]:
        chunks: list[TokenChunk] = []
        samples = iter(zip(token_ids, logprobs, strict=True))
        for item in work:
            sampled = next(samples) if item.samples else None
            self._scheduler.commit(item)
            if sampled is not None:
                chunks.append(self._append(item.sequence, *sampled))
        return chunks

    def _append(self, sequence: Running, token_id: int, logprob: float) -> TokenChunk:
        request = sequence.request
        if not math.isfinite(logprob):
            return self._end(request, FinishReason.ERROR, "the model's logits are not finite")
        position = sequence.position
        sequence.tokens.append(token_id)
        self._decoded_tokens += 1
        finish = None
        most_tokens = request.sampling.max_new_tokens
        if token_id in request.sampling.stop_token_ids:
            finish = FinishReason.STOP
        elif sequence.position >= most_tokens or len(sequence.tokens) >= self._settings.max_context_tokens:
            finish = FinishReason.LENGTH
        elif request.request_id in self._aborting:
            finish = FinishReason.ABORTED
        chunk = self._chunk(request, sequence, position, [token_id], [logprob], finish)
        if finish is not None:
            self._forget(request.request_id)
        return chunk

    def _give_up(self, work: list[Work], why: str) -> list[TokenChunk]:
        """The iteration failed: its requests end, the rest is computed afresh."""
        with self._changed:
            chunks = [self._end(item.sequence.request, FinishReason.ERROR, why) for item in work]
            if self._version is not None:
                self._scheduler.use_version(self._version, keep_kv=False)
            return chunks

    def _end(self, request: GenerateRequest, finish: FinishReason, detail: str = "") -> TokenChunk:
        chunk = self._last_chunk(request, finish, detail)
        self._forget(request.request_id)
        return chunk

    def _last_chunk(self, request: GenerateRequest, finish: FinishReason, detail: str) -> TokenChunk:
        sequence = self._alive.get(request.request_id)
        position = sequence.position if sequence else request.start
        return self._chunk(request, sequence, position, [], [], finish, detail)

    def _chunk(
        self,
        request: GenerateRequest,
        sequence: Running | None,
        start: int,
        token_ids: list[int],
        logprobs: list[float],
        finish: FinishReason | None,
        detail: str = "",
    ) -> TokenChunk:
        first = sequence is not None and not sequence.reported
        if sequence is not None:
            sequence.reported = True
        return TokenChunk(
            request_id=request.request_id,
            start=start,
            token_ids=token_ids,
            logprobs=logprobs,
            weights_version=NO_VERSION if self._version is None else self._version,
            finish=finish,
            cached_tokens=sequence.cached_tokens if sequence and first else 0,
            prefilled_tokens=sequence.prefilled_tokens if sequence and first else 0,
            detail=detail,
        )

    def _forget(self, request_id: str) -> None:
        sequence = self._alive.pop(request_id)
        if sequence is not None:
            self._scheduler.remove(sequence)
        self._aborting.discard(request_id)

    def _emit(self, chunks: list[TokenChunk]) -> None:
        assert self._sink is not None
        if not chunks:
            return
        try:
            self._sink(chunks)
        except Exception:
            _log.error("the sink of an engine's chunks failed", trace=traceback.format_exc())

    def _charge_iteration(self, work: list[Work]) -> float:
        """Share out the coming iteration's time; returns its modelled length in seconds (paced engines only)."""
        load, costs = load_of(work), self._costs(work)
        accounts = zip((Account.DECODE, Account.PREFILL, Account.RECOMPUTE), load, costs, strict=True)
        self._charge({account: max(cost, SMALLEST_COST) for account, tokens, cost in accounts if tokens})
        return sum(costs)

    def _costs(self, work: list[Work]) -> pacing.Costs:
        """What the parts of the coming iteration cost: modelled, or learned from those before."""
        paced, load = self._settings.pacing, load_of(work)
        return self._learned.costs(load) if paced is None else pacing.costs(load, paced)

    def _charge(self, costs: Mapping[Account, float]) -> None:
        self._meter.switch(time.monotonic_ns(), costs)

    def _fail_orders(self) -> None:
        while self._orders:
            self._orders.popleft().applied.set_exception(RuntimeError("the engine is closed"))

    def _refuse_closed(self) -> None:
        if self._closed:
            raise RuntimeError("the engine is closed")

    def _require_thread(self) -> None:
        if self._thread is None:
            raise RuntimeError("the engine is not started")
        if self._thread is threading.current_thread():
            raise RuntimeError("the engine's own thread cannot wait for itself")


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("engine.device: 'cuda' was asked for, but torch finds no CUDA device")
    return torch.device(name)
