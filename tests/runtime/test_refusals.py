"""Refusals are counted whoever is refused, and cost neither memory nor a log file."""

import structlog
from hypothesis import given
from hypothesis import strategies as st

from elastic.runtime.refusals import BURST_LINES, KINDS_MAX, LINES_PER_S, REASON_MAX, TURN, RefusalCount, Refusals


def test_a_refusal_is_told_in_one_line() -> None:
    lie = RefusalCount(worker="spot-3", reason="log-probability above 0", count=12)
    assert str(lie) == "refused: 12 frames of worker spot-3: log-probability above 0"
    assert (
        str(RefusalCount(worker="", reason="wrong token", count=1))
        == "refused: 1 connection of unauthenticated peers: wrong token"
    )


def test_a_worker_that_is_slow_is_not_said_to_be_refused() -> None:
    slow = RefusalCount(worker="spot-3", reason="it took long", count=2, what=TURN)
    assert str(slow) == "2 turns went badly at worker spot-3: it took long"
    with structlog.testing.capture_logs() as lines:
        Refusals().note("spot-3", "it took long", 0.0, TURN)
    assert [line["event"] for line in lines] == ["a turn went badly"]


@given(st.lists(st.tuples(st.sampled_from(["", "w-1", "w-2"]), st.text(max_size=400), st.floats(0, 2)), max_size=200))
def test_every_refusal_counts_and_few_are_logged(refused: list[tuple[str, str, float]]) -> None:
    refusals, now_s = Refusals(), 1000.0
    with structlog.testing.capture_logs() as lines:
        for worker, reason, passed_s in refused:
            now_s += passed_s
            refusals.note(worker, reason, now_s)
    counts = refusals.counts()
    for worker in ("", "w-1", "w-2"):
        assert sum(c.count for c in counts if c.worker == worker) == sum(who == worker for who, *_ in refused)
    assert all(c.reason.isprintable() and len(c.reason) <= REASON_MAX for c in counts)
    assert len(lines) <= BURST_LINES + (now_s - 1000.0) * LINES_PER_S + 1
    left_out = sum(line.get("unlogged", 0) for line in lines)
    assert len(lines) + left_out <= len(refused)


def test_unauthenticated_peers_that_always_say_something_else_take_no_room() -> None:
    refusals = Refusals()
    for n in range(10 * KINDS_MAX):
        refusals.note("", f"frame of {n} bytes", 0.0)
    refusals.note("w-1", "log-probability above 0", 0.0)
    counts = refusals.counts()
    assert len(counts) <= KINDS_MAX + 2
    assert counts[-1] == RefusalCount(worker="w-1", reason="log-probability above 0", count=1)
    assert sum(c.count for c in counts) == 10 * KINDS_MAX + 1
