"""How numbers read."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.report import units
from elastic.system.plain_values import printable


@pytest.mark.parametrize(
    ("value_s", "words"),
    [
        (None, "–"),
        (0, "0 s"),
        (0.0123, "12.3 ms"),
        (0.9999, "1 s"),
        (4.5678, "4.57 s"),
        (59.99, "1 min 00 s"),
        (312, "5 min 12 s"),
        (3599.7, "1 h 00 min"),
        (11_040, "3 h 04 min"),
    ],
)
def test_durations(value_s, words):
    assert units.duration(value_s) == words


@pytest.mark.parametrize(
    ("value", "words"),
    [(None, "–"), (0, "0"), (1.25, "1.25"), (9999, "9,999"), (12_345, "12.3 k"), (999_960, "1 M"), (4.2e9, "4.2 G")],
)
def test_counts(value, words):
    assert units.count(value) == words


@pytest.mark.parametrize(
    ("value", "words"),
    [(None, "–"), (0.0, "0 %"), (0.0001, "< 0.1 %"), (0.0731, "7.3 %"), (1.0, "100 %"), (0.9999, "100.0 %")],
)
def test_shares(value, words):
    assert units.share(value) == words


@pytest.mark.parametrize(
    ("value", "words"), [(None, "–"), (0.0, "$0.00"), (0.0004, "$0.0004"), (0.904, "$0.904"), (1234.5, "$1,234.50")]
)
def test_dollars(value, words):
    assert units.usd(value) == words


@given(st.text())
def test_printable_text_stays_and_the_rest_shows(text):
    shown = printable(text)
    assert shown.isprintable()
    assert len(shown) == len(text)
    if text.isprintable():
        assert shown == text
