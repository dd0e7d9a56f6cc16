"""Timers against a dictionary of deadlines."""

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.core.timers import Timers, Wait

NAMES = "abcdef"
KEYS = st.sampled_from(NAMES)
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("set"), KEYS, st.integers(0, 20)),
        st.tuples(st.just("clear"), KEYS, st.just(0)),
        st.tuples(st.just("pass"), KEYS, st.integers(0, 15)),
    ),
    max_size=80,
)


Make: TypeAlias = Callable[..., Timers]


@pytest.fixture(scope="module", params=[1, 64], ids=["always sweeps", "hardly ever sweeps"])
def make(request: pytest.FixtureRequest) -> Make:
    return partial(Timers, request.param, 1 + request.param // 16)


@given(actions=ACTIONS)
def test_every_deadline_is_met_once_and_in_order(make: Make, actions: list[tuple[str, str, int]]) -> None:
    timers, model, now_ns = make(), dict[str, tuple[int, int]](), 0
    for action, key, ns in actions:
        if action == "set":
            timers.set("w", key, now_ns, ns)
            model[key] = (now_ns, now_ns + ns)
        elif action == "clear":
            timers.clear("w", key)
            model.pop(key, None)
        else:
            now_ns += ns
            due = sorted((until, key) for key, (_, until) in model.items() if until <= now_ns)
            assert list(timers.pop_due(now_ns)) == [("w", key) for _, key in due]
            for _, key in due:
                del model[key]
        assert timers.next_ns() == min((until for _, until in model.values()), default=None)
        assert timers.waits() == sorted(Wait("w", key, since, until) for key, (since, until) in model.items())
        assert all(timers.waiting("w", key) is (key in model) for key in NAMES)


def test_many_that_were_put_off_hold_nobody_up_and_hide_nobody(make: Make) -> None:
    timers, met = make(brought_up_to_date=3), list[str]()
    for number in range(20):
        timers.set("w", f"{number:02}", 0, 10)
    for number in range(20):
        timers.set("w", f"{number:02}", 5, 10 + number % 7)
    last_ns = looks = 0
    while (next_ns := timers.next_ns()) is not None:
        last_ns = max(last_ns, next_ns)
        met += [f"{15 + int(key) % 7} {key}" for _, key in timers.pop_due(last_ns)]
        assert all(int(name[:2]) == last_ns for name in met[-1:])
        looks += 1
    assert met == sorted(f"{15 + number % 7} {number:02}" for number in range(20))
    assert looks <= 20


def test_wait_that_is_cleared_while_others_fall_due_does_not_fall_due(make: Make) -> None:
    timers = make()
    timers.set("w", "a", 0, 1)
    timers.set("w", "b", 0, 1)
    for _, key in timers.pop_due(5):
        assert key == "a"
        timers.clear("w", "b")


def test_nothing_is_left_after_clear_all(make: Make) -> None:
    timers = make()
    timers.set("w", "a", 0, 1)
    timers.clear_all()
    assert (timers.next_ns(), timers.waits(), list(timers.pop_due(9))) == (None, [], [])
