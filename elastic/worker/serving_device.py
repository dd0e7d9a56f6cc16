"""The device of a serving host as rollouts meet it: serving's modelled work takes real time, and goes first."""

import threading
import time
from collections.abc import Callable

from elastic import wire
from elastic.core.types import NS_PER_S
from elastic.engine.base import RolloutEngine
from elastic.worker.agent import build_engine
from providers.serving_load import Lending, ServingLoad
from providers.serving_messages import LendingSettings, LoadReport

HELD_MAX_S = 0.25
"""An engine that asks again after longer than this was idle in between, and kept serving from nothing."""


class ServingDevice:
    """The load model on a clock; may be used from any thread."""

    def __init__(
        self, load: ServingLoad, settings: LendingSettings, clock_ns: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self.stall_s = settings.stall_s
        self._load = load
        self._lending = Lending(load, settings)
        self._clock_ns = clock_ns
        self._start_ns = clock_ns()
        self._lock = threading.Lock()

    def lend(self) -> "LentShare":
        return LentShare(self)

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

    def press(self) -> None:
        with self._lock:
            self._lending.press(self._updated())

    def owed_s(self, held_since_s: float, asked_s: float) -> float:
        """How much longer serving has the device, for one who held it from `held_since_s` and asked at `asked_s`.

        What fell due while rollouts held it is done now; the wait since `asked_s` counts towards it.
        """
        with self._lock:
            now_s = self._updated()
            due_s = self._load.busy_s(held_since_s, now_s) + max(0.0, self._load.busy_until_s - now_s)
            return due_s - (now_s - asked_s)

    def _updated(self) -> float:
        now_s = self.now_s()
        self._lending.update(now_s)
        return now_s


class LentShare:
    """One worker's `DeviceShare`, until it is reclaimed."""

    def __init__(self, device: ServingDevice) -> None:
        self._device = device
        self._granted_s = -HELD_MAX_S
        self._reclaimed = threading.Event()

    def build_engine(self, welcome: wire.Welcome) -> RolloutEngine:
        return build_engine(welcome, self)

    def capacity_turns(self, most: int) -> int:
        return 0 if self._reclaimed.is_set() else self._device.credits(most)

    def hold_back(self) -> bool:
        return self._reclaimed.is_set() or self._device.pressed()

    def acquire_iteration(self) -> int:
        asked_s = self._device.now_s()
        held_since_s = self._granted_s if asked_s - self._granted_s < HELD_MAX_S else asked_s
        while (owed_s := self._device.owed_s(held_since_s, asked_s)) > 0 and not self._reclaimed.is_set():
            patience_s = self._device.stall_s - (self._device.now_s() - asked_s)
            if patience_s <= 0:
                self._device.press()
                break
            self._reclaimed.wait(min(owed_s, patience_s))
        self._granted_s = self._device.now_s()
        return round((self._granted_s - asked_s) * NS_PER_S)

    def reclaim(self) -> None:
        """Everything must leave now; whoever waits for the device is let go."""
        self._reclaimed.set()

    def end(self) -> None:
        self.reclaim()
