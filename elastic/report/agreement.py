"""How far workers' log-probabilities were from the trainer's at the same weights version."""

import msgspec

from elastic.core import events as e
from elastic.core.types import WorkerId
from elastic.report.history import History


class WorkerAgreement(msgspec.Struct, frozen=True, kw_only=True):
    """Over `tokens` of a worker that were compared, the mean |log-ratio| in nats; `worst` is that of one version."""

    worker: WorkerId
    tokens: int
    mean: float
    worst: float


def agreements_of(history: History) -> list[WorkerAgreement]:
    """By worker, the farthest first."""
    sums: dict[WorkerId, dict[int, tuple[int, float]]] = {}
    for segment in history.segments:
        for _, event in segment.events_of(e.GroupTrained, e.WeightsPublished):
            for check in event.checks:
                of = sums.setdefault(f"{segment.prefix}{check.worker}", {})
                tokens, log_ratio = of.get(check.version, (0, 0.0))
                of[check.version] = (tokens + check.tokens, log_ratio + check.log_ratio)
    found: list[WorkerAgreement] = []
    for worker, of in sums.items():
        tokens, log_ratio = sum(n for n, _ in of.values()), sum(far for _, far in of.values())
        worst = max(far / max(1, n) for n, far in of.values())
        found.append(WorkerAgreement(worker=worker, tokens=tokens, mean=log_ratio / max(1, tokens), worst=worst))
    return sorted(found, key=lambda one: -one.worst)
