"""Worlds in which nothing goes wrong: nobody is given up there, and nothing is sent again for its silence."""

from random import Random

import msgspec
import pytest

from elastic.testing.faults.core.faults import NO_FAULTS
from elastic.testing.faults.core.settings import draw_settings
from elastic.testing.faults.core.world import simulate

SEEDS = [8, 116, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in (1, 16, 20))]


@pytest.mark.parametrize("seed", SEEDS)
def test_long_turns_in_small_batches_are_waited_for(seed: int) -> None:
    """Turns take several times the limits of loading and of a turn's next token, and most wait for others."""
    drawn = draw_settings(Random(seed))
    long = msgspec.structs.replace(
        drawn, max_new_tokens=120, tokens_per_iteration=1, max_batch=min(drawn.max_batch, 2), capacity_turns=4
    )
    assert not simulate(seed, long, NO_FAULTS).failed
