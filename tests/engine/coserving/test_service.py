import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.core.device_sharing import Slo
from elastic.engine.coserving.service import WINDOW_S, ServiceLog, milliseconds

MS = 1_000_000


@pytest.fixture
def log() -> ServiceLog:
    return ServiceLog(Slo(ttft_ns=100 * MS, tpot_ns=20 * MS))


def test_latencies_count_from_the_arrival_and_between_tokens(log: ServiceLog):
    log.served(1.0, [1.05, 1.06, 1.07])
    log.served(2.0, [2.05])
    log.refused(WINDOW_S)
    assert (log.requests, log.failed) == (3, 1)
    assert log.ttft_ms == pytest.approx((50, 50))
    assert log.tpot_ms == pytest.approx((10, 10))
    assert log.violated_minutes == pytest.approx(WINDOW_S / 60), "of the request that was not served"


@pytest.mark.parametrize("times_s", [[0.2, 0.21], [0.05, 0.1]], ids=["ttft", "tpot"])
def test_a_window_is_violated_by_either_target(log: ServiceLog, times_s: list[float]):
    for window in range(3):
        log.served(window * WINDOW_S, [window * WINDOW_S + 0.01])
    log.served(0.0, times_s)
    assert log.violated_minutes == pytest.approx(WINDOW_S / 60)


@given(
    st.lists(
        st.tuples(st.integers(0, 400), st.sampled_from(("served", "late", "refused"))),
        max_size=60,
    )
)
def test_what_was_violated_stays_so(requests: list[tuple[int, str]]):
    log = ServiceLog(Slo(ttft_ns=100 * MS, tpot_ns=20 * MS))
    violated: set[int] = set()
    for arrival_s, fate in sorted(requests):
        if fate == "refused":
            log.refused(arrival_s)
        else:
            log.served(arrival_s, [arrival_s + (0.2 if fate == "late" else 0.01)])
        if fate != "served":
            violated.add(int(arrival_s / WINDOW_S))
        assert log.violated_minutes <= len(violated) * WINDOW_S / 60 + 1e-9
    refused = {int(arrival_s / WINDOW_S) for arrival_s, fate in requests if fate == "refused"}
    assert log.violated_minutes >= len(refused) * WINDOW_S / 60 - 1e-9
    assert log.failed == sum(fate == "refused" for _, fate in requests)


def test_nothing_is_known_before_the_first(log: ServiceLog):
    assert log.ttft_ms == log.tpot_ms == (None, None)
    assert milliseconds([], 99) is None
    assert milliseconds([5 * MS], 99) == 5
