"""An engine's rates from how long its iterations took. Pure.

An iteration is taken to cost what it costs the simulated engine (`elastic.simulation.performance.profile.EngineRates`):

    overhead_s + prefilled / prefill_tokens_per_s + decode_step_s(batch) + context_s · context

Least squares of the relative errors, so that short iterations count as much as long ones, and no rate is negative.
"""

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[np.float64]

SMALLEST_SHARE = 1e-3
"""Prefilling and decoding take at least this much of their shortest iteration: a profile has no times of zero."""
DISTINCT = 1e-3
"""Columns whose directions differ by less than this cannot be told apart."""


class FitError(ValueError):
    """The samples do not determine the coefficients. The message says what is missing."""


class IterationSample(NamedTuple):
    """Iterations that were timed together: their `seconds` in all, and the mean sizes of one."""

    seconds: float
    iterations: float
    batch: float
    """Number of decoding sequences."""
    context: float = 0.0
    """Sum of these sequences' contexts, in tokens."""
    prefilled: float = 0.0
    """Number of prefilled tokens."""


class Rates(NamedTuple):
    """What fits best. `error` is the median of the relative errors, `noise_s` the same of an iteration's seconds.

    Prefill and the batches that are `hidden` take less of any iteration than the error.
    """

    prefill_tokens_per_s: float
    decode_step_s: dict[int, float]
    context_s: float
    overhead_s: float
    error: float
    noise_s: float
    prefill_hidden: bool
    batches_hidden: frozenset[int]


def fit_rates(samples: Sequence[IterationSample], batches: Sequence[int], *, context: bool, overhead: bool) -> Rates:
    """Rates at these batch sizes, linear in between. Without `context`, or `overhead`, that rate is zero.

    Overhead can be told from decoding only where some iterations do not decode. Raises `FitError`.
    """
    if not batches or not samples:
        raise FitError("there is nothing to fit")
    batches = sorted(batches)
    seconds = np.array([sample.seconds for sample in samples])
    if not (np.isfinite(seconds).all() and (seconds > 0).all()):
        raise FitError("an iteration took no time")
    columns = {"prefill": [s.iterations * s.prefilled for s in samples]}
    if context:
        columns["context"] = [s.iterations * s.context for s in samples]
    if overhead:
        columns["overhead"] = [s.iterations for s in samples]
    weights = np.array([_shares(s.batch, batches) for s in samples])
    iterations = np.array([s.iterations for s in samples])
    measured = np.column_stack([*map(np.array, columns.values()), weights * iterations[:, None]]) / seconds[:, None]
    _require_distinct(measured, [*columns, *(f"decoding {batch} sequences" for batch in batches)])
    floor = SMALLEST_SHARE / measured.max(axis=0)
    floor[1 : len(columns)] = 0.0
    rates = floor + nonnegative_least_squares(measured, 1.0 - measured @ floor)
    found = dict(zip(columns, rates.tolist(), strict=False))
    errors = np.abs(measured @ rates - 1.0)
    error = float(np.median(errors))
    hidden = rates * measured.max(axis=0) <= max(2 * SMALLEST_SHARE, error)
    return Rates(
        prefill_tokens_per_s=1.0 / found["prefill"],
        decode_step_s=dict(zip(batches, rates[len(columns) :].tolist(), strict=True)),
        context_s=found.get("context", 0.0),
        overhead_s=found.get("overhead", 0.0),
        error=error,
        noise_s=float(np.median(errors * seconds / iterations)),
        prefill_hidden=bool(hidden[0]),
        batches_hidden=frozenset(b for b, is_hidden in zip(batches, hidden[len(columns) :], strict=True) if is_hidden),
    )


def nonnegative_least_squares(matrix: Array, wanted: Array) -> Array:
    """The x >= 0 for which `matrix @ x` is nearest to `wanted`. Source: Lawson & Hanson 1974, chapter 23."""
    scale = np.linalg.norm(matrix, axis=0)
    scaled = matrix / np.where(scale > 0, scale, 1.0)
    count = matrix.shape[1]
    x, free = np.zeros(count), np.zeros(count, dtype=bool)
    tolerance = 1e-10 * max(1.0, float(np.abs(scaled.T @ wanted).max()))
    for _ in range(10 * count):
        gradient = np.where(free, -np.inf, scaled.T @ (wanted - scaled @ x))
        if gradient.max() <= tolerance:
            break
        free[gradient.argmax()] = True
        while free.any():
            best = np.zeros(count)
            best[free] = np.linalg.lstsq(scaled[:, free], wanted, rcond=None)[0]
            blocked = free & (best <= 0)
            if not blocked.any():
                x = best
                break
            # As far towards the best as everything stays positive; what has become zero is left out.
            ratios = np.where(blocked, x / np.where(blocked, x - best, 1.0), np.inf)
            x = np.where(free, x + max(0.0, ratios.min()) * (best - x), 0.0)
            free[ratios.argmin()] = False
            x[ratios.argmin()] = 0.0
    return x / np.where(scale > 0, scale, 1.0)


def _shares(batch: float, batches: Sequence[int]) -> list[float]:
    """How much of each batch size's decode time an iteration with this many takes.

    Linear in between and beyond the last two, as `EngineRates` has it; below the first it is that of the first,
    for those of the iterations that decode at all.
    """
    shares = [0.0] * len(batches)
    if batch <= batches[0] or len(batches) == 1:
        shares[0] = min(1.0, batch)
        return shares
    upper = next((i for i, size in enumerate(batches) if size >= batch), len(batches) - 1)
    low, high = batches[upper - 1], batches[upper]
    shares[upper] = (batch - low) / (high - low)
    shares[upper - 1] = 1.0 - shares[upper]
    return shares


def _require_distinct(matrix: Array, names: Sequence[str]) -> None:
    scale = np.linalg.norm(matrix, axis=0)
    missing = [name for name, length in zip(names, scale, strict=True) if length == 0]
    if missing:
        raise FitError(f"nothing was measured of: {', '.join(missing)}")
    if len(matrix) < len(names) or np.linalg.svd(matrix / scale, compute_uv=False).min() < DISTINCT:
        raise FitError(f"{len(matrix)} samples do not tell apart: {', '.join(names)}")
