"""How long the core waits: as configured, and longer where the run has shown that things take longer.

- A limit is never below the configured value, and never above `TIMES_MOST` times it.
- In between it is `MARGIN` times the longest that what it is for has lately taken to come.
- What did not come teaches nothing: hosts that hang do not earn themselves patience.
- A whole turn has so long as its tokens could take at the slowest pace of other workers' turns: nobody who is slow on
  purpose earns himself patience, either.
- A turn is late that has taken a multiple of what the others' turns take in the mean, whatever its limit.
"""

from dataclasses import dataclass

from elastic.core.demand import LEARNING_SHARE
from elastic.core.types import NS_PER_S, Limits, Nanoseconds, WorkerId

TIMES_MOST = 10
MARGIN = 3
"""Factor on the longest known duration. The next duration has the same distribution, and may exceed all known ones."""
FAR = 10
"""Times the mean of others' turns beyond which a worker is held to be of little use: no two kinds of devices that serve
one model differ as much."""
COMPARED_TURNS = 4
"""Turns that others have ended before anybody is compared with them."""
COMPARED_WORKERS = 8
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
            self.since_ns += age_ns // REMEMBERED_NS * REMEMBERED_NS
            self.duration_ns = 0
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


@dataclass(slots=True)
class _Usual:
    """What a worker's turns take in the mean, the last ones most."""

    turns: int = 0
    tokens: float = 0.0
    duration_ns: float = 0.0

    def note(self, tokens: int, duration_ns: Nanoseconds) -> None:
        self.turns += 1
        share = max(LEARNING_SHARE, 1 / self.turns)
        self.tokens += share * (tokens - self.tokens)
        self.duration_ns += share * (duration_ns - self.duration_ns)


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
        self._usual: dict[WorkerId, _Usual] = {}
        """The usual times of the workers that have ended turns last, the most recent worker at the end."""

    def note(self, what: str, duration_ns: Nanoseconds, now_ns: Nanoseconds) -> None:
        longest = self._longest.get(what)
        if longest is None:
            longest = self._longest[what] = Longest(now_ns)
        if duration_ns > longest.duration_ns or now_ns >= longest.since_ns + REMEMBERED_NS:
            longest.note(duration_ns, now_ns)
            self._known.pop(what, None)

    def note_turn(self, worker: WorkerId, tokens: int, duration_ns: Nanoseconds, now_ns: Nanoseconds) -> None:
        """A turn has ended, so long after its worker began it, and with as many tokens of this worker."""
        turns = self._turns
        if duration_ns > turns.duration_ns or now_ns >= turns.since_ns + REMEMBERED_NS:
            turns.note(duration_ns, now_ns)
        usual = self._usual.pop(worker, None) or _Usual()
        usual.note(tokens, duration_ns)
        self._usual[worker] = usual
        if len(self._usual) > COMPARED_WORKERS:
            del self._usual[next(iter(self._usual))]
        token_ns = duration_ns // max(1, tokens)
        since_ns, paces = now_ns - REMEMBERED_NS, self._paces
        if len(paces) == 2 and token_ns < paces[1].token_ns and paces[0].at_ns > since_ns < paces[1].at_ns:
            return
        known = [p for p in paces if p.at_ns > since_ns]
        if any(p.worker == worker and p.token_ns >= token_ns for p in known):
            self._paces = known
        else:
            pace = _Pace(worker, token_ns, now_ns)
            others = [p for p in known if p.worker != worker]
            self._paces = sorted([pace, *others], key=lambda pace: -pace.token_ns)[:2]

    def turn_ns(self, worker: WorkerId, tokens: int, token_ns: Nanoseconds) -> Nanoseconds:
        """How long a worker may take for a whole turn of so many tokens, of which any may take `token_ns`.

        A prefill takes at most as long as any token may. Where no other worker has finished a turn lately, so may each
        token; else it may take `TIMES_MOST` as long as theirs.
        """
        pace_ns = token_ns
        for pace in self._paces:
            if pace.worker != worker:
                pace_ns = min(token_ns, TIMES_MOST * pace.token_ns)
                break
        return token_ns + tokens * pace_ns

    def late(self, worker: WorkerId, tokens: float, took_ns: Nanoseconds, times: float = FAR) -> bool:
        """Whether a turn of so many tokens has taken so many times as long as other workers' turns do in the mean, and
        as so many tokens of theirs do.

        No turn is `FAR` too late that has taken less than a single token may: devices pause, for weights or neighbours.
        """
        if times >= FAR and took_ns <= self._least_ns["token"]:
            return False
        others = [usual for other, usual in self._usual.items() if other != worker]
        if sum(usual.turns for usual in others) < COMPARED_TURNS:
            return False
        duration_ns = sum(usual.duration_ns for usual in others) / len(others)
        if took_ns <= times * duration_ns:
            return False
        mean_tokens = sum(usual.tokens for usual in others) / len(others)
        return took_ns > times * duration_ns * tokens / max(1.0, mean_tokens)

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
