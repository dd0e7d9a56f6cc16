"""A serving engine's work on its device, and what it leaves for rollouts. Pure: the caller brings the time.

The load is open loop: requests arrive as in a trace, each is prefilled as soon as the device and the KV cache have
room, and all that run decode one token every `tpot_s`, or as fast as the device can. So when serving computes is
a function of the arrivals alone. Times are seconds since the host's start. Source: ROSE §4.1.
"""

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from providers.serving_messages import DeviceSettings, LendingSettings
from traces.serving import ServingRequest

HISTORY_S = 32.0
"""How far back `busy_s` can look: past the longest `window_s`."""
HELD_MAX_S = 0.25
"""An engine that asks again after longer than this was idle in between, and kept serving from nothing."""


@dataclass(slots=True)
class _Running:
    tokens_left: int
    kv_tokens: int


class ServingLoad:
    """Serving iterations in order of time, worked out up to `advance`'s last time. No two of them overlap."""

    def __init__(self, requests: Iterator[ServingRequest], device: DeviceSettings) -> None:
        self._requests = requests
        self._device = device
        self._arriving = next(requests, None)
        self._waiting: deque[ServingRequest] = deque()
        self._running: list[_Running] = []
        self._held_tokens = 0
        self._free_s = 0.0
        self._next_decode_s = 0.0
        self._iterations: deque[tuple[float, float]] = deque()
        self._due_s = self._next_due_s()

    @property
    def active(self) -> int:
        """Requests that run or wait."""
        return len(self._running) + len(self._waiting)

    @property
    def kv_share(self) -> float:
        """The share of the KV cache that requests hold."""
        return min(1.0, self._held_tokens / self._device.kv_tokens)

    @property
    def busy_until_s(self) -> float:
        """The end of the last iteration that has begun."""
        return self._free_s

    def busy_s(self, since_s: float, until_s: float) -> float:
        """How long serving computed between two times of the last `HISTORY_S`."""
        total_s = 0.0
        for begin_s, end_s in reversed(self._iterations):
            if end_s <= since_s:
                break
            total_s += max(0.0, min(end_s, until_s) - max(begin_s, since_s))
        return total_s

    def advance(self, now_s: float) -> None:
        """Begin every iteration that is due by `now_s`."""
        while self._due_s <= now_s:
            self._iterate(self._due_s)
            self._due_s = self._next_due_s()
        self._admit(now_s)
        while self._iterations and self._iterations[0][1] < now_s - HISTORY_S:
            self._iterations.popleft()

    def _iterate(self, begin_s: float) -> None:
        prefill = self._prefill_due_s() <= begin_s
        self._admit(begin_s)
        self._free_s = begin_s + (self._prefill() if prefill else self._decode(begin_s))
        self._iterations.append((begin_s, self._free_s))

    def _next_due_s(self) -> float:
        return min(self._prefill_due_s(), self._decode_due_s())

    def _prefill_due_s(self) -> float:
        head = self._waiting[0] if self._waiting else self._arriving
        return max(self._free_s, head.arrival_s) if head is not None and self._fits(head) else math.inf

    def _decode_due_s(self) -> float:
        return max(self._free_s, self._next_decode_s) if self._running else math.inf

    def _fits(self, request: ServingRequest) -> bool:
        """A request that is too long for the whole cache must run alone."""
        held = self._held_tokens
        return not self._running or held + request.prompt_tokens + request.output_tokens <= self._device.kv_tokens

    def _admit(self, now_s: float) -> None:
        while self._arriving is not None and self._arriving.arrival_s <= now_s:
            self._waiting.append(self._arriving)
            self._arriving = next(self._requests, None)

    def _prefill(self) -> float:
        request = self._waiting.popleft()
        if request.output_tokens > 1:
            self._running.append(_Running(request.output_tokens - 1, request.prompt_tokens + 1))
            self._held_tokens += request.prompt_tokens + 1
        return request.prompt_tokens / self._device.prefill_tokens_per_s

    def _decode(self, begin_s: float) -> float:
        step_s = self._device.decode_base_s + self._device.decode_per_request_s * len(self._running)
        self._next_decode_s = begin_s + max(self._device.tpot_s, step_s)
        for request in self._running:
            request.tokens_left -= 1
            request.kv_tokens += 1
        self._held_tokens += len(self._running)
        self._held_tokens -= sum(request.kv_tokens for request in self._running if request.tokens_left <= 0)
        self._running = [request for request in self._running if request.tokens_left > 0]
        return step_s


class Lending:
    """What serving leaves: credits while it is idle enough, nothing under pressure.

    Credit follows the idle share of the device and the KV cache that serving does not use. Pressure begins when
    serving needs the cache, or holds the device for `stall_s`; it ends after `window_s` at the earliest, and when
    both have clearly eased, so that rollouts do not come and go with every burst.
    """

    def __init__(self, load: ServingLoad, settings: LendingSettings) -> None:
        self._load = load
        self._settings = settings
        self._credit_share = 1.0
        self._credit_due_s = 0.0
        self._pressed_since_s = 0.0
        self.pressed = False

    def update(self, now_s: float) -> None:
        self._load.advance(now_s)
        s, kv_share = self._settings, self._load.kv_share
        if kv_share >= s.kv_high_share:
            self.press(now_s)
        elif self.pressed and now_s >= self._pressed_since_s + s.window_s:
            self.pressed = kv_share > s.kv_low_share or self.busy_share(now_s) > s.resume_busy_share
        if now_s >= self._credit_due_s:
            self._credit_due_s = now_s + s.credit_interval_s
            self._credit_share = max(0.0, min(1 - self.busy_share(now_s), 1 - kv_share / s.kv_high_share))

    def busy_share(self, now_s: float) -> float:
        """Serving's share of the device over the last `window_s`."""
        window_s = min(self._settings.window_s, now_s)
        return self._load.busy_s(now_s - window_s, now_s) / window_s if window_s > 0 else 0.0

    def press(self, now_s: float) -> None:
        """Rollouts must leave: serving needs the KV cache, or an iteration has waited for `stall_s`."""
        if not self.pressed:
            self.pressed, self._pressed_since_s = True, now_s

    def claim(self) -> "DeviceClaim":
        return DeviceClaim(self, self._settings.stall_s)

    def owed_s(self, now_s: float, held_since_s: float, asked_s: float) -> float:
        """How much longer serving has the device, for one who held it from `held_since_s` and asked at `asked_s`.

        What fell due while rollouts held it is done now; the wait since `asked_s` counts towards it.
        """
        self.update(now_s)
        due_s = self._load.busy_s(held_since_s, now_s) + max(0.0, self._load.busy_until_s - now_s)
        return due_s - (now_s - asked_s)

    def credits(self, most: int) -> int:
        """Turns that rollouts may hold, of at most `most`: the credit's share, rounded to the nearest."""
        return 0 if self.pressed else math.floor(most * self._credit_share + 0.5)


class DeviceClaim:
    """One rollout engine's claim to the device, for which it asks before each iteration."""

    def __init__(self, lending: Lending, stall_s: float) -> None:
        self._lending = lending
        self._stall_s = stall_s
        self._granted_s = -HELD_MAX_S
        self._asked_s: float | None = None
        self._held_since_s = 0.0

    def wait_s(self, now_s: float) -> float | None:
        """How long to wait before asking again, 0 if the device may be used; None when rollouts must leave."""
        if self._asked_s is None:
            self._asked_s = now_s
            self._held_since_s = self._granted_s if now_s - self._granted_s < HELD_MAX_S else now_s
        owed_s = self._lending.owed_s(now_s, self._held_since_s, self._asked_s)
        patience_s = self._stall_s - (now_s - self._asked_s)
        if owed_s > 0 and patience_s > 0:
            return min(owed_s, patience_s)
        if owed_s > 0:
            self._lending.press(now_s)
        self._granted_s, self._asked_s = now_s, None
        return None if owed_s > 0 else 0.0
