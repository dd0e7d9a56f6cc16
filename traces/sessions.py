"""Session traces: what agents and their environments exchanged, turn by turn, as lengths and times.

The format is `session,new_tokens,output_tokens,gap_s`: the rows of a session stand together, in order of its turns.
"""

import math
from collections.abc import Iterator
from pathlib import Path

import msgspec

from traces import data_path
from traces.errors import TraceError, at_line, numbered_lines

HEADER = "session,new_tokens,output_tokens,gap_s"
SESSIONS = ("claude-code-sessions",)
"""The shipped ones."""


class SessionTurn(msgspec.Struct, frozen=True):
    """`new_tokens` came to the context, `gap_s` after the last turn's end; `output_tokens` were generated."""

    new_tokens: int
    output_tokens: int
    gap_s: float


def read_sessions(name: str) -> list[tuple[SessionTurn, ...]]:
    """A shipped trace's sessions, by its name."""
    return read_session_trace(data_path(name))


def read_session_trace(path: Path) -> list[tuple[SessionTurn, ...]]:
    """All sessions in order. Raises `TraceError` at the first line that is not as it must be."""
    sessions: list[list[SessionTurn]] = []
    seen: dict[str, None] = {}
    with numbered_lines(path) as lines:
        _, header = next(lines, (1, ""))
        if header != HEADER:
            raise at_line(path, 1, repr(header), f"the header {HEADER}")
        for line, session, turn in _turns(path, lines):
            if session in seen and session != next(reversed(seen)):
                raise at_line(path, line, f"session {session!r} again", "the rows of a session together")
            if session not in seen:
                seen[session] = None
                sessions.append([])
            sessions[-1].append(turn)
    if not sessions:
        raise TraceError(f"{path}: no turns; allowed: at least one")
    return [tuple(turns) for turns in sessions]


def _turns(path: Path, lines: Iterator[tuple[int, str]]) -> Iterator[tuple[int, str, SessionTurn]]:
    for line, text in lines:
        fields = text.split(",")
        if len(fields) != 4:
            raise at_line(path, line, f"{len(fields)} fields in {text!r}", "4")
        session, new, output, gap = fields
        yield line, session, SessionTurn(_tokens(path, line, new), _tokens(path, line, output), _gap(path, line, gap))


def _tokens(path: Path, line: int, text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise at_line(path, line, f"{text!r} tokens", "a whole number from 1 on")
    return int(text)


def _gap(path: Path, line: int, text: str) -> float:
    try:
        gap_s = float(text)
    except ValueError:
        gap_s = math.nan
    if not (math.isfinite(gap_s) and gap_s >= 0):
        raise at_line(path, line, f"gap {text!r}", "a number from 0 on")
    return gap_s
