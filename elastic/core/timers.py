"""Named deadlines: everything that waits in the core waits here, with a reason and a bound."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush, heapreplace
from typing import NamedTuple, TypeAlias

from elastic.core.types import Nanoseconds


class Wait(NamedTuple):
    """`what` waits since `since_ns`, at the latest until `until_ns`."""

    what: str
    key: str
    since_ns: Nanoseconds
    until_ns: Nanoseconds


LEAST_SWEPT = 64
"""Entries that the heap may have, however few waits there are."""
SWEPT_AT_ONCE = 4
"""Entries that go from an old heap to the new one with each that comes: the old one is empty long before the new one
is due to be swept."""
BROUGHT_UP_TO_DATE = 500
"""Entries at the top of a heap that one call updates. A step's turns all begin at once, and most deadlines have been
extended when the first ones would come. If the bound is too small, the caller is asked to call again at once."""

_Name: TypeAlias = tuple[str, str]
_Heap: TypeAlias = list[tuple[Nanoseconds, _Name]]


@dataclass(slots=True)
class _WaitSpan:
    since_ns: Nanoseconds
    until_ns: Nanoseconds


class Timers:
    """Deadlines by (what, key). Postponing one only writes two numbers, for it happens with every token.

    Each wait has one valid heap entry, no later than its deadline; entries of ended waits stay in the heap. Once most
    entries are stale, the heap is set aside and its valid entries move to a new one a few at a time, so that no single
    call takes long.
    """

    def __init__(
        self,
        least_swept: int = LEAST_SWEPT,
        swept_at_once: int = SWEPT_AT_ONCE,
        brought_up_to_date: int = BROUGHT_UP_TO_DATE,
    ) -> None:
        self._least_swept = least_swept
        self._swept_at_once = swept_at_once
        self._brought_up_to_date = brought_up_to_date
        self._waits: dict[_Name, _WaitSpan] = {}
        self._heap: _Heap = []
        self._old_heap: _Heap = []
        self._queued: dict[_Name, Nanoseconds] = {}

    def set(self, what: str, key: str, now_ns: Nanoseconds, after_ns: Nanoseconds) -> None:
        """(Re)start the wait: due `after_ns` from now."""
        name, until_ns = (what, key), now_ns + after_ns
        wait = self._waits.get(name)
        if wait is None:
            self._waits[name] = _WaitSpan(now_ns, until_ns)
        else:
            put_off = until_ns >= wait.until_ns
            wait.since_ns, wait.until_ns = now_ns, until_ns
            if put_off:
                return
        queued_ns = self._queued.get(name)
        if queued_ns is None or queued_ns > until_ns:
            self._queue(name, until_ns)
            self._sweep()

    def _queue(self, name: _Name, at_ns: Nanoseconds) -> None:
        self._queued[name] = at_ns
        heappush(self._heap, (at_ns, name))

    def _sweep(self) -> None:
        old = self._old_heap
        for _ in range(min(self._swept_at_once, len(old))):
            at_ns, name = old.pop()  # Without its last entry a heap is a heap.
            if self._queued.get(name) == at_ns:
                wait = self._waits.get(name)
                if wait is not None:
                    self._queue(name, wait.until_ns)
                else:
                    del self._queued[name]
        if not old and len(self._heap) > 2 * len(self._waits) + self._least_swept:
            self._heap, self._old_heap = old, self._heap

    def put_off(self, by_ns: Nanoseconds, but: Collection[str]) -> None:
        """Move all waits on by so much, but for those for one of `but`."""
        for (what, _), wait in self._waits.items():
            if what not in but:
                wait.since_ns += by_ns
                wait.until_ns += by_ns

    def clear(self, what: str, key: str) -> None:
        self._waits.pop((what, key), None)

    def clear_all(self) -> None:
        for index in (self._waits, self._queued, self._heap, self._old_heap):
            index.clear()

    def waiting(self, what: str, key: str) -> bool:
        return (what, key) in self._waits

    def since_ns(self, what: str, key: str) -> Nanoseconds | None:
        """Since when it is waited for; None where it is not."""
        wait = self._waits.get((what, key))
        return None if wait is None else wait.since_ns

    def until_ns(self, what: str, key: str) -> Nanoseconds | None:
        """Until when it is waited for; None where it is not."""
        wait = self._waits.get((what, key))
        return None if wait is None else wait.until_ns

    def due(self, now_ns: Nanoseconds) -> bool:
        heap, old = self._heap, self._old_heap
        if (not heap or heap[0][0] > now_ns) and (not old or old[0][0] > now_ns):
            return False  # No deadline is earlier than its entry.
        first = self._first()
        return bool(first) and first[0][0] <= now_ns and self._is_true(first[0])

    def pop_due(self, now_ns: Nanoseconds) -> Iterator[_Name]:
        """Waits whose deadline has come, each removed as it is yielded, in a fixed order."""
        while self.due(now_ns):
            _, name = heappop(self._first())
            del self._queued[name]
            del self._waits[name]
            yield name

    def next_ns(self) -> Nanoseconds | None:
        first = self._first()
        return first[0][0] if first else None

    def _first(self) -> _Heap:
        """The heap with the earliest deadline at its top."""
        heap, old = self._heap, self._old_heap
        for entries in (heap, old) if old else (heap,):
            if entries and not self._is_true(entries[0]):
                self._settle(entries)
        return old if old and (not heap or old[0] < heap[0]) else heap

    def _settle(self, heap: _Heap) -> None:
        """Bring a true deadline to the top of the heap, or come closer to that."""
        for _ in range(self._brought_up_to_date):
            if not heap or self._is_true(heap[0]):
                return
            at_ns, name = heap[0]
            wait = self._waits.get(name)
            if self._queued.get(name) != at_ns:
                heappop(heap)
            elif wait is None:
                heappop(heap)
                del self._queued[name]
            else:
                heapreplace(heap, (wait.until_ns, name))
                self._queued[name] = wait.until_ns

    def _is_true(self, entry: tuple[Nanoseconds, _Name]) -> bool:
        at_ns, name = entry
        wait = self._waits.get(name)
        return wait is not None and wait.until_ns == at_ns

    def waits(self) -> list[Wait]:
        """Return who waits for what, since when, and until when (invariant 12)."""
        return sorted(Wait(*name, wait.since_ns, wait.until_ns) for name, wait in self._waits.items())
