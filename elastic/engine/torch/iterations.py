"""Computes planned iterations: shares out their time, samples, paces, books and reports them."""

import time
import traceback
from collections.abc import Callable

import structlog
import torch

from elastic.config import EngineConfig
from elastic.core.types import NS_PER_S, Account, Nanoseconds
from elastic.engine.torch import pacing, sampling
from elastic.engine.torch.controls import EngineControls
from elastic.engine.torch.costs import LearnedCosts
from elastic.engine.torch.runner import Runner
from elastic.engine.torch.scheduler import Work, load_of
from elastic.system.logs import PaceLog

SMALLEST_COST = 1e-9
"""A curve that falls, as noise makes it, would have some work cost nothing, and an iteration be in no account."""

_log = structlog.get_logger(__name__)


class IterationRunner:
    """Used by one thread. `profiled` tells what the parts of an iteration cost, where that has been measured; what a
    paced engine models goes before it, and without either costs are learned."""

    def __init__(
        self,
        settings: EngineConfig,
        device: torch.device,
        runner: Runner,
        controls: EngineControls,
        profiled: Callable[[list[Work]], pacing.Costs] | None = None,
    ) -> None:
        self._pacing = settings.pacing
        self._device = device
        self._runner = runner
        self._controls = controls
        self._profiled = profiled
        self._learned = LearnedCosts()
        self._paces = PaceLog("iterations")

    def run(self, work: list[Work]) -> None:
        controls, load = self._controls, load_of(work)
        with controls.changed:
            started_ns, modelled_s = time.monotonic_ns(), self._charge(work)
        try:
            token_ids, logprobs = self._compute(work)
        except Exception as error:
            _log.error("engine iteration failed", trace=traceback.format_exc())
            with controls.changed:
                chunks = controls.table.give_up(work, f"{type(error).__name__}: {error}")
            controls.emit(chunks)
            return
        self._learned.observe(load, (time.monotonic_ns() - started_ns) / NS_PER_S)
        if self._pacing is not None:
            self._pace(started_ns, modelled_s)
        with controls.changed:
            chunks = controls.table.commit(work, token_ids, logprobs)
            controls.iterations += 1
        controls.emit(chunks)

    def _charge(self, work: list[Work]) -> float:
        """Share out the coming iteration's time; returns its modelled length in seconds (paced engines only)."""
        load = load_of(work)
        if self._pacing is not None:
            costs = pacing.costs(load, self._pacing)
        else:
            costs = self._profiled(work) if self._profiled is not None else self._learned.costs(load)
        accounts = zip((Account.DECODE, Account.PREFILL, Account.RECOMPUTE), load, costs, strict=True)
        self._controls.charge({account: max(cost, SMALLEST_COST) for account, tokens, cost in accounts if tokens})
        return sum(costs)

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

    def _pace(self, started_ns: Nanoseconds, modelled_s: float) -> None:
        """Wait until the modelled time is over, or the engine is told to stop."""
        controls = self._controls
        left_s = modelled_s - (time.monotonic_ns() - started_ns) / NS_PER_S
        self._paces.took(held=left_s >= 0)
        with controls.changed:
            controls.paced_iterations += 1
            controls.late_iterations += left_s < 0
            if left_s > 0:
                controls.changed.wait_for(lambda: controls.closed or controls.rests, left_s)
