"""A run's journal as a stream of events that a reader can resume after any event.

An event's id names its journal and its number there. A journal is discarded when its process came to nothing; its name
is never used again, and its readers begin anew.
"""

import re
import threading
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from elastic.core import events as e
from elastic.core.types import NS_PER_S
from elastic.protocol.api import RunEvent
from elastic.runtime.journal import JournalError, JournalReader, RunDirectory, ShownJournal
from elastic.runtime.journal.reader import EVENT_NUMBER_MAX
from elastic.server.history.apart import apart
from elastic.system.tenant_files import as_owner

INCARNATION = "incarnation"
"""The note under which a journal stores its own name."""
UNREAD = ("Tick", "WorkerReported", "TokensReceived", "TurnRequested", "RewardRequested", "RewardScored")
"""Kinds of events that the stream omits because there are too many: heartbeats and single turns."""
ROUTINE = (
    "TrajectoryFinished",
    "GroupTrained",
    "OfferChanged",
    "WeightsApplied",
    "WorkerSlept",
    "WorkerAwoke",
    "LeaseRepriced",
    "AgentNoted",
    "TurnCut",
    "FunctionsBilled",
    "TurnsHeld",
    "PermitGranted",
    "PermitEnded",
    "PermitRecalled",
)
"""Kinds that happen all the time, which a reader may leave out."""
SCANNED_AT_ONCE = 2_000


class Position(NamedTuple):
    """The position behind the event `number` in the journal at this index of the run's list."""

    journal: int
    number: int


class EventsGone(Exception):
    """The journal that an event's id names does not exist any more."""


class EventBatch(NamedTuple):
    """Events with their positions, how far the journals were read, and whether that was everything."""

    events: list[tuple[Position, RunEvent]]
    position: Position
    whole: bool


class EventLog:
    """The events of one run, read on demand by any thread. Positions are valid for this object only: its list of
    journals grows and never shrinks."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._journals: list[tuple[str, Path]] = []
        self._lock = threading.Lock()

    def after(self, event: str) -> Position:
        """Return the position behind the event of this id; the beginning for an empty id. Raises `EventsGone`."""
        if not event:
            return Position(0, 0)
        self.refresh()
        name, dash, number = event.rpartition("-")
        names = [known for known, _ in self._journals]
        if not dash or not number.isdecimal() or len(number) > 18 or name not in names:
            raise EventsGone(event)
        return Position(names.index(name), int(number))

    def behind_last(self, most: int, end: Position, *, routine: bool = True) -> Position:
        """Return the position behind which a journal's last `most` events up to `end` are."""
        if not self._journals:
            return Position(0, 0)
        name, path = self._journals[end.journal]
        unread = _unread(routine)
        return Position(end.journal, _behind_last(self._run_dir, name, path, most, unread, end.number))

    def until(self, event: str) -> Position:
        """Return the position of the event of this id, or the end of the journal before, where it is the beginning of
        one; the end of everything for an empty id. Raises `EventsGone`."""
        if not event:
            return self.end()
        place, number = self.after(event)
        while place > 0 and number == 0:
            place -= 1
            number = _last_event(self._run_dir, *self._journals[place])
        return Position(place, number)

    def refresh(self) -> None:
        """Look for new journals. Raises `JournalError`."""
        with self._lock:
            known = {name for name, _ in self._journals}
            self._journals += [one for one in _named_journals(self._run_dir) if one[0] not in known]

    def end(self) -> Position:
        """Return the position behind everything that exists now."""
        self.refresh()
        if not self._journals:
            return Position(0, 0)
        name, path = self._journals[-1]
        return Position(len(self._journals) - 1, _last_event(self._run_dir, name, path))

    def id_at(self, position: Position) -> str:
        """Return the id behind which a reader goes on from a position; empty before the run has a journal."""
        return f"{self._journals[position.journal][0]}-{position.number}" if self._journals else ""

    def read(self, position: Position, *, routine: bool = True, end: Position | None = None) -> EventBatch:
        """Read a bounded number of events behind a position, or but for routine ones; none behind `end`, which is in
        the same journal. Raises `JournalError`."""
        if position.journal >= len(self._journals) - 1:
            self.refresh()
        place, number = position
        if place >= len(self._journals):
            return EventBatch([], position, True)
        name, path = self._journals[place]
        last = None if end is None else end.number
        scanned, reached, whole = _scanned(self._run_dir, name, path, number, last, _unread(routine))
        found = [(Position(place, seq), event) for seq, event in scanned]
        if whole and end is None and place < len(self._journals) - 1:
            return EventBatch(found, Position(place + 1, 0), False)
        return EventBatch(found, Position(place, reached), whole)


@apart()
def _named_journals(run_dir: Path) -> list[tuple[str, Path]]:
    found: list[tuple[str, Path]] = []
    with as_owner(run_dir):
        for path in RunDirectory(run_dir).journal_paths():
            with ShownJournal(path) as journal:
                found.append((_name(journal), path))
    return found


@apart()
def _last_event(run_dir: Path, name: str, path: Path) -> int:
    with as_owner(run_dir), ShownJournal(path) as journal:
        return journal.last_event() if _name(journal) == name else 0


@apart()
def _behind_last(run_dir: Path, name: str, path: Path, most: int, unread: Collection[str], end: int) -> int:
    with as_owner(run_dir), ShownJournal(path) as journal:
        return journal.behind_last(most, unread, end) if _name(journal) == name else 0


@apart()
def _scanned(
    run_dir: Path, name: str, path: Path, number: int, end: int | None, unread: Collection[str]
) -> tuple[list[tuple[int, RunEvent]], int, bool]:
    """Return events behind a number, each with its own, up to where they were read, and whether that is the end."""
    with as_owner(run_dir):
        if path.exists():
            with ShownJournal(path) as journal:
                if _name(journal) == name:
                    last = max(number, _last_known(journal) if end is None else end)
                    # Where routine is left out, those that are read are few, and indexed.
                    until = last if ROUTINE[0] in unread else min(last, number + SCANNED_AT_ONCE)
                    found: list[tuple[int, RunEvent]] = []
                    try:
                        for seq, t_ns, event in journal.scan(number, until, SCANNED_AT_ONCE, unread):
                            found.append((seq, _told(name, seq, t_ns, event)))
                    except JournalError:
                        if not found:
                            raise
                        return found, found[-1][0], False  # What follows says why it cannot be read.
                    reached = found[-1][0] if len(found) == SCANNED_AT_ONCE else until
                    if not found and until < last:  # Numbers of a garbled journal may be far apart.
                        reached = min(last, max(until, journal.first_event(until) - 1))
                    return found, reached, reached == last
    return [], number, True


def _last_known(journal: JournalReader) -> int:
    """Return the number of the last event, or one behind all where the end of the journal cannot be read."""
    try:
        return journal.last_event()
    except JournalError:
        return EVENT_NUMBER_MAX


def _unread(routine: bool) -> tuple[str, ...]:
    return UNREAD if routine else UNREAD + ROUTINE


def _name(journal: JournalReader) -> str:
    return journal.meta().get(INCARNATION, journal.path.stem.replace("-", "."))


def _told(name: str, seq: int, t_ns: int, event: e.Event) -> RunEvent:
    data: dict[str, Any] = msgspec.to_builtins(event, str_keys=True)
    data.pop("type", None)
    return RunEvent(id=f"{name}-{seq}", type=event_type(event), at_s=t_ns / NS_PER_S, data=data)


def as_sent(event: RunEvent) -> bytes:
    """Return an event as streams send it."""
    data = msgspec.json.encode({"at_s": event.at_s, **event.data})
    return b"id: %s\nevent: %s\ndata: %s\n\n" % (event.id.encode(), event.type.encode(), data)


def event_type(event: e.Event) -> str:
    """Return the event's name in the API, such as `lease.granted` for `LeaseGranted`. A lease's end is named by its
    cause."""
    if isinstance(event, e.LeaseEnded):
        return f"lease.{event.cause}"
    words: Sequence[str] = re.findall(r"[A-Z][a-z0-9]*", type(event).__name__)
    return ".".join(word.lower() for word in (words if len(words) > 1 else ("Run", *words)))
