"""What each worker's engine has come to, counted as vLLM does for its own: by turn and by report, never by token.

A worker's figures count the turns that ended at it, wherever they began, and leave with the worker.
"""

from elastic.core import events as e
from elastic.core.ids import lease_of
from elastic.core.scheduler import Scheduler
from elastic.core.types import NS_PER_S, FinishReason, LeaseId, Nanoseconds, WorkerId, WorkerRole, WorkerState
from elastic.protocol import metrics
from elastic.protocol.front_messages import EngineFigures
from elastic.protocol.metrics import Buckets
from elastic.runtime.journal import TurnRow


class EngineMeters:
    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._engines: dict[WorkerId, EngineFigures] = {}

    def reported(self, event: e.WorkerReported) -> None:
        if (engine := self._engine(event.worker)) is not None:
            engine.kv_used_share = event.kv_used_share
            engine.prompt_tokens, engine.prefix_hit_tokens = event.prompt_tokens, event.prefix_hit_tokens
            engine.generation_tokens = event.decoded_tokens

    def moved(self, worker: WorkerId) -> None:
        """A turn goes on elsewhere than on this worker."""
        if (engine := self._engine(worker)) is not None:
            engine.preemptions += 1

    def finished(self, turn: TurnRow, sent_ns: Nanoseconds | None, max_tokens: int) -> None:
        """A turn is over that was sent to its first worker at `sent_ns`."""
        engine = self._engine(turn.worker)
        if engine is None:
            return
        reason = FinishReason.LENGTH if turn.tokens >= max_tokens else FinishReason.STOP
        engine.finished[reason] = engine.finished.get(reason, 0) + 1
        sent_ns = turn.requested_ns if sent_ns is None else sent_ns
        seen = {
            metrics.END_TO_END: (turn.finished_ns - turn.requested_ns) / NS_PER_S,
            metrics.QUEUE: (sent_ns - turn.requested_ns) / NS_PER_S,
            metrics.INFERENCE: (turn.finished_ns - sent_ns) / NS_PER_S,
            metrics.TURN_PROMPT: turn.prompt_tokens,
            metrics.TURN_TOKENS: turn.tokens,
            metrics.CHOICES: 1,
            metrics.TURN_LIMIT: max_tokens,
        }
        between = 0
        if turn.first_token_ns is not None:
            decode_s = (turn.finished_ns - turn.first_token_ns) / NS_PER_S
            between = max(0, turn.tokens - 1)
            seen |= {
                metrics.FIRST_TOKEN: (turn.first_token_ns - turn.requested_ns) / NS_PER_S,
                metrics.PREFILL: (turn.first_token_ns - sent_ns) / NS_PER_S,
                metrics.DECODE: decode_s,
                metrics.BETWEEN_TOKENS: decode_s / between if between else 0.0,
            }
        for family, buckets in zip(metrics.HISTOGRAMS, engine.histograms, strict=True):
            if (value := seen.get(family)) is not None:
                buckets.note(family.bounds, value, between if family is metrics.BETWEEN_TOKENS else 1)

    def forget(self, lease: LeaseId) -> None:
        """The lease has ended, and its workers with it."""
        self._engines = {worker: engine for worker, engine in self._engines.items() if lease_of(worker) != lease}

    def figures(self) -> list[EngineFigures]:
        """Those of the workers that there are and have an engine, with what they have to do now."""
        told: list[EngineFigures] = []
        imports = self._scheduler.serving is not None
        for worker in self._scheduler.fleet.workers.values():
            engineless = imports and worker.role is WorkerRole.TRAINER
            shown = worker.served and worker.state is not WorkerState.GONE and not engineless
            if shown and (engine := self._engine(worker.id)) is not None:
                engine.running, engine.waiting = len(worker.turns) - worker.pending, worker.pending
                told.append(engine)
        return told

    def _engine(self, worker: WorkerId) -> EngineFigures | None:
        """Return the engine's figures of a worker that is connected."""
        engine = self._engines.get(worker)
        if engine is None and worker in self._scheduler.fleet.workers:
            histograms = [Buckets.of(family) for family in metrics.HISTOGRAMS]
            engine = self._engines[worker] = EngineFigures(worker, histograms=histograms)
        return engine
