"""What the two engines of a shared device have in common: steps for the executor's thread, and KV on shared pages."""

import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future
from math import ceil
from pathlib import Path
from typing import NamedTuple

import structlog
import torch
from torch import Tensor

from elastic.config import EngineConfig
from elastic.core.types import NS_PER_S, Account, FinishReason, Nanoseconds
from elastic.engine.base import ChunkSink, TokenChunk
from elastic.engine.coserving.blocks import LeasedBlocks
from elastic.engine.coserving.profile import CostModel, CostProfile, Prefill, Shape, write_profile
from elastic.engine.coserving.profiler import device_name, kept_profile, measuring, model_name, profile_path
from elastic.engine.coserving.runner import PagedRunner
from elastic.engine.coserving.spec import ModelSpec, PageLending
from elastic.engine.kv import PagePool
from elastic.engine.torch.controls import ControlledEngine
from elastic.engine.torch.iterations import IterationRunner
from elastic.engine.torch.pacing import Costs
from elastic.engine.torch.requests import RequestTable
from elastic.engine.torch.runner import device_named
from elastic.engine.torch.scheduler import BatchScheduler, Work, load_of
from elastic.engine.torch.scheduler import Sequence as Running

_log = structlog.get_logger(__name__)
Step = Callable[[], None]
_EXHAUSTED = object()


class Iteration(NamedTuple):
    work: list[Work]
    shape: Shape


class Loading(NamedTuple):
    """Weights on their way into the device, piece by piece; `finish` puts them in force."""

    account: Account
    pieces: Iterator[None]
    finish: Callable[[], None]
    fail: Callable[[Exception], None]


class _PagedScheduler(BatchScheduler):
    def __init__(self, settings: EngineConfig, pool: LeasedBlocks) -> None:
        super().__init__(settings)
        self.pool: LeasedBlocks = pool
        self.placing: Running | None = None
        """The waiting sequence that gets its first blocks just now."""

    def plan_chunk(self, admit_new: bool, chunk_tokens: int) -> list[Work]:
        self._chunk_tokens = chunk_tokens
        return self.plan(admit_new)

    def _place(self, sequence: Running) -> bool:
        self.placing = sequence
        try:
            return super()._place(sequence)
        finally:
            self.placing = None


class SharedDeviceEngine(ControlledEngine):
    """One model's engine: `elastic.engine.base.RolloutEngine`. Its thread is the executor's, which asks it for steps.

    Raises `ValueError` where a page of the pool does not suit the model's KV.
    """

    kind: str
    runner: PagedRunner

    def __init__(self, spec: ModelSpec, pool: PagePool, lending: PageLending, changed: threading.Condition) -> None:
        self.layout = spec.layout(pool.page_bytes)
        # The executor sees to it that one sequence of `max_context_tokens` fits.
        blocks = max(pool.total * self.layout.blocks_per_page, spec.settings.max_context_tokens)
        settings = spec.settings.model_copy(update={"kv_blocks": blocks})
        device = device_named(settings.device)
        runner = spec.runner(
            spec.config, device, spec.dtype, settings.max_context_tokens, self.layout, pool.space(), pool.total
        )
        self.pool = LeasedBlocks(
            runner.space,
            self.layout,
            pool.total,
            lending.lease_ns,
            time.monotonic_ns,
            lending.growth,
            lending.growing,
            runner.place_page,
        )
        self._scheduler = _PagedScheduler(settings, self.pool)
        table = RequestTable(
            self._scheduler, spec.config.vocab_size, settings, committed=self._committed, forgotten=self._forgotten
        )
        super().__init__(settings, device, runner, table, changed)
        self._iterations = IterationRunner(self, profiled=self._profiled_costs)
        self._spec = spec
        self.costs: CostModel | None = None
        """By iteration. Nothing is computed before they are known."""
        self._measuring: Generator[None, None, CostProfile] | None = None
        self._outbox: list[TokenChunk] = []
        self._loading: Loading | None = None
        self._host: dict[str, Tensor] = {}
        self.aside = False
        self._retired = False
        self._until_measured: list[Future[None]] = []
        self.piece_ns: Nanoseconds = 0
        """How long the next piece of weights, or forward pass of the profile, will take, to go by the last ones."""
        self.slowest_piece_ns = 0
        """How long the slowest piece of weights so far took."""

    # Called by anybody.

    def start(self, sink: ChunkSink) -> None:
        with self.changed:
            if self.sink is not None or self.closed:
                raise RuntimeError("the engine was started before")
            self.sink = sink
            self.changed.notify_all()

    # Called by the executor, on its thread and under its lock, except for the steps that are returned.

    @property
    def active(self) -> bool:
        """Whether the device holds the weights, all of one version."""
        return self.table.version is not None and self.runner.loaded and self._loading is None

    @property
    def has_work(self) -> bool:
        return bool(self._scheduler.running or self._scheduler.waiting)

    def housekeeping(self) -> Step | None:
        """Work that does not occupy the device: handing over chunks, and falling asleep."""
        if self.sink is None:
            return None
        chunks, self._outbox = self._outbox + self.table.take(), []
        if chunks:
            return lambda: self.emit(chunks)
        if self.closed:
            self.fail_waiting(RuntimeError("the engine is closed"))
        if self.asleep and not self.resting:
            self._deactivate()
            self.rest()
        return None

    def fail_waiting(self, error: Exception) -> None:
        """Fails the load that is waited for."""
        loading, self._loading = self._loading, None
        if loading is not None:
            loading.fail(error)
        self.fail_orders(error)
        while self._until_measured:
            self._until_measured.pop().set_exception(error)

    def loading_step(self) -> Step | None:
        """The next piece of weights to copy to the device, if any."""
        if self.closed:
            return None
        if self._loading is None:
            self._loading = self._begin_loading()
        return self._load_piece if self._loading is not None else None

    def expect_pieces_like(self, other: "SharedDeviceEngine") -> None:
        """Take the pieces of this model's weights to be as slow, for their size, as the slowest of another one's were:
        none of its own has been measured yet."""
        size_ratio = self.runner.largest_piece_bytes / other.runner.largest_piece_bytes
        self.piece_ns = ceil(other.slowest_piece_ns * size_ratio)

    def measuring_step(self, profiles: Path | None) -> Step:
        """The next forward pass of the cost profile; the profile itself where it is on disk."""
        model = model_name(self._spec.config, self._spec.dtype)
        device = device_name(self.device, self.settings)
        path = profile_path(profiles, model, device) if profiles is not None else None
        if self._measuring is None:
            kept = kept_profile(path, model, device, self.settings)
            if kept is not None:
                return lambda: self._use_profile(kept)
            self._measuring = measuring(self.runner, model, device, self.settings)
        pieces = self._measuring

        def measure() -> None:
            started_ns = time.monotonic_ns()
            with self.changed:
                self.charge(Account.LOADING)
            try:
                next(pieces)
            except StopIteration as end:
                if path is not None:
                    self._keep_profile(path, end.value)
                self._use_profile(end.value)
            self._note_piece(started_ns)

        return measure

    def set_aside(self) -> None:
        """Leave the device altogether: everything ends with ABORTED, weights and KV go."""
        with self.changed:
            self.aside = True
            self.end_early(list(self._scheduler), FinishReason.ABORTED, "the model makes way")
            self._deactivate()

    def bring_back(self) -> None:
        """Undo `set_aside`, in one piece."""
        with self.changed:
            self.aside = False
        while (piece := self.loading_step()) is not None:
            piece()

    def retire(self) -> None:
        """Leave nothing behind: the engine is closed."""
        self._deactivate()
        self.runner.unload()
        self.runner.space.close()
        self._retired = True
        self.changed.notify_all()

    def emit_outbox(self) -> None:
        chunks, self._outbox = self._outbox, []
        self.emit(chunks)

    def charge_idle(self) -> None:
        account = self.idle_account
        if self.asleep:
            account = Account.ASLEEP
        elif self._loading is not None or self._until_measured:
            account = Account.LOADING
        self.charge(account)

    def iterate(self, iteration: Iteration) -> None:
        """Compute; outside of the lock."""
        assert self.costs is not None
        started_ns = time.monotonic_ns()
        self._iterations.run(iteration.work)
        self.costs.observe(iteration.shape, time.monotonic_ns() - started_ns)

    def end_early(self, sequences: Iterable[Running], finish: FinishReason, why: str) -> None:
        self._outbox.extend(self.table.end(sequence.request, finish, why) for sequence in sequences)

    def fail(self, why: str) -> None:
        """End everything that is alive with an error, and give the memory back.

        A model whose costs could not be measured is not tried again until it gets other weights.
        """
        # All last chunks come before any book-keeping, which may be what has failed.
        self._outbox.extend(self.table.last_chunks(FinishReason.ERROR, why))
        self.table.forget_all()
        self.pool.forget()
        self.pool.trim()
        self._measuring = None
        if self.costs is None:
            self._drop_weights()
            self.fail_waiting(RuntimeError(why))

    def abandon(self, why: str) -> None:
        """Leave the device without the book-keeping, where `fail` has failed too."""
        self.table.abandon()
        self.closed = self._retired = True
        self.emit_outbox()
        self._drop_weights()
        self.fail_waiting(RuntimeError(why))
        self.runner.space.close()
        self.changed.notify_all()

    # What the two engines differ in.

    def _committed(self, work: Sequence[Work]) -> None:
        """An iteration has been computed; its chunks come next."""

    def _forgotten(self, request_id: str) -> None:
        """A request is over."""

    def _kept(self, tensor: object) -> object:
        # In host memory, from which the model is activated; made on the caller's time. What of it the device lacks is
        # brought there piece by piece, between iterations.
        if not isinstance(tensor, Tensor):
            return tensor
        return torch.empty_like(tensor, pin_memory=self.device.type == "cuda").copy_(tensor)

    def _keep_profile(self, path: Path, profile: CostProfile) -> None:
        try:
            write_profile(path, profile)
        except OSError as error:
            _log.warning("the cost profile is not kept", path=str(path), reason=error.strerror)

    def _use_profile(self, profile: CostProfile) -> None:
        with self.changed:
            self._measuring = None
            self.costs = CostModel(profile)
            self._announce_weights()
            self.changed.notify_all()

    def _announce_weights(self) -> None:
        """Loading is over once the weights are in force and what they cost is known."""
        if self.costs is not None or self.asleep or self.aside:
            for applied in self._until_measured:
                applied.set_result(None)
            self._until_measured.clear()

    def _profiled_costs(self, work: list[Work]) -> Costs:
        assert self.costs is not None
        load = load_of(work)
        prefill_s, decode_s = (part_ns / NS_PER_S for part_ns in self.costs.parts_ns(shape_of(work)))
        again = load.recompute / max(1, load.prefill + load.recompute)
        return Costs(decode=decode_s, prefill=(1 - again) * prefill_s, recompute=again * prefill_s)

    def _begin_loading(self) -> Loading | None:
        if self.may_apply:
            return self._begin_order()
        if self._host and not self.runner.loaded and not (self.asleep or self.aside):
            pieces = self.runner.loading(self._host)
            return Loading(Account.LOADING, pieces, lambda: None, self._activation_failed)
        return None

    def _begin_order(self) -> Loading | None:
        order = self.orders.popleft()
        keep = self.keeps_kv(order)

        def finish() -> None:
            self._host = order.tensors
            self.runner.scrub_cache(keep)
            self.table.use_version(order.version, keep, order.signed_by)
            self._until_measured.append(order.applied)
            self._announce_weights()

        def fail(error: Exception) -> None:
            self._drop_weights()
            order.applied.set_exception(error)

        if self.asleep or self.aside:
            # A deactivated model keeps nothing on the device: the new version waits in host memory.
            finish()
            return None
        if order.patch is not None and self.fits(order.patch) and self.runner.loaded:
            pieces = self.runner.applying(order.patch)
        else:
            pieces = self.runner.loading(order.tensors)
        return Loading(Account.APPLYING, pieces, finish, fail)

    def _load_piece(self) -> None:
        assert self._loading is not None
        loading = self._loading
        with self.changed:
            self.charge(loading.account)
        started_ns = time.monotonic_ns()
        try:
            if next(loading.pieces, _EXHAUSTED) is _EXHAUSTED:
                with self.changed:
                    self._loading = None
                    loading.finish()
        except Exception as error:
            _log.error("weights cannot be loaded", model=self.kind, reason=str(error))
            with self.changed:
                self._loading = None
                loading.fail(error)
        self.slowest_piece_ns = max(self.slowest_piece_ns, self._note_piece(started_ns))

    def _note_piece(self, started_ns: Nanoseconds) -> Nanoseconds:
        """How long the piece took."""
        took_ns = time.monotonic_ns() - started_ns
        self.piece_ns = max(self.piece_ns * 9 // 10, took_ns)  # The longest of the last ones: they differ in size.
        self.pieces_applied += 1
        return took_ns

    def _activation_failed(self, error: Exception) -> None:
        self._drop_weights()
        self.fail(f"the model cannot be activated: {error}")

    def _drop_weights(self) -> None:
        """Weights of which only a part has come to the device are of no use, but their memory is."""
        self.table.version = None
        self._host = {}
        self.runner.unload()

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
            self.runner.unload()


def shape_of(work: Sequence[Work]) -> Shape:
    """The shape of an iteration that is not committed yet: from it its cost is estimated."""
    prefills = [Prefill(item.sequence.computed, item.token_count) for item in work if not decodes(item.sequence)]
    contexts = [item.sequence.computed for item in work if decodes(item.sequence)]
    return Shape(prefills, len(contexts), max(contexts, default=0))


def decodes(sequence: Running) -> bool:
    """Whether all of its prompt is in the cache."""
    return len(sequence.tokens) - sequence.computed == 1 and sequence.computed >= sequence.prefill_end > 0
