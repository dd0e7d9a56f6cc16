"""Uploads in the store: whose each is, and which files it is to have."""

import re

import sqlalchemy as sa

from elastic.protocol.api import Upload, UploadFile
from elastic.server import ids
from elastic.server.store import jobs
from elastic.server.store.database import now_us
from elastic.server.store.rows import first, inserted, told
from elastic.server.store.runs import DELETE
from elastic.server.store.tables import runs, uploads


def insert(tx: sa.Connection, project: str, name: str, files: list[UploadFile], created_by: str) -> sa.RowMapping:
    return inserted(
        tx,
        uploads,
        id=ids.new_id(ids.UPLOAD),
        project=project,
        name=name,
        files=[file.model_dump() for file in files],
        bytes=sum(file.bytes for file in files),
        created_by=created_by,
        created_us=now_us(),
    )


def find(connection: sa.Connection, id_: str) -> sa.RowMapping | None:
    return first(connection, sa.select(uploads).where(uploads.c.id == id_))


def remove(tx: sa.Connection, id_: str) -> None:
    tx.execute(sa.delete(uploads).where(uploads.c.id == id_))


def bytes_of(connection: sa.Connection, project: str) -> int:
    """Return the size of a project's uploads, with files that are still to come."""
    total = sa.select(sa.func.coalesce(sa.func.sum(uploads.c.bytes), 0)).where(uploads.c.project == project)
    return int(connection.execute(total).scalar_one())


def all_of(connection: sa.Connection) -> list[tuple[str, str]]:
    """Every upload's project and id."""
    return [(row[0], row[1]) for row in connection.execute(sa.select(uploads.c.project, uploads.c.id))]


def user_of(connection: sa.Connection, project: str, id_: str) -> str | None:
    """Return a run or job that goes on, or may, and that names this upload."""
    naming = sa.select(runs.c.id).where(
        runs.c.project == project,
        runs.c.wanted != DELETE,
        runs.c.ended_us.is_(None),
        runs.c.config.contains(id_, autoescape=True),
    )
    return connection.execute(naming.limit(1)).scalar() or jobs.naming(connection, project, id_)


def gone(connection: sa.Connection, project: str, config: str) -> str | None:
    """Return an upload in whose place this configuration names something, and which the project does not have (any
    more)."""
    named = sorted(set(re.findall(rf"/({ids.pattern(ids.UPLOAD)})(?=[/\"])", config)))
    there = sa.select(uploads.c.id).where(uploads.c.project == project, uploads.c.id.in_(named))
    known = set(connection.execute(there).scalars()) if named else set[str]()
    return next((id_ for id_ in named if id_ not in known), None)


def last_use_us(connection: sa.Connection, project: str, id_: str) -> int:
    """Return when the last existing run or job that named this upload ended; 0 for none."""
    ended = sa.select(sa.func.max(runs.c.ended_us)).where(
        runs.c.project == project, runs.c.config.contains(id_, autoescape=True)
    )
    return max(connection.execute(ended).scalar() or 0, jobs.last_naming_us(connection, project, id_))


def files_of(row: sa.RowMapping) -> list[UploadFile]:
    return [UploadFile(**file) for file in row["files"]]


def as_upload(row: sa.RowMapping, *, ready: bool, received: set[str]) -> Upload:
    missing = [] if ready else sorted({file.sha256 for file in files_of(row)} - received)
    return told(Upload, row, state="ready" if ready else "open", missing=missing)
