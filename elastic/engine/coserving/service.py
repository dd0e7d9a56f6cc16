"""How a serving host's own requests fared, in a few numbers."""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from elastic.core.device_sharing import Slo

WINDOW_S = 5.0
"""A target counts as broken for as long as the P99 of what arrived then is above it."""
KEPT = 5_000
OPEN_WINDOWS = 60
"""Number of windows whose requests are remembered."""
NS_PER_MS = 1_000_000


class _Request(NamedTuple):
    ttft_ms: float
    tpot_ms: float | None


class Latencies(NamedTuple):
    """Latencies in milliseconds; None before the first request."""

    p50: float | None
    p99: float | None


class ServiceLog:
    """Requests as they end; percentiles are of the last `KEPT`, all else is of all. Times are seconds on one clock."""

    def __init__(self, slo: Slo) -> None:
        self.ttft_slo_ms, self.tpot_slo_ms = slo.ttft_ns / NS_PER_MS, slo.tpot_ns / NS_PER_MS
        self.requests = 0
        self.failed = 0
        self._recent: deque[_Request] = deque(maxlen=KEPT)
        self._windows: dict[int, list[_Request]] = {}
        self._violated: set[int] = set()

    def served(self, arrival_s: float, token_times_s: Sequence[float]) -> None:
        """`token_times_s` is not empty."""
        self.requests += 1
        first_s, last_s, gaps = token_times_s[0], token_times_s[-1], len(token_times_s) - 1
        tpot_ms = 1e3 * (last_s - first_s) / gaps if gaps else None
        request = _Request(1e3 * (first_s - arrival_s), tpot_ms)
        self._recent.append(request)
        window = int(arrival_s / WINDOW_S)
        self._windows.setdefault(window, []).append(request)
        if self._violates(self._windows[window]):
            self._violated.add(window)
        if len(self._windows) > OPEN_WINDOWS:
            del self._windows[min(self._windows)]

    def refused(self, arrival_s: float) -> None:
        """A request that was not served breaks every target."""
        self.requests += 1
        self.failed += 1
        self._violated.add(int(arrival_s / WINDOW_S))

    @property
    def ttft_ms(self) -> Latencies:
        return _latencies([request.ttft_ms for request in self._recent])

    @property
    def tpot_ms(self) -> Latencies:
        return _latencies([request.tpot_ms for request in self._recent if request.tpot_ms is not None])

    @property
    def violated_minutes(self) -> float:
        return len(self._violated) * WINDOW_S / 60

    def _violates(self, requests: Sequence[_Request]) -> bool:
        ttft = percentile([request.ttft_ms for request in requests], 99)
        tpot = percentile([request.tpot_ms for request in requests if request.tpot_ms is not None], 99)
        return (ttft or 0.0) > self.ttft_slo_ms or (tpot or 0.0) > self.tpot_slo_ms


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Return a percentile; None if there are no values."""
    return float(np.percentile(values, percent)) if values else None


def milliseconds(times_ns: Sequence[int], percent: float) -> float | None:
    """A percentile of durations in nanoseconds."""
    found = percentile(times_ns, percent)
    return None if found is None else found / NS_PER_MS


def _latencies(values: Sequence[float]) -> Latencies:
    return Latencies(percentile(values, 50), percentile(values, 99))
