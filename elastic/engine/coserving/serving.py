"""The serving engine of a shared device."""

import threading
import time
from collections import deque
from collections.abc import Sequence

import msgspec

from elastic.core.device_sharing import ArrivingPrefill, QueuedPrefill, ServingView
from elastic.core.types import Nanoseconds
from elastic.engine.base import GenerateRequest
from elastic.engine.coserving.profile import Prefill, Shape
from elastic.engine.coserving.shared_device_engine import Iteration, SharedDeviceEngine, decodes, shape_of
from elastic.engine.coserving.spec import ModelSpec, PageLending
from elastic.engine.kv import PagePool
from elastic.engine.torch.scheduler import Sequence as Running
from elastic.engine.torch.scheduler import Work

RECENT_REQUESTS = 100
"""The next request's prompt is taken to be no longer than theirs."""
BURST_KEPT = 0.97
"""What each request leaves of the memory of the longest queue; after a hundred a twentieth."""


class SharedServingEngine(SharedDeviceEngine):
    """The serving model's engine; it remembers the times that its latency targets are about."""

    kind = "serving"

    def __init__(self, spec: ModelSpec, pool: PagePool, lending: PageLending, changed: threading.Condition) -> None:
        super().__init__(spec, pool, lending, changed)
        self._arrivals_ns: dict[str, Nanoseconds] = {}
        self._last_tokens_ns: dict[str, Nanoseconds] = {}
        self._recent_prompts: deque[int] = deque(maxlen=RECENT_REQUESTS)
        self._burst_ns = 0
        """The prefills of the longest queue of late: the next burst is taken to be as large."""
        self._iterated_ns = time.monotonic_ns()
        """When the last iteration ended."""

    def submit(self, requests: Sequence[GenerateRequest]) -> None:
        now_ns = time.monotonic_ns()
        with self.changed:
            for request in requests:
                self._arrivals_ns.setdefault(request.request_id, now_ns)
                self._burst_ns = int(BURST_KEPT * self._burst_ns)
                self._recent_prompts.append(min(len(request.token_ids), self.settings.max_context_tokens))
            super().submit(requests)

    def next_iteration(self) -> Iteration | None:
        if not (self.active and self.costs and self.has_work):
            return None
        work = self._scheduler.plan_chunk(not self.orders, self.settings.prefill_chunk_tokens)
        return Iteration(work, shape_of(work)) if work else None

    def needed_since_ns(self) -> Nanoseconds:
        """Since when serving needs the pages: for a new request its arrival; for a running or preempted one the end
        of the last iteration."""
        placing = self._scheduler.placing
        if placing is None or placing.admissions:
            return self._iterated_ns
        return self._arrivals_ns[placing.request.request_id]

    def view(self, now_ns: Nanoseconds) -> ServingView:
        """The state of serving that an admission policy decides on."""
        if not self.costs:
            return ServingView(now_ns=now_ns)
        cost, chunk = self.costs, self.settings.prefill_chunk_tokens
        decoding = [sequence for sequence in self._scheduler.running if decodes(sequence)]
        prefilling = [sequence for sequence in self._scheduler if not decodes(sequence)]
        shared = Shape((), len(decoding), max((sequence.computed for sequence in decoding), default=0))
        pieces = self._next_prefills(prefilling)
        queued = [
            QueuedPrefill(
                self._arrivals_ns[sequence.request.request_id],
                cost.prefill_ns(sequence.computed, len(sequence.tokens), chunk, shared),
            )
            for sequence in prefilling
        ]
        longest_ns = cost.prefill_ns(0, max(self._recent_prompts, default=0), chunk, shared)
        self._burst_ns = max(self._burst_ns, longest_ns, sum(request.cost_ns for request in queued))
        if left := self._steps_until_a_place(decoding):
            first = -len(self._scheduler.waiting)
            waited_ns = left * cost.iteration_ns(shared)
            queued[first] = msgspec.structs.replace(queued[first], cost_ns=queued[first].cost_ns + waited_ns)
        room = chunk - sum(piece.count for piece in pieces)
        return ServingView(
            now_ns=now_ns,
            queued=queued,
            last_tokens_ns=[self._last_tokens_ns.get(s.request.request_id, now_ns) for s in decoding],
            decode_ns=cost.iteration_ns(msgspec.structs.replace(shared, prefills=pieces)),
            arriving=ArrivingPrefill(
                cost_ns=self._burst_ns, next_ns=min(self._burst_ns, cost.prefill_ns(0, room, chunk))
            ),
        )

    def _steps_until_a_place(self, decoding: Sequence[Running]) -> int:
        """Decode steps until a request ends whose place in the batch another waits for; 0 where none does."""
        if not self._scheduler.waiting or len(self._scheduler.running) < self.settings.max_batch:
            return 0
        return min((sequence.request.sampling.max_new_tokens - sequence.position for sequence in decoding), default=0)

    def _next_prefills(self, prefilling: Sequence[Running]) -> list[Prefill]:
        """The prompt tokens of these sequences that fit into one chunk."""
        pieces: list[Prefill] = []
        left = self.settings.prefill_chunk_tokens
        for sequence in prefilling:
            if not left:
                break
            pieces.append(Prefill(sequence.computed, min(left, len(sequence.tokens) - sequence.computed)))
            left -= pieces[-1].count
        return pieces

    def _committed(self, work: Sequence[Work]) -> None:
        self._iterated_ns = time.monotonic_ns()
        for item in work:
            if item.samples:
                self._last_tokens_ns[item.sequence.request.request_id] = self._iterated_ns

    def _forgotten(self, request_id: str) -> None:
        self._arrivals_ns.pop(request_id, None)
        self._last_tokens_ns.pop(request_id, None)
