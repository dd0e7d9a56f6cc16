"""What the gateway has refused: counted by whom and why, and logged at a bounded rate."""

import msgspec
import structlog

log = structlog.get_logger(__name__)

FRAME, TURN = "frame", "turn"
"""What is counted of workers: frames that were refused, and turns that went badly."""
UNAUTHENTICATED = ""
"""Stands in the place of a worker's name for peers that have not proved to be a worker."""
REFUSED_NOTE = "refused"
"""The journal's note with what was refused so far, as JSON: a list of `RefusalCount`."""
BURST_LINES = 20
LINES_PER_S = 1.0
KINDS_MAX = 100
"""Different refusals of unauthenticated peers that are told apart: reasons may hold what the other side sent."""
REASON_MAX = 200
"""Characters of a reason that are kept."""
OTHERS = "other reasons"


class RefusalCount(msgspec.Struct, frozen=True, kw_only=True):
    """`count` frames of a worker, or connections of unauthenticated peers, that were refused for one reason. Or `what`
    are turns that went badly at a worker, which need not be its fault."""

    worker: str
    reason: str
    count: int
    what: str = FRAME

    @property
    def of_turns(self) -> bool:
        """Whether nothing was refused: a worker was slow, or failed turns."""
        return self.what == TURN

    def __str__(self) -> str:
        if self.of_turns:
            turns = "1 turn" if self.count == 1 else f"{self.count:,} turns"
            return f"{turns} went badly at worker {self.worker}: {self.reason}"
        what, of = (self.what, f"worker {self.worker}") if self.worker else ("connection", "unauthenticated peers")
        return f"refused: {self.count:,} {what}{'' if self.count == 1 else 's'} of {of}: {self.reason}"


class Refusals:
    """A log line that is left out is counted in the next one."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str, str], int] = {}
        self._lines = float(BURST_LINES)
        self._filled_s = 0.0
        self._unlogged = 0

    def note(self, worker: str, reason: str, now_s: float, what: str = FRAME) -> None:
        """`now_s` is of any clock that only goes forward."""
        reason = _legible(reason)
        if worker == UNAUTHENTICATED and (worker, reason, what) not in self._counts and len(self._counts) >= KINDS_MAX:
            reason = OTHERS
        self._counts[worker, reason, what] = self._counts.get((worker, reason, what), 0) + 1
        self._log(worker, reason, now_s, what)

    def counts(self) -> list[RefusalCount]:
        """Return the counts in the order of their first refusals."""
        return [
            RefusalCount(worker=worker, reason=reason, count=count, what=what)
            for (worker, reason, what), count in self._counts.items()
        ]

    def _log(self, worker: str, reason: str, now_s: float, what: str) -> None:
        self._lines = min(float(BURST_LINES), self._lines + (now_s - self._filled_s) * LINES_PER_S)
        self._filled_s = now_s
        if self._lines < 1:
            self._unlogged += 1
            return
        self._lines -= 1
        log.warning(
            "a turn went badly" if what == TURN else "refused",
            worker=worker or "an unauthenticated peer",
            reason=reason,
            **({"unlogged": self._unlogged} if self._unlogged else {}),
        )
        self._unlogged = 0


def _legible(reason: str) -> str:
    """Make text printable. It may contain what a peer sent, and goes to terminals."""
    clipped = reason[:REASON_MAX]
    return clipped if clipped.isprintable() else ascii(clipped)[1:-1][:REASON_MAX]
