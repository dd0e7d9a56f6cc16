"""The device of a serving host as rollouts meet it: serving's modelled work takes real time, and goes first."""

import threading
import time
from collections.abc import Callable

from elastic.core.types import NS_PER_S
from elastic.engine.base import RolloutEngine
from elastic.protocol import wire
from elastic.worker.agent import build_engine
from providers.serving_load import DeviceClaim, Lending, ServingLoad
from providers.serving_messages import LendingSettings, LoadReport


class ServingDevice:
    """The load model on a clock; may be used from any thread."""

    def __init__(
        self, load: ServingLoad, settings: LendingSettings, clock_ns: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self._load = load
        self._lending = Lending(load, settings)
        self._clock_ns = clock_ns
        self._start_ns = clock_ns()
        self._lock = threading.Lock()

    def lend(self) -> "LentShare":
        return LentShare(self)

    def claim(self) -> DeviceClaim:
        return self._lending.claim()

    def now_s(self) -> float:
        return (self._clock_ns() - self._start_ns) / NS_PER_S

    def report(self) -> LoadReport:
        with self._lock:
            now_s = self._updated()
            return LoadReport(
                active_requests=self._load.active,
                busy_share=self._lending.busy_share(now_s),
                kv_used_share=self._load.kv_share,
                pressed=self._lending.pressed,
            )

    def credits(self, most: int) -> int:
        with self._lock:
            self._updated()
            return self._lending.credits(most)

    def pressed(self) -> bool:
        with self._lock:
            self._updated()
            return self._lending.pressed

    def wait_s(self, claim: DeviceClaim) -> float | None:
        """See `DeviceClaim.wait_s`."""
        with self._lock:
            return claim.wait_s(self.now_s())

    def _updated(self) -> float:
        now_s = self.now_s()
        self._lending.update(now_s)
        return now_s


class LentShare:
    """One worker's `DeviceShare`, until it is reclaimed."""

    def __init__(self, device: ServingDevice) -> None:
        self._device = device
        self._claim = device.claim()
        self._reclaimed = threading.Event()

    def build_engine(self, welcome: wire.Welcome) -> RolloutEngine:
        return build_engine(welcome, self)

    def capacity_turns(self, most: int) -> int:
        return 0 if self._reclaimed.is_set() else self._device.credits(most)

    def hold_back(self) -> bool:
        return self._reclaimed.is_set() or self._device.pressed()

    def acquire_iteration(self) -> int:
        asked_s = self._device.now_s()
        while (wait_s := self._device.wait_s(self._claim)) and not self._reclaimed.is_set():
            self._reclaimed.wait(wait_s)
        return round((self._device.now_s() - asked_s) * NS_PER_S)

    def reclaim(self) -> None:
        """Takes the device back at once; calls that wait for it return."""
        self._reclaimed.set()

    def end(self) -> None:
        self.reclaim()
