from hypothesis import given
from hypothesis import strategies as st

from elastic.engine.coserving.usage import UsageMeter

moments = st.lists(st.tuples(st.integers(0, 100), st.sampled_from(["serving", "rollout", None, True, False])))


@given(moments)
def test_every_moment_is_booked_once_whenever_it_is_read(changes: list[tuple[int, str | bool | None]]) -> None:
    read_often, read_once = UsageMeter(0), UsageMeter(0)
    now_ns, user, lent = 0, None, False
    expected = {"serving": 0, "rollout": 0, "lent": 0, "lent serving": 0}
    for elapsed_ns, change in changes:
        now_ns += elapsed_ns
        if user is not None:
            expected[user] += elapsed_ns
        expected["lent"] += elapsed_ns * lent
        expected["lent serving"] += elapsed_ns * (lent and user == "serving")
        for meter in (read_often, read_once):
            if isinstance(change, bool):
                meter.lend(change, now_ns)
            else:
                meter.hand_to(change, now_ns)
        user, lent = (user, change) if isinstance(change, bool) else (change, lent)
        usage = read_often.read(now_ns)
        assert usage.serving_ns == expected["serving"]
    usage = read_once.read(now_ns)
    assert usage == read_often.read(now_ns)
    assert [usage.serving_ns, usage.rollout_ns, usage.lent_ns, usage.lent_serving_ns] == [*expected.values()]
