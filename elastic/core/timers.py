"""Named deadlines: everything that waits in the core waits here, with a reason and a bound."""

import heapq
from collections.abc import Iterator
from typing import NamedTuple

from elastic.core.types import Nanoseconds


class Wait(NamedTuple):
    """`what` waits since `since_ns`, at the latest until `until_ns`."""

    what: str
    key: str
    since_ns: Nanoseconds
    until_ns: Nanoseconds


LEAST_COMPACTED = 64
"""Entries that the heap may have, however few waits there are."""


class Timers:
    """Deadlines by (what, key). Putting one off is a dictionary write, since that happens with every token.

    The heap has one true entry a name, no later than its deadline; waits that are over leave theirs behind, until
    it comes to the top or most of the heap is like it.
    """

    def __init__(self) -> None:
        self._waits: dict[tuple[str, str], tuple[Nanoseconds, Nanoseconds]] = {}
        self._heap: list[tuple[Nanoseconds, tuple[str, str]]] = []
        self._queued: dict[tuple[str, str], Nanoseconds] = {}

    def set(self, what: str, key: str, now_ns: Nanoseconds, after_ns: Nanoseconds) -> None:
        """(Re)start the wait: due `after_ns` from now."""
        name = (what, key)
        until_ns = now_ns + after_ns
        self._waits[name] = (now_ns, until_ns)
        queued_ns = self._queued.get(name)
        if queued_ns is None or queued_ns > until_ns:
            self._queued[name] = until_ns
            heapq.heappush(self._heap, (until_ns, name))
            if len(self._heap) > 2 * len(self._waits) + LEAST_COMPACTED:
                self._compact()

    def _compact(self) -> None:
        self._queued = {name: at_ns for name, at_ns in self._queued.items() if name in self._waits}
        self._heap = [(at_ns, name) for name, at_ns in self._queued.items()]
        heapq.heapify(self._heap)

    def clear(self, what: str, key: str) -> None:
        self._waits.pop((what, key), None)

    def clear_all(self) -> None:
        self._waits.clear()
        self._queued.clear()
        self._heap.clear()

    def waiting(self, what: str, key: str) -> bool:
        return (what, key) in self._waits

    def since_ns(self, what: str, key: str) -> Nanoseconds | None:
        """Since when it is waited for; None where it is not."""
        wait = self._waits.get((what, key))
        return None if wait is None else wait[0]

    def due(self, now_ns: Nanoseconds) -> bool:
        if not self._heap or self._heap[0][0] > now_ns:
            return False  # No deadline is earlier than its entry.
        return self._settle() and self._heap[0][0] <= now_ns

    def pop_due(self, now_ns: Nanoseconds) -> Iterator[tuple[str, str]]:
        """Waits whose deadline has come, each removed as it is yielded, in a fixed order."""
        while self.due(now_ns):
            _, name = heapq.heappop(self._heap)
            del self._queued[name]
            del self._waits[name]
            yield name

    def next_ns(self) -> Nanoseconds | None:
        return self._heap[0][0] if self._settle() else None

    def _settle(self) -> bool:
        """Bring a true deadline to the top of the heap; False when there is none."""
        while self._heap:
            at_ns, name = self._heap[0]
            wait = self._waits.get(name)
            if wait is not None and wait[1] == at_ns:
                return True
            if self._queued.get(name) != at_ns:
                heapq.heappop(self._heap)
            elif wait is None:
                heapq.heappop(self._heap)
                del self._queued[name]
            else:
                heapq.heapreplace(self._heap, (wait[1], name))
                self._queued[name] = wait[1]
        return False

    def waits(self) -> list[Wait]:
        """Who waits for what, since when, until when (invariant 12)."""
        return sorted(Wait(what, key, since, until) for (what, key), (since, until) in self._waits.items())
