"""What the stand-in for AWS knows of itself: its pools, the instances that it has rented out, and what it bills.

Nothing here is shared with `providers.ec2`, whose figures are compared with these.
"""

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import traces
from traces.spot import SpotChange, read_spot_trace

USD_ON_DEMAND: Mapping[str, float] = {
    "g5.xlarge": 1.006,
    "g6.xlarge": 0.8048,
    "p3.2xlarge": 3.06,
    "p4d.24xlarge": 32.7726,
    "p5.48xlarge": 98.32,
}
TAKEN, ORDERED, BY_ITSELF = (
    "Server.SpotInstanceTermination",
    "Client.UserInitiatedShutdown",
    "Client.InstanceInitiatedShutdown",
)
MESSAGES = {
    TAKEN: "Server.SpotInstanceTermination: Spot instance termination",
    ORDERED: "Client.UserInitiatedShutdown: User initiated shutdown",
    BY_ITSELF: "Client.InstanceInitiatedShutdown: Instance initiated shutdown",
}


@dataclass
class Rented:
    """An instance from its start to its end. Times are Unix time, in whole seconds, as EC2 tells and bills them."""

    id: str
    pool: tuple[str, str]
    tags: Mapping[str, str]
    user_data: str
    began_s: int
    ended_s: int | None = None
    reason: str = ""
    visible_s: float = 0.0
    action_s: float | None = None
    """When it will be taken back, once that is said."""
    advised_s: float | None = None
    asked_ns: int = 0
    """When its order came in, on this machine's monotonic clock."""

    @property
    def lives(self) -> bool:
        return self.ended_s is None


class Prices:
    """Spot prices that follow a trace: what is scarce is dear. One step of the trace is one step of the price."""

    def __init__(
        self, trace: str = "rlboost-a", speed: float = 600.0, floor: float = 0.3, ceiling: float = 0.8
    ) -> None:
        events = read_spot_trace(traces.find(trace)).events
        there, counts = 0, list[tuple[float, int]]()
        for event in events:
            there += 1 if event.change is SpotChange.ADD else -1
            counts.append((event.time_s / speed, there))
        peak = max(count for _, count in counts)
        self.began_s = time.time() - 1800
        shares = [(at_s, floor + (ceiling - floor) * (1 - count / peak)) for at_s, count in counts]
        self._steps = [(self.began_s, floor), *((self.began_s + at_s, share) for at_s, share in shares)]

    def change(self, times: float, since_s: float = 0.0) -> None:
        """Let all prices be so many times what they are, since so long."""
        now_s = time.time() - since_s
        past = [step for step in self._steps if step[0] <= now_s]
        self._steps = [*past, (now_s, past[-1][1] * times)]

    def history(self, instance_type: str, zone: str) -> list[tuple[float, float]]:
        """(Unix time, dollars an hour), oldest first. A zone's prices differ by a little."""
        usd = USD_ON_DEMAND[instance_type] * (1 + 0.01 * (ord(zone[-1]) - ord("a")))
        return [(round(at_s, 3), round(usd * share, 6)) for at_s, share in self._steps]

    def at(self, instance_type: str, zone: str, at_s: float) -> float:
        usd = self.history(instance_type, zone)[0][1]
        for from_s, price in self.history(instance_type, zone):
            if from_s > at_s:
                break
            usd = price
        return usd


@dataclass
class Books:
    """Everything that was ever rented out. Thread-safe where it is changed."""

    prices: Prices
    capacity: dict[tuple[str, str], int]
    quota: int = 64
    rented: dict[str, Rented] = field(default_factory=dict)
    lock: threading.RLock = field(default_factory=threading.RLock)

    def living(self, pool: tuple[str, str] | None = None) -> list[Rented]:
        with self.lock:
            return [one for one in self.rented.values() if one.lives and pool in (None, one.pool)]

    def free(self, pool: tuple[str, str]) -> int:
        return self.capacity.get(pool, 0) - len(self.living(pool))

    def end(self, instance: str, reason: str) -> bool:
        """Whether this has ended it."""
        with self.lock:
            one = self.rented.get(instance)
            if one is None or not one.lives:
                return False
            one.ended_s, one.reason = int(time.time()), reason
            return True

    def usd(self) -> float:
        """The bill: seconds, sixty at the least, each hour at its first moment's price; nothing for what was taken
        back in its first hour."""
        total = 0.0
        with self.lock:
            for one in self.rented.values():
                until_s = int(time.time()) if one.ended_s is None else one.ended_s
                seconds = until_s - one.began_s
                if one.reason == TAKEN and seconds < 3600:
                    continue
                left, at_s = max(60, seconds), float(one.began_s)
                while left > 0:
                    part = min(3600, left)
                    total += self.prices.at(*one.pool, at_s) * part / 3600
                    left, at_s = left - part, at_s + part
        return total
