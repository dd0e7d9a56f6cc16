"""Spot availability traces: which instances a market gave and took back, and when.

Two formats are read. The one with a header, `time_s,event,instance_id` and optionally `kind`, says in `kind`
whether an instance was there from the start (`initial`, only at time 0), came (`allocation`) or went
(`preemption`). Bamboo's own has no header and gives milliseconds: `480000,add,node1`.
"""

import itertools
import re
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path

import msgspec

from traces.errors import TraceError, at_line, numbered_lines
from traces.rows import Row, rows_of

COLUMNS = ("time_s", "event", "instance_id", "kind")
_KINDS = {"add": ("initial", "allocation"), "remove": ("preemption",)}
_BAMBOO_LINE = re.compile(r"\d+,[^,]*,[^,]*")
_MS_PER_S = 1000


class SpotChange(StrEnum):
    ADD = "add"
    REMOVE = "remove"


class SpotEvent(msgspec.Struct, frozen=True):
    time_s: float
    change: SpotChange
    instance: str


class SpotTrace(msgspec.Struct, frozen=True):
    """Events in order of time; an instance is added before it is removed, and never twice in between."""

    events: tuple[SpotEvent, ...]
    first_line: int = 1
    """Of its file: where the first event is."""

    @property
    def end_s(self) -> float:
        return self.events[-1].time_s

    def hole(self, path: Path, time_s: float) -> str:
        """Which lines of its file at `path` stand around a time at which there is no event."""
        last = sum(event.time_s <= time_s for event in self.events)
        sides = [(n, self.events[n]) for n in (last - 1, last) if 0 <= n < len(self.events)]
        told = [f"{path.name}:{self.first_line + n} is at {event.time_s:g} s" for n, event in sides]
        return ", ".join(told) + ("" if last < len(self.events) else ", its last")

    def available(self, time_s: float) -> tuple[str, ...]:
        """Instances that are there right after what happens at `time_s`, longest there first."""
        there: dict[str, None] = {}
        for event in itertools.takewhile(lambda e: e.time_s <= time_s, self.events):
            if event.change is SpotChange.ADD:
                there[event.instance] = None
            else:
                del there[event.instance]
        return tuple(there)

    def mean_life_s(self, time_s: float) -> float | None:
        """Mean life of an instance as far as it shows by `time_s`; None before the first removal.

        The time that all instances spent so far over the number of removals: the maximum-likelihood estimate
        for exponential lives, in which instances that still live count with the age they have.
        """
        added_s: dict[str, float] = {}
        lived_s, removals = 0.0, 0
        for event in itertools.takewhile(lambda e: e.time_s <= time_s, self.events):
            if event.change is SpotChange.ADD:
                added_s[event.instance] = event.time_s
            else:
                lived_s += event.time_s - added_s.pop(event.instance)
                removals += 1
        lived_s += sum(time_s - added for added in added_s.values())
        return lived_s / removals if removals else None


def replay(
    trace: SpotTrace, *, start_s: float = 0.0, end_s: float | None = None, speed: float = 1.0, repeat: bool = False
) -> Iterator[SpotEvent]:
    """The window from `start_s` to `end_s` (by default the trace's end), `speed` times as fast, from time 0 on.

    Instances that are there when the window opens are added at 0. With `repeat` the window is played for ever:
    at the seam, instances are removed and added until those are there that were there at its start.
    """
    end_s = trace.end_s if end_s is None else end_s
    if not 0 <= start_s < end_s:
        raise TraceError(f"window from {start_s:g} s to {end_s:g} s; allowed: 0 ≤ start < end")
    opening = trace.available(start_s)
    inside = [SpotEvent(e.time_s - start_s, e.change, e.instance) for e in trace.events if start_s < e.time_s <= end_s]
    changes = _cycles(opening, inside, end_s - start_s, repeat)
    return (SpotEvent(event.time_s / speed, event.change, event.instance) for event in changes)


def _cycles(opening: tuple[str, ...], inside: list[SpotEvent], window_s: float, repeat: bool) -> Iterator[SpotEvent]:
    there: dict[str, None] = {}
    for cycle in itertools.count() if repeat and inside else range(1):
        seam = [SpotEvent(0.0, SpotChange.REMOVE, i) for i in there if i not in opening]
        seam += [SpotEvent(0.0, SpotChange.ADD, i) for i in opening if i not in there]
        for event in itertools.chain(seam, inside):
            if event.change is SpotChange.ADD:
                there[event.instance] = None
            else:
                del there[event.instance]
            yield SpotEvent(cycle * window_s + event.time_s, event.change, event.instance)


def read_spot_trace(path: Path) -> SpotTrace:
    """Read a trace in either format. Raises `TraceError` at the first line that is not as it must be."""
    with numbered_lines(path) as lines:
        number, first = next(lines, (1, ""))
        columns = tuple(first.split(","))
        if columns in (COLUMNS, COLUMNS[:3]):
            return SpotTrace(tuple(_checked(rows_of(path, columns, lines), 1)), first_line=2)
        if _BAMBOO_LINE.fullmatch(first):
            all_lines = itertools.chain([(number, first)], lines)
            return SpotTrace(tuple(_checked(rows_of(path, COLUMNS[:3], all_lines), _MS_PER_S)))
        header = ",".join(COLUMNS)
        raise at_line(path, 1, repr(first), f"the header {header} (kind is optional), or time_ms,add,instance")


def _checked(read: Iterator[Row], units_per_s: int) -> Iterator[SpotEvent]:
    last = 0.0
    there: set[str] = set()
    for row in read:
        last = row.number("time_s", last)
        change, instance, kind = row.fields["event"], row.fields["instance_id"], row.fields.get("kind")
        if change not in _KINDS:
            raise row.wrong(f"event {change!r}", ", ".join(_KINDS))
        if not instance.strip():
            raise row.wrong("no instance id", "a name")
        if kind is not None and kind not in _KINDS[change]:
            raise row.wrong(f"kind {kind!r} of an event {change!r}", ", ".join(_KINDS[change]))
        if kind == "initial" and last > 0:
            raise row.wrong(f"kind 'initial' at {last:g} s", "initial at time 0, else allocation")
        if change == SpotChange.ADD and instance in there:
            raise row.wrong(f"a second add of {instance!r}", "remove it first")
        if change == SpotChange.REMOVE and instance not in there:
            raise row.wrong(f"a remove of {instance!r}", "instances that are there")
        there ^= {instance}
        yield SpotEvent(last / units_per_s, SpotChange(change), instance)
