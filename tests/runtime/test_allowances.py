"""What a session may say follows from its time and its orders: honest ones never reach it, and floods are held."""

from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.core.types import SamplingParameters, WeightMode
from elastic.protocol import wire
from elastic.runtime.allowances import BEATS_BURST, BEATS_PER_INTERVAL, FAR_BEYOND, HELD_SHARE, SessionAllowances
from tests.seeds import examples

INTERVAL_S, FLUSH_S, SILENCE_S = 0.5, 0.03, 5.0


def turn(tokens: int) -> wire.Generate:
    return wire.Generate("0/0/0#0", 1, 0, 0, bytearray(), SamplingParameters(max_new_tokens=tokens, noise_seed=1))


@given(st.lists(st.tuples(st.integers(1, 64), st.floats(0, 3)), max_size=60), st.floats(0, 60))
def test_honest_sessions_are_never_held(turns: list[tuple[int, float]], late_s: float) -> None:
    """Even where every token comes in a frame of its own, every frame comes twice, and all of them come late."""
    allowed, now_s = SessionAllowances(INTERVAL_S, SILENCE_S, 0.0), 0.0
    waiting = 0
    for tokens, passed_s in turns:
        now_s += passed_s
        allowed.ordered(turn(tokens))
        allowed.ordered(wire.PullWeights(1, WeightMode.FINISH))
        waiting += 2 * (tokens + 2) + 2 * round(passed_s / INTERVAL_S)
        if now_s > late_s:
            for _ in range(waiting):
                allowed.said(200, now_s)
            waiting = 0
            assert not allowed.wait_s(now_s)


@settings(max_examples=examples(5, 10))
@given(st.integers(200, 4 << 20), st.integers(0, 2))
def test_a_flood_is_held_and_ten_times_as_much_is_the_end(size_bytes: int, turns: int) -> None:
    allowed = SessionAllowances(INTERVAL_S, SILENCE_S, 0.0)
    for _ in range(turns):
        allowed.ordered(turn(64))
    before = allowed.messages.allowed, allowed.bytes.allowed
    while not allowed.wait_s(0.0):
        allowed.said(size_bytes, 0.0)
    assert allowed.messages.used <= before[0] + 1
    assert allowed.bytes.used <= before[1] + size_bytes
    wait_s = allowed.wait_s(0.0)
    assert not allowed.wait_s(wait_s + 1e-6)
    while not allowed.far_beyond:
        allowed.said(size_bytes, 0.0)
    assert allowed.messages.used <= FAR_BEYOND * allowed.messages.allowed + 1


def test_what_was_not_said_in_a_day_cannot_be_said_at_once() -> None:
    allowed = SessionAllowances(INTERVAL_S, SILENCE_S, 0.0)
    for _ in range(50_000):
        allowed.said(100, 86_400.0)
    assert allowed.wait_s(86_400.0)


def test_who_is_held_for_long_is_out_however_slowly_it_is_read() -> None:
    """What it says beyond its allowance waits on its side, and never comes to ten times as much."""
    allowed, now_s = SessionAllowances(INTERVAL_S, SILENCE_S, 0.0), 0.0
    while not allowed.far_beyond:
        allowed.said(2000, now_s)
        wait_s = allowed.wait_s(now_s)
        allowed.held(wait_s, now_s)
        now_s += wait_s
    assert HELD_SHARE * SILENCE_S <= now_s < 2 * HELD_SHARE * SILENCE_S


@given(st.lists(st.floats(0, 2 * INTERVAL_S), min_size=200, max_size=400))
def test_heartbeats_count_as_often_as_they_tell_something(pauses: list[float]) -> None:
    allowed, now_s, counted = SessionAllowances(INTERVAL_S, SILENCE_S, 0.0), 0.0, 0
    for pause_s in pauses:
        now_s += pause_s
        counted += not allowed.beaten(now_s)
    assert counted <= BEATS_BURST + 1 + BEATS_PER_INTERVAL * now_s / INTERVAL_S
    assert counted >= min(len(pauses), now_s / INTERVAL_S - 1)
