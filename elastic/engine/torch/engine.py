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
from elastic.engine.torch.controls import ControlledEngine, EngineControls, SwitchOrder, WeightsOrder
from elastic.engine.torch.iterations import IterationRunner
from elastic.engine.torch.requests import RequestTable
from elastic.engine.torch.runner import Runner
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

    With a `share` the engine borrows its device, and asks for it before each iteration. What computes there is made of
    `Runner`'s arguments.

    Raises `ValueError` when the KV cache cannot hold one sequence of `max_context_tokens`, or the device is not there.
    """

    def __init__(
        self,
        config: Qwen3Config,
        settings: EngineConfig,
        share: DeviceShare | None = None,
        make_runner: Callable[..., Runner] = Runner,
    ) -> None:
        kv_tokens = settings.kv_blocks * settings.kv_block_tokens
        if kv_tokens < settings.max_context_tokens:
            raise ValueError(
                f"engine.kv_blocks: {settings.kv_blocks} blocks of {settings.kv_block_tokens} tokens hold less than "
                f"max_context_tokens={settings.max_context_tokens}"
            )
        self._settings = settings
        self._share = share
        device = device_named(settings.device)
        self._runner = make_runner(
            config, device, settings.max_context_tokens, settings.kv_blocks, settings.kv_block_tokens
        )
        self._scheduler = BatchScheduler(settings)
        self._table = RequestTable(self._scheduler, config.vocab_size, settings)
        self._device = device
        self._host: Mapping[str, Tensor] = {}
        """The weights in force, in host memory, where they are kept there."""
        self._keeps_all = False
        self._changing = threading.Lock()
        """Held by who changes the host's copy of the weights or takes them from there to the device."""
        self._changed = threading.Condition()
        super().__init__(EngineControls(settings, device, self._runner, self._table, self._changed))
        self._iterations = IterationRunner(settings, device, self._runner, self._controls)

    def start(self, sink: ChunkSink) -> None:
        controls = self._controls
        if controls.thread is not None or controls.closed:
            raise RuntimeError("the engine was started before")
        controls.sink = sink
        controls.thread = threading.Thread(target=self._run, name="torch-engine", daemon=True)
        controls.thread.start()

    def load_version(self, source: WeightsSource, mode: WeightMode) -> float:
        with self._changing:
            return super().load_version(source, mode)

    def park(self) -> Switch:
        begun_s = time.monotonic()
        with self._changed:
            self._controls.table.abort_all()
            self._changed.notify_all()
        with self._changing:
            size_bytes = 0 if self._controls.parked else self._controls.switch(park=True)
        rest_bytes = max(self._runner.rest_bytes, held_bytes(self._device))
        return Switch(time.monotonic() - begun_s, size_bytes, rest_bytes)

    def resume(self) -> Switch:
        begun_s = time.monotonic()
        with self._changing:
            size_bytes = self._controls.switch(park=False) if self._controls.parked else 0
        return Switch(time.monotonic() - begun_s, size_bytes)

    def close(self) -> None:
        """End every live request with ABORTED, and the thread. Safe to call twice."""
        self._controls.end()
        thread = self._controls.thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(CLOSE_TIMEOUT_S)
        self._controls.weights.close()

    # The engine's thread.

    def _run(self) -> None:
        torch.set_num_threads(self._settings.threads)
        with torch.inference_mode():
            while (step := self._next_step()) is not None:
                step()
        self._runner.free_cache()
        self._host = {}

    def _next_step(self) -> _Step | None:
        """Waits for work, charges the wait to its account, and returns the work; None at the end."""
        controls = self._controls
        with self._changed:
            while True:
                if chunks := self._table.take():
                    return partial(controls.emit, chunks)
                if controls.closed:
                    controls.fail_orders(RuntimeError("the engine is closed"))
                    controls.charge({controls.idle_account: 1.0})
                    return None
                if controls.switches:
                    controls.charge({Account.SWITCHING: 1.0})
                    return partial(self._switch, controls.switches[0])
                if controls.may_apply:
                    controls.charge({Account.APPLYING: 1.0})
                    return partial(self._apply, controls.orders.popleft())
                if work := self._plan():
                    return partial(self._iterate, work)
                self._rest()

    def _plan(self) -> list[Work]:
        if self._table.version is None or self._controls.rests:
            return []
        return self._scheduler.plan(admit_new=not self._controls.orders)

    def _rest(self) -> None:
        controls = self._controls
        resting = Account.ASLEEP if controls.asleep else controls.idle_account
        controls.charge({Account.PARKED if controls.parked else resting: 1.0})
        if controls.asleep and not controls.resting:
            self._scheduler.pool.forget()
            self._runner.free_cache()
            controls.rest()
        self._changed.wait()

    def _switch(self, order: SwitchOrder) -> None:
        """Leave the device, or take it again; what cannot be taken altogether is left."""
        try:
            size_bytes = self._leave_device() if order.park else self._take_device()
            error = None
        except Exception as failure:
            size_bytes, error = 0, failure
            self._leave_device()
        with self._changed:
            self._controls.switches.popleft()
            self._controls.parked = order.park or error is not None
        if error is None:
            order.done.set_result(size_bytes)
        else:
            order.done.set_exception(error)

    def _leave_device(self) -> int:
        self._keeps_all = True
        with self._changed:
            self._scheduler.pool.forget()
            if not self._host:
                self._table.version = None
        size_bytes = self._runner.weight_bytes
        self._runner.free_cache()
        self._runner.unload()
        empty_caches([self._device])
        return size_bytes

    def _take_device(self) -> int:
        if self._host:
            self._runner.load(self._host)
        return self._runner.weight_bytes

    def _apply(self, order: WeightsOrder) -> None:
        """Put new weights in force; after a failure half-way nothing is served until the next load."""
        keep = self._controls.keeps_kv(order)
        self._host = order.tensors if order.lasts or self._keeps_all else {}
        if self._controls.parked:
            with self._changed:
                self._table.use_version(order.version, keep_kv=False)
            order.applied.set_result(None)
            return
        try:
            if order.patch is not None and self._controls.fits(order.patch):
                self._runner.apply(order.patch)
            else:
                self._runner.load(order.tensors)
            self._runner.scrub_cache(keep)
            with self._changed:
                self._table.use_version(order.version, keep)
                self._controls.pieces_applied += 1
        except Exception as error:
            self._table.version, self._host = None, {}
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
        with self._changed:
            self._controls.charge({Account.SERVING: 1.0})
        self._share.acquire_iteration()
        return not self._share.hold_back()


def device_named(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("engine.device: 'cuda' was asked for, but torch finds no CUDA device")
    return torch.device(name)
