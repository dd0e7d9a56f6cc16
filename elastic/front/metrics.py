"""A run's metrics as its fronts show them: `vllm:*` with an `engine` label for each worker, beside `elastic_*`."""

from collections.abc import Iterator

from elastic.protocol import metrics as m
from elastic.protocol.front_messages import EngineFigures, MetricsTold
from elastic.protocol.metrics import Family, family, histogram, labelled

QUEUE = "queue"
"""The engine of turns that no worker has yet."""


def exposition(told: MetricsTold, run: str, model: str, cache: dict[str, str]) -> str:
    """`cache` is what is said of each engine's KV cache."""
    return "".join(f"{line}\n" for line in _lines(told, run, model, cache))


def _lines(told: MetricsTold, run: str, model: str, cache: dict[str, str]) -> Iterator[str]:
    for field, of_run in m.RUN.items():
        yield from family(of_run, [(labelled(run=run), told.run.get(field))])
    for field, of_provider in m.PROVIDER.items():
        by_provider = ((labelled(run=run, provider=name), one.get(field)) for name, one in told.providers.items())
        yield from family(of_provider, by_provider)
    for field, of_chats in m.CHATS.items():
        yield from family(of_chats, [(labelled(run=run), told.chats.get(field))])
    engines = [(labelled(model_name=model, engine=engine.engine), engine) for engine in told.engines]
    queue, queued = labelled(model_name=model, engine=QUEUE), told.run.get("queued_turns", 0)
    waiting = [*((labels, engine.waiting) for labels, engine in engines), (queue, queued)]
    yield from family(m.RUNNING, ((labels, engine.running) for labels, engine in engines))
    yield from family(m.WAITING, waiting)
    for_capacity = ((f"{labels},{labelled(reason='capacity')}", turns) for labels, turns in waiting)
    yield from family(m.WAITING_BY_REASON, for_capacity)
    yield from family(m.KV_USED, ((labels, engine.kv_used_share) for labels, engine in engines))
    yield from family(m.CACHE_CONFIG, ((f"{labels},{labelled(**cache)}", 1) for labels, _ in engines))
    for counter, field in _COUNTERS:
        yield from family(counter, ((labels, getattr(engine, field)) for labels, engine in engines))
    yield from family(m.SUCCESSES, _by_reason(engines))
    yield from family(m.REJECTIONS, [(queue, told.rejections)])
    for number, one in enumerate(m.HISTOGRAMS):
        yield from histogram(one, ((labels, engine.histograms[number]) for labels, engine in engines))


_COUNTERS: tuple[tuple[Family, str], ...] = (
    (m.PROMPT_TOKENS, "prompt_tokens"),
    (m.GENERATION_TOKENS, "generation_tokens"),
    (m.CACHE_QUERIES, "prompt_tokens"),
    (m.CACHE_HITS, "prefix_hit_tokens"),
    (m.PROMPT_TOKENS_CACHED, "prefix_hit_tokens"),
    (m.PREEMPTIONS, "preemptions"),
)
"""Each with the figure of an engine that it shows."""


def _by_reason(engines: list[tuple[str, EngineFigures]]) -> Iterator[tuple[str, float]]:
    for labels, engine in engines:
        for reason, turns in sorted(engine.finished.items()):
            yield f"{labels},{labelled(finished_reason=reason)}", turns
