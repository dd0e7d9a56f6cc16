"""How far workers' log-probabilities were from the trainer's: of each with the same weights, and by provider and engine
of all that was trained on."""

from collections.abc import Iterable, Mapping

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


class SourceAgreement(msgspec.Struct, frozen=True, kw_only=True):
    """The agreement on `tokens` from a provider's engines, such as "spot/vllm", that were used for a gradient, as in
    docs/training.md; `log_ratio_max` is of all steps."""

    source: str
    tokens: float
    log_ratio_mean: float
    log_ratio_max: float
    mismatch_kl: float
    masked_fraction: float
    clip_fraction: float


_SEEN = "tokens_seen/"
_MEANS = ("log_ratio_mean", "mismatch_kl", "masked_fraction", "clip_fraction")


def sources_of(steps: Iterable[Mapping[str, float | None]]) -> list[SourceAgreement]:
    """By source, from the trainer's figures of each step; the farthest first."""
    tokens: dict[str, float] = {}
    most: dict[str, float] = {}
    sums: dict[str, dict[str, float]] = {}
    for figures in steps:
        for key, seen in figures.items():
            if not key.startswith(_SEEN) or not seen:
                continue
            source = key.removeprefix(_SEEN)
            tokens[source] = tokens.get(source, 0.0) + seen
            most[source] = max(most.get(source, 0.0), figures.get(f"log_ratio_max/{source}") or 0.0)
            own = sums.setdefault(source, dict.fromkeys(_MEANS, 0.0))
            for name in _MEANS:
                own[name] += seen * (figures.get(f"{name}/{source}") or 0.0)
    found = [
        SourceAgreement(
            source=source,
            tokens=seen,
            log_ratio_max=most[source],
            **{name: total / seen for name, total in sums[source].items()},
        )
        for source, seen in tokens.items()
    ]
    return sorted(found, key=lambda one: -one.mismatch_kl)


def source_words(one: SourceAgreement) -> str:
    return (
        f"{one.source}: log-probabilities {one.log_ratio_mean:.2g} nats from the trainer's (at most "
        f"{one.log_ratio_max:.2g}), mismatch KL {one.mismatch_kl:.2g}, {one.masked_fraction:.1%} masked, "
        f"{one.clip_fraction:.1%} clipped"
    )
