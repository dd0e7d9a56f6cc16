"""Legal transitions and the stories of things: what may follow what, and how a thing came to where it is."""

from collections.abc import Mapping
from enum import StrEnum

from elastic.core.types import NS_PER_S, GroupState, LeaseState, Nanoseconds, ScoringState, TurnState, WorkerState

_L, _W, _T, _G, _S = LeaseState, WorkerState, TurnState, GroupState, ScoringState

LEGAL: Mapping[type[StrEnum], Mapping[StrEnum, frozenset[StrEnum]]] = {
    LeaseState: {
        _L.REQUESTED: frozenset({_L.GRANTED, _L.REFUSED}),
        _L.GRANTED: frozenset({_L.RELEASING, _L.ENDED}),
        _L.RELEASING: frozenset({_L.ENDED}),
        _L.ENDED: frozenset(),
        _L.REFUSED: frozenset(),
    },
    WorkerState: {
        _W.BOOTING: frozenset({_W.LOADING, _W.READY, _W.ASLEEP, _W.DRAINING, _W.GONE}),
        _W.LOADING: frozenset({_W.READY, _W.DRAINING, _W.DETACHED, _W.GONE}),
        _W.READY: frozenset({_W.LOADING, _W.ASLEEP, _W.DRAINING, _W.DETACHED, _W.GONE}),
        _W.ASLEEP: frozenset({_W.READY, _W.DRAINING, _W.DETACHED, _W.GONE}),
        _W.DRAINING: frozenset({_W.GONE}),
        _W.DETACHED: frozenset({_W.LOADING, _W.READY, _W.ASLEEP, _W.DRAINING, _W.GONE}),
        _W.GONE: frozenset(),
    },
    TurnState: {
        _T.QUEUED: frozenset({_T.RUNNING, _T.FINISHED, _T.CANCELLED, _T.FAILED}),
        _T.RUNNING: frozenset({_T.QUEUED, _T.MOVING, _T.FINISHED, _T.CANCELLED, _T.FAILED}),
        _T.MOVING: frozenset({_T.QUEUED, _T.FINISHED, _T.CANCELLED, _T.FAILED}),
        _T.FINISHED: frozenset(),
        _T.CANCELLED: frozenset(),
        _T.FAILED: frozenset(),
    },
    GroupState: {
        _G.RUNNING: frozenset({_G.READY, _G.DROPPED}),
        _G.READY: frozenset({_G.TRAINING, _G.DROPPED}),
        _G.TRAINING: frozenset({_G.TRAINED}),
        _G.TRAINED: frozenset(),
        _G.DROPPED: frozenset(),
    },
    ScoringState: {
        _S.QUEUED: frozenset({_S.RUNNING, _S.UNAVAILABLE}),
        _S.RUNNING: frozenset({_S.SCORED, _S.BACKING_OFF, _S.UNAVAILABLE}),
        _S.BACKING_OFF: frozenset({_S.QUEUED, _S.UNAVAILABLE}),
        _S.SCORED: frozenset(),
        _S.UNAVAILABLE: frozenset(),
    },
}
"""Per kind of thing, from each state, the states that may follow. (By kind: a turn's `running` equals a group's.)"""

STORY_LENGTH = 24
"""Enough to see how a thing came to its state; of a long story the last part is kept."""


class IllegalTransition(AssertionError):
    """The core tried to take a thing where it may not go: always a bug of ours, never bad input."""

    def __init__(self, name: str, start: StrEnum, finish: StrEnum, story: "Story") -> None:
        self.name, self.start, self.finish = name, start, finish
        super().__init__(f"{name}: {start} → {finish} is not a legal transition\n{story}")


class Story:
    """The last transitions of one thing, with their causes. Formatted only when read."""

    __slots__ = ("_chapters",)

    def __init__(self) -> None:
        self._chapters: list[tuple[Nanoseconds, StrEnum, StrEnum, str, str]] = []

    def tell(self, now_ns: Nanoseconds, start: StrEnum, finish: StrEnum, cause: str, detail: str = "") -> None:
        self._chapters.append((now_ns, start, finish, cause, detail))
        if len(self._chapters) > STORY_LENGTH:
            del self._chapters[0]

    @property
    def chapters(self) -> tuple[tuple[Nanoseconds, StrEnum, StrEnum, str, str], ...]:
        return tuple(self._chapters)

    def last_ns(self, state: StrEnum) -> Nanoseconds | None:
        """When it last came to this state; None if the story does not tell."""
        return next((now_ns for now_ns, _, finish, *_ in reversed(self._chapters) if finish is state), None)

    def __str__(self) -> str:
        return "\n".join(
            f"  {now_ns / NS_PER_S:.3f} s: {start} → {finish}{detail and f' at {detail}'} ({cause})"
            for now_ns, start, finish, cause, detail in self._chapters
        )


def take_transition(
    name: str, start: StrEnum, finish: StrEnum, story: Story, now_ns: Nanoseconds, cause: str, detail: str = ""
) -> None:
    """Enter a transition into the thing's story; raises `IllegalTransition` unless `finish` may follow `start`."""
    if finish not in LEGAL[type(start)][start]:
        raise IllegalTransition(name, start, finish, story)
    story.tell(now_ns, start, finish, cause, detail)
