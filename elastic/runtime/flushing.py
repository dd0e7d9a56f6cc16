"""How often workers send what they have generated: often while the orchestrator's core has room, rarely as it fills.

- `FlushControl` decides. It is pure: the caller says how busy the core is, at even intervals.
- Frames cost about the same whether they have one token of a turn or ten. So the interval follows the share of the core
  that is in use to `WANTED_SHARE`, within its bounds: at a share twice as large it grows, at a smaller one it shrinks.
- It goes half of the way at once, on a scale of factors, and by a bounded one; the look after that still sees frames of
  before, and does not count. So it does not swing, and is back at its least within a second once the load is gone.
- Small changes (`FELT`) are none: a steady load costs no messages.

The core knows nothing of this: what it is told comes in larger pieces, and is journaled as it came.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from elastic.system.host import here

LOOK_S = 0.1
"""Between two looks at the core's load."""
WANTED_SHARE = 1 / 8
"""The share of the core below which tokens come as soon as is configured. Turns that begin and end need most of the
rest."""
STEP_MAX = 2.5
"""Factor by which one look may change the interval: from 30 to 250 ms, or back, takes three."""
KEPT = 0.95
"""The part of the shown mean share that each look keeps."""
FELT = 1.2
"""Least factor of a change."""
SATURATED_SHARE = 0.9
"""Above this the core is the run's limit."""


class FlushControl:
    """The flush interval that a load asks for, from `least_s` to `most_s`. `interval_s` is what workers are told."""

    def __init__(self, least_s: float, most_s: float) -> None:
        self.least_s, self.most_s = least_s, max(least_s, most_s)
        self.interval_s = least_s
        self.share = 0.0
        """The mean share of the core that was in use in the last seconds."""
        self._just_changed = False

    def note(self, share: float) -> bool:
        """The core was this busy since the last look. Returns whether the interval has changed."""
        self.share += (1 - KEPT) * (share - self.share)
        if self._just_changed:
            self._just_changed = False
            return False
        step = min(STEP_MAX, max(1 / STEP_MAX, (share / WANTED_SHARE) ** 0.5))
        wanted_s = min(self.most_s, max(self.least_s, self.interval_s * step))
        if wanted_s == self.interval_s or 1 / FELT < step < FELT:
            return False
        self.interval_s, self._just_changed = wanted_s, True
        return True


@dataclass(frozen=True, slots=True)
class CoreLoad:
    """The share of its core that the orchestrator takes, and how often workers send tokens."""

    share: float = 0.0
    flush_interval_s: float = 0.0


UNKNOWN_LOAD = CoreLoad()
"""The load of a run that nobody watches."""


def thread_busy_s() -> float:
    """How long this thread has computed."""
    return here().thread_time()


async def follow_load(control: FlushControl, tell: Callable[[float], None], busy_s: Callable[[], float]) -> None:
    """Look at the load for ever, and `tell` workers of each new interval."""
    before_s, at_s = busy_s(), here().monotonic()
    while True:
        await asyncio.sleep(LOOK_S)
        now_busy_s, now_s = busy_s(), here().monotonic()
        if control.note((now_busy_s - before_s) / max(LOOK_S / 2, now_s - at_s)):
            tell(control.interval_s)
        before_s, at_s = now_busy_s, now_s
