"""The rollout engine of a shared device."""

import threading
import time
from collections.abc import Callable

import msgspec

from elastic.core.types import FinishReason, Nanoseconds
from elastic.engine.base import EngineStatistics
from elastic.engine.coserving.profile import CostModel, Prefill, Shape
from elastic.engine.coserving.shared_device_engine import Iteration, Loading, SharedDeviceEngine, decodes, shape_of
from elastic.engine.coserving.spec import ModelSpec, PageLending
from elastic.engine.kv import PagePool
from elastic.engine.torch.engine import CLOSE_TIMEOUT_S

SMALLEST_CHUNK = 16
"""Rollout prefill is not cut into pieces that are mostly overhead."""


class SharedRolloutEngine(SharedDeviceEngine):
    """The rollout model's engine: `RolloutEngine` for the ordinary worker agent.

    Turns that lose their memory end with ABORTED, turns that make no progress for `stall_timeout_ns` with
    STALLED; the scheduler routes both again. Its credits follow the memory budget.
    """

    kind = "rollout"

    def __init__(
        self,
        spec: ModelSpec,
        pool: PagePool,
        lending: PageLending,
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

    def close(self) -> None:
        """End every live request with ABORTED, and give the device back. Safe to call twice."""
        self.end()
        if threading.current_thread() is not self.thread:
            with self.changed:
                self.changed.wait_for(lambda: self._retired, CLOSE_TIMEOUT_S)

    def statistics(self) -> EngineStatistics:
        with self.changed:
            known = super().statistics()
            tokens = self._budget_pages() * self.layout.layer_slots
            credits = min(known.capacity_turns, tokens // self.settings.max_context_tokens)
            blocks = self._budget_pages() * self.layout.blocks_per_page
            return msgspec.structs.replace(
                known, capacity_turns=credits, kv_blocks_total=max(blocks, known.kv_blocks_used)
            )

    def next_iteration(self, allowance_ns: Nanoseconds, tries: bool) -> Iteration | None:
        """The largest iteration that is profiled to take no longer than `allowance_ns`.

        If that `tries`, the smallest one there is may run in any case: a profile that is too gloomy could otherwise
        never be put right.
        """
        if not (self.active and self.costs and self.has_work) or self.asleep:
            return None
        chunk = self._affordable_chunk(allowance_ns, self.costs)
        if chunk is None:
            if not tries:
                return None
            chunk = 0 if any(map(decodes, self._scheduler.running)) else SMALLEST_CHUNK
        work = self._scheduler.plan_chunk(not self.orders, chunk)
        return Iteration(work, shape_of(work)) if work else None

    def end_stalled(self, now_ns: Nanoseconds) -> None:
        """Give up turns that have made no progress for too long. Waiting for a place in the batch, for other turns'
        prompts, for weights, or for turns to end before new weights, is no stall: no other worker would be quicker."""
        if not (self.active or self._loading) or self.costs is None or self.asleep:
            self._progress_ns.clear()
            return
        full = len(self._scheduler.running) >= self.settings.max_batch
        for sequence in list(self._scheduler):
            request = sequence.request
            if sequence not in self._scheduler.running and (full or (self.orders and not sequence.admissions)):
                self._progress_ns[request.request_id] = now_ns
            waited_ns = now_ns - self._progress_ns.setdefault(request.request_id, now_ns)
            if waited_ns > self._stall_timeout_ns:
                why = f"no progress for {waited_ns / 1e9:.1f} s: serving holds the device"
                self.end_early([sequence], FinishReason.STALLED, why)

    def tidy(self) -> None:
        """End leases that are over, and give back every page that holds nothing."""
        self.pool.expire()
        self.pool.trim()

    def give_back(self, most_pages: int) -> None:
        """Hold at most so many pages: cached ones go first, then the newest turns, whole."""
        self.pool.trim()
        self._drop_cached(most_pages)
        while self.pool.pages > most_pages and self._scheduler.running:
            self.end_early(self._scheduler.running[-1:], FinishReason.ABORTED, "serving takes its memory back")
            self._drop_cached(most_pages)

    def iterate(self, iteration: Iteration) -> None:
        prefills = any(not decodes(item.sequence) for item in iteration.work)
        super().iterate(iteration)
        now_ns = time.monotonic_ns()
        progressed = [item.sequence for item in iteration.work]
        if prefills:
            # Prompts are read one after the other: who waits behind another's is not held up by serving.
            progressed += [sequence for sequence in self._scheduler if not decodes(sequence)]
        for sequence in progressed:
            if sequence.request.request_id in self.table:
                self._progress_ns[sequence.request.request_id] = now_ns

    def _load_piece(self) -> None:
        super()._load_piece()
        # Turns that wait for weights progress as these do.
        self._progress_ns = dict.fromkeys(self._progress_ns, time.monotonic_ns())

    def _affordable_chunk(self, allowance_ns: Nanoseconds, cost: CostModel) -> int | None:
        """How many prompt tokens may go with the next decodes; None when not even these may run."""
        decoding = [sequence for sequence in self._scheduler.running if decodes(sequence)]
        prefilling = [sequence for sequence in self._scheduler.running if not decodes(sequence)]
        shape = Shape((), len(decoding), max((sequence.computed for sequence in decoding), default=0))
        if decoding and cost.iteration_ns(shape) > allowance_ns:
            return None
        if prefilling or self._scheduler.waiting:
            chunk = self.settings.prefill_chunk_tokens
            # All but the end of what waits may be in the cache, which the end has to attend to.
            starts = [len(sequence.tokens) - chunk for sequence in self._scheduler.waiting]
            start = max(0, *starts, *(sequence.computed for sequence in prefilling))
            while chunk >= min(SMALLEST_CHUNK, self.settings.prefill_chunk_tokens):
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

    def _begin_order(self) -> Loading | None:
        # A new version of the policy is a new step of the run.
        self._on_version()
        return super()._begin_order()

    def _forgotten(self, request_id: str) -> None:
        self._progress_ns.pop(request_id, None)
