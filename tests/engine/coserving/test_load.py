import pytest

from elastic.engine.coserving.load import RequestRecord, Targets, report, violated_minutes

TARGETS = Targets(ttft_ms=100, tpot_ms=20)


def record(arrival_s: float, ttft_s: float, tpot_s: float, tokens: int = 5, error: str = "") -> RequestRecord:
    times = [arrival_s + ttft_s + i * tpot_s for i in range(tokens)]
    return RequestRecord(arrival_s=arrival_s, prompt_tokens=10, token_times_s=[] if error else times, error=error)


def test_latencies_are_a_requests_own() -> None:
    result = report([record(0, 0.05, 0.01), record(1, 0.15, 0.03)], TARGETS)
    assert (result.ttft_ms.mean, result.tpot_ms.mean) == (pytest.approx(100), pytest.approx(20))
    assert result.itl_ms.p99 == pytest.approx(30)
    assert result.e2el_ms.median == pytest.approx((90 + 270) / 2)
    assert result.request_goodput == pytest.approx(1 / result.duration_s)


def test_a_request_of_one_token_has_no_tpot() -> None:
    result = report([record(0, 0.05, 0, tokens=1)])
    assert (result.tpot_ms.p99, result.ttft_ms.p99, result.request_goodput) == (None, pytest.approx(50), None)


def test_minutes_in_violation_count_windows_by_arrival() -> None:
    fine, slow, late = record(0.1, 0.05, 0.01), record(5.2, 0.05, 0.03), record(10.3, 0.2, 0.01)
    failed = record(15.0, 0, 0, error="503")
    assert violated_minutes([fine], TARGETS, window_s=5) == 0
    assert violated_minutes([fine, slow, late, failed], TARGETS, window_s=5) == pytest.approx(15 / 60)


def test_nothing_is_reported_of_nothing() -> None:
    result = report([record(0, 0, 0, error="refused")])
    assert (result.completed, result.failed, result.ttft_ms.p99) == (0, 1, None)
