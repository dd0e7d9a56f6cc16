"""Journals that are read again and again while they grow: of their events only what is new is read.

Each process that reads keeps some for itself. A run's journal has a name that is never used again, so what is kept of
one is not told of another that has come in its place.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from elastic.core import events as e
from elastic.core.types import Nanoseconds
from elastic.runtime.journal import ShownJournal
from elastic.runtime.journal.reader import EVENT_NUMBER_MAX
from elastic.server.history.events import INCARNATION

LISTS_MAX = 8
"""Lists of events, of one journal and some kinds each, that are kept; those that were read last."""
EVENTS_MAX = 50_000
"""A longer list is not kept."""


@dataclass
class _KeptList:
    """Events of some kinds up to number `end` of their journal."""

    end: int = 0
    events: list[tuple[Nanoseconds, e.Event]] = field(default_factory=list[tuple[Nanoseconds, e.Event]])


_kept: OrderedDict[tuple[str, str, int, tuple[str, ...]], _KeptList] = OrderedDict()


class KeepingReader(ShownJournal):
    """A journal whose events, where they were read before, are not read once more."""

    def events_of(self, *kinds: str) -> Iterator[tuple[Nanoseconds, e.Event]]:
        status = self.path.stat()
        key = (str(self.path), self.meta().get(INCARNATION, ""), status.st_ino, kinds)
        end = EVENT_NUMBER_MAX if (last := self._largest("seq", "events")) is None else last
        kept = _kept.pop(key, None)
        if kept is None or kept.end > end:
            kept = _KeptList()
        kept.events += self.events_between(kept.end, end, *kinds)
        kept.end = end
        if len(kept.events) <= EVENTS_MAX and not self.broken:
            _kept[key] = kept
            while len(_kept) > LISTS_MAX:
                _kept.popitem(last=False)
        return iter(kept.events)
