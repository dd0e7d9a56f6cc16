"""A serving host on virtual time: the load model of live hosts, and one worker's share of its device."""

from collections.abc import Callable, Iterator

from elastic.core.types import NS_PER_S, Nanoseconds
from elastic.simulation.loop import EventLoop
from providers.serving_load import Lending, ServingLoad
from providers.serving_messages import DeviceSettings, LendingSettings
from traces.serving import ServingRequest

WATCH_S = 0.05
"""Interval at which a lent host's load is checked. Live workers check more often, which would cost too many events
here."""


class LentHostModel:
    """See `providers.markets.LendableHost`. It answers from `started_ns` on."""

    def __init__(
        self,
        loop: EventLoop,
        requests: Iterator[ServingRequest],
        device: DeviceSettings,
        lending: LendingSettings,
        started_ns: Nanoseconds,
    ) -> None:
        self._loop = loop
        self._started_ns = started_ns
        self._load = ServingLoad(requests, device)
        self._lending = Lending(self._load, lending)

    @property
    def lendable(self) -> bool:
        return self._loop.now_ns >= self._started_ns and not self.updated().pressed

    @property
    def kv_used_share(self) -> float:
        return self._load.kv_share

    def now_s(self) -> float:
        return (self._loop.now_ns - self._started_ns) / NS_PER_S

    def updated(self) -> Lending:
        self._lending.update(self.now_s())
        return self._lending


class LentShareModel:
    """One worker's share of a host, until it ends."""

    def __init__(self, loop: EventLoop, host: LentHostModel) -> None:
        self._loop = loop
        self._host = host
        self._claim = host.updated().claim()
        self._ended = False
        self._seen: tuple[bool, int] | None = None

    def capacity_turns(self, most: int) -> int:
        return 0 if self._ended else self._host.updated().credits(most)

    def hold_back(self) -> bool:
        return self._host.updated().pressed or self._ended

    def acquire(self) -> Nanoseconds | None:
        """Return when to ask again (now: the device may be used); None if rollouts must leave."""
        wait_s = self._claim.wait_s(self._host.now_s())
        if wait_s is None:
            return None
        return self._loop.now_ns + (max(1, round(wait_s * NS_PER_S)) if wait_s else 0)

    def watch(self, changed: Callable[[], None]) -> None:
        """Call `changed` whenever credit or pressure has changed."""
        if self._ended:
            return
        seen = (self.hold_back(), self.capacity_turns(1 << 10))
        if seen != self._seen:
            self._seen = seen
            changed()
        self._loop.after(round(WATCH_S * NS_PER_S), lambda: self.watch(changed))

    def end(self) -> None:
        self._ended = True
