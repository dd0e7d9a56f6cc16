"""Timers against a dictionary of deadlines."""

from hypothesis import given
from hypothesis import strategies as st

from elastic.core.timers import Timers, Wait

KEYS = st.sampled_from(["a", "b", "c"])
ACTIONS = st.one_of(
    st.tuples(st.just("set"), KEYS, st.integers(0, 20)),
    st.tuples(st.just("clear"), KEYS, st.just(0)),
    st.tuples(st.just("pass"), KEYS, st.integers(0, 15)),
)


@given(st.lists(ACTIONS, max_size=60))
def test_every_deadline_is_met_once_and_in_order(actions: list[tuple[str, str, int]]) -> None:
    timers, model, now_ns = Timers(), dict[str, tuple[int, int]](), 0
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
        assert all(timers.waiting("w", key) is (key in model) for key in "abc")


def test_wait_that_is_cleared_while_others_fall_due_does_not_fall_due() -> None:
    timers = Timers()
    timers.set("w", "a", 0, 1)
    timers.set("w", "b", 0, 1)
    for _, key in timers.pop_due(5):
        assert key == "a"
        timers.clear("w", "b")


def test_nothing_is_left_after_clear_all() -> None:
    timers = Timers()
    timers.set("w", "a", 0, 1)
    timers.clear_all()
    assert (timers.next_ns(), timers.waits(), list(timers.pop_due(9))) == (None, [], [])
