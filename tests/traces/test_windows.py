import pytest
from hypothesis import given
from hypothesis import strategies as st

from traces import data_path
from traces.serving import ServingRequest, read_serving_trace
from traces.windows import merged, scaled, typical_windows, window_at

arrivals = st.lists(st.floats(0, 100, allow_nan=False), min_size=1, max_size=50).map(sorted)


def trace_of(times: list[float]) -> list[ServingRequest]:
    return [ServingRequest(time, 10, 5) for time in times]


@given(arrivals, arrivals)
def test_merging_keeps_every_request_in_order(a: list[float], b: list[float]) -> None:
    assert [request.arrival_s for request in merged(trace_of(a), trace_of(b))] == sorted(a + b)


def test_windows_are_chosen_by_rule() -> None:
    # Requests per window of 10 s, and the peak second of each: 3 (3), 6 (1), 4 (2), then a broken one.
    times = [1.1, 1.2, 1.3, *(11.0 + i for i in range(6)), 20.1, 20.2, 25.0, 26.0, 31.0]
    windows = typical_windows(trace_of(times), length_s=10)
    assert windows == {"mean": 20.0, "burstiest": 0.0, "median": 20.0}
    assert [request.arrival_s for request in window_at(trace_of(times), 20.0, 10)] == pytest.approx([0.1, 0.2, 5, 6])


def test_scaling_keeps_lengths_within_bounds() -> None:
    (small, large) = scaled(
        [ServingRequest(4, 3, 2), ServingRequest(8, 8000, 900)], speed=2, length=0.1, most_prompt=400, most_output=50
    )
    assert (small.arrival_s, small.prompt_tokens, small.output_tokens) == (2, 1, 1)
    assert (large.arrival_s, large.prompt_tokens, large.output_tokens) == (4, 400, 50)


def test_the_shipped_traces_have_three_windows() -> None:
    trace = merged(*(read_serving_trace(data_path(f"azure-{name}")) for name in ("conversation", "code")))
    assert len(trace) == 19_366 + 8_819
    windows = typical_windows(trace)
    assert windows.keys() == {"mean", "burstiest", "median"}
    assert all(window_at(trace, start_s, 120) for start_s in windows.values())
