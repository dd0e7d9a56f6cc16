"""Which requests go well together on one worker: those with a mark in common, such as a session or a long beginning.

Source: weak affinity of production routers (SGLang's router: the cache first, unless the load is out of balance). Pure.
"""

from dataclasses import dataclass, field

from elastic.core.types import TurnId, WorkerId

MARKS_KEPT = 4096
"""The last that are known. Caches of workers do not reach further back, either."""
ABOVE_MEAN, SPREAD = 1.5, 2
"""A worker has too much for its affinity to count with more turns than so many times the mean, and so many more."""
CACHED_SHARE = 0.5
"""The least share of a prompt that requests with a common beginning share."""


@dataclass(slots=True)
class Affinity:
    """Marks are opaque texts. Of a request's marks the first that is known counts."""

    _holders: dict[str, WorkerId] = field(default_factory=dict[str, WorkerId])
    """By mark, who was given such a request last; the mark of the last one at the end."""
    _marks: dict[TurnId, tuple[str, ...]] = field(default_factory=dict[TurnId, tuple[str, ...]])
    """The marks of each turn that is not over."""

    def asked(self, turn: TurnId, marks: tuple[str, ...]) -> WorkerId | None:
        """The worker that had the last request like this one, if any is known."""
        if marks:
            self._marks[turn] = marks
        return next((self._holders[mark] for mark in marks if mark in self._holders), None)

    def began(self, turn: TurnId, worker: WorkerId) -> None:
        """The worker was given the turn."""
        for mark in self._marks.get(turn, ()):
            self._holders.pop(mark, None)
            self._holders[mark] = worker
            if len(self._holders) > MARKS_KEPT:
                del self._holders[next(iter(self._holders))]

    def over(self, turn: TurnId) -> None:
        self._marks.pop(turn, None)


def has_too_much(outstanding: int, turns: int, workers: int) -> bool:
    """Whether a worker with so many turns has more than its share of all by so much that others come first."""
    return outstanding > ABOVE_MEAN * turns / max(1, workers) + SPREAD
