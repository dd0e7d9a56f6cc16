"""Limits follow what the run has measured, within bounds."""

from hypothesis import example, given
from hypothesis import strategies as st

from elastic.core import commands as c
from elastic.core.digest import digest
from elastic.core.patience import ADAPTIVE, COMPARED_TURNS, FAR, MARGIN, REMEMBERED_NS, TIMES_MOST, Patience
from elastic.core.types import NS_PER_S, FinishReason
from elastic.testing.faults.core.settings import SMALL_LIMITS

TOKEN_S = SMALL_LIMITS.turn_stall_timeout_ns / NS_PER_S


@given(
    st.sampled_from(sorted(ADAPTIVE)),
    st.lists(st.tuples(st.integers(0, 2 * REMEMBERED_NS), st.integers(0, 10**12)), max_size=20),
)
@example("boot", [(0, 5 * NS_PER_S), (REMEMBERED_NS + 2, 0), (REMEMBERED_NS - 1, 0)])
def test_limits_stay_within_their_bounds_and_cover_what_was_seen(what: str, seen: list[tuple[int, int]]) -> None:
    patience, now_ns = Patience(SMALL_LIMITS), 0
    least_ns = getattr(SMALL_LIMITS, ADAPTIVE[what])
    times: list[tuple[int, int]] = []
    for pause_ns, duration_ns in seen:
        now_ns += pause_ns
        patience.note(what, duration_ns, now_ns)
        times.append((now_ns, duration_ns))
        limit_ns = patience.limit_ns(what, now_ns)
        lately = [duration for at_ns, duration in times if now_ns - at_ns < REMEMBERED_NS]
        ever = [duration for at_ns, duration in times if now_ns - at_ns <= 2 * REMEMBERED_NS]
        assert least_ns <= limit_ns <= TIMES_MOST * least_ns
        assert limit_ns >= min(MARGIN * max(lately), TIMES_MOST * least_ns)
        assert limit_ns <= max(least_ns, MARGIN * max(ever))


def test_what_is_long_ago_counts_no_more() -> None:
    patience = Patience(SMALL_LIMITS)
    patience.note("token", 4 * NS_PER_S, 0)
    assert patience.limit_ns("token", 1) == 12 * NS_PER_S
    assert patience.limit_ns("token", 2 * REMEMBERED_NS) == SMALL_LIMITS.turn_stall_timeout_ns


def slow_turn(core) -> c.StartTurn:
    """On a worker whose tokens come four seconds apart, which is close to the limit of five."""
    core.trainer()
    core.worker()
    core.end_seeding()
    core.request("0/0/0")
    start = core.one(c.StartTurn)
    for token in range(3):
        core.wait(4, beating=("trainer", start.worker))
        core.tokens(start, 1, start=token)
    return start


def test_turn_whose_tokens_have_come_late_is_waited_for_longer(core) -> None:
    start = slow_turn(core)
    out = core.wait(MARGIN * 4 - 0.5, beating=("trainer", start.worker))
    assert not [k for k in out if isinstance(k, c.AbortTurn)]
    out = core.wait(1, beating=("trainer", start.worker))
    assert [k.turn for k in out if isinstance(k, c.AbortTurn)] == [start.turn]


def test_what_never_came_teaches_no_patience(core) -> None:
    core.trainer()
    worker = core.worker()
    core.end_seeding()
    core.request("0/0/0")
    out = core.wait(10 * TOKEN_S, beating=("trainer", worker))
    assert len([k for k in out if isinstance(k, c.AbortTurn)]) > 1
    patience = core.scheduler.patience
    assert patience.limit_ns("token", core.scheduler.now_ns) == SMALL_LIMITS.turn_stall_timeout_ns


def test_patience_is_part_of_the_state(make_core) -> None:
    one, two = make_core(), make_core()
    slow, quick = slow_turn(one), slow_turn(two)
    assert digest(one.scheduler) == digest(two.scheduler)
    for core, start, pause_s in ((one, slow, 4.5), (two, quick, 1.0)):
        core.wait(pause_s, beating=("trainer", start.worker))
        core.tokens(start, 1, start=3, finish=FinishReason.STOP)
        core.wait(5.5 - pause_s, beating=("trainer", start.worker))
    limits = [core.scheduler.patience.limit_ns("token", core.scheduler.now_ns) for core in (one, two)]
    assert limits[0] > limits[1]


@given(st.integers(1, 4000), st.integers(1, 4000), st.floats(0.001, 1), st.floats(1, FAR))
def test_a_turn_is_late_that_takes_many_times_as_long_as_those_of_others(
    tokens: int, usual_tokens: int, token_s: float, slower: float
) -> None:
    """Neither is a long turn at a pace like theirs, nor any turn before there is somebody to compare with."""
    patience, token_ns = Patience(SMALL_LIMITS), round(token_s * NS_PER_S)
    took_ns = tokens * round(token_ns * slower)
    for _ in range(COMPARED_TURNS):
        assert not patience.late("slow", tokens, 1000 * took_ns)
        patience.note_turn("slow", tokens, took_ns, 0)
        patience.note_turn("fast", usual_tokens, usual_tokens * token_ns, 0)
    assert not patience.late("slow", tokens, round(0.99 * took_ns))
    far_ns = round(1.01 * FAR * token_ns * max(tokens, usual_tokens))
    assert patience.late("slow", tokens, max(far_ns, SMALL_LIMITS.turn_stall_timeout_ns + 1))
    assert not patience.late("slow", tokens, min(far_ns, SMALL_LIMITS.turn_stall_timeout_ns))
    assert not patience.late("fast", usual_tokens, usual_tokens * token_ns // 2)
