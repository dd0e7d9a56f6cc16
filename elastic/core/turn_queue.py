"""The queue of turns that wait for a worker: what may go to the same workers stands in one line.

- A line has the turns with the same needs, the one that was requested first at its head.
- The heads are known at any time, in the order of their requests; a change costs O(log n) in the turns of its line and
  in the lines.
- `changed` says that a line has got another head. Until then, and until a worker has got room, a caller that has found
  no worker for the heads need not look again.
"""

from bisect import bisect_left, insort
from heapq import heappop, heappush
from typing import TypeAlias

from elastic.core.types import TurnId, WorkerId

Needs: TypeAlias = tuple[int, tuple[WorkerId, ...]]
"""A queued turn's demands on a worker: the oldest weights version allowed, and the workers excluded."""


class TurnQueue:
    def __init__(self) -> None:
        self.changed = False
        self._needs: dict[TurnId, Needs] = {}
        """The needs of each queued turn. An entry of a line counts while its turn is here with the line's needs."""
        self._lines: dict[Needs, list[tuple[int, TurnId]]] = {}
        self.heads: list[tuple[int, Needs, TurnId]] = []
        """Each line's head with its order and needs, oldest request first."""

    def __bool__(self) -> bool:
        return bool(self.heads)

    def head(self) -> TurnId | None:
        """The turn that was requested first of all."""
        return self.heads[0][2] if self.heads else None

    def add(self, turn: TurnId, order: int, needs: Needs) -> None:
        """Queue a turn, or have one that is queued stand in another line. Its request was the `order`-th."""
        if turn in self._needs:
            self.remove(turn, order)
        self._needs[turn] = needs
        line = self._lines.get(needs)
        if line is None:
            self._lines[needs] = [(order, turn)]
        else:
            former = line[0]
            heappush(line, (order, turn))
            if former[0] < order:
                return
            self._unhead(needs, *former)
        insort(self.heads, (order, needs, turn))
        self.changed = True

    def remove(self, turn: TurnId, order: int) -> None:
        needs = self._needs.pop(turn)
        line = self._lines[needs]
        if line[0][1] != turn:
            return
        self._unhead(needs, order, turn)
        if len(line) == 1:
            del self._lines[needs]
            return
        while line and self._needs.get(line[0][1]) != needs:
            heappop(line)
        if not line:
            del self._lines[needs]
            return
        order, turn = line[0]
        insort(self.heads, (order, needs, turn))
        self.changed = True

    def _unhead(self, needs: Needs, order: int, turn: TurnId) -> None:
        del self.heads[bisect_left(self.heads, (order, needs, turn))]
