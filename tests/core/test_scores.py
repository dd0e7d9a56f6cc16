"""pass@k and avg@k are what counting all choices of k episodes comes to, and errors are those over tasks."""

import math
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.core.scores import avg_at_k, estimate, metrics, paired, pass_at_k, student_95

REWARDS = st.lists(st.floats(-10, 10), min_size=1, max_size=6)
TASKS = st.lists(st.lists(st.sampled_from([-1.0, 0.0, 0.5, 1.0]), max_size=5), max_size=8)


@given(st.lists(st.booleans(), min_size=1, max_size=9), st.data())
def test_pass_at_k_is_the_share_of_choices_of_k_episodes_with_one_that_passed(
    passed: list[bool], data: st.DataObject
) -> None:
    k = data.draw(st.integers(1, len(passed)))
    chosen = [any(some) for some in combinations(passed, k)]
    assert math.isclose(pass_at_k(len(passed), sum(passed), k), sum(chosen) / len(chosen), abs_tol=1e-12)


@given(st.integers(1, 4000), st.data())
def test_pass_at_k_is_a_probability_that_grows_with_k_and_with_what_passed(samples: int, data: st.DataObject) -> None:
    passed = data.draw(st.integers(0, samples))
    k = data.draw(st.integers(1, samples))
    found = pass_at_k(samples, passed, k)
    assert 0.0 <= found <= 1.0
    assert math.isclose(pass_at_k(samples, passed, 1), passed / samples)
    if k > 1:
        assert found >= pass_at_k(samples, passed, k - 1) - 1e-12
    if passed:
        assert found >= pass_at_k(samples, passed - 1, k) - 1e-12


@pytest.mark.parametrize(("samples", "passed", "k"), [(3, 1, 4), (3, 1, 0), (3, 4, 1), (3, -1, 1), (0, 0, 1)])
def test_what_cannot_be_is_refused(samples: int, passed: int, k: int) -> None:
    with pytest.raises(ValueError, match="allowed: k from 1"):
        pass_at_k(samples, passed, k)


@given(st.lists(REWARDS, min_size=2, max_size=12))
def test_an_estimate_is_the_mean_over_tasks_whatever_their_order_and_its_error_shrinks_with_them(
    rewards: list[list[float]],
) -> None:
    values = [avg_at_k(task) for task in rewards]
    found, again = estimate(values), estimate(values[::-1])
    assert found is not None
    assert found == again
    assert min(values) - 1e-9 <= found.mean <= max(values) + 1e-9
    assert found.tasks == len(values)
    assert found.error is not None
    assert found.interval is not None
    doubled = estimate(values * 2)
    assert doubled is not None
    assert doubled.error is not None
    assert doubled.error <= found.error + 1e-12
    assert found.interval[0] <= found.mean <= found.interval[1]


@pytest.mark.parametrize(
    ("degrees", "published"),
    [
        (1, 12.706),
        (2, 4.303),
        (5, 2.571),
        (10, 2.228),
        (11, 2.201),
        (15, 2.131),
        (29, 2.045),
        (60, 2.000),
        (120, 1.980),
    ],
)
def test_intervals_are_as_wide_as_tables_of_students_t_have_it(degrees: int, published: float) -> None:
    assert round(student_95(degrees), 3) == published
    values = [0.0, 1.0] * degrees
    found = estimate(values[: degrees + 1])
    assert found is not None
    assert found.error is not None
    assert found.interval is not None
    assert math.isclose(found.interval[1] - found.mean, student_95(degrees) * found.error)


def test_one_task_has_no_error_and_none_no_estimate() -> None:
    one = estimate([0.5])
    assert one is not None
    assert (one.error, one.interval) == (None, None)
    assert estimate([]) is None


@given(TASKS)
def test_failed_episodes_are_left_out_and_tasks_with_too_few_are_not_guessed(rewards: list[list[float]]) -> None:
    found = metrics(rewards, 5, (1, 3))
    assert ("avg@5" in found) is any(rewards)
    assert ("pass@3" in found) is any(len(task) >= 3 for task in rewards)
    if "pass@3" in found:
        assert found["pass@3"].tasks == sum(len(task) >= 3 for task in rewards)
        assert found["pass@1"].tasks == sum(len(task) >= 1 for task in rewards)


@given(TASKS)
def test_a_policy_does_not_differ_from_itself_and_differences_turn_around(rewards: list[list[float]]) -> None:
    same = paired(rewards, rewards)
    assert (same is None) is not any(rewards)
    assert same is None or (same.mean, same.error or 0.0) == (0.0, 0.0)
    better = [[reward + 1 for reward in task] for task in rewards]
    ahead, behind = paired(better, rewards), paired(rewards, better)
    if ahead is not None and behind is not None:
        assert math.isclose(ahead.mean, 1.0)
        assert math.isclose(ahead.mean, -behind.mean)


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=2, max_size=6))
def test_differences_of_rewards_of_any_size_are_numbers(rewards: list[float]) -> None:
    found = paired([[reward] for reward in rewards], [[reward] for reward in reversed(rewards)])
    assert found is not None
    assert found.error is not None
    assert found.interval is not None
    assert all(map(math.isfinite, (found.mean, found.error, *found.interval)))


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=2, max_size=6))
def test_rewards_of_any_size_have_a_mean_and_an_error(rewards: list[float]) -> None:
    assert math.isfinite(avg_at_k(rewards))
    found = estimate(rewards)
    assert found is not None
    assert found.error is not None
    assert math.isfinite(found.mean)
    assert math.isfinite(found.error)
    assert math.isclose(found.mean, avg_at_k(rewards))
