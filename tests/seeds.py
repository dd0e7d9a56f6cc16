"""How many seeds and examples, of those that a test is for, each change is tried with."""

import pytest
from hypothesis import settings

NIGHTLY = "nightly"
"""The profile with which properties are tried more often: `pytest --hypothesis-profile nightly`."""


def seeds(often: int, in_all: int) -> list[object]:
    """From 0 on: the first with every change, and all of them nightly."""
    return [*range(often), *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(often, in_all))]


def examples(often: int, in_all: int) -> int:
    """How many examples a property is tried with: so many with every change, and all of them nightly."""
    return in_all if settings.get_current_profile_name() == NIGHTLY else often
