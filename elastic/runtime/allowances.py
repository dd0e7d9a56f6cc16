"""How much a session may say: as many messages and bytes as its time and its orders can need.

Pure: the caller brings the time, in seconds on any clock that only goes forward.
"""

from elastic.protocol import wire

SLACK = 4
"""Times as much as is needed that is allowed."""
BURST_MESSAGES = 64
MESSAGE_BYTES = 2048
"""Allowed for each message, on average; tokens count besides."""
TOKEN_BYTES = 32
BEATS_PER_INTERVAL = 2
"""Messages that a session needs in a heartbeat's interval for nothing but its life."""
ORDER_MESSAGES = 4
WEIGHTS_BYTES = 1 << 16
"""For an order to load weights: its report may name many that did not verify."""
REPORTS_BURST = 16
REPORTS_PER_S = 0.1
"""Reports on weights that nobody ordered: a worker that finds its own to be wrong pulls them again."""
ORDER_REPORTS = 2
BEATS_BURST = 32
"""Heartbeats at once, as of a device that is lent and taken back; of those beyond, the last one tells as much."""
HELD_SHARE = 0.25
"""The share of the time for which a worker may be silent: a session that was held up for that long in all is over."""
SAVED_S = 300.0
SAVED_ORDERS = 256
"""What a session has not said it may say later: as much as in so much time, and as after so many orders."""
FAR_BEYOND = 10
"""Times as much as is allowed for which a session is over."""
OPENINGS_BURST = 32
OPENINGS_PER_S = 1.0


class Allowance:
    """A rate limit on one kind of thing: `burst` at once, and `per_s` besides, saved for `saved_s`; more is granted for
    orders."""

    def __init__(self, burst: float, per_s: float, now_s: float, saved_s: float = SAVED_S) -> None:
        self._burst = burst
        self._saved_s = saved_s
        self._per_s = per_s
        self._at_s = now_s
        self._left = burst
        self._most_granted = 0.0
        self.allowed = burst
        """In all, so far."""
        self.used = 0.0

    def grant(self, more: float) -> None:
        self._most_granted = max(self._most_granted, more)
        self._put(more)

    def use(self, amount: float, now_s: float) -> None:
        self._pass(now_s)
        self._left -= amount
        self.used += amount

    def wait_s(self, now_s: float) -> float:
        """How long until no more is used than is allowed; 0 if that is so now."""
        self._pass(now_s)
        return max(0.0, -self._left / self._per_s)

    @property
    def far_beyond(self) -> bool:
        return self.used > FAR_BEYOND * self.allowed

    def _pass(self, now_s: float) -> None:
        passed_s, self._at_s = max(0.0, now_s - self._at_s), max(now_s, self._at_s)
        self._put(passed_s * self._per_s)

    def _put(self, more: float) -> None:
        self.allowed += more
        most = self._burst + self._saved_s * self._per_s + SAVED_ORDERS * self._most_granted
        self._left = min(most, self._left + more)


class SessionAllowances:
    """What one session may say, and how often it may begin anew. It may be silent for `silence_s`."""

    def __init__(self, heartbeat_interval_s: float, silence_s: float, now_s: float) -> None:
        per_s = SLACK * BEATS_PER_INTERVAL / heartbeat_interval_s
        burst = SLACK * BURST_MESSAGES
        self.messages = Allowance(burst, per_s, now_s)
        self.bytes = Allowance(burst * MESSAGE_BYTES, per_s * MESSAGE_BYTES, now_s)
        self.reports = Allowance(REPORTS_BURST, REPORTS_PER_S, now_s)
        self.beats = Allowance(BEATS_BURST, BEATS_PER_INTERVAL / heartbeat_interval_s, now_s, saved_s=0.0)
        self._held_most_s = HELD_SHARE * silence_s
        self._held_s = self._held_until_s = 0.0
        self.openings = Allowance(OPENINGS_BURST, OPENINGS_PER_S, now_s)

    def ordered(self, order: wire.FromOrchestrator) -> None:
        """The session has been told to do this, and will have to answer."""
        messages, more_bytes = ORDER_MESSAGES, 0
        match order:
            case wire.Generate():
                tokens = order.sampling.max_new_tokens - order.start
                messages, more_bytes = messages + tokens, tokens * TOKEN_BYTES
            case wire.PullWeights():
                more_bytes = WEIGHTS_BYTES
                self.reports.grant(ORDER_REPORTS)
            case wire.Ping() | wire.Welcome() | wire.Waiting() | wire.RefusedFrame():
                return
            case _:
                pass
        self.messages.grant(SLACK * messages)
        self.bytes.grant(SLACK * (ORDER_MESSAGES * MESSAGE_BYTES + more_bytes))

    def said(self, size_bytes: int, now_s: float) -> None:
        self.messages.use(1, now_s)
        self.bytes.use(size_bytes, now_s)

    def reported(self, now_s: float) -> bool:
        """Whether one more report on weights may have been asked for."""
        self.reports.use(1, now_s)
        return not self.reports.wait_s(now_s)

    def beaten(self, now_s: float) -> float:
        """How long one more heartbeat is to wait for those before it; 0 if it counts now."""
        wait_s = self.beats.wait_s(now_s)
        if not wait_s:
            self.beats.use(1, now_s)
        return wait_s

    def held(self, wait_s: float, now_s: float) -> None:
        """Nothing is read from the session for so long."""
        until_s = now_s + wait_s
        self._held_s += max(0.0, until_s - max(now_s, self._held_until_s))
        self._held_until_s = max(until_s, self._held_until_s)

    @property
    def far_beyond(self) -> bool:
        return self._held_s > self._held_most_s or self.messages.far_beyond or self.bytes.far_beyond

    def wait_s(self, now_s: float) -> float:
        """How long nothing is to be read from the session."""
        return max(self.messages.wait_s(now_s), self.bytes.wait_s(now_s))
