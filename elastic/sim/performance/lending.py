"""A serving host on virtual time: the load model of live hosts, and one worker's share of its device."""

from collections.abc import Callable, Iterator

from elastic.core.types import NS_PER_S, Nanoseconds
from elastic.sim.loop import EventLoop
from providers.serving_load import Lending, ServingLoad
from providers.serving_messages import DeviceSettings, LendingSettings
from traces.serving import ServingRequest

HELD_MAX_S = 0.25
"""As live: an engine that asks again after longer than this was idle in between."""
WATCH_S = 0.05
"""How often a lent host is looked at; live workers look more often, which is not worth the events here."""


class ServingHost:
    def __init__(
        self,
        loop: EventLoop,
        requests: Iterator[ServingRequest],
        device: DeviceSettings,
        lending: LendingSettings,
        started_ns: Nanoseconds,
    ) -> None:
        self.lease: str | None = None
        self.stall_s = lending.stall_s
        self._loop = loop
        self._started_ns = started_ns
        self._load = ServingLoad(requests, device)
        self._lending = Lending(self._load, lending)

    def now_s(self) -> float:
        return (self._loop.now_ns - self._started_ns) / NS_PER_S

    def update(self) -> float:
        now_s = self.now_s()
        self._lending.update(now_s)
        return now_s

    @property
    def pressed(self) -> bool:
        return self._lending.pressed

    @property
    def kv_share(self) -> float:
        return self._load.kv_share

    def credits(self, most: int) -> int:
        self.update()
        return self._lending.credits(most)

    def press(self) -> None:
        self._lending.press(self.update())

    def owed_s(self, held_since_s: float, asked_s: float) -> float:
        """How much longer serving has the device; see `elastic.worker.serving_device`."""
        now_s = self.update()
        due_s = self._load.busy_s(held_since_s, now_s) + max(0.0, self._load.busy_until_s - now_s)
        return due_s - (now_s - asked_s)


class LentShare:
    """One worker's share of a host, until it ends."""

    def __init__(self, loop: EventLoop, host: ServingHost) -> None:
        self._loop = loop
        self._host = host
        self._granted_s = -HELD_MAX_S
        self._asked_s: float | None = None
        self._ended = False
        self._seen: tuple[bool, int] | None = None

    def capacity_turns(self, most: int) -> int:
        return 0 if self._ended else self._host.credits(most)

    def hold_back(self) -> bool:
        self._host.update()
        return self._ended or self._host.pressed

    def acquire(self) -> Nanoseconds | None:
        """When to ask again, now if the device may be used; None when rollouts must leave."""
        now_s = self._host.now_s()
        if self._asked_s is None:
            self._asked_s = now_s
            self._held_since_s = self._granted_s if now_s - self._granted_s < HELD_MAX_S else now_s
        owed_s = self._host.owed_s(self._held_since_s, self._asked_s)
        patience_s = self._host.stall_s - (now_s - self._asked_s)
        if owed_s > 0 and patience_s > 0:
            return self._loop.now_ns + max(1, round(min(owed_s, patience_s) * NS_PER_S))
        if owed_s > 0:
            self._host.press()
        self._granted_s, self._asked_s = now_s, None
        return None if owed_s > 0 else self._loop.now_ns

    def watch(self, changed: Callable[[], None]) -> None:
        """Call `changed` whenever credit or pressure have."""
        if self._ended:
            return
        seen = (self.hold_back(), self._host.credits(1 << 10))
        if seen != self._seen:
            self._seen = seen
            changed()
        self._loop.after(round(WATCH_S * NS_PER_S), lambda: self.watch(changed))

    def end(self) -> None:
        self._ended = True
