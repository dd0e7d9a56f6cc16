"""Journals of earlier schema versions, brought to the present one: a step from each version to the next.

A journal that is read is never written to: what is migrated is a copy. The statements stand here as they were when the
version came, whatever the record types look like by now.
"""

import sqlite3
from collections.abc import Callable, Mapping
from typing import Any

import msgspec


def migrated(source: sqlite3.Connection, found: int, wanted: int) -> sqlite3.Connection:
    """A private copy of the journal, brought from version `found` to `wanted`; memory or disk as SQLite sees fit."""
    copy = sqlite3.connect("", isolation_level=None)
    try:
        source.backup(copy)
        copy.execute("BEGIN")
        for version in range(found, wanted):
            MIGRATIONS[version](copy)
        copy.execute("COMMIT")
    except BaseException:
        copy.close()
        raise
    return copy


_V1_TABLES = (
    "CREATE TABLE IF NOT EXISTS groups (t_ns INTEGER NOT NULL, group_id TEXT PRIMARY KEY, step INTEGER NOT NULL, "
    "version INTEGER NOT NULL, dropped TEXT NOT NULL, body TEXT NOT NULL)",
    "CREATE TABLE IF NOT EXISTS calls (t_ns INTEGER NOT NULL, function TEXT NOT NULL, key TEXT NOT NULL, "
    "outcome TEXT NOT NULL, queued_s REAL NOT NULL, cold_start_s REAL NOT NULL, duration_s REAL NOT NULL, "
    "usd REAL NOT NULL)",
)
_V1_COLUMNS = (
    ("pulls", "body", "TEXT NOT NULL DEFAULT '{}'"),
    ("trajectories", "truncated", "INTEGER NOT NULL DEFAULT 0"),
)
"""Tables and columns that came while version 1 lasted."""

_V2_TABLES = (
    'CREATE TABLE moves_2 (seq INTEGER PRIMARY KEY, "turn" TEXT NOT NULL, "attempt" INTEGER NOT NULL, '
    '"from_worker" TEXT NOT NULL, "to_worker" TEXT NOT NULL, "left_ns" INTEGER NOT NULL, '
    '"started_ns" INTEGER NOT NULL, "accepted_tokens" INTEGER NOT NULL)',
    'CREATE TABLE groups_2 ("group" TEXT NOT NULL, "t_ns" INTEGER NOT NULL, "step" INTEGER NOT NULL, '
    '"version" INTEGER NOT NULL, "dropped" TEXT NOT NULL, "lengths" TEXT NOT NULL, "tokens_by_age" TEXT NOT NULL, '
    'PRIMARY KEY ("group"))',
    'CREATE TABLE steps_2 ("step" INTEGER NOT NULL, "t_ns" INTEGER NOT NULL, "record" TEXT NOT NULL, '
    '"success_rate" REAL, "trainer" TEXT NOT NULL, "weights" TEXT, PRIMARY KEY ("step"))',
    'CREATE TABLE pulls_2 (seq INTEGER PRIMARY KEY, "t_ns" INTEGER NOT NULL, "worker" TEXT NOT NULL, '
    '"version" INTEGER NOT NULL, "bytes" INTEGER NOT NULL, "pull_s" REAL NOT NULL, "apply_s" REAL NOT NULL, '
    '"error" TEXT NOT NULL, "full_bytes" INTEGER NOT NULL, "split_s" TEXT NOT NULL, "refused" TEXT NOT NULL)',
    'CREATE TABLE calls_2 (seq INTEGER PRIMARY KEY, "t_ns" INTEGER NOT NULL, "function" TEXT NOT NULL, '
    '"key" TEXT NOT NULL, "outcome" TEXT NOT NULL, "queued_s" REAL NOT NULL, "cold_start_s" REAL NOT NULL, '
    '"duration_s" REAL NOT NULL, "usd" REAL NOT NULL)',
    'CREATE TABLE books ("worker" TEXT NOT NULL, "book" TEXT NOT NULL, PRIMARY KEY ("worker"))',
)
_V2_ROWS = (
    "INSERT INTO moves_2 SELECT rowid, turn, attempt, from_worker, to_worker, left_ns, started_ns, accepted_tokens "
    "FROM moves ORDER BY rowid",
    "INSERT INTO groups_2 SELECT group_id, t_ns, step, version, dropped, json_extract(body, '$.lengths'), "
    "json_extract(body, '$.tokens_by_age') FROM groups ORDER BY rowid",
    "INSERT INTO steps_2 SELECT step, t_ns, json_remove(body, '$.success_rate', '$.trainer', '$.weights'), "
    "json_extract(body, '$.success_rate'), json_extract(body, '$.trainer'), "
    "json_extract(body, '$.weights') FROM steps ORDER BY rowid",
    "INSERT INTO pulls_2 SELECT rowid, t_ns, worker, version, bytes, pull_s, apply_s, error, "
    "coalesce(json_extract(body, '$.full_bytes'), 0), coalesce(json_extract(body, '$.split_s'), '{}'), "
    "coalesce(json_extract(body, '$.refused'), '[]') FROM pulls ORDER BY rowid",
    "INSERT INTO calls_2 SELECT rowid, t_ns, function, key, outcome, queued_s, cold_start_s, duration_s, usd "
    "FROM calls ORDER BY rowid",
    "INSERT INTO books SELECT json_extract(value, '$.worker'), value FROM "
    "json_each((SELECT value FROM meta WHERE key = 'books'))",
    "DELETE FROM meta WHERE key = 'books'",
)


def _to_version_2(connection: sqlite3.Connection) -> None:
    """Each kind of row has its own columns, frames are as they came off the wire, books have a table."""
    for statement in _V1_TABLES:
        connection.execute(statement)
    for table, column, declared in _V1_COLUMNS:
        if not any(found[1] == column for found in connection.execute(f"PRAGMA table_info({table})").fetchall()):
            connection.execute(f"ALTER TABLE {table} ADD COLUMN {column} {declared}")
    for statement in (*_V2_TABLES, *_V2_ROWS):
        connection.execute(statement)
    for table in ("moves", "groups", "steps", "pulls", "calls"):
        connection.execute(f"DROP TABLE {table}")
        connection.execute(f"ALTER TABLE {table}_2 RENAME TO {table}")
    connection.execute("ALTER TABLE samples RENAME COLUMN body TO status")
    connection.execute('ALTER TABLE trajectories RENAME COLUMN group_id TO "group"')
    _events_to_version_2(connection)


def _events_to_version_2(connection: sqlite3.Connection) -> None:
    """A frame is the worker's message, and what only the trainer says names the worker that it came from."""
    trainer: Mapping[str, Any] = {"worker": "", "epoch": 0}
    changed: list[tuple[bytes, int]] = []
    kinds = "('frame', 'WorkerJoined', 'GroupTrained', 'WeightsPublished')"
    for seq, kind, body in connection.execute(f"SELECT seq, kind, body FROM events WHERE kind IN {kinds} ORDER BY seq"):
        event = msgspec.msgpack.decode(body)
        if kind == "frame":
            worker, epoch, chunks = event
            changed.append((msgspec.msgpack.encode((worker, epoch, ("Tokens", chunks))), seq))
        elif kind != "WorkerJoined":
            changed.append((msgspec.msgpack.encode(event | trainer), seq))
        elif event["worker"].startswith("trainer-"):
            trainer = {"worker": event["worker"], "epoch": event["epoch"]}
    connection.executemany("UPDATE events SET body = ? WHERE seq = ?", changed)


def _to_version_3(connection: sqlite3.Connection) -> None:
    """Trajectories have what training on them once more takes."""
    connection.execute("ALTER TABLE trajectories ADD COLUMN sampled BLOB NOT NULL DEFAULT x''")


MIGRATIONS: Mapping[int, Callable[[sqlite3.Connection], None]] = {1: _to_version_2, 2: _to_version_3}
"""Migration steps by the version from which each begins."""
