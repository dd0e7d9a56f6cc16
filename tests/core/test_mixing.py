"""Environments have their shares of the groups, by number, whoever counts from where."""

from hypothesis import given
from hypothesis import strategies as st

from elastic.core.mixing import counts_before, next_of

RATIOS = st.lists(st.floats(0, 1e6), min_size=1, max_size=6).filter(lambda ratios: max(ratios) > 1e-3)


@given(RATIOS, st.integers(0, 300))
def test_every_environment_has_its_share_to_within_less_than_a_group_for_each_other(
    ratios: list[float], number: int
) -> None:
    counts = counts_before(ratios, number)
    assert sum(counts) == number
    for ratio, count in zip(ratios, counts, strict=True):
        due = number * ratio / sum(ratios)
        assert abs(count - due) < len(ratios)
        assert ratio or not count, "one of no share has no group"


@given(RATIOS, st.integers(0, 60), st.integers(0, 60))
def test_what_goes_on_from_any_number_is_what_would_have_come(ratios: list[float], number: int, more: int) -> None:
    counts = counts_before(ratios, number)
    for _ in range(more):
        counts[next_of(ratios, counts)] += 1
    assert counts == counts_before(ratios, number + more)


def test_of_those_that_lack_the_same_the_first_comes_first() -> None:
    counts, order = [0, 0, 0], list[int]()
    for _ in range(8):
        order.append(next_of((2, 1, 1), counts))
        counts[order[-1]] += 1
    assert order == [0, 1, 2, 0, 0, 1, 2, 0]
