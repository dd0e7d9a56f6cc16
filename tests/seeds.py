"""How many seeds, of those that a test is for, each change is tried with."""

import pytest


def seeds(often: int, in_all: int) -> list[object]:
    """From 0 on: the first with every change, and all of them nightly."""
    return [*range(often), *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(often, in_all))]
