"""Loops that serve all: an item that fails ends nothing, waits longer each time, is counted, and logged in bounds."""

import asyncio
import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from elastic.system.isolation import ITEMS_KEPT, LOGGED_AT_ONCE, IsolatedLoop, LoopFaults
from elastic.system.supervision import signal_name


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans(), st.floats(0, 40)), max_size=60))
def test_an_item_waits_for_its_own_failures_only(steps: list[tuple[str, bool, float]]) -> None:
    """Whatever fails when: nothing is raised, each failure is counted, and an item's wait follows from its own row."""
    clock = Clock()
    faults = LoopFaults(clock)
    loop = IsolatedLoop("tests", faults, base_s=1.0, max_s=8.0, clock=clock)
    in_a_row, free_at_s, failed = dict.fromkeys("abc", 0), dict.fromkeys("abc", 0.0), 0
    for item, fails, passes_s in steps:
        with loop.attempt(item) as attempt:
            if fails:
                raise ValueError(item)
        assert bool(attempt.fault) == fails == loop.has_failed(item)
        failed += fails
        in_a_row[item] = in_a_row[item] + 1 if fails else 0
        free_at_s[item] = clock.now_s + min(2.0 ** (in_a_row[item] - 1), 8.0) if fails else 0.0
        clock.now_s += passes_s
        for other in "abc":
            assert loop.wait_s(other) == pytest.approx(max(0.0, free_at_s[other] - clock.now_s))
    assert faults.counts() == ({"tests": failed} if failed else {})


def test_a_flood_of_faults_is_counted_and_logged_within_bounds() -> None:
    """Twice as many faults as are kept: the bound shows beyond it alone."""
    clock = Clock()
    faults = LoopFaults(clock)
    loop = IsolatedLoop("tests", faults, clock=clock)
    with capture_logs() as told:
        for number in range(2 * ITEMS_KEPT):
            with loop.attempt(str(number)):
                raise RuntimeError("x" * 10_000)
        clock.now_s += 3600
        with loop.attempt("last"):
            raise RuntimeError
    assert faults.counts() == {"tests": 2 * ITEMS_KEPT + 1}
    assert len(told) == LOGGED_AT_ONCE + 1
    assert told[-1]["unsaid"] == 2 * ITEMS_KEPT - LOGGED_AT_ONCE
    assert max(len(str(one)) for one in told) < 1_000
    assert not loop.has_failed("0")  # What is remembered is bounded, too.


async def test_what_is_no_fault_passes() -> None:
    loop = IsolatedLoop("tests", LoopFaults(), outages=(LookupError,))
    for raised in (KeyError(), asyncio.CancelledError(), KeyboardInterrupt()):
        with pytest.raises(type(raised)), loop.attempt("a"):
            raise raised
    assert not loop.has_failed("a")


def test_whatever_a_process_ends_by_has_a_name() -> None:
    for number in (signal.SIGKILL, signal.SIGRTMIN, signal.SIGRTMIN + 3, signal.SIGRTMAX - 1):
        assert signal_name(number).startswith("SIG")
    assert [signal_name(number) for number in (0, 99)] == ["signal 0", "signal 99"]
