"""Scales and ticks hold what they are given."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.report import svg

POSITIVE = st.floats(1e-6, 1e12)


@given(POSITIVE)
def test_an_axis_holds_its_values_in_few_round_steps(value):
    high, step = svg.nice_ceiling(value)
    ticks = svg.spaced(high, step)
    assert high >= value * (1 - 1e-6)
    assert 2 <= len(ticks) <= 6
    assert ticks[-1] == pytest.approx(high)


@given(st.floats(0.001, 1e8), st.integers(3, 12))
def test_time_ticks_stay_in_range_and_apart(high_s, most):
    ticks = svg.time_ticks(high_s, most)
    assert len(ticks) <= most + 1
    assert all(0 <= value <= high_s * (1 + 1e-6) for value, _ in ticks)
    assert len({label for _, label in ticks}) == len(ticks)


@given(POSITIVE, st.floats(1.3, 1e9))
def test_log_ticks_stay_in_range(low, ratio):
    assert all(low * 0.999 <= tick <= low * ratio * 1.001 for tick in svg.log_ticks(low, low * ratio, 8))


@given(st.floats(-1e9, 1e9), st.floats(-1e9, 1e9), st.floats(-1e9, 1e9))
def test_a_scale_never_leaves_its_pixels(one, other, value):
    low, high = sorted((one, other))
    assert 10.0 <= svg.Scale(low, high, 10.0, 90.0)(value) <= 90.0


def test_a_scale_is_linear_or_logarithmic():
    assert svg.Scale(0.0, 10.0, 100.0, 0.0)(2.5) == 75.0
    assert svg.Scale(1.0, 100.0, 0.0, 50.0, log=True)(10.0) == pytest.approx(25.0)
