"""An engine between its callers and the thread that computes. Callers leave wishes (requests, aborts, weights, sleep)
under a lock; that thread takes them between iterations."""

import threading
import time
import traceback
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import NamedTuple

import structlog
import torch
from msgspec import UNSET
from torch import Tensor

from elastic.config import EngineConfig
from elastic.core.types import Account, Capabilities, WeightMode
from elastic.engine.base import BF16_NOISE, ChunkSink, EngineStatistics, GenerateRequest, TokenChunk
from elastic.engine.meter import AccountMeter
from elastic.engine.torch.requests import RequestTable
from elastic.engine.torch.runner import ModelRunner, Patch
from elastic.weights.client import WeightsClient
from elastic.weights.errors import VersionSuperseded
from elastic.weights.source import PullReport, RelaySource, TensorSource, WeightsSource

_log = structlog.get_logger(__name__)


class WeightsOrder(NamedTuple):
    """Verified weights that wait to be applied, with the call that waits for them."""

    version: int
    tensors: dict[str, Tensor]
    mode: WeightMode
    applied: Future[None]
    patch: Patch | None = None
    """The change from the weights of `patch.base` to these."""
    lasts: bool = False
    """The tensors are in host memory, and stay there as they are until the next version is in force."""
    signed_by: str = ""
    """The key of the trainer that has published them; empty for tensors of this process."""


class SwitchOrder(NamedTuple):
    """The device is to be left, or taken again; `done` gets the bytes that came to it, or left."""

    park: bool
    done: Future[int]


class ControlledEngine:
    """What `elastic.engine.base.RolloutEngine` asks of the engines that compute in this process; `changed` is the lock.

    Requests wait until the first `load_version`, and while the engine sleeps. A request whose id is still alive is the
    same one again: it is joined, not started twice. `load_version` and `sleep` wait for the thread that computes, so
    the sink must not call them. A subclass sets `sink` and `thread`, and reports `resting` once it sleeps.
    """

    def __init__(
        self,
        settings: EngineConfig,
        device: torch.device,
        runner: ModelRunner,
        table: RequestTable,
        changed: threading.Condition,
    ) -> None:
        self.settings = settings
        self.device = device
        self.runner = runner
        self.changed = changed
        self.table = table
        self.meter = AccountMeter(time.monotonic_ns(), Account.IDLE)
        self.weights = WeightsClient()
        self.sink: ChunkSink | None = None
        self.thread: threading.Thread | None = None
        self.orders: deque[WeightsOrder] = deque()
        self.switches: deque[SwitchOrder] = deque()
        self.parked = False
        self.asleep = False
        self.resting = False
        self.closed = False
        self.idle_account = Account.IDLE
        self.iterations = 0
        self.paced_iterations = 0
        """Those whose time was modelled."""
        self.late_iterations = 0
        """Those of them that took longer."""
        self.pieces_applied = 0
        self.capabilities = Capabilities(
            engine="torch",
            # Several threads cut element-wise work at places that depend on its size.
            replayable_sampling=device.type == "cpu" and settings.threads == 1,
            max_context_tokens=settings.max_context_tokens,
            device=str(device),
            tflops=settings.tflops,
            memory_gb_per_s=settings.memory_gb_per_s,
            max_batch=settings.max_batch,
            logprob_noise=UNSET if device.type == "cpu" else BF16_NOISE,
        )

    # On callers' threads.

    def submit(self, requests: Sequence[GenerateRequest]) -> None:
        with self.changed:
            self._refuse_closed()
            self.table.add(requests)
            self.changed.notify_all()

    def abort(self, request_ids: Sequence[str]) -> None:
        """In force at once: of each request that is still alive, the next chunk is the last."""
        with self.changed:
            self.table.abort(request_ids)
            self.changed.notify_all()

    def prefetch(self, source: RelaySource, timeout_s: float) -> PullReport:
        return self.weights.stage(source, timeout_s)

    def audit(self) -> bool:
        return self.weights.audit()

    def load_version(self, source: WeightsSource, mode: WeightMode) -> float:
        """Order a version and wait until it is applied."""
        begun_s = time.monotonic()
        try:
            weights = source if isinstance(source, TensorSource) else self.weights.apply(source)
        except VersionSuperseded:
            # What was staged goes as the engine is closed, which is what the caller is to hear.
            with self.changed:
                self._refuse_closed()
            raise
        written_s = time.monotonic() - begun_s
        # Everything that can be done beforehand is done on the caller's time, while the engine goes on.
        tensors = {name: self._kept(tensor) for name, tensor in weights.tensors.items()}
        verified, changes = self.runner.verify(tensors), weights.changes
        applies = changes is not None and changes.base == self.table.version and not self.parked
        patch = self.runner.patch_of(changes) if changes is not None and applies else None
        pulled = isinstance(source, RelaySource)
        signed_by = source.publisher if pulled else ""
        order = WeightsOrder(weights.version, verified, mode, Future(), patch, pulled, signed_by)
        with self.changed:
            self._require_thread()
            self._refuse_closed()
            self.orders.append(order)
            self.changed.notify_all()
        order.applied.result()
        return written_s

    def sleep(self) -> None:
        with self.changed:
            self._require_thread()
            self._refuse_closed()
            self.asleep = True
            self.resting = False
            self.table.abort_all()
            self.changed.notify_all()
            self.changed.wait_for(lambda: self.resting or self.closed or not self.asleep)

    def wake(self) -> None:
        with self.changed:
            self.asleep = False
            self.changed.notify_all()

    def switch(self, park: bool) -> int:
        """Leave the device, or take it again, and wait until that is done; returns the bytes that it took.

        To leave it everything that runs is aborted. Raises what failed.
        """
        order = SwitchOrder(park, Future())
        with self.changed:
            self._require_thread()
            self._refuse_closed()
            if park:
                self.table.abort_all()
            self.switches.append(order)
            self.changed.notify_all()
        return order.done.result()

    def set_idle_account(self, account: Account) -> None:
        with self.changed:
            self.idle_account = account
            self.changed.notify_all()
            if self.thread is None:
                self.charge(account)

    def statistics(self) -> EngineStatistics:
        with self.changed:
            scheduler, settings = self.table.scheduler, self.settings
            return EngineStatistics(
                pending=self.table.pending,
                executing=len(scheduler.running),
                capacity_turns=0 if self.rests or self.closed else settings.max_batch + settings.max_pending,
                kv_blocks_used=scheduler.pool.used,
                kv_blocks_total=scheduler.pool.total,
                prefix_hit_tokens=scheduler.prefix_hit_tokens,
                prompt_tokens=scheduler.prompt_tokens,
                decoded_tokens=self.table.decoded_tokens,
                progress=self.iterations,
                accounts_ns=self.meter.read(time.monotonic_ns()),
                weights_version=self.table.version,
                asleep=self.asleep,
                waits_to_apply=bool(self.orders) and not self.may_apply,
                load_progress=self.pieces_applied,
                received_bytes=self.weights.received_bytes,
                paced_iterations=self.paced_iterations,
                late_iterations=self.late_iterations,
            )

    def end(self) -> None:
        """End every live request with ABORTED, soon."""
        with self.changed:
            self.closed = True
            self.table.abort_all()
            self.changed.notify_all()

    @property
    def rests(self) -> bool:
        """Whether nothing is to be generated."""
        return self.asleep or self.parked or bool(self.switches)

    # On the thread that computes.

    @property
    def may_apply(self) -> bool:
        """Whether the next order of weights, if there is one, is due."""
        return bool(self.orders) and (
            self.orders[0].mode is not WeightMode.FINISH or not self.table.scheduler.has_started
        )

    def keeps_kv(self, order: WeightsOrder) -> bool:
        return order.mode is WeightMode.KEEP and self.table.version is not None

    def fits(self, patch: Patch | None) -> bool:
        """Whether `patch` changes the version that is served."""
        return patch is not None and patch.base == self.table.version

    def fail_orders(self, error: Exception) -> None:
        while self.orders:
            self.orders.popleft().applied.set_exception(error)
        while self.switches:
            self.switches.popleft().done.set_exception(error)

    def rest(self) -> None:
        """Marks the engine as asleep, and lets the caller of `sleep` go on."""
        self.resting = True
        self.changed.notify_all()

    def charge(self, account: Account) -> None:
        """From now on time is spent on this."""
        self.share_out({account: 1.0})

    def share_out(self, costs: Mapping[Account, float]) -> None:
        """From now on time is shared out in proportion to `costs`."""
        self.meter.switch(time.monotonic_ns(), costs)

    def emit(self, chunks: Sequence[TokenChunk]) -> None:
        assert self.sink is not None
        if not chunks:
            return
        try:
            self.sink(chunks)
        except Exception:
            _log.error("the sink of an engine's chunks failed", trace=traceback.format_exc())

    def _kept(self, tensor: object) -> object:
        """The engine's own copy of a tensor, where it needs one."""
        return tensor

    def _refuse_closed(self) -> None:
        if self.closed:
            raise RuntimeError("the engine is closed")

    def _require_thread(self) -> None:
        if self.thread is None or self.sink is None:
            raise RuntimeError("the engine is not started")
        if self.thread is threading.current_thread():
            raise RuntimeError("the engine's own thread cannot wait for itself")
