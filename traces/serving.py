"""Serving traces: when requests reached a serving cluster, and how long they were.

The format is that of the Azure LLM inference traces of 2023 and 2024: `TIMESTAMP,ContextTokens,GeneratedTokens`, where
a time stamp is a wall-clock time with decimals (`2023-11-16 18:15:46.6805900`), or one with its offset from UTC
(`2024-05-10 00:00:00.009930+00:00`). A request without any tokens in or out counts as one with one.
"""

import functools
import itertools
import math
import re
import statistics
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path

import msgspec

from traces.errors import TraceError, at_line
from traces.rows import Row, rows

HOLE_S = 600.0
HOLE_SPACINGS = 100
"""A time without a request is a hole in the recording where it is longer than both: this, and so many times the usual
time between two requests. The longest of the shipped traces is 217 s."""

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_EPOCH = datetime(1970, 1, 1)
_TIME = re.compile(
    r"(?P<whole>[0-9-]+ [0-9:]+)(\.(?P<decimals>[0-9]*))?((?P<sign>[+-])(?P<hours>[0-9]{2}):(?P<minutes>[0-9]{2}))?"
)


class ServingRequest(msgspec.Struct, frozen=True):
    """One request; `arrival_s` counts from the trace's first."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int


def read_serving_trace(path: Path) -> tuple[ServingRequest, ...]:
    """All requests in order of arrival. Raises `TraceError` at the first line that is not as it must be."""
    try:
        stat = path.stat()
    except OSError as error:
        raise TraceError(f"{path}: cannot be read ({error})") from error
    return _read(path, stat.st_mtime_ns, stat.st_size)


@functools.lru_cache(maxsize=4)
def _read(path: Path, mtime_ns: int, size_bytes: int) -> tuple[ServingRequest, ...]:
    """Once for each state of the file: a command asks for a trace wherever its settings are checked."""
    with rows(path, COLUMNS) as read:
        requests = tuple(_checked(read))
    _check_holes(path, requests)
    return requests


def _check_holes(path: Path, requests: Sequence[ServingRequest]) -> None:
    spacings_s = [later.arrival_s - request.arrival_s for request, later in itertools.pairwise(requests)]
    most_s = max(HOLE_S, HOLE_SPACINGS * statistics.median(spacings_s)) if spacings_s else HOLE_S
    for line, spacing_s in enumerate(spacings_s, start=3):
        if spacing_s > most_s:
            found = f"a hole of {spacing_s:g} s before this request"
            raise at_line(path, line, found, f"up to {most_s:g} s, so that no missing record is taken for idle time")


def _checked(read: Iterator[Row]) -> Iterator[ServingRequest]:
    first: tuple[float, float] | None = None
    last_s = 0.0
    for row in read:
        now = _timestamp(row)
        first = first or now
        # Part by part: as one number, seconds since 1970 would leave too few digits for the fraction.
        arrival_s = (now[0] - first[0]) + (now[1] - first[1])
        if arrival_s < last_s:
            raise row.wrong(f"time {row.fields['TIMESTAMP']!r}", "not before the last request's")
        last_s = arrival_s
        yield ServingRequest(arrival_s, max(1, row.whole("ContextTokens")), max(1, row.whole("GeneratedTokens")))


def _timestamp(row: Row) -> tuple[float, float]:
    """Whole seconds since 1970, and the fraction."""
    text = row.fields["TIMESTAMP"]
    parts = _TIME.fullmatch(text)
    try:
        if parts is None:
            raise ValueError
        seconds = (datetime.strptime(parts["whole"], "%Y-%m-%d %H:%M:%S") - _EPOCH).total_seconds()
        offset_s = 60.0 * (60 * int(parts["hours"]) + int(parts["minutes"])) if parts["sign"] else 0.0
        ahead_s = -offset_s if parts["sign"] == "-" else offset_s
        return seconds - ahead_s, float(f"0.{parts['decimals'] or 0}")
    except ValueError:
        allowed = "YYYY-MM-DD HH:MM:SS with decimals, and +HH:MM where it is not UTC"
        raise row.wrong(f"time {text!r}", allowed) from None


def replay_requests(
    trace: Sequence[ServingRequest], *, start_s: float = 0.0, speed: float = 1.0, share: float = 1.0, phase: int = 0
) -> Iterator[ServingRequest]:
    """The requests of one host, for ever: from `start_s` on, `speed` times as fast, and then over and over.

    A host gets `share` of all requests, evenly spread. Hosts with equal shares whose phases are 0, 1, 2, … get
    different ones, as long as their shares do not exceed the whole.
    """
    span_s = trace[-1].arrival_s + trace[-1].arrival_s / len(trace)
    number = phase
    for cycle in itertools.count():
        for request in trace:
            arrival_s = cycle * span_s + request.arrival_s - start_s
            if arrival_s < 0:
                continue
            number += 1
            if math.floor(number * share) > math.floor((number - 1) * share):
                yield ServingRequest(arrival_s / speed, request.prompt_tokens, request.output_tokens)


def window_at(trace: Sequence[ServingRequest], start_s: float, length_s: float) -> list[ServingRequest]:
    """The requests of a window; arrivals count from its start."""
    return [
        ServingRequest(request.arrival_s - start_s, request.prompt_tokens, request.output_tokens)
        for request in trace
        if start_s <= request.arrival_s < start_s + length_s
    ]


def scaled(
    window: Sequence[ServingRequest], *, speed: float, length: float, most_prompt: int, most_output: int
) -> list[ServingRequest]:
    """Arrivals `speed` times as fast, lengths times `length`, at least one token and at most so many."""
    return [
        ServingRequest(
            request.arrival_s / speed,
            min(most_prompt, max(1, round(request.prompt_tokens * length))),
            min(most_output, max(1, round(request.output_tokens * length))),
        )
        for request in window
    ]
