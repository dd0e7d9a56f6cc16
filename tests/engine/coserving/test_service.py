import pytest

from elastic.engine.coserving.service import WINDOW_S, ServiceLog, milliseconds
from policies.coexecution import Slo

MS = 1_000_000


@pytest.fixture
def log() -> ServiceLog:
    return ServiceLog(Slo(ttft_ns=100 * MS, tpot_ns=20 * MS))


def test_latencies_count_from_the_arrival_and_between_tokens(log: ServiceLog):
    log.served(1.0, [1.05, 1.06, 1.07])
    log.served(2.0, [2.05])
    log.refused()
    assert (log.requests, log.failed) == (3, 1)
    assert log.ttft_ms == pytest.approx((50, 50))
    assert log.tpot_ms == pytest.approx((10, 10))
    assert log.violated_minutes == 0


@pytest.mark.parametrize("times_s", [[0.2, 0.21], [0.05, 0.1]], ids=["ttft", "tpot"])
def test_a_window_is_violated_by_either_target(log: ServiceLog, times_s: list[float]):
    for window in range(3):
        log.served(window * WINDOW_S, [window * WINDOW_S + 0.01])
    log.served(0.0, times_s)
    assert log.violated_minutes == pytest.approx(WINDOW_S / 60)


def test_nothing_is_known_before_the_first(log: ServiceLog):
    assert log.ttft_ms == log.tpot_ms == (None, None)
    assert milliseconds([], 99) is None
    assert milliseconds([5 * MS], 99) == 5
