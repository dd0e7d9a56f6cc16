"""Projects and keys in the store."""

import hashlib
import secrets
from typing import Any

import sqlalchemy as sa

from elastic.resources import AccessRole, ApiKey, Project
from elastic.server import ids
from elastic.server.clock import rfc3339
from elastic.server.store.database import now_us
from elastic.server.store.tables import keys, projects

SECRET_PREFIX = "elastic_"
_HINT_CHARACTERS = 12
DEFAULT_PROJECT = "default"


def hash_of(secret: str) -> bytes:
    """What of a key is kept. Keys have 256 bits of chance, so a fast hash cannot be searched."""
    return hashlib.sha256(secret.encode()).digest()


def new_key(
    tx: sa.Connection,
    *,
    project: str | None,
    name: str,
    role: AccessRole,
    scopes: list[str],
    expires_us: int | None,
) -> tuple[sa.RowMapping, str]:
    """Make a key; returns it and its secret, which is kept nowhere."""
    secret = SECRET_PREFIX + secrets.token_urlsafe(32)
    row = {
        "id": ids.new_id(ids.KEY),
        "project": project,
        "name": name,
        "role": role.value,
        "scopes": scopes,
        "hash": hash_of(secret),
        "hint": secret[:_HINT_CHARACTERS] + "…",
        "created_us": now_us(),
        "expires_us": expires_us,
    }
    tx.execute(sa.insert(keys).values(**row))
    made = key(tx, row["id"])
    assert made is not None
    return made, secret


def key(connection: sa.Connection, id_: str) -> sa.RowMapping | None:
    return connection.execute(sa.select(keys).where(keys.c.id == id_)).mappings().first()


def key_of_secret(connection: sa.Connection, secret: str) -> sa.RowMapping | None:
    """The key with this secret, if it is neither expired nor revoked."""
    found = connection.execute(sa.select(keys).where(keys.c.hash == hash_of(secret))).mappings().first()
    return found if found is not None and usable(found) else None


def usable(key: sa.RowMapping) -> bool:
    """Whether a key is neither expired nor revoked."""
    expires_us = key["expires_us"]
    return key["revoked_us"] is None and (expires_us is None or expires_us > now_us())


def revoke(tx: sa.Connection, id_: str) -> None:
    tx.execute(sa.update(keys).where(keys.c.id == id_, keys.c.revoked_us.is_(None)).values(revoked_us=now_us()))


def any_key(connection: sa.Connection) -> bool:
    return connection.execute(sa.select(keys.c.id).limit(1)).first() is not None


def new_project(tx: sa.Connection, name: str, unix_user: str | None) -> sa.RowMapping:
    """Raises `IntegrityError` where the name is taken."""
    row = {
        "id": ids.new_id(ids.PROJECT),
        "name": name,
        "unix_user": unix_user,
        "created_us": now_us(),
        "version": 1,
    }
    tx.execute(sa.insert(projects).values(**row))
    made = project(tx, row["id"])
    assert made is not None
    return made


def project(connection: sa.Connection, id_or_name: str) -> sa.RowMapping | None:
    """A project by its id or its name."""
    wanted = (projects.c.id == id_or_name) | (projects.c.name == id_or_name)
    return connection.execute(sa.select(projects).where(wanted)).mappings().first()


def all_projects(connection: sa.Connection) -> list[sa.RowMapping]:
    return list(connection.execute(sa.select(projects).order_by(projects.c.id)).mappings())


def change_project(tx: sa.Connection, id_: str, changes: dict[str, Any]) -> None:
    """Raises `IntegrityError` where the name is taken."""
    tx.execute(sa.update(projects).where(projects.c.id == id_).values(**changes, version=projects.c.version + 1))


def as_project(row: sa.RowMapping) -> Project:
    return Project(
        id=row["id"], name=row["name"], unix_user=row["unix_user"], created_at=rfc3339(row["created_us"]) or ""
    )


def as_key(row: sa.RowMapping) -> ApiKey:
    return ApiKey(
        id=row["id"],
        name=row["name"],
        project=row["project"],
        role=AccessRole(row["role"]),
        scopes=row["scopes"],
        hint=row["hint"],
        created_at=rfc3339(row["created_us"]) or "",
        expires_at=rfc3339(row["expires_us"]),
        revoked_at=rfc3339(row["revoked_us"]),
    )
