"""The co-serving executor: a serving model and a rollout model on one device, in turns, serving first.

One thread owns the device. At each tick it decides what runs next: housekeeping, then serving; a rollout
iteration only behind a serving one (or where serving has nothing to do), and only if the admission policy's
slack covers what it is profiled to cost and the memory policy leaves it the pages. A failure of the rollout engine
ends its turns and leaves serving as it was. Source: ROSE §4.1.
"""

import os
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import structlog
import torch

from elastic.core.device_sharing import AdmissionPolicy, Budget, MemoryPolicy
from elastic.core.types import NS_PER_S, Account, Nanoseconds, WeightMode
from elastic.engine.base import ChunkSink
from elastic.engine.coserving.memory import SharedMemory
from elastic.engine.coserving.rollout import SharedRolloutEngine
from elastic.engine.coserving.serving import SharedServingEngine
from elastic.engine.coserving.shared_device_engine import Iteration, SharedDeviceEngine, Step
from elastic.engine.coserving.spec import ModelSpec
from elastic.engine.coserving.swapping import Swapping
from elastic.engine.coserving.usage import DeviceUsage, UsageMeter
from elastic.engine.kv import PageBackend
from elastic.weights.source import TensorSource

STOP_TIMEOUT_S = 10.0
PASS_GROWTH = 4
"""How much longer than the last ones a forward pass of the cost profile may take."""

_log = structlog.get_logger(__name__)


class CoServingStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """What the executor has done so far. `reclaims_ns` are the latest times from serving's need of rollouts' pages
    to getting them."""

    budget: Budget
    serving_pages: int
    rollout_pages: int
    rollout_bytes: int
    """All that the rollout model holds of the device: weights, tables and pages."""
    serving_peak_pages: int
    usage: DeviceUsage
    reclaims_ns: tuple[Nanoseconds, ...]
    activation_s: float
    """How long the rollout model's last activation blocked the device."""


class CoServing:
    """Owns the device, its KV memory and the two engines. `close` ends both."""

    def __init__(
        self,
        serving: ModelSpec,
        backend: PageBackend,
        admission: AdmissionPolicy,
        memory: MemoryPolicy,
        stall_timeout_ns: Nanoseconds = 2 * NS_PER_S,
        profiles: Path | None = None,
        cpu: int | None = None,
        swapping: Swapping | None = None,
        try_after_ns: Nanoseconds = NS_PER_S,
    ) -> None:
        """`profiles`: directory of cost profiles; `cpu`: the core that the thread is bound to; `swapping`: only one
        model at a time has its weights on the device (the stop-and-reload baseline); `try_after_ns`: how long rollouts
        may be kept from the device by what they are thought to cost, before that is tried once."""
        self._admission = admission
        self.memory = SharedMemory(backend, memory, self._lose_rollout)
        """The KV memory of both engines."""
        self._stall_timeout_ns = stall_timeout_ns
        self._profiles = profiles
        self._cpu = cpu
        self._swapping = swapping
        self._try_after_ns = try_after_ns
        self.changed = threading.Condition()
        """Its holder keeps the executor between two steps, so that all answers meanwhile are of one moment."""
        self.rollout_failures = 0
        self._usage = UsageMeter(time.monotonic_ns())
        self._activating_ns = 0
        self._activation_s = 0.0
        self._rollout_ran = True
        self._rolled_ns = 0
        """When a rollout step was last begun, or the device lent."""
        self._closed = False
        self._thread: threading.Thread | None = None
        self.rollout: SharedRolloutEngine | None = None
        """The engine of the run to which the device is lent."""
        self.serving = SharedServingEngine(serving, self.memory.pages, self.memory.serving_lending(), self.changed)
        self.memory.serving = self.serving
        self._refuse_too_small(self.serving, self.memory.budget.serving_pages)

    @property
    def running(self) -> bool:
        """Whether the executor runs: after `start`, and before `close` or a failure of its own."""
        return self._thread is not None and not self._closed

    def start(self, sink: ChunkSink, tensors: Mapping[str, object]) -> None:
        """Serve the serving model's weights; returns once its costs are known. Raises `WeightsMismatch`."""
        if self._thread is not None or self._closed:
            raise RuntimeError("the executor was started before")
        self._thread = threading.Thread(target=self._run, name="co-serving", daemon=True)
        self.serving.thread = self._thread
        self.serving.start(sink)
        self._thread.start()
        try:
            self.serving.load_version(TensorSource(0, tensors), WeightMode.FINISH)
        except BaseException:
            self.close()
            raise

    def attach(self, spec: ModelSpec) -> SharedRolloutEngine:
        """Lend the device to a run: an engine for its model, until that is closed. One at a time.

        Raises `ValueError` where the model's KV does not fit, `RuntimeError` while another run has the device.
        """
        with self.changed:
            if self._thread is None or self._closed:
                raise RuntimeError("the executor is not running")
            if self.rollout is not None:
                raise RuntimeError("the device is lent to another run")
            rollout = SharedRolloutEngine(
                spec,
                self.memory.pages,
                self.memory.rollout_lending(),
                self.changed,
                self._stall_timeout_ns,
                lambda: self.memory.budget.pages,
                self.begin_step,
            )
            try:
                # Less than a whole turn's worth may be left for a while, but more must be possible.
                self._refuse_too_small(rollout, self.memory.most_rollout_pages)
            except ValueError:
                rollout.retire()
                raise
            rollout.thread = self._thread
            rollout.expect_pieces_like(self.serving)
            self._rolled_ns = time.monotonic_ns()
            self.rollout = self.memory.rollout = rollout
            self._usage.lend(True, time.monotonic_ns())
            self.begin_step()
            return rollout

    def _refuse_too_small(self, engine: SharedDeviceEngine, most_pages: int) -> None:
        tokens = engine.settings.max_context_tokens
        needed = engine.layout.pages_for(tokens)
        if needed > most_pages:
            raise ValueError(
                f"the {engine.kind} model does not fit: {tokens} tokens of KV need {needed} pages of "
                f"{self.memory.pages.page_bytes} bytes, and it may have {most_pages} of {self.memory.usable}"
            )

    @property
    def serving_kv_share(self) -> float:
        """The part of the KV memory that serving has mapped."""
        with self.changed:
            return self.memory.serving_pages / self.memory.usable

    def begin_step(self) -> None:
        """A new step of the run: the rollout budget is derived anew from serving's recent use."""
        with self.changed:
            self.memory.begin_step()

    def statistics(self) -> CoServingStatistics:
        with self.changed:
            rollout, memory = self.rollout, self.memory
            return CoServingStatistics(
                budget=memory.budget,
                serving_pages=memory.serving_pages,
                rollout_pages=memory.rollout_pages,
                rollout_bytes=rollout.runner.device_bytes if rollout else 0,
                serving_peak_pages=memory.serving_peak,
                usage=self._usage.read(time.monotonic_ns()),
                reclaims_ns=tuple(memory.reclaims_ns),
                activation_s=self._activation_s,
            )

    def close(self) -> None:
        """End every request of both engines with ABORTED, and the thread. Safe to call twice."""
        with self.changed:
            self._closed = True
            for engine in self._engines():
                engine.end()
            self.changed.notify_all()
        if self._thread is None:
            self.memory.pages.close()
        elif self._thread is not threading.current_thread():
            self._thread.join(STOP_TIMEOUT_S)

    # The executor's thread.

    def _run(self) -> None:
        try:
            if self._cpu is not None:
                os.sched_setaffinity(0, {self._cpu})
            torch.set_num_threads(self.serving.settings.threads)
            with torch.inference_mode():
                while (step := self._next_step()) is not None:
                    step()
        except Exception:
            _log.critical("the co-serving executor failed", trace=traceback.format_exc())
            self._end_all("the co-serving executor failed")
        finally:
            with self.changed:
                self._usage.lend(False, time.monotonic_ns())
            self.memory.pages.close()

    def _next_step(self) -> Step | None:
        """Waits for work and returns it; None at the end."""
        with self.changed:
            while True:
                step = self.serving.housekeeping() or self._on_rollout(self._rollout_housekeeping)
                if step is not None:
                    return step
                if self._closed:
                    return None
                now_ns = time.monotonic_ns()
                self.memory.share(now_ns)
                if (step := self._decide(now_ns)) is not None:
                    return step
                for engine in self._engines():
                    engine.charge_idle()
                self.changed.wait(self._patience_s(now_ns))

    def _decide(self, now_ns: Nanoseconds) -> Step | None:
        """Serving first; rollouts behind each of its iterations as far as there is slack, and when it rests."""
        if self._swapping is not None:
            step = self._swapping.step(self.serving, self.rollout, now_ns)
            if step is not None:
                return step
        if self._rollout_ran and (step := self._serving_step()) is not None:
            self._rollout_ran = False
            return step
        self._rollout_ran = True
        return self._on_rollout(self._rollout_step) or self._serving_step()

    def _serving_step(self) -> Step | None:
        if (step := self.serving.loading_step()) is not None:
            return step
        if self.serving.active and self.serving.costs is None:
            return self.serving.measuring_step(self._profiles)
        iteration = self.serving.next_iteration()
        if iteration is None:
            return None
        if self.rollout is not None:
            self.rollout.charge(Account.SERVING)
        return self._timed(self.serving, iteration)

    def _rollout_step(self, rollout: SharedRolloutEngine) -> Step | None:
        now_ns = time.monotonic_ns()
        view = self.serving.view(now_ns)
        allowance_ns = self._admission.allowance_ns(view)
        if allowance_ns <= 0:
            return None
        # What was slow once could otherwise never be found quick again, nor what is not known yet be measured: the
        # smallest step may go while serving rests, and now and then beside a load that never does.
        tries = not view.busy or now_ns - self._rolled_ns > self._try_after_ns
        step = self.admitted_step(rollout, allowance_ns, tries)
        if step is None:
            return None
        self._rolled_ns = now_ns
        return self._guarded(step)

    def admitted_step(self, rollout: SharedRolloutEngine, allowance_ns: Nanoseconds, tries: bool) -> Step | None:
        """The step that the allowance covers; where it covers none and the executor `tries`, the smallest step."""
        if (tries or allowance_ns > rollout.piece_ns) and (step := rollout.loading_step()) is not None:
            return self._activating(rollout, step)
        if rollout.active and rollout.costs is None:
            measures = tries or allowance_ns > PASS_GROWTH * rollout.piece_ns
            return rollout.measuring_step(self._profiles) if measures else None
        iteration = rollout.next_iteration(allowance_ns, tries)
        return self._timed(rollout, iteration) if iteration is not None else None

    def _rollout_housekeeping(self, rollout: SharedRolloutEngine) -> Step | None:
        rollout.end_stalled(time.monotonic_ns())
        if (step := rollout.housekeeping()) is not None:
            return step
        if rollout.closed:
            rollout.retire()
            self._detach()
        return None

    def _detach(self) -> None:
        self.rollout = self.memory.rollout = None
        self._usage.lend(False, time.monotonic_ns())

    def _timed(self, engine: SharedDeviceEngine, iteration: Iteration) -> Step:
        def run() -> None:
            self._hand_to(engine.kind)
            try:
                engine.iterate(iteration)
            finally:
                self._hand_to(None)

        return run

    def _hand_to(self, user: str | None) -> None:
        """Gives the device to "serving" or "rollout", or takes it from both (None)."""
        with self.changed:
            self._usage.hand_to(user, time.monotonic_ns())

    def _activating(self, rollout: SharedRolloutEngine, piece: Step) -> Step:
        """Note how long it takes from the first piece of weights until the model can run."""

        def run() -> None:
            started_ns = time.monotonic_ns()
            piece()
            self._activating_ns += time.monotonic_ns() - started_ns
            if rollout.active:
                self._activation_s, self._activating_ns = self._activating_ns / NS_PER_S, 0

        return run

    # Faults.

    def _on_rollout(self, ask: Callable[[SharedRolloutEngine], Step | None]) -> Step | None:
        if self.rollout is None:
            return None
        try:
            return ask(self.rollout)
        except Exception:
            self._lose_rollout()
            return None

    def _guarded(self, step: Step) -> Step:
        def run() -> None:
            try:
                step()
            except Exception:
                with self.changed:
                    self._lose_rollout()

        return run

    def _lose_rollout(self) -> None:
        """The rollout engine failed: its turns end, its memory comes back, serving goes on."""
        rollout = self.rollout
        assert rollout is not None
        self.rollout_failures += 1
        _log.error("the rollout engine failed", trace=traceback.format_exc())
        why = "the rollout engine of the co-serving executor failed"
        try:
            rollout.fail(why)
        except Exception:
            _log.error("the rollout engine is given up", trace=traceback.format_exc())
            self._detach()
            rollout.abandon(why)

    def _end_all(self, why: str) -> None:
        with self.changed:
            self._closed = True
            for engine in self._engines():
                engine.end()
                engine.fail(why)
                engine.fail_waiting(RuntimeError(why))
            self.changed.notify_all()
        for engine in self._engines():
            engine.emit_outbox()

    def _engines(self) -> list[SharedDeviceEngine]:
        return [engine for engine in (self.serving, self.rollout) if engine is not None]

    def _patience_s(self, now_ns: Nanoseconds) -> float:
        """How long nothing can happen by itself: a lease or a stall may end, slack may be checked again."""
        if self.rollout is not None and (self.rollout.has_work or self.serving.has_work):
            return 0.002
        expiry_ns = self.rollout.pool.next_expiry_ns if self.rollout is not None else None
        return 0.1 if expiry_ns is None else min(0.1, max(0.001, (expiry_ns - now_ns) / NS_PER_S))
