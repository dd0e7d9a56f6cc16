"""What a journal need not keep: what came by the clock or with requests, once a state stands for all that it led to.

Rows are deleted with the state's in one transaction, and their space is written again: the file stays as large as it
was once. Leases, workers, versions, commands and costs stay, of which there are few.
"""

import contextlib
import sqlite3
from collections.abc import Iterable
from pathlib import Path

from elastic.core import events as e
from elastic.core.types import Nanoseconds
from elastic.runtime.journal.records import FRAME, TABLES, StateRow
from elastic.system.sqlite import open_sqlite

_EVENTS = (
    e.Tick,
    e.TokensReceived,
    e.TurnRequested,
    e.TurnCut,
    e.AgentNoted,
    e.WorkerReported,
    e.OfferChanged,
)
"""Those of which there are as many as requests, or as moments."""
_KINDS = (FRAME, *(kind.__name__ for kind in _EVENTS))
_BY_TIME = (("samples", "t_ns"), ("pulls", "t_ns"), ("turns", "finished_ns"), ("moves", "started_ns"))
"""Tables of which the last rows are kept, with the column of their time."""


def forget(connection: sqlite3.Connection, after: int, until: int, before_ns: Nanoseconds) -> None:
    """Delete what the events between these two led to no more than a state says, and rows of before a moment.

    Event `until` stays, for numbers go on behind the last.
    """
    marks = ", ".join("?" * len(_KINDS))
    connection.execute(f"DELETE FROM events WHERE seq > ? AND seq < ? AND kind IN ({marks})", (after, until, *_KINDS))
    for table, column in _BY_TIME:
        connection.execute(f'DELETE FROM "{table}" WHERE "{column}" < ?', (before_ns,))


def forget_former(paths: Iterable[Path]) -> None:
    """As `forget`, of the journals of former incarnations, once a later one's has a state. Raises `sqlite3.Error`."""
    for path in paths:
        with contextlib.closing(open_sqlite(path, "rw")) as connection:
            last = connection.execute("SELECT MAX(seq) FROM events").fetchone()[0] or 0
            if TABLES[StateRow].find(connection, "0") == (gone := StateRow(events=last, saved=b"")):
                continue
            connection.execute("BEGIN IMMEDIATE")
            TABLES[StateRow].insert(connection, [TABLES[StateRow].kept(gone)])
            forget(connection, 0, last, 2**63 - 1)
            connection.execute("COMMIT")
            connection.execute("VACUUM")
