"""The two engines of a shared device: a `TorchEngine` each, driven by the executor's thread on shared pages."""

import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple

import msgspec
import structlog
import torch
from torch import Tensor

from elastic.config import EngineConfig
from elastic.core.types import Account, FinishReason, Nanoseconds, WeightMode
from elastic.engine.base import ChunkSink, EngineStatistics, GenerateRequest, TokenChunk
from elastic.engine.coserving.blocks import LeasedBlocks
from elastic.engine.coserving.profile import CostModel, CostProfile, Prefill, Shape, write_profile
from elastic.engine.coserving.profiler import device_name, kept_profile, measuring, model_name
from elastic.engine.coserving.runner import PagedRunner
from elastic.engine.kv import KvLayout, PagePool
from elastic.engine.torch.engine import CLOSE_TIMEOUT_S, TorchEngine
from elastic.engine.torch.scheduler import Scheduler, Work
from elastic.engine.torch.scheduler import Sequence as Running
from elastic.model.config import Qwen3Config
from policies.coexecution import QueuedPrefill, ServingView

SMALLEST_CHUNK = 16
"""Rollout prefill is not cut into pieces that are mostly overhead."""

_log = structlog.get_logger(__name__)
Step = Callable[[], None]


class ModelSpec(NamedTuple):
    """A model on a shared device. `settings.kv_blocks` does not count: the pool's pages do."""

    config: Qwen3Config
    settings: EngineConfig
    dtype: torch.dtype

    def layout(self, page_bytes: int) -> KvLayout:
        config = self.config
        return KvLayout(
            page_bytes=page_bytes,
            slot_bytes=config.num_key_value_heads * 2 * config.head_dim * self.dtype.itemsize,
            layers=config.num_hidden_layers,
            block_tokens=self.settings.kv_block_tokens,
        )


class Lending(NamedTuple):
    """How a half gets pages: how many more it may map now, and whom to tell before it does."""

    growth: Callable[[], int]
    make_room: Callable[[int], None]
    lease_ns: Nanoseconds


class Iteration(NamedTuple):
    work: list[Work]
    shape: Shape


class _Loading(NamedTuple):
    """Weights on their way into the device, piece by piece; `finish` puts them in force."""

    account: Account
    pieces: Iterator[None]
    finish: Callable[[], None]
    fail: Callable[[Exception], None]


class _PagedScheduler(Scheduler):
    def __init__(self, settings: EngineConfig, pool: LeasedBlocks) -> None:
        super().__init__(settings)
        self.pool: LeasedBlocks = pool

    def plan_chunk(self, admit_new: bool, chunk_tokens: int) -> list[Work]:
        self._chunk_tokens = chunk_tokens
        return self.plan(admit_new)


class Half(TorchEngine):
    """One model's engine. Its own thread is the executor's, which asks it for steps instead of waiting in it.

    Raises `ValueError` where a page of the pool does not suit the model's KV.
    """

    kind: str

    def __init__(self, spec: ModelSpec, pool: PagePool, lending: Lending, changed: threading.Condition) -> None:
        self.layout = spec.layout(pool.page_bytes)
        # The executor sees to it that one sequence of `max_context_tokens` fits.
        blocks = max(pool.total * self.layout.blocks_per_page, spec.settings.max_context_tokens)
        settings = spec.settings.model_copy(update={"kv_blocks": blocks})
        super().__init__(spec.config, settings)
        self._changed = changed
        self._runner = runner = PagedRunner(
            spec.config,
            self._device,
            spec.dtype,
            settings.max_context_tokens,
            self.layout,
            pool.space(),
            pool.total,
        )
        self.pool = LeasedBlocks(
            runner.space,
            self.layout,
            pool.total,
            lending.lease_ns,
            time.monotonic_ns,
            lending.growth,
            lending.make_room,
            runner.place_page,
        )
        self._scheduler = _PagedScheduler(settings, self.pool)
        self._spec = spec
        self._cost: CostModel | None = None
        self._measuring: Generator[None, None, CostProfile] | None = None
        self._outbox: list[TokenChunk] = []
        self._loading: _Loading | None = None
        self._host: dict[str, Tensor] = {}
        self._aside = False
        self._retired = False
        self._until_measured: list[Future[None]] = []
        self._piece_ns = 0

    # Called by the executor, on its thread and under its lock, except for the steps that are returned.

    @property
    def settings(self) -> EngineConfig:
        return self._settings

    @property
    def costs(self) -> CostModel | None:
        """What an iteration costs; nothing is computed before it is known."""
        return self._cost

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def aside(self) -> bool:
        return self._aside

    @property
    def active(self) -> bool:
        """Whether the device holds the weights, all of one version."""
        return self._version is not None and self._runner.loaded and self._loading is None

    @property
    def has_work(self) -> bool:
        return bool(self._scheduler.running or self._scheduler.waiting)

    def housekeeping(self) -> Step | None:
        """What costs the device nothing: chunks to hand over, and falling asleep."""
        if self._sink is None:
            return None
        chunks, self._outbox = self._outbox + self._take_wishes(), []
        if chunks:
            return lambda: self._emit(chunks)
        if self._closed:
            self.fail_waiting(RuntimeError("the engine is closed"))
        if self._asleep and not self._resting:
            self._deactivate()
            self._resting = True
            self._changed.notify_all()
        return None

    def fail_waiting(self, error: Exception) -> None:
        """Whoever waits for weights to be loaded waits in vain."""
        loading, self._loading = self._loading, None
        if loading is not None:
            loading.fail(error)
        for applied in [*(order.applied for order in self._orders), *self._until_measured]:
            applied.set_exception(error)
        self._orders.clear()
        self._until_measured.clear()

    def loading_step(self) -> Step | None:
        """The next piece of weights to copy to the device, if any."""
        if self._closed:
            return None
        if self._loading is None:
            self._loading = self._begin_loading()
        return self._load_piece if self._loading is not None else None

    @property
    def piece_ns(self) -> Nanoseconds:
        """How long the next piece of weights will take, to go by the last ones."""
        return self._piece_ns

    def measuring_step(self, profiles: Path | None) -> Step:
        """The next forward pass of the cost profile; the profile itself where it is on disk."""
        settings = self._settings
        model = model_name(self._config, self._spec.dtype)
        device = device_name(self._device, settings.threads)
        path = profiles / f"{model}.json" if profiles is not None else None
        if self._measuring is None:
            kept = kept_profile(path, model, device)
            if kept is not None:
                return lambda: self._use_profile(kept)
            self._measuring = measuring(self._runner, model, device, settings)
        pieces = self._measuring

        def measure() -> None:
            try:
                next(pieces)
            except StopIteration as end:
                if path is not None:
                    self._keep_profile(path, end.value)
                self._use_profile(end.value)

        return measure

    def _keep_profile(self, path: Path, profile: CostProfile) -> None:
        try:
            write_profile(path, profile)
        except OSError as error:
            _log.warning("the cost profile is not kept", path=str(path), reason=error.strerror)

    def _use_profile(self, profile: CostProfile) -> None:
        with self._changed:
            self._measuring = None
            self._cost = CostModel(profile)
            self._announce_weights()
            self._changed.notify_all()

    def _announce_weights(self) -> None:
        """Loading is over once the weights are in force and what they cost is known."""
        if self._cost is not None or self._asleep or self._aside:
            for applied in self._until_measured:
                applied.set_result(None)
            self._until_measured.clear()

    def set_aside(self) -> None:
        """Leave the device altogether: everything ends with ABORTED, weights and KV go."""
        with self._changed:
            self._aside = True
            self._outbox.extend(
                self._end(s.request, FinishReason.ABORTED, "the model makes way") for s in list(self._scheduler)
            )
            self._deactivate()

    def bring_back(self) -> None:
        """Undo `set_aside`, in one piece."""
        with self._changed:
            self._aside = False
        while (piece := self.loading_step()) is not None:
            piece()

    def retire(self) -> None:
        """Leave nothing behind: the half is closed."""
        self._deactivate()
        self._runner.unload()
        self._runner.space.close()
        self._retired = True
        self._changed.notify_all()

    def emit_outbox(self) -> None:
        chunks, self._outbox = self._outbox, []
        self._emit(chunks)

    def charge(self, account: Account) -> None:
        self._charge({account: 1.0})

    def charge_idle(self) -> None:
        account = self._idle_account
        if self._asleep:
            account = Account.ASLEEP
        elif self._loading is not None or self._until_measured:
            account = Account.LOADING
        self.charge(account)

    def iterate(self, iteration: Iteration) -> None:
        """Compute; outside of the lock."""
        assert self._cost is not None
        started_ns = time.monotonic_ns()
        self._iterate(iteration.work)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._cost.observe(iteration.shape, time.monotonic_ns() - started_ns)

    def fail(self, why: str) -> None:
        """End everything that is alive with an error, and give the memory back.

        A model whose costs could not be measured is not tried again until it gets other weights.
        """
        for request_id in list(self._alive):
            sequence = self._alive[request_id]
            if sequence is not None:
                self._outbox.append(self._end(sequence.request, FinishReason.ERROR, why))
        self.pool.forget()
        self.pool.trim()
        self._measuring = None
        if self._cost is None:
            self._version = None
            self._host = {}
            self.fail_waiting(RuntimeError(why))

    # The engine's own parts, as they differ here.

    def start(self, sink: ChunkSink) -> None:
        with self._changed:
            if self._sink is not None or self._closed:
                raise RuntimeError("the engine was started before")
            self._sink = sink
            self._changed.notify_all()

    def drive(self, thread: threading.Thread) -> None:
        """Name the thread that will ask for steps."""
        self._thread = thread

    def load_weights(self, version: int, tensors: Mapping[str, object], mode: WeightMode) -> None:
        # A copy of its own in host memory, from which the model is activated; made on the caller's time.
        super().load_weights(version, {name: self._kept(tensor) for name, tensor in tensors.items()}, mode)

    def _kept(self, tensor: object) -> object:
        if not isinstance(tensor, Tensor):
            return tensor
        return tensor.pin_memory() if self._device.type == "cuda" else tensor.clone()

    def _require_thread(self) -> None:
        if self._sink is None:
            raise RuntimeError("the engine is not started")
        super()._require_thread()

    def _begin_loading(self) -> _Loading | None:
        if self._orders and self._may_apply(self._orders[0]):
            return self._begin_order()
        if self._host and not self._runner.loaded and not (self._asleep or self._aside):
            pieces = self._runner.loading(self._host)
            return _Loading(Account.LOADING, pieces, lambda: None, self._activation_failed)
        return None

    def _begin_order(self) -> _Loading | None:
        order = self._orders.popleft()
        keep = order.mode is WeightMode.KEEP and self._version is not None

        def finish() -> None:
            self._host = order.tensors
            self._runner.scrub_cache(keep)
            self._scheduler.use_version(order.version, keep_kv=keep)
            self._version = order.version
            self._until_measured.append(order.applied)
            self._announce_weights()

        def fail(error: Exception) -> None:
            self._version = None
            order.applied.set_exception(error)

        if self._asleep or self._aside:
            # A deactivated model keeps nothing on the device: the new version waits in host memory.
            finish()
            return None
        return _Loading(Account.APPLYING, self._runner.loading(order.tensors), finish, fail)

    def _load_piece(self) -> None:
        assert self._loading is not None
        loading = self._loading
        with self._changed:
            self.charge(loading.account)
        started_ns = time.monotonic_ns()
        try:
            next(loading.pieces)
        except StopIteration:
            with self._changed:
                self._loading = None
                loading.finish()
        except Exception as error:
            _log.error("weights cannot be loaded", model=self.kind, reason=str(error))
            with self._changed:
                self._loading = None
                loading.fail(error)
        # The longest of the last ones: pieces differ in size.
        self._piece_ns = max(self._piece_ns * 9 // 10, time.monotonic_ns() - started_ns)

    def _activation_failed(self, error: Exception) -> None:
        self._version = None
        self._host = {}
        self.fail(f"the model cannot be activated: {error}")

    def _deactivate(self) -> None:
        self.charge(Account.ASLEEP)
        self.pool.forget()
        self.pool.trim()
        if self._loading is not None:
            # Weights that were on their way have reached host memory, which is enough now.
            loading, self._loading = self._loading, None
            loading.finish()
        self._announce_weights()
        if self._host:
            self._runner.unload()

    def end(self) -> None:
        """End every live request with ABORTED, soon. The thread is the executor's and goes on."""
        with self._changed:
            self._closed = True
            self._aborting.update(self._alive)
            self._changed.notify_all()


class ServingHalf(Half):
    """The serving model's engine; it remembers the times that its latency targets are about."""

    kind = "serving"

    def __init__(self, spec: ModelSpec, pool: PagePool, lending: Lending, changed: threading.Condition) -> None:
        super().__init__(spec, pool, lending, changed)
        self._arrivals_ns: dict[str, Nanoseconds] = {}
        self._last_tokens_ns: dict[str, Nanoseconds] = {}

    def submit(self, requests: Sequence[GenerateRequest]) -> None:
        now_ns = time.monotonic_ns()
        with self._changed:
            for request in requests:
                self._arrivals_ns.setdefault(request.request_id, now_ns)
            super().submit(requests)

    def next_iteration(self) -> Iteration | None:
        if not (self.active and self._cost and self.has_work):
            return None
        work = self._scheduler.plan_chunk(not self._orders, self._settings.prefill_chunk_tokens)
        return Iteration(work, shape_of(work)) if work else None

    def view(self, now_ns: Nanoseconds) -> ServingView:
        """What admission decides on."""
        if not (self.has_work and self._cost):
            return ServingView(now_ns=now_ns)
        cost, chunk = self._cost, self._settings.prefill_chunk_tokens
        decoding = [sequence for sequence in self._scheduler.running if _decodes(sequence)]
        prefilling = [sequence for sequence in self._scheduler if not _decodes(sequence)]
        decodes = Shape((), len(decoding), max((sequence.computed for sequence in decoding), default=0))
        first = [Prefill(s.computed, min(chunk, len(s.tokens) - s.computed)) for s in prefilling[:1]]
        return ServingView(
            now_ns=now_ns,
            queued=[
                QueuedPrefill(
                    self._arrivals_ns[sequence.request.request_id],
                    cost.prefill_ns(sequence.computed, len(sequence.tokens), chunk, decodes),
                )
                for sequence in prefilling
            ],
            last_tokens_ns=[self._last_tokens_ns.get(s.request.request_id, now_ns) for s in decoding],
            decode_ns=cost.iteration_ns(msgspec.structs.replace(decodes, prefills=first)),
        )

    def _commit(self, work: list[Work], token_ids: list[int], logprobs: list[float]) -> list[TokenChunk]:
        now_ns = time.monotonic_ns()
        for item in work:
            if item.samples:
                self._last_tokens_ns[item.sequence.request.request_id] = now_ns
        return super()._commit(work, token_ids, logprobs)

    def _forget(self, request_id: str) -> None:
        super()._forget(request_id)
        self._arrivals_ns.pop(request_id, None)
        self._last_tokens_ns.pop(request_id, None)


class RolloutHalf(Half):
    """The rollout model's engine: `RolloutEngine` for the ordinary worker agent.

    Turns that lose their memory end with ABORTED, turns that make no progress for `stall_timeout_ns` with
    STALLED; the scheduler routes both again. Its credits follow the memory budget.
    """

    kind = "rollout"

    def __init__(
        self,
        spec: ModelSpec,
        pool: PagePool,
        lending: Lending,
        changed: threading.Condition,
        stall_timeout_ns: Nanoseconds,
        budget_pages: Callable[[], int],
        on_version: Callable[[], None],
    ) -> None:
        super().__init__(spec, pool, lending, changed)
        self._stall_timeout_ns = stall_timeout_ns
        self._budget_pages = budget_pages
        self._on_version = on_version
        self._progress_ns: dict[str, Nanoseconds] = {}
        self.aborted_by_pressure = 0
        self.stalled = 0

    def close(self) -> None:
        """End every live request with ABORTED, and give the device back. Safe to call twice."""
        self.end()
        if threading.current_thread() is not self._thread:
            with self._changed:
                self._changed.wait_for(lambda: self._retired, CLOSE_TIMEOUT_S)

    def statistics(self) -> EngineStatistics:
        with self._changed:
            known = super().statistics()
            tokens = self._budget_pages() * self.layout.layer_slots
            credits = min(known.capacity_turns, tokens // self._settings.max_context_tokens)
            blocks = self._budget_pages() * self.layout.blocks_per_page
            return msgspec.structs.replace(
                known, capacity_turns=credits, kv_blocks_total=max(blocks, known.kv_blocks_used)
            )

    def next_iteration(self, allowance_ns: Nanoseconds, serving_rests: bool) -> Iteration | None:
        """The largest iteration that is profiled to take no longer than `allowance_ns`.

        While serving rests the smallest one there is may run in any case: a profile that is too gloomy could
        otherwise never be put right.
        """
        if allowance_ns <= 0 or not (self.active and self._cost and self.has_work) or self._asleep:
            return None
        chunk = self._affordable_chunk(allowance_ns, self._cost)
        if chunk is None:
            if not serving_rests:
                return None
            chunk = 0 if any(map(_decodes, self._scheduler.running)) else SMALLEST_CHUNK
        work = self._scheduler.plan_chunk(not self._orders, chunk)
        return Iteration(work, shape_of(work)) if work else None

    def end_stalled(self, now_ns: Nanoseconds) -> None:
        """Give up turns that got nothing for too long. Waiting for a place in the batch, for weights or for other
        turns to end before new weights is no stall: nobody else would be quicker."""
        if not self.active or self._cost is None or self._orders or self._asleep:
            self._progress_ns.clear()
            return
        full = len(self._scheduler.running) >= self._settings.max_batch
        for sequence in list(self._scheduler):
            request = sequence.request
            if full and sequence not in self._scheduler.running:
                self._progress_ns[request.request_id] = now_ns
            waited_ns = now_ns - self._progress_ns.setdefault(request.request_id, now_ns)
            if waited_ns > self._stall_timeout_ns:
                self.stalled += 1
                why = f"no progress for {waited_ns / 1e9:.1f} s: serving holds the device"
                self._outbox.append(self._end(request, FinishReason.STALLED, why))

    def give_back(self, most_pages: int) -> None:
        """Hold at most so many pages: cached ones go first, then the newest turns, whole."""
        self.pool.trim()
        self._drop_cached(most_pages)
        while self.pool.pages > most_pages and self._scheduler.running:
            newest = self._scheduler.running[-1]
            self._outbox.append(self._end(newest.request, FinishReason.ABORTED, "serving takes its memory back"))
            self.aborted_by_pressure += 1
            self._drop_cached(most_pages)

    def iterate(self, iteration: Iteration) -> None:
        super().iterate(iteration)
        now_ns = time.monotonic_ns()
        for item in iteration.work:
            if item.sequence.request.request_id in self._alive:
                self._progress_ns[item.sequence.request.request_id] = now_ns

    def _affordable_chunk(self, allowance_ns: Nanoseconds, cost: CostModel) -> int | None:
        """How many prompt tokens may go with the next decodes; None when not even these may run."""
        decoding = [sequence for sequence in self._scheduler.running if _decodes(sequence)]
        prefilling = [sequence for sequence in self._scheduler.running if not _decodes(sequence)]
        shape = Shape((), len(decoding), max((sequence.computed for sequence in decoding), default=0))
        if decoding and cost.iteration_ns(shape) > allowance_ns:
            return None
        if prefilling or self._scheduler.waiting:
            start = max((sequence.computed for sequence in prefilling), default=0)
            chunk = self._settings.prefill_chunk_tokens
            while chunk >= min(SMALLEST_CHUNK, self._settings.prefill_chunk_tokens):
                whole = msgspec.structs.replace(shape, prefills=(Prefill(start, chunk),))
                if cost.iteration_ns(whole) <= allowance_ns:
                    return chunk
                chunk //= 2
        return 0 if decoding else None

    def _drop_cached(self, most_pages: int) -> None:
        excess = self.pool.pages - most_pages
        if excess > 0:
            self.pool.drop_cached(excess)
            self.pool.trim()

    def _begin_order(self) -> _Loading | None:
        # A new version of the policy is a new step of the run.
        self._on_version()
        return super()._begin_order()

    def _forget(self, request_id: str) -> None:
        super()._forget(request_id)
        self._progress_ns.pop(request_id, None)


def shape_of(work: Sequence[Work]) -> Shape:
    """What an iteration costs, before it is committed."""
    prefills = [Prefill(item.sequence.computed, item.token_count) for item in work if not _decodes(item.sequence)]
    contexts = [item.sequence.computed for item in work if _decodes(item.sequence)]
    return Shape(prefills, len(contexts), max(contexts, default=0))


def _decodes(sequence: Running) -> bool:
    return len(sequence.tokens) - sequence.computed == 1 and sequence.computed >= sequence.prefill_end > 0
