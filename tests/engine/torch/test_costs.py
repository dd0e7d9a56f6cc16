"""How an iteration of a device that nobody has modelled is shared out, once the device has been seen at work."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.engine.torch.costs import FOLLOW, LearnedCosts
from elastic.engine.torch.pacing import IterationLoad


def alone_s(load: IterationLoad) -> tuple[float, float]:
    """Of a device that reads its weights for 20 ms whatever it decodes, and prefills 10,000 tokens a second."""
    tokens = load.prefill + load.recompute
    return (0.02 if load.decode else 0.0), tokens / 10_000


def taught(*loads: IterationLoad) -> LearnedCosts:
    learned = LearnedCosts()
    for load in loads:
        learned.observe(load, sum(alone_s(load)))
    return learned


def shares(costs: tuple[float, ...]) -> list[float]:
    return [cost / sum(costs) for cost in costs]


PREFILL, DECODE, MIXED = IterationLoad(0, 256, 0), IterationLoad(16, 0, 0), IterationLoad(16, 192, 64)


@pytest.mark.parametrize("seen", [(PREFILL, DECODE), (PREFILL, MIXED), (PREFILL, MIXED, DECODE, DECODE)])
def test_decodes_beside_a_chunk_of_prefill_get_what_they_cost(seen: tuple[IterationLoad, ...]) -> None:
    decode, prefill, recompute = shares(taught(*seen).costs(MIXED))
    assert decode == pytest.approx(0.02 / 0.0456)  # and not 16 of 272 tokens
    assert prefill == pytest.approx(3 * recompute)


def test_nobody_knows_before_both_were_seen() -> None:
    assert shares(LearnedCosts().costs(MIXED)) == shares(taught(PREFILL).costs(MIXED)) == shares(MIXED)


def test_a_hiccup_counts_for_little() -> None:
    learned = taught(*[PREFILL, DECODE] * 20)
    learned.observe(DECODE, 60.0)
    assert learned.costs(DECODE).decode == pytest.approx(0.02 * (1 + FOLLOW))


loads = st.builds(IterationLoad, decode=st.integers(0, 64), prefill=st.integers(0, 512), recompute=st.integers(0, 512))


@given(st.lists(st.tuples(loads.filter(any), st.floats(1e-6, 10.0))), loads.filter(any))
def test_only_parts_that_there_are_cost_something(seen: list[tuple[IterationLoad, float]], load: IterationLoad) -> None:
    learned = LearnedCosts()
    for other, took_s in seen:
        learned.observe(other, took_s)
    for cost, tokens in zip(learned.costs(load), load, strict=True):
        assert cost >= 0
        assert tokens > 0 or not cost
