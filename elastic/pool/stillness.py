"""Whether a silent process hangs. Pure.

It does once it neither uses a processor nor waits for one: a process that computes, or whose machine is too busy to let
it, is silent and does not hang; one that was stopped, or whose threads all wait for each other, does. A process that
says nothing for much longer hangs whatever it does. Who was still or silent for long and spoke again earns itself
patience, as in `elastic.core.patience`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from elastic.core.patience import MARGIN, TIMES_MOST, Longest
from elastic.core.types import NS_PER_S


@dataclass(slots=True)
class Stillness:
    """One process's. It hangs once it was still for `still_s`, or three times as long as it has lately been still
    before it spoke again. Who looks at it less than twice in that time was held up, perhaps together with it, and knows
    nothing of the time in between. Times are seconds of any clock that never goes back."""

    still_s: float
    _used: int | None = None
    _since_s: float = 0.0
    _looked_s: float = 0.0
    _longest: Longest = field(default_factory=lambda: Longest(0))

    def limit_s(self, now_s: float) -> float:
        return max(self.still_s, MARGIN * self._longest.lately_ns(round(now_s * NS_PER_S)) / NS_PER_S)

    def spoke(self, now_s: float) -> None:
        """Note that it has said something since it was last looked at."""
        if self._used is not None:
            self._longest.note(round((now_s - self._since_s) * NS_PER_S), round(now_s * NS_PER_S))
            self._used = None

    def hangs(self, used: int | None, is_due: Callable[[], bool], now_s: float) -> float:
        """Return for how long the silent process has been still, if that is too long, or 0.

        `used`: the processor time that it has had, None once it is gone. `is_due`: whether it runs, or waits for a
        processor or a disk.
        """
        before, self._used = self._used, used
        looked_s, self._looked_s = self._looked_s, now_s
        if before is None or used != before or now_s - looked_s > self.still_s / 2:
            self._since_s = now_s
        still_s = now_s - self._since_s
        if used is None or still_s < self.limit_s(now_s):
            return 0.0
        if is_due():
            self._since_s = now_s
            return 0.0
        return still_s


@dataclass(slots=True)
class Silence:
    """One process's. It hangs once it has said nothing for `stall_s`, or for three times as long as it has lately been
    silent before it spoke again, up to ten times `stall_s`. Who looks at it less than twice in `stall_s` was held up,
    perhaps together with it, and knows nothing of the time in between. Times are seconds of any clock that never goes
    back."""

    stall_s: float
    _since_s: float = 0.0
    _looked_s: float = 0.0
    _longest: Longest = field(default_factory=lambda: Longest(0))

    def limit_s(self, now_s: float) -> float:
        wanted_s = MARGIN * self._longest.lately_ns(round(now_s * NS_PER_S)) / NS_PER_S
        return max(self.stall_s, min(wanted_s, TIMES_MOST * self.stall_s))

    def hangs(self, heard_s: float, now_s: float) -> float:
        """Return for how long the process has said nothing, if that is too long, or 0. `heard_s`: when it last has."""
        looked_s, self._looked_s = self._looked_s, now_s
        if heard_s > self._since_s:
            # What is known is how long it had been silent when it was last looked at.
            self._longest.note(round(max(0.0, looked_s - self._since_s) * NS_PER_S), round(now_s * NS_PER_S))
            self._since_s = heard_s
        elif now_s - looked_s > self.stall_s / 2:
            self._since_s = now_s
        silent_s = now_s - self._since_s
        return silent_s if silent_s >= self.limit_s(now_s) else 0.0
