"""The load model: what serving computes depends on the arrivals alone, and rollouts get what it leaves."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from providers.serving_load import Lending, ServingLoad
from providers.serving_messages import DeviceSettings, LendingSettings
from traces.serving import ServingRequest

DEVICE = DeviceSettings(
    prefill_tokens_per_s=1000, decode_base_s=0.01, decode_per_request_s=0.001, tpot_s=0.05, kv_tokens=1000
)
LENDING = LendingSettings(window_s=1, credit_interval_s=0.5, kv_high_share=0.8, kv_low_share=0.5, stall_s=1)

requests = st.lists(
    st.builds(ServingRequest, st.floats(0, 5), st.integers(1, 1200), st.integers(1, 60)), max_size=12
).map(lambda found: sorted(found, key=lambda request: request.arrival_s))
steps_s = st.lists(st.floats(0, 0.5), max_size=40)


def load(*requests: ServingRequest) -> ServingLoad:
    return ServingLoad(iter(requests), DEVICE)


def busy_grid(load: ServingLoad, end_s: float) -> list[float]:
    return [load.busy_s(k / 20, (k + 1) / 20) for k in range(int(end_s * 20))]


@given(requests, steps_s)
def test_the_past_does_not_depend_on_when_it_is_looked_at(
    requests: Sequence[ServingRequest], steps_s: list[float]
) -> None:
    at_once, in_steps = load(*requests), load(*requests)
    now_s = 0.0
    for step_s in steps_s:
        now_s += step_s
        in_steps.advance(now_s)
    in_steps.advance(now_s)
    at_once.advance(now_s)
    assert busy_grid(in_steps, now_s) == busy_grid(at_once, now_s)
    assert (in_steps.active, in_steps.kv_share) == (at_once.active, at_once.kv_share)


@given(requests)
def test_every_request_is_served_in_full_and_time_is_never_counted_twice(requests: Sequence[ServingRequest]) -> None:
    served = load(*requests)
    busy_s, now_s = 0.0, 0.0
    for _ in range(2000):
        served.advance(now_s + 0.1)
        window_s = served.busy_s(now_s, now_s + 0.1)
        assert 0 <= window_s <= 0.1 + 1e-9
        busy_s += window_s
        now_s += 0.1
    assert (served.active, served.kv_share) == (0, 0)
    prefill_s = sum(r.prompt_tokens for r in requests) / DEVICE.prefill_tokens_per_s
    tokens = sum(r.output_tokens - 1 for r in requests)
    steps = max((r.output_tokens - 1 for r in requests), default=0)
    floor_s = prefill_s + steps * DEVICE.decode_base_s + tokens * DEVICE.decode_per_request_s
    ceiling_s = prefill_s + tokens * (DEVICE.decode_base_s + DEVICE.decode_per_request_s)
    assert floor_s - 1e-6 <= busy_s <= ceiling_s + 1e-6


def test_a_request_is_prefilled_at_once_and_decoded_at_its_pace() -> None:
    one = load(ServingRequest(1.0, 100, 3))
    one.advance(0.99)
    assert one.active == 0
    one.advance(1.05)
    assert (one.active, one.busy_until_s) == (1, pytest.approx(1.1))
    one.advance(1.2)
    step_s = DEVICE.decode_base_s + DEVICE.decode_per_request_s
    assert one.busy_s(0, 2) == pytest.approx(0.1 + 2 * step_s)
    assert one.busy_s(1.1, 1.1 + step_s) == pytest.approx(step_s)
    assert one.busy_s(1.15 + step_s, 2) == pytest.approx(0)
    assert one.active == 0


def test_a_prefill_goes_before_decoding_and_waits_for_room_in_the_cache() -> None:
    busy = load(ServingRequest(0, 500, 20), ServingRequest(0.1, 400, 80), ServingRequest(0.2, 100, 2))
    busy.advance(0.95)
    assert busy.active == 3
    assert busy.kv_share == pytest.approx((500 + 1 + 1 + 400 + 1 + 1) / 1000)
    for before_s, after_s in pairwise([0.0, 0.5, 0.9]):
        assert busy.busy_s(before_s, after_s) == pytest.approx(after_s - before_s)
    busy.advance(10)
    assert busy.active == 0


def test_credit_follows_what_serving_leaves() -> None:
    requests = load(ServingRequest(1, 400, 1), ServingRequest(10, 1, 2))
    lending = Lending(requests, LENDING)
    lending.update(0)
    assert lending.credits(10) == 10
    lending.update(1.5)
    assert requests.busy_s(0.5, 1.5) == pytest.approx(0.4)
    assert lending.credits(10) == 6
    assert not lending.pressed
    lending.update(1.9)
    assert lending.credits(10) == 6
    lending.update(3)
    assert lending.credits(10) == 10


def test_rollouts_leave_when_the_cache_fills_and_return_when_it_has_clearly_emptied() -> None:
    requests = load(ServingRequest(0, 790, 30), ServingRequest(5, 1, 1))
    lending = Lending(requests, LENDING)
    lending.update(0.8)
    assert requests.kv_share < LENDING.kv_high_share
    assert not lending.pressed
    lending.update(1.5)
    assert lending.pressed
    assert lending.credits(10) == 0
    lending.update(4)
    assert not lending.pressed
    assert lending.credits(10) == 10


def test_pressure_lasts_at_least_a_window() -> None:
    lending = Lending(load(), LENDING)
    lending.update(1)
    lending.press(1)
    lending.update(1.99)
    assert lending.pressed
    lending.update(2.0)
    assert not lending.pressed


@given(requests, st.lists(st.floats(0.01, 0.5), max_size=60), st.integers(0, 64))
def test_credits_stay_within_bounds(requests: Sequence[ServingRequest], steps_s: list[float], most: int) -> None:
    lending = Lending(load(*requests), LENDING)
    now_s = 0.0
    for step_s in steps_s:
        now_s += step_s
        lending.update(now_s)
        assert 0 <= lending.credits(most) <= most
        assert not (lending.pressed and lending.credits(most))


def test_what_fell_due_while_rollouts_held_the_device_is_done_then() -> None:
    lending = Lending(load(ServingRequest(1.01, 40, 1)), LENDING)
    assert lending.owed_s(1.0, 1.0, 1.0) == 0
    assert lending.owed_s(1.1, 1.0, 1.1) == pytest.approx(0.04)
    assert lending.owed_s(1.1, 1.06, 1.1) == pytest.approx(0)
    assert lending.owed_s(1.13, 1.0, 1.1) == pytest.approx(0.01)


@given(requests, st.lists(st.tuples(st.floats(0.001, 2), st.booleans()), max_size=40))
def test_a_claim_waits_no_longer_than_it_may_and_then_leaves_under_pressure(
    requests: Sequence[ServingRequest], asks: list[tuple[float, bool]]
) -> None:
    """Whether the engine comes back as soon as it may, or later."""
    lending = Lending(load(*requests), LENDING)
    claim, now_s, asked_s = lending.claim(), 0.0, None
    for later_s, prompt in asks:
        asked_s = now_s if asked_s is None else asked_s
        wait_s = claim.wait_s(now_s)
        if wait_s is None:
            assert lending.pressed
            assert now_s - asked_s >= LENDING.stall_s - 1e-9
        if wait_s:
            assert now_s + wait_s <= asked_s + LENDING.stall_s + 1e-9
            now_s += wait_s if prompt else wait_s + later_s
        else:
            asked_s = None
            now_s += later_s
