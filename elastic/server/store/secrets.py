"""Projects' secrets in the store: encrypted, and read by nobody but who begins a run's process."""

import sqlalchemy as sa

from elastic.protocol.api import VENDORS, ProjectCredentials, ProjectSecret
from elastic.server.store.database import now_us
from elastic.server.store.rows import told
from elastic.server.store.tables import secrets


def put(tx: sa.Connection, project: str, name: str, sealed: bytes) -> None:
    """Store a secret, replacing an earlier one of the same name."""
    remove(tx, project, name)
    tx.execute(sa.insert(secrets).values(project=project, name=name, sealed=sealed, updated_us=now_us()))


def remove(tx: sa.Connection, project: str, name: str) -> bool:
    """Whether there was such a secret."""
    gone = sa.delete(secrets).where(secrets.c.project == project, secrets.c.name == name)
    return tx.execute(gone).rowcount > 0


def all_of(connection: sa.Connection, project: str) -> list[sa.RowMapping]:
    """Return a project's secrets, and its credentials, each under the vendor's name."""
    wanted = sa.select(secrets).where(secrets.c.project == project).order_by(secrets.c.name)
    return list(connection.execute(wanted).mappings())


def as_told(row: sa.RowMapping) -> ProjectSecret | ProjectCredentials:
    kind = ProjectCredentials if row["name"] in VENDORS else ProjectSecret
    return told(kind, row, id=row["name"])
