"""How a run went over time: its samples, gathered into a few hundred equal intervals."""

from collections.abc import Callable, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from elastic.core.types import NS_PER_S, Nanoseconds
from elastic.runtime.status import ProviderStatus, RunStatus

INTERVALS = 160
"""Number of intervals that a page's width can show. More would only draw the noise of single steps."""


class ProviderSeries(msgspec.Struct, frozen=True, kw_only=True):
    """`tokens_per_s` has a value for each of the timeline's `step_edges_s`, the others for each of its `edges_s`.

    Workers are means over an interval: up (awake or asleep), and not there yet. `usd` is the cost up to its end.
    """

    tokens_per_s: list[float]
    up_workers: list[float]
    booting_workers: list[float]
    usd: list[float]


class Timeline(msgspec.Struct, frozen=True, kw_only=True):
    """`edges_s` bound equal intervals, `step_edges_s` the training steps: one edge more than there are values.

    Throughput is that of whole steps (RLBoost §6.1), since within a step it alternates with training; a run
    without a finished step has it by equal intervals. Empty without samples.
    """

    edges_s: list[float]
    step_edges_s: list[float]
    providers: dict[str, ProviderSeries]


def timeline(samples: Sequence[tuple[Nanoseconds, RunStatus]], step_ends_s: Sequence[float]) -> Timeline:
    """Series by provider up to the last sample; tokens per second × interval sum to the tokens accepted."""
    if not samples or samples[-1][0] <= 0:
        return Timeline(edges_s=[], step_edges_s=[], providers={})
    at_s = np.array([t_ns / NS_PER_S for t_ns, _ in samples])
    edges_s = np.linspace(0.0, at_s[-1], min(INTERVALS, len(samples)) + 1)
    step_edges_s = _step_edges(step_ends_s, at_s[-1])
    if len(step_edges_s) == 2:
        step_edges_s = edges_s
    names = sorted({name for _, status in samples for name in status.providers})
    return Timeline(
        edges_s=edges_s.tolist(),
        step_edges_s=step_edges_s.tolist(),
        providers={name: _series(name, samples, at_s, edges_s, step_edges_s) for name in names},
    )


def _step_edges(step_ends_s: Sequence[float], end_s: float) -> NDArray[np.float64]:
    """Return the step ends within (0, end_s), evenly thinned to what can be drawn."""
    inner = sorted({end for end in step_ends_s if 0.0 < end < end_s})
    stride = -(-len(inner) // INTERVALS) or 1
    return np.array([0.0, *inner[stride - 1 :: stride], end_s])


def _series(
    name: str,
    samples: Sequence[tuple[Nanoseconds, RunStatus]],
    at_s: NDArray[np.float64],
    edges_s: NDArray[np.float64],
    step_edges_s: NDArray[np.float64],
) -> ProviderSeries:
    absent = ProviderStatus()

    def column(value: Callable[[ProviderStatus], float]) -> NDArray[np.float64]:
        return np.array([value(status.providers.get(name, absent)) for _, status in samples], dtype=np.float64)

    tokens = _at(step_edges_s, at_s, column(lambda p: p.tokens))
    return ProviderSeries(
        tokens_per_s=(np.diff(tokens) / np.diff(step_edges_s)).tolist(),
        up_workers=_means(edges_s, at_s, column(lambda p: p.ready + p.other)),
        booting_workers=_means(edges_s, at_s, column(lambda p: p.booting)),
        usd=_at(edges_s, at_s, column(lambda p: p.usd))[1:].tolist(),
    )


def _at(edges_s: NDArray[np.float64], at_s: NDArray[np.float64], total: NDArray[np.float64]) -> NDArray[np.float64]:
    """A running total, zero at the start, at each edge."""
    return np.interp(edges_s, np.concatenate(([0.0], at_s)), np.concatenate(([0.0], total)))


def _means(edges_s: NDArray[np.float64], at_s: NDArray[np.float64], level: NDArray[np.float64]) -> list[float]:
    """Return the mean of a level over each interval. A sample holds for the time since the one before."""
    area = np.cumsum(level * np.diff(at_s, prepend=0.0))
    return (np.diff(_at(edges_s, at_s, area)) / np.diff(edges_s)).tolist()
