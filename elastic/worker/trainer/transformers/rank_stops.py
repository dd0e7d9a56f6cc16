"""Ranks that a signal has stopped, seen by the process that has started them."""

import os
from collections.abc import Mapping, Sequence

from elastic.pool.messages import BEAT_VARIABLE, BEATS
from elastic.system.processes import is_stopped


class RankStops:
    """The stops of ranks, of which a pool's node agent sees none: it hears their resident. Outside of pools they may be
    as long as they will."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        beat_s = float(environment.get(BEAT_VARIABLE, "inf"))
        self._most_s, self._since_s = BEATS * beat_s, dict[int, float]()

    def hang(self, pids: Sequence[int], now_s: float) -> int | None:
        """Return which of these was stopped before and is for too long; None for none."""
        self._since_s = {pid: self._since_s.get(pid, now_s) for pid in pids if is_stopped(pid)}
        late = (place for place, pid in enumerate(pids) if now_s - self._since_s.get(pid, now_s) >= self._most_s)
        return next(late, None)
