"""How long the core waits: as configured, and longer where the run has shown that things take longer.

- A limit is never below the configured value, and never above `TIMES_MOST` times it.
- In between it is `MARGIN` times the longest that what it is for has lately taken to come.
- What did not come teaches nothing: hosts that hang do not earn themselves patience.
- A whole turn has so long as its tokens could take at the slowest pace of other workers' turns: nobody who is slow on
  purpose earns himself patience, either.
"""

from dataclasses import dataclass

from elastic.core.types import NS_PER_S, Limits, Nanoseconds, WorkerId

TIMES_MOST = 10
MARGIN = 3
"""Factor on the longest known duration. The next duration has the same distribution, and may exceed all known ones."""
REMEMBERED_NS = 600 * NS_PER_S
"""Durations younger than this count; durations older than twice this do not."""

ADAPTIVE = {
    "boot": "boot_timeout_ns",
    "load": "load_timeout_ns",
    "stall": "stall_timeout_ns",
    "token": "turn_stall_timeout_ns",
    "handover": "handover_timeout_ns",
}
"""The configured limit of each wait, by the wait's name."""


@dataclass(slots=True)
class Longest:
    """The longest duration noted since `since_ns`, and in the stretch of time before that."""

    since_ns: Nanoseconds
    duration_ns: Nanoseconds = 0
    before_ns: Nanoseconds = 0

    def note(self, duration_ns: Nanoseconds, now_ns: Nanoseconds) -> None:
        age_ns = now_ns - self.since_ns
        if age_ns >= REMEMBERED_NS:
            self.before_ns = self.duration_ns if age_ns < 2 * REMEMBERED_NS else 0
            self.since_ns, self.duration_ns = now_ns, 0
        if duration_ns > self.duration_ns:
            self.duration_ns = duration_ns

    def lately_ns(self, now_ns: Nanoseconds) -> Nanoseconds:
        age_ns = now_ns - self.since_ns
        if age_ns >= 2 * REMEMBERED_NS:
            return 0
        return self.duration_ns if age_ns >= REMEMBERED_NS else max(self.duration_ns, self.before_ns)

    def changes_ns(self, now_ns: Nanoseconds) -> Nanoseconds:
        """Return until when `lately_ns` keeps its value if nothing is noted."""
        return self.since_ns + (1 + (now_ns - self.since_ns) // REMEMBERED_NS) * REMEMBERED_NS


@dataclass(slots=True)
class _Pace:
    """A worker's turn that took `token_ns` for each of its tokens, and ended at `at_ns`."""

    worker: WorkerId
    token_ns: Nanoseconds
    at_ns: Nanoseconds


class Patience:
    """The limits as they are now. What a wait was for has come: `note` says after how long."""

    def __init__(self, limits: Limits) -> None:
        self._least_ns: dict[str, Nanoseconds] = {what: getattr(limits, name) for what, name in ADAPTIVE.items()}
        self._drain_ns = limits.drain_timeout_ns
        self._longest: dict[str, Longest] = {}
        self._known: dict[str, tuple[Nanoseconds, Nanoseconds]] = {}
        """Limits that have been asked for, each with until when it holds: one is asked for with every token."""
        self._turns = Longest(0)
        self._paces: list[_Pace] = []
        """The slowest of late, of two workers at most; the slowest first."""

    def note(self, what: str, duration_ns: Nanoseconds, now_ns: Nanoseconds) -> None:
        longest = self._longest.get(what)
        if longest is None:
            longest = self._longest[what] = Longest(now_ns)
        if duration_ns > longest.duration_ns or now_ns >= longest.since_ns + REMEMBERED_NS:
            longest.note(duration_ns, now_ns)
            self._known.pop(what, None)

    def note_turn(self, worker: WorkerId, tokens: int, duration_ns: Nanoseconds, now_ns: Nanoseconds) -> None:
        """A turn has ended, so long after its worker began it, and with as many tokens of this worker."""
        self._turns.note(duration_ns, now_ns)
        pace = _Pace(worker, duration_ns // max(1, tokens), now_ns)
        known = [p for p in self._paces if p.at_ns > now_ns - REMEMBERED_NS]
        if any(p.worker == worker and p.token_ns >= pace.token_ns for p in known):
            self._paces = known
        else:
            others = [p for p in known if p.worker != worker]
            self._paces = sorted([pace, *others], key=lambda pace: -pace.token_ns)[:2]

    def turn_ns(self, worker: WorkerId, tokens: int, now_ns: Nanoseconds) -> Nanoseconds:
        """How long a worker may take for a whole turn of so many tokens.

        A prefill takes at most as long as any token may. Where no other worker has finished a turn lately, so may each
        token; else it may take `TIMES_MOST` as long as theirs.
        """
        token_ns = self.limit_ns("token", now_ns)
        pace_ns = next((p.token_ns for p in self._paces if p.worker != worker), None)
        return token_ns + tokens * (token_ns if pace_ns is None else min(token_ns, TIMES_MOST * pace_ns))

    def overdue(self, worker: WorkerId, tokens: int, took_ns: Nanoseconds) -> bool:
        """Whether another worker would have finished a turn of so many tokens long ago."""
        pace_ns = next((p.token_ns for p in self._paces if p.worker != worker), None)
        return pace_ns is not None and took_ns > MARGIN * pace_ns * tokens

    def limit_ns(self, what: str, now_ns: Nanoseconds) -> Nanoseconds:
        """How long to wait now for what is called so in `ADAPTIVE`."""
        known = self._known.get(what)
        if known is not None and now_ns < known[1]:
            return known[0]
        least_ns, longest = self._least_ns[what], self._longest.get(what)
        if longest is None:
            return least_ns
        limit_ns = _within(least_ns, MARGIN * longest.lately_ns(now_ns))
        self._known[what] = limit_ns, longest.changes_ns(now_ns)
        return limit_ns

    def leaving_ns(self, now_ns: Nanoseconds) -> Nanoseconds:
        """How long before a lease ends by time its workers begin to leave: so that most turns end where they are."""
        return _within(self._drain_ns, self._turns.lately_ns(now_ns))

    @property
    def leaving_most_ns(self) -> Nanoseconds:
        """More than `leaving_ns` ever is."""
        return TIMES_MOST * self._drain_ns


def _within(least_ns: Nanoseconds, wanted_ns: Nanoseconds) -> Nanoseconds:
    return max(least_ns, min(wanted_ns, TIMES_MOST * least_ns))
