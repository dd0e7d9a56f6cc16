"""What the gateway has refused: counted by whom and why, and logged at a bounded rate."""

import msgspec
import structlog

log = structlog.get_logger(__name__)

STRANGERS = "strangers"
"""Whoever has not shown that it is a worker. What it calls itself is no name to count under."""
REFUSED_NOTE = "refused"
"""The journal's note with what was refused so far, as JSON: a list of `Refused`."""
BURST_LINES = 20
LINES_PER_S = 1.0
KINDS_MAX = 1000
"""Different refusals that are told apart: reasons may hold what the other side sent."""
REASON_MAX = 200
"""Characters of a reason that are kept."""
OTHERS = "other reasons"


class Refused(msgspec.Struct, frozen=True, kw_only=True):
    """`count` frames of a worker, or connections of strangers, that were refused for one reason."""

    who: str
    reason: str
    count: int


class Refusals:
    """A log line that is left out is counted in the next one."""

    def __init__(self) -> None:
        self.total = 0
        self._counts: dict[tuple[str, str], int] = {}
        self._lines = float(BURST_LINES)
        self._filled_s = 0.0
        self._unlogged = 0

    def note(self, who: str, reason: str, now_s: float) -> None:
        """`now_s` is of any clock that only goes forward."""
        reason = _legible(reason)
        kind = (who, reason) if (who, reason) in self._counts or len(self._counts) < KINDS_MAX else (STRANGERS, OTHERS)
        self._counts[kind] = self._counts.get(kind, 0) + 1
        self.total += 1
        self._log(who, reason, now_s)

    def counts(self) -> list[Refused]:
        """In the order in which they first came."""
        return [Refused(who=who, reason=reason, count=count) for (who, reason), count in self._counts.items()]

    def _log(self, who: str, reason: str, now_s: float) -> None:
        self._lines = min(float(BURST_LINES), self._lines + (now_s - self._filled_s) * LINES_PER_S)
        self._filled_s = now_s
        if self._lines < 1:
            self._unlogged += 1
            return
        self._lines -= 1
        log.warning("refused", who=who, reason=reason, **({"unlogged": self._unlogged} if self._unlogged else {}))
        self._unlogged = 0


def _legible(reason: str) -> str:
    """What the other side sent may be part of it, and goes to terminals."""
    clipped = reason[:REASON_MAX]
    return clipped if clipped.isprintable() else ascii(clipped)[1:-1][:REASON_MAX]
