"""Legal transitions and the stories of things: what may follow what, and how a thing came to where it is."""

from collections import deque
from collections.abc import Mapping
from enum import StrEnum

from elastic.core.types import GroupState, LeaseState, Nanoseconds, TurnState, WorkerState

_L, _W, _T, _G = LeaseState, WorkerState, TurnState, GroupState

LEGAL: Mapping[StrEnum, frozenset[StrEnum]] = {
    _L.REQUESTED: frozenset({_L.GRANTED, _L.REFUSED}),
    _L.GRANTED: frozenset({_L.RELEASING, _L.ENDED}),
    _L.RELEASING: frozenset({_L.ENDED}),
    _L.ENDED: frozenset(),
    _L.REFUSED: frozenset(),
    _W.BOOTING: frozenset({_W.LOADING, _W.READY, _W.DRAINING, _W.GONE}),
    _W.LOADING: frozenset({_W.READY, _W.DRAINING, _W.DETACHED, _W.GONE}),
    _W.READY: frozenset({_W.ASLEEP, _W.DRAINING, _W.DETACHED, _W.GONE}),
    _W.ASLEEP: frozenset({_W.READY, _W.DRAINING, _W.DETACHED, _W.GONE}),
    _W.DRAINING: frozenset({_W.GONE}),
    _W.DETACHED: frozenset({_W.LOADING, _W.READY, _W.DRAINING, _W.GONE}),
    _W.GONE: frozenset(),
    _T.QUEUED: frozenset({_T.RUNNING, _T.CANCELLED, _T.FAILED}),
    _T.RUNNING: frozenset({_T.QUEUED, _T.MOVING, _T.FINISHED, _T.CANCELLED, _T.FAILED}),
    _T.MOVING: frozenset({_T.QUEUED, _T.FINISHED, _T.CANCELLED, _T.FAILED}),
    _T.FINISHED: frozenset(),
    _T.CANCELLED: frozenset(),
    _T.FAILED: frozenset(),
    _G.RUNNING: frozenset({_G.READY, _G.DROPPED}),
    _G.READY: frozenset({_G.TRAINING}),
    _G.TRAINING: frozenset({_G.TRAINED}),
    _G.TRAINED: frozenset(),
    _G.DROPPED: frozenset(),
}
"""From each state, the states that may follow."""

STORY_LENGTH = 24
"""Enough to see how a thing got where it is; long lives keep their last chapters."""


class IllegalTransition(AssertionError):
    """The core tried to take a thing where it may not go: always a bug of ours, never bad input."""

    def __init__(self, name: str, start: StrEnum, finish: StrEnum, story: "Story") -> None:
        self.name, self.start, self.finish = name, start, finish
        super().__init__(f"{name}: {start} → {finish} is not a legal transition\n{story}")


class Story:
    """The last transitions of one thing, with their causes."""

    __slots__ = ("_chapters",)

    def __init__(self) -> None:
        self._chapters: deque[tuple[Nanoseconds, str, str]] = deque(maxlen=STORY_LENGTH)

    def tell(self, now_ns: Nanoseconds, what: str, cause: str) -> None:
        self._chapters.append((now_ns, what, cause))

    def __str__(self) -> str:
        return "\n".join(f"  {now_ns / 1e9:.3f} s: {what} ({cause})" for now_ns, what, cause in self._chapters)


def check_transition(name: str, start: StrEnum, finish: StrEnum, story: Story) -> None:
    """Raises `IllegalTransition`, with the thing's story, unless `finish` may follow `start`."""
    if finish not in LEGAL[start]:
        raise IllegalTransition(name, start, finish, story)
