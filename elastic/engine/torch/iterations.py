"""Computes planned iterations: shares out their time, samples, paces, books and reports them."""

import time
import traceback
from collections.abc import Callable

import structlog
import torch

from elastic.core.types import NS_PER_S, Nanoseconds
from elastic.engine.torch import pacing, sampling
from elastic.engine.torch.controls import ControlledEngine
from elastic.engine.torch.costs import LearnedCosts
from elastic.engine.torch.scheduler import Work, load_of
from elastic.system.logs import PaceLog

_log = structlog.get_logger(__name__)


class IterationRunner:
    """Used by one thread. `profiled` tells what the parts of an iteration cost, where that has been measured; what a
    paced engine models goes before it, and without either costs are learned."""

    def __init__(self, engine: ControlledEngine, profiled: Callable[[list[Work]], pacing.Costs] | None = None) -> None:
        self._engine = engine
        self._pacing = engine.settings.pacing
        self._device = engine.device
        self._profiled = profiled
        self._learned = LearnedCosts()
        self._paces = PaceLog("iterations")

    def run(self, work: list[Work]) -> None:
        engine, load = self._engine, load_of(work)
        with engine.changed:
            started_ns, modelled_s = time.monotonic_ns(), self._charge(work)
        try:
            token_ids, logprobs = self._compute(work)
        except Exception as error:
            _log.error("engine iteration failed", trace=traceback.format_exc())
            with engine.changed:
                chunks = engine.table.give_up(work, f"{type(error).__name__}: {error}")
            engine.emit(chunks)
            return
        self._learned.observe(load, (time.monotonic_ns() - started_ns) / NS_PER_S)
        if self._pacing is not None:
            self._pace(started_ns, modelled_s)
        with engine.changed:
            chunks = engine.table.commit(work, token_ids, logprobs)
            engine.iterations += 1
        engine.emit(chunks)

    def _charge(self, work: list[Work]) -> float:
        """Share out the coming iteration's time; returns its modelled length in seconds (paced engines only)."""
        load = load_of(work)
        if self._pacing is not None:
            costs = pacing.costs(load, self._pacing)
        else:
            costs = self._profiled(work) if self._profiled is not None else self._learned.costs(load)
        self._engine.share_out(pacing.by_account(load, costs))
        return sum(costs)

    def _compute(self, work: list[Work]) -> tuple[list[int], list[float]]:
        """The next token, and its log-probability, of each item that samples, in order."""
        logits = self._engine.runner.forward(work)
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

    def _pace(self, started_ns: Nanoseconds, modelled_s: float) -> None:
        """Wait until the modelled time is over, or the engine is told to stop."""
        engine = self._engine
        left_s = modelled_s - (time.monotonic_ns() - started_ns) / NS_PER_S
        self._paces.took(held=left_s >= 0)
        with engine.changed:
            engine.paced_iterations += 1
            engine.late_iterations += left_s < 0
            if left_s > 0:
                engine.changed.wait_for(lambda: engine.closed or engine.rests, left_s)
