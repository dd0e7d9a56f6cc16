"""The lent device on a clock: serving goes first, rollouts pay for the time they kept it from working."""

import threading
import time

from elastic.engine.base import DeviceShare
from elastic.worker.serving_device import LentShare, ServingDevice
from providers.serving_load import HELD_MAX_S, ServingLoad
from providers.serving_messages import DeviceSettings, LendingSettings
from traces.serving import ServingRequest


class Clock:
    """Stands still until told otherwise, or runs as fast as the real one from now on."""

    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> int:
        return self.now_ns

    def advance(self, seconds: float) -> None:
        self.now_ns += round(seconds * 1e9)


def device(*requests: ServingRequest, clock: Clock | None = None, stall_s: float = 5.0) -> ServingDevice:
    settings = DeviceSettings(prefill_tokens_per_s=1000, kv_tokens=100_000)
    lending = LendingSettings(window_s=0.5, stall_s=stall_s)
    return ServingDevice(ServingLoad(iter(requests), settings), lending, clock or time.monotonic_ns)


def test_an_idle_device_is_had_at_once() -> None:
    share: DeviceShare = LentShare(device(clock=Clock()))
    assert share.acquire_iteration() == 0
    assert not share.hold_back()
    assert share.capacity_turns(16) == 16


def test_an_iteration_waits_for_the_serving_iteration_in_hand() -> None:
    share = LentShare(device(ServingRequest(0, 300, 1)))
    before_s = time.monotonic()
    blocked_ns = share.acquire_iteration()
    waited_s = time.monotonic() - before_s
    assert 0.25 <= blocked_ns / 1e9 <= waited_s


def test_an_engine_that_was_idle_owes_nothing() -> None:
    clock = Clock()
    share = LentShare(device(ServingRequest(0.1, 40, 1), clock=clock))
    assert share.acquire_iteration() == 0
    clock.advance(HELD_MAX_S + 0.1)
    assert share.acquire_iteration() == 0


def test_a_wait_is_bounded_and_ends_in_pressure() -> None:
    share = LentShare(device(ServingRequest(0, 60_000, 1), stall_s=0.1))
    assert not share.hold_back()
    assert 0.1 <= share.acquire_iteration() / 1e9 < 60.0
    assert share.hold_back()
    assert share.capacity_turns(16) == 0


def test_reclaiming_lets_a_waiting_engine_go() -> None:
    share = LentShare(device(ServingRequest(0, 60_000, 1), stall_s=60))
    engine = threading.Thread(target=share.acquire_iteration)
    engine.start()
    share.reclaim()
    engine.join(timeout=10)
    assert not engine.is_alive()
    assert share.hold_back()
    assert share.capacity_turns(16) == 0
