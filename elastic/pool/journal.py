"""A pool's journal: the events that the cluster has taken, each durable before it has an effect, and the records beside
them.

The journal is one SQLite file in the pool's directory. A restarted process begins at the last snapshot of the cluster's
state and replays the events since. It compares digests that were noted on the way, so that a program that would decide
differently reports this instead of going on from another state. Jobs that are over leave the cluster for the table
`forgotten`, whose columns are what they are looked up by.
"""

import contextlib
import json
import os
import secrets
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from elastic.core.cluster import Cluster, ClusterPolicies
from elastic.core.cluster.history import ClusterEntry, ClusterOpening, cluster_digest, encode, restore, save
from elastic.core.cluster.types import JobId, Nanoseconds, NodeId, PoolSpec, WaitLimits
from elastic.pool.machines import JoinTerms
from elastic.pool.ports import DoneCommand, ForgottenJob, JobEntry
from elastic.system.files import StandingFiles
from elastic.system.sqlite import open_sqlite

JOURNAL = "journal.sqlite"
LAYOUT = "4"
DIGEST_EVERY = 64
"""Events between two digests."""
SNAPSHOT_EVERY = 2048
"""Events between two snapshots: what a start replays at most."""
_SCHEMA = """
CREATE TABLE IF NOT EXISTS notes (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS events (number INTEGER PRIMARY KEY, record BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS digests (number INTEGER PRIMARY KEY, digest TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS snapshots (number INTEGER PRIMARY KEY, state BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS forgotten (
    arrival INTEGER PRIMARY KEY, job TEXT NOT NULL UNIQUE, place TEXT NOT NULL, record BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS forgotten_place ON forgotten (place, arrival);
CREATE TABLE IF NOT EXISTS jobs (job TEXT PRIMARY KEY, entry BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS commands (id TEXT PRIMARY KEY, words TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS deaths (number INTEGER PRIMARY KEY, death BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS node_agents (node TEXT PRIMARY KEY, ticket INTEGER NOT NULL, spent INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS joined (node TEXT PRIMARY KEY, terms BLOB NOT NULL) WITHOUT ROWID;
"""


class NotedDeath(msgspec.Struct, frozen=True):
    """The death of a node agent, a job's process or the pool's own process. `what`: how it died, and what follows."""

    at_ns: Nanoseconds
    node: NodeId
    job: JobId
    what: str


class PoolJournalError(Exception):
    """The journal cannot be read, written or continued. The message names the file."""


class PoolJournal:
    """The journal of a running pool. One process at a time has it open for writing."""

    def __init__(self, directory: Path) -> None:
        """Open the journal of a pool's directory. Raises `PoolJournalError`."""
        self.path = directory / JOURNAL
        try:
            self._db = open_sqlite(self.path, "rwc")
            self.path.chmod(0o600)
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = FULL")
            self._db.executescript(_SCHEMA)
            self.events: int = self._db.execute("SELECT COALESCE(MAX(number), -1) + 1 FROM events").fetchone()[0]
        except sqlite3.Error as error:
            raise PoolJournalError(f"{self.path}: {error}") from error
        self._standing = StandingFiles(self.path, self.path.with_name(f"{self.path.name}-wal"))
        layout = self.note("layout")
        self._digested = self._snapshotted = self.events
        if layout not in ("", LAYOUT):
            raise PoolJournalError(f"{self.path}: its layout: found {layout}; allowed: {LAYOUT}")
        if not layout:
            self.set_note("layout", LAYOUT)

    def close(self) -> None:
        self._db.close()

    def open_pool(
        self, spec: PoolSpec, limits: WaitLimits, policies: ClusterPolicies, policy: str
    ) -> tuple[Cluster, Nanoseconds]:
        """Return the cluster after the last event, or a new one, and the time of that event.

        Raises `PoolJournalError` for a journal of another policy or of other nodes, and for one whose replay leads to
        another state.
        """
        former = self.note("policy")
        if former not in ("", policy):
            raise PoolJournalError(f"{self.path}: this pool began with policy {former!r}; found {policy!r}")
        if not self.events:
            self.set_note("policy", policy)
            self.append(encode(ClusterOpening(0, spec, limits)))
            return Cluster(spec, policies, limits, 0), 0
        cluster, last_ns = self.replayed(policies)
        if cluster.spec != spec:
            began, found = (
                ", ".join(f"{kind.nodes} {kind.name}" for kind in one.kinds.values()) for one in (cluster.spec, spec)
            )
            raise PoolJournalError(
                f"{self.path}: this pool began with other nodes, prices or sites ({began}); found {found}; allowed: as "
                "it began, or a pool of another name"
            )
        return cluster, last_ns

    def replayed(self, policies: ClusterPolicies) -> tuple[Cluster, Nanoseconds]:
        """Return a new cluster as it was after the last event, and the time of that event. Raises as `open_pool`."""
        try:
            first, cluster = self._last_snapshot(policies)
            last_ns = cluster.now_ns
            digests = dict(self._db.execute("SELECT number, digest FROM digests WHERE number >= ?", (first,)))
            records = self._db.execute("SELECT number, record FROM events WHERE number >= ? ORDER BY number", (first,))
            decoder = msgspec.msgpack.Decoder(ClusterEntry)
            for number, record in records:
                entry = decoder.decode(record)
                cluster.handle(entry.event, entry.now_ns)
                last_ns = max(last_ns, entry.now_ns)
                if number in digests and cluster_digest(cluster) != digests[number]:
                    raise PoolJournalError(
                        f"{self.path}: its first {number} events lead to another state than they did for the process "
                        "that wrote them: it was another program; end this pool with that one"
                    )
        except (sqlite3.Error, msgspec.MsgspecError, ValueError) as error:
            raise PoolJournalError(f"{self.path}: {error}") from error
        return cluster, last_ns

    def _last_snapshot(self, policies: ClusterPolicies) -> tuple[int, Cluster]:
        """Return the cluster of the last snapshot, or a new one, and the number of the event that follows it."""
        row = self._db.execute("SELECT number, state FROM snapshots ORDER BY number DESC LIMIT 1").fetchone()
        if row is not None:
            return row[0] + 1, restore(row[1], policies)
        first = self._db.execute("SELECT record FROM events ORDER BY number LIMIT 1").fetchone()[0]
        opening = msgspec.msgpack.decode(first, type=ClusterOpening)
        return 1, Cluster(opening.spec, policies, opening.limits, opening.now_ns)

    def append(
        self,
        record: bytes,
        entry: JobEntry | None = None,
        command: DoneCommand | None = None,
        forgotten: Sequence[ForgottenJob] = (),
    ) -> None:
        """Append a record. It is durable when this returns. `entry` is of a job that enters the cluster, `forgotten`
        are those that leave it. Raises `PoolJournalError`."""
        with self._transaction():
            self._db.execute("INSERT INTO events VALUES (?, ?)", (self.events, record))
            if entry is not None:
                self._db.execute(
                    "INSERT OR REPLACE INTO jobs VALUES (?, ?)", (entry.job, msgspec.msgpack.encode(entry))
                )
                self._db.execute("DELETE FROM forgotten WHERE job = ?", (entry.job,))
            for job in forgotten:
                values = (job.record.arrival, job.record.request.id, job.place, _kept(job))
                self._db.execute("INSERT INTO forgotten VALUES (?, ?, ?, ?)", values)
            if command is not None:
                self._db.execute("INSERT OR IGNORE INTO commands VALUES (?, ?)", (command.id, command.words))
        self.events += 1

    def note_death(self, death: NotedDeath) -> None:
        """Make a death durable that is no event of the cluster's, for the report."""
        with self._transaction():
            self._db.execute("INSERT INTO deaths (death) VALUES (?)", (msgspec.msgpack.encode(death),))

    def keep(self, command: DoneCommand) -> None:
        """Make a command durable that is no event."""
        with self._transaction():
            self._db.execute("INSERT OR IGNORE INTO commands VALUES (?, ?)", (command.id, command.words))

    def note_state(self, cluster: Cluster, *, at_once: bool = False) -> None:
        """Note what a later process needs of the cluster's state where it is time to, or `at_once`: a digest, to
        compare its own state with, and a snapshot, to begin at. Call it between two events."""
        last = self.events - 1
        if at_once or self.events - self._digested >= DIGEST_EVERY:
            with self._transaction():
                self._db.execute("INSERT OR REPLACE INTO digests VALUES (?, ?)", (last, cluster_digest(cluster)))
            self._digested = self.events
        if at_once or self.events - self._snapshotted >= SNAPSHOT_EVERY:
            with self._transaction():
                self._db.execute("DELETE FROM snapshots")
                self._db.execute("INSERT INTO snapshots VALUES (?, ?)", (last, save(cluster)))
            self._snapshotted = self.events

    def forgotten(self, job: str) -> ForgottenJob | None:
        """Return the last state of a job that has left the cluster; None for another."""
        row = self._db.execute("SELECT record FROM forgotten WHERE job = ?", (job,)).fetchone()
        return None if row is None else _of_kept(row[0])

    def forgotten_jobs(self, before: int, most: int, like: str = "", within: str = "") -> list[ForgottenJob]:
        """Return jobs that have left the cluster and arrived before the job with this number, the latest first: those
        whose names have `like` in them, and whose directories lie in `within`, if it is given."""
        query, given = "SELECT record FROM forgotten WHERE arrival < ?", [before]
        for condition, value in (("instr(job, ?)", like), ("place = ?", within)):
            if value:
                query, given = f"{query} AND {condition}", [*given, value]
        rows = self._db.execute(f"{query} ORDER BY arrival DESC LIMIT ?", (*given, most))
        return [_of_kept(row[0]) for row in rows]

    def count_forgotten(self) -> int:
        return self._db.execute("SELECT COUNT(*) FROM forgotten").fetchone()[0]

    def words_of(self, command: str) -> str | None:
        """Return the text of the command with this id; None if there was none."""
        row = self._db.execute("SELECT words FROM commands WHERE id = ?", (command,)).fetchone()
        return None if row is None else row[0]

    def entries(self) -> list[JobEntry]:
        """Return the records of the submissions of jobs that have not left the cluster."""
        wanted = "SELECT entry FROM jobs WHERE job NOT IN (SELECT job FROM forgotten) ORDER BY job"
        rows = self._db.execute(wanted).fetchall()
        return [msgspec.msgpack.decode(row[0], type=JobEntry) for row in rows]

    def note(self, key: str) -> str:
        row = self._db.execute("SELECT value FROM notes WHERE key = ?", (key,)).fetchone()
        return "" if row is None else row[0]

    def set_note(self, key: str, value: str) -> None:
        with self._transaction():
            self._db.execute("INSERT OR REPLACE INTO notes VALUES (?, ?)", (key, value))

    # Node agents' tickets.

    def mint_ticket(self, node: NodeId, terms: JoinTerms | None = None) -> int:
        """Return the number of a new ticket for a node's agent. Older tickets become invalid. With `terms` it is
        for another machine."""
        with self._transaction():
            if terms is not None:
                self._keep_terms(node, terms)
            self._db.execute(
                "INSERT INTO node_agents VALUES (?, 1, 0)"
                " ON CONFLICT (node) DO UPDATE SET ticket = ticket + 1, spent = 0",
                (node,),
            )
        return self.ticket(node)[0]

    def ticket(self, node: NodeId) -> tuple[int, bool]:
        """Return the number of a node's ticket (0 for none), and whether it was used."""
        row = self._db.execute("SELECT ticket, spent FROM node_agents WHERE node = ?", (node,)).fetchone()
        return (0, True) if row is None else (row[0], bool(row[1]))

    def spend_ticket(self, node: NodeId) -> None:
        with self._transaction():
            self._db.execute("UPDATE node_agents SET spent = 1 WHERE node = ?", (node,))

    def joined(self) -> dict[NodeId, JoinTerms]:
        """Return the terms of the nodes for which a ticket was minted that another machine may spend, or has."""
        rows = self._db.execute("SELECT node, terms FROM joined ORDER BY node")
        return {node: msgspec.msgpack.decode(terms, type=JoinTerms) for node, terms in rows}

    def change_terms(self, node: NodeId, terms: JoinTerms) -> None:
        with self._transaction():
            self._keep_terms(node, terms)

    def _keep_terms(self, node: NodeId, terms: JoinTerms) -> None:
        self._db.execute("INSERT OR REPLACE INTO joined VALUES (?, ?)", (node, msgspec.msgpack.encode(terms)))

    def node_agents(self) -> Sequence[NodeId]:
        """Return the nodes for which a node agent was ever started, or may join."""
        return [row[0] for row in self._db.execute("SELECT node FROM node_agents ORDER BY node")]

    def forget_node_agent(self, node: NodeId) -> None:
        with self._transaction():
            self._db.execute("DELETE FROM node_agents WHERE node = ?", (node,))

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        try:
            self._db.execute("BEGIN IMMEDIATE")
            yield
            self._db.execute("COMMIT")
            self._standing.check()
        except (sqlite3.Error, OSError) as error:
            with contextlib.suppress(sqlite3.Error):
                self._db.execute("ROLLBACK")
            raise PoolJournalError(f"{self.path}: {error}") from error


def _kept(job: ForgottenJob) -> bytes:
    return json.dumps(msgspec.to_builtins(job)).encode()  # Sums of money are longer than what msgpack takes.


def _of_kept(record: bytes) -> ForgottenJob:
    return msgspec.convert(json.loads(record), ForgottenJob)


def read_records(directory: Path) -> Iterator[bytes]:
    """Yield the journal's records from its opening on, also while it is written. Raises `PoolJournalError`."""
    return _read(directory, "SELECT record FROM events ORDER BY number")


def read_entries(directory: Path) -> list[JobEntry]:
    """Return the records of submissions, also while the journal is written. Raises `PoolJournalError`."""
    rows = _read(directory, "SELECT entry FROM jobs")
    return [msgspec.msgpack.decode(row, type=JobEntry) for row in rows]


def read_deaths(directory: Path) -> list[NotedDeath]:
    """Return what was noted of deaths, also while the journal is written. Raises `PoolJournalError`."""
    rows = _read(directory, "SELECT death FROM deaths ORDER BY number")
    return [msgspec.msgpack.decode(row, type=NotedDeath) for row in rows]


def _read(directory: Path, query: str) -> Iterator[bytes]:
    """Yield the only column of what a query finds. Raises `PoolJournalError`."""
    path = directory / JOURNAL
    try:
        with contextlib.closing(open_sqlite(path, "ro")) as db:
            for row in db.execute(query):
                yield row[0]
    except sqlite3.Error as error:
        raise PoolJournalError(f"{path}: {error}") from error


def pool_secret(directory: Path) -> bytes:
    """Return the secret from which the pool's tokens are derived. Creates it once. Raises `OSError`."""
    path = directory / "secret"
    with contextlib.suppress(FileExistsError):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_bytes(32))
            file.flush()
            os.fsync(file.fileno())
    return path.read_bytes()
