"""The fit finds the rates that made the samples, is never worse than them, and says when samples do not tell."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from elastic.simulation.calibration.fit import FitError, IterationSample, fit_rates, nonnegative_least_squares
from elastic.simulation.calibration.numbers import speeds
from elastic.simulation.performance.profile import EngineRates

BATCHES = (1, 2, 4, 8, 16)
PREFILLS = (32, 128, 256)
CONTEXTS = (40, 400)


@st.composite
def engines(draw: st.DrawFn) -> EngineRates:
    """Engines whose batches differ by less than the smallest share of an iteration that a fit allows."""
    first_s = draw(st.floats(1e-3, 0.1))
    growths = draw(st.lists(st.floats(0, 0.5), min_size=len(BATCHES), max_size=len(BATCHES)))
    return EngineRates(
        prefill_tokens_per_s=draw(st.floats(500, 100_000)),
        decode_step_s={b: first_s * (1 + sum(growths[: i + 1])) for i, b in enumerate(BATCHES)},
        context_s=draw(st.floats(0, 1)) * first_s / (16 * 400),
        overhead_s=draw(st.floats(0, 1)) * first_s,
        kv_tokens=16_384,
        kv_block_tokens=16,
        prefill_chunk_tokens=256,
        max_batch=16,
        max_pending=8,
        max_context_tokens=448,
    )


def iteration_s(engine: EngineRates, batch: float, context: float, prefilled: float) -> float:
    decode_s = engine.decode_s(int(batch)) + engine.context_s * context if batch else 0.0
    return engine.overhead_s + decode_s + prefilled / engine.prefill_tokens_per_s


def samples_of(engine: EngineRates, errors: list[float] | None = None) -> list[IterationSample]:
    """Of prefills alone and of decodes alone, each off by its part of `errors`."""
    what = [(0, 0, tokens) for tokens in PREFILLS]
    what += [(batch, batch * context, 0) for batch in BATCHES for context in CONTEXTS]
    errors = errors or [0.0] * len(what)
    return [
        IterationSample(3 * iteration_s(engine, *load) * (1 + error), 3, *load)
        for load, error in zip(what, errors, strict=True)
    ]


LOADS = len(PREFILLS) + len(BATCHES) * len(CONTEXTS)


@given(engines())
def test_exact_samples_give_the_rates_back(engine: EngineRates) -> None:
    rates = fit_rates(samples_of(engine), BATCHES, context=True, overhead=True)
    assert (rates.prefill_hidden, rates.batches_hidden) == (False, frozenset())
    scale = engine.decode_step_s[1]
    assert rates.prefill_tokens_per_s == pytest.approx(engine.prefill_tokens_per_s, rel=1e-4)
    assert rates.decode_step_s == pytest.approx(engine.decode_step_s, rel=1e-4, abs=1e-4 * scale)
    assert rates.overhead_s == pytest.approx(engine.overhead_s, rel=1e-4, abs=1e-4 * scale)
    assert 6400 * rates.context_s == pytest.approx(6400 * engine.context_s, rel=1e-4, abs=1e-4 * scale)
    assert rates.error < 1e-4


@given(engines(), st.lists(st.floats(-0.1, 0.1), min_size=LOADS, max_size=LOADS))
def test_nothing_fits_noisy_samples_better(engine: EngineRates, errors: list[float]) -> None:
    """Not even the rates that made them; and whatever the noise, no rate is negative, no time zero."""
    samples = samples_of(engine, errors)
    rates = fit_rates(samples, BATCHES, context=True, overhead=True)
    assert min(rates.context_s, rates.overhead_s) >= 0
    assert 0 < rates.prefill_tokens_per_s < math.inf
    assert all(step_s > 0 for step_s in rates.decode_step_s.values())

    def off(sample: IterationSample) -> float:
        decode_s = rates.decode_step_s[int(sample.batch)] + rates.context_s * sample.context if sample.batch else 0.0
        found_s = rates.overhead_s + decode_s + sample.prefilled / rates.prefill_tokens_per_s
        return found_s * sample.iterations / sample.seconds - 1

    truth = [1 / (1 + error) - 1 for error in errors]
    assert math.hypot(*map(off, samples)) <= math.hypot(*truth) + 1e-6


def test_what_noise_hides_is_not_called_measured() -> None:
    """Prefills of any length take the same, and decoding takes no longer than they do."""
    samples = [IterationSample(0.01, 1, 0, prefilled=tokens) for tokens in PREFILLS]
    samples += [IterationSample(0.01, 1, batch, batch * context) for batch in BATCHES for context in CONTEXTS]
    rates = fit_rates(samples, BATCHES, context=True, overhead=True)
    assert rates.prefill_hidden
    assert rates.batches_hidden == set(BATCHES)
    assert rates.overhead_s == pytest.approx(0.01, rel=0.01)
    prefill, steps = speeds(rates, samples, "measured")
    for number in (prefill, *steps.values()):
        assert number.estimate
        assert number.low is not None
        assert number.high is not None
        assert number.low <= number.value <= number.high
    assert prefill.low == pytest.approx(256 / 0.01)


@given(engines(), st.lists(st.integers(1, 16), min_size=20, max_size=40), st.integers(0, 2**32))
def test_mixed_iterations_tell_prefill_from_decode(engine: EngineRates, batches: list[int], seed: int) -> None:
    """As a run's reports have them: without context and overhead, which are then in the decode times."""
    engine = EngineRates(**{f: getattr(engine, f) for f in engine.__struct_fields__} | {"context_s": 0.0})
    random = np.random.default_rng(seed)
    mixed = [(batch, 0, float(random.uniform(0, 200))) for batch in (*BATCHES, *batches)]
    samples = [IterationSample(20 * iteration_s(engine, *load), 20, *load) for load in mixed]
    rates = fit_rates(samples, BATCHES, context=False, overhead=False)
    for batch in BATCHES:
        assert rates.decode_step_s[batch] == pytest.approx(engine.decode_step_s[batch] + engine.overhead_s, rel=1e-3)
    assert rates.overhead_s == rates.context_s == 0.0


@given(engines(), st.integers(1, 16))
def test_between_batches_times_are_those_of_the_simulated_engine(engine: EngineRates, batch: int) -> None:
    """Samples of any batch, fitted at few sizes that lie on a line with it, give that batch's time."""
    line = EngineRates(
        **{f: getattr(engine, f) for f in engine.__struct_fields__}
        | {"decode_step_s": {2: 0.01, 16: 0.03}, "context_s": 0.0, "overhead_s": 0.0}
    )
    loads = [(size, 0, tokens) for size in (2, 16, batch) for tokens in (0, 100)]
    samples = [IterationSample(iteration_s(line, *load), 1, *load) for load in loads]
    rates = fit_rates(samples, (2, 16), context=False, overhead=False)
    assert rates.decode_step_s == pytest.approx({2: 0.01, 16: 0.03}, rel=1e-3)
    assert rates.error < 1e-3


@given(
    arrays.arrays(np.float64, (8, 4), elements=st.floats(0, 1, width=16)),
    arrays.arrays(np.float64, 8, elements=st.floats(-1, 1, width=16)),
)
def test_no_step_from_the_best_brings_more(matrix: np.ndarray, wanted: np.ndarray) -> None:
    """The conditions of Karush, Kuhn and Tucker."""
    x = nonnegative_least_squares(matrix, wanted)
    gradient = matrix.T @ (wanted - matrix @ x)
    assert (x >= 0).all()
    assert (gradient <= 1e-6).all()
    assert np.abs(gradient[x > 0]).max(initial=0.0) <= 1e-6


@pytest.mark.parametrize(
    ("samples", "found"),
    [
        ([], "nothing to fit"),
        ([IterationSample(0.0, 1, 1)], "took no time"),
        ([IterationSample(0.1, 1, batch) for batch in BATCHES], "nothing was measured of: prefill"),
        (
            [IterationSample(0.1, 1, 1, prefilled=5), IterationSample(0.2, 1, 2, prefilled=10)] * 9,
            "nothing was measured of: decoding 4",
        ),
        (
            [IterationSample(0.1, 1, batch, prefilled=10) for batch in BATCHES] * 3,
            "do not tell apart: prefill, decoding 1",
        ),
        (
            [IterationSample(0.1, 1, 0, prefilled=9), *(IterationSample(0.1, 1, b) for b in BATCHES)][:3],
            "3 samples do not tell|decoding",
        ),
    ],
)
def test_what_samples_do_not_tell(samples: list[IterationSample], found: str) -> None:
    with pytest.raises(FitError, match=found):
        fit_rates(samples, BATCHES, context=False, overhead=False)
