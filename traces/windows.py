"""Cuts windows out of serving traces by a fixed rule, and scales them to a host."""

from collections import Counter
from collections.abc import Iterable, Sequence
from heapq import merge
from statistics import mean, median

from traces.serving import ServingRequest


def merged(*traces: Iterable[ServingRequest]) -> list[ServingRequest]:
    """Several traces that began at the same time, as one."""
    return list(merge(*traces, key=lambda request: request.arrival_s))


def window_at(trace: Sequence[ServingRequest], start_s: float, length_s: float) -> list[ServingRequest]:
    """The requests of a window; arrivals count from its start."""
    return [
        ServingRequest(request.arrival_s - start_s, request.prompt_tokens, request.output_tokens)
        for request in trace
        if start_s <= request.arrival_s < start_s + length_s
    ]


def typical_windows(trace: Sequence[ServingRequest], length_s: float = 120.0) -> dict[str, float]:
    """Where three windows begin, of all whole ones that follow on each other: `mean`, whose number of requests is
    nearest the average; `burstiest`, with the busiest second; `median`, whose busiest second is the median one."""
    counts: dict[int, int] = Counter()
    seconds: dict[int, Counter[int]] = {}
    for request in trace:
        window = int(request.arrival_s // length_s)
        counts[window] += 1
        seconds.setdefault(window, Counter())[int(request.arrival_s)] += 1
    # The last one is not whole.
    whole = sorted(counts)[:-1] or sorted(counts)
    peaks = {window: max(seconds[window].values()) for window in whole}
    average = mean(counts[window] for window in whole)
    middle = median(peaks.values())
    chosen = {
        "mean": min(whole, key=lambda window: abs(counts[window] - average)),
        "burstiest": max(whole, key=lambda window: peaks[window]),
        "median": min(whole, key=lambda window: abs(peaks[window] - middle)),
    }
    return {name: window * length_s for name, window in chosen.items()}


def scaled(
    window: Sequence[ServingRequest], *, speed: float, length: float, most_prompt: int, most_output: int
) -> list[ServingRequest]:
    """Arrivals `speed` times as fast, lengths times `length`, at least one token and at most so many."""
    return [
        ServingRequest(
            request.arrival_s / speed,
            min(most_prompt, max(1, round(request.prompt_tokens * length))),
            min(most_output, max(1, round(request.output_tokens * length))),
        )
        for request in window
    ]
