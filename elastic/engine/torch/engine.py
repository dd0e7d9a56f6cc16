"""The embedded rollout engine: one thread that plans, computes, paces and reports an iteration at a time.

`_next_step` decides under the lock what to do next, and the step itself runs without it.
"""

import threading
import time
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from elastic.config import EngineConfig
from elastic.core.types import Account, WeightMode
from elastic.engine.base import ChunkSink, DeviceShare
from elastic.engine.model.config import Qwen3Config
from elastic.engine.torch.controls import ControlledEngine, SwitchOrder, WeightsOrder
from elastic.engine.torch.iterations import IterationRunner
from elastic.engine.torch.requests import RequestTable
from elastic.engine.torch.runner import ModelRunner, Runner, device_named
from elastic.engine.torch.scheduler import BatchScheduler, Work
from elastic.system.parking import Switch
from elastic.system.parking.tensors import empty_caches, held_bytes
from elastic.weights.source import WeightsSource

CLOSE_TIMEOUT_S = 10.0

_Step = Callable[[], None]


class TorchEngine(ControlledEngine):
    """`elastic.engine.base.RolloutEngine`, and `Parkable`, on one device, in plain torch.

    On one CPU thread the engine is replayable: a turn that is cut at any token and continued elsewhere gives
    bit-identical tokens and log-probabilities. A temperature of zero decodes greedily.

    With a `share` the engine borrows its device, and asks for it before each iteration. What computes there is made by
    `make_runner`.

    Raises `ValueError` when the KV cache cannot hold one sequence of `max_context_tokens`, or the device is not there.
    """

    def __init__(
        self,
        config: Qwen3Config,
        settings: EngineConfig,
        share: DeviceShare | None = None,
        make_runner: Callable[..., ModelRunner] = Runner,
    ) -> None:
        kv_tokens = settings.kv_blocks * settings.kv_block_tokens
        if kv_tokens < settings.max_context_tokens:
            raise ValueError(
                f"engine.kv_blocks: {settings.kv_blocks} blocks of {settings.kv_block_tokens} tokens hold less than "
                f"max_context_tokens={settings.max_context_tokens}"
            )
        device = device_named(settings.device)
        runner = make_runner(config, device, settings.max_context_tokens, settings.kv_blocks, settings.kv_block_tokens)
        self._scheduler = BatchScheduler(settings)
        table = RequestTable(self._scheduler, config.vocab_size, settings)
        super().__init__(settings, device, runner, table, threading.Condition())
        self._share = share
        self._host: Mapping[str, Tensor] = {}
        """The weights in force, in host memory, where they are kept there."""
        self._keeps_all = False
        self._changing = threading.Lock()
        """Held by who changes the host's copy of the weights or takes them from there to the device."""
        self._iterations = IterationRunner(self)

    def start(self, sink: ChunkSink) -> None:
        if self.thread is not None or self.closed:
            raise RuntimeError("the engine was started before")
        self.sink = sink
        self.thread = threading.Thread(target=self._run, name="torch-engine", daemon=True)
        self.thread.start()

    def load_version(self, source: WeightsSource, mode: WeightMode) -> float:
        with self._changing:
            return super().load_version(source, mode)

    def park(self) -> Switch:
        begun_s = time.monotonic()
        with self.changed:
            self.table.abort_all()
            self.changed.notify_all()
        with self._changing:
            size_bytes = 0 if self.parked else self.switch(park=True)
        rest_bytes = max(self.runner.rest_bytes, held_bytes(self.device))
        return Switch(time.monotonic() - begun_s, size_bytes, rest_bytes)

    def resume(self) -> Switch:
        begun_s = time.monotonic()
        with self._changing:
            size_bytes = self.switch(park=False) if self.parked else 0
        return Switch(time.monotonic() - begun_s, size_bytes)

    def close(self) -> None:
        """End every live request with ABORTED, and the thread. Safe to call twice."""
        self.end()
        thread = self.thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(CLOSE_TIMEOUT_S)
        self.weights.close()

    # The engine's thread.

    def _run(self) -> None:
        torch.set_num_threads(self.settings.threads)
        with torch.inference_mode():
            while (step := self._next_step()) is not None:
                step()
        self.runner.free_cache()
        self._host = {}

    def _next_step(self) -> _Step | None:
        """Waits for work, charges the wait to its account, and returns the work; None at the end."""
        with self.changed:
            while True:
                if chunks := self.table.take():
                    return partial(self.emit, chunks)
                if self.closed:
                    self.fail_orders(RuntimeError("the engine is closed"))
                    self.charge(self.idle_account)
                    return None
                if self.switches:
                    self.charge(Account.SWITCHING)
                    return partial(self._switch, self.switches[0])
                if self.may_apply:
                    self.charge(Account.APPLYING)
                    return partial(self._apply, self.orders.popleft())
                if work := self._plan():
                    return partial(self._iterate, work)
                self._rest()

    def _plan(self) -> list[Work]:
        if self.table.version is None or self.rests:
            return []
        return self._scheduler.plan(admit_new=not self.orders)

    def _rest(self) -> None:
        resting = Account.ASLEEP if self.asleep else self.idle_account
        self.charge(Account.PARKED if self.parked else resting)
        if self.asleep and not self.resting:
            self._scheduler.pool.forget()
            self.runner.free_cache()
            self.rest()
        self.changed.wait()

    def _switch(self, order: SwitchOrder) -> None:
        """Leave the device, or take it again; what cannot be taken altogether is left."""
        try:
            size_bytes = self._leave_device() if order.park else self._take_device()
            error = None
        except Exception as failure:
            size_bytes, error = 0, failure
            self._leave_device()
        with self.changed:
            self.switches.popleft()
            self.parked = order.park or error is not None
        if error is None:
            order.done.set_result(size_bytes)
        else:
            order.done.set_exception(error)

    def _leave_device(self) -> int:
        self._keeps_all = True
        with self.changed:
            self._scheduler.pool.forget()
            if not self._host:
                self.table.version = None
        size_bytes = self.runner.weight_bytes
        self.runner.free_cache()
        self.runner.unload()
        empty_caches([self.device])
        return size_bytes

    def _take_device(self) -> int:
        if self._host:
            self.runner.load(self._host)
        return self.runner.weight_bytes

    def _apply(self, order: WeightsOrder) -> None:
        """Put new weights in force; after a failure half-way nothing is served until the next load."""
        keep = self.keeps_kv(order)
        self._host = order.tensors if order.lasts or self._keeps_all else {}
        if self.parked:
            with self.changed:
                self.table.use_version(order.version, keep_kv=False, signed_by=order.signed_by)
            order.applied.set_result(None)
            return
        try:
            if order.patch is not None and self.fits(order.patch):
                self.runner.apply(order.patch)
            else:
                self.runner.load(order.tensors)
            self.runner.scrub_cache(keep)
            with self.changed:
                self.table.use_version(order.version, keep, order.signed_by)
                self.pieces_applied += 1
        except Exception as error:
            self.table.version, self._host = None, {}
            order.applied.set_exception(error)
        else:
            order.applied.set_result(None)

    def _iterate(self, work: list[Work]) -> None:
        if self._got_device():
            self._iterations.run(work)

    def _got_device(self) -> bool:
        """Waits for a borrowed device. False where its owner still needs it."""
        if self._share is None:
            return True
        with self.changed:
            self.charge(Account.SERVING)
        self._share.acquire_iteration()
        return not self._share.hold_back()
