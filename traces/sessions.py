"""Session traces: what agents and their environments exchanged, turn by turn, as lengths and times.

The format is `session,new_tokens,output_tokens,gap_s`: the rows of a session stand together, in order of its turns.
"""

from pathlib import Path

import msgspec

from traces import data_path
from traces.rows import rows

COLUMNS = ("session", "new_tokens", "output_tokens", "gap_s")
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
    sessions: dict[str, list[SessionTurn]] = {}
    with rows(path, COLUMNS) as read:
        for row in read:
            session = row.fields["session"]
            if session in sessions and session != next(reversed(sessions)):
                raise row.wrong(f"session {session!r} again", "the rows of a session together")
            turn = SessionTurn(row.whole("new_tokens", 1), row.whole("output_tokens", 1), row.number("gap_s"))
            sessions.setdefault(session, []).append(turn)
    return [tuple(turns) for turns in sessions.values()]
