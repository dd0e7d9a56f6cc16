"""Projects and keys in the store."""

import hashlib
import secrets
from typing import Any

import sqlalchemy as sa

from elastic.protocol.api import AccessRole, ApiKey, Project
from elastic.server import ids
from elastic.server.permissions import lesser
from elastic.server.store.database import now_us
from elastic.server.store.rows import changed, first, inserted, told
from elastic.server.store.tables import keys, members, projects, users

SECRET_PREFIX = "elastic_"
_HINT_CHARACTERS = 12
DEFAULT_PROJECT = "default"


_keys = (
    sa.select(
        keys,
        members.c.role.label("member_role"),
        members.c.removed_us.label("member_removed_us"),
        users.c.vouched_until_us,
    )
    .outerjoin(members, members.c.id == keys.c.member)
    .outerjoin(users, users.c.id == members.c.user)
)

_KEY = _keys.where(keys.c.id == sa.bindparam("key"))
_KEY_OF_HASH = _keys.where(keys.c.hash == sa.bindparam("digest"))
keys_seen = _keys.subquery("keys_seen")
"""Keys, each with what its person may do at present."""


def hash_of(secret: str) -> bytes:
    """Return the part of a key that is stored. Keys have 256 random bits, so a fast hash is safe."""
    return hashlib.sha256(secret.encode()).digest()


def new_key(
    tx: sa.Connection,
    *,
    project: str | None,
    name: str,
    role: AccessRole,
    scopes: list[str],
    expires_us: int | None,
    member: str | None = None,
    sha256: str | None = None,
) -> tuple[sa.RowMapping, str | None]:
    """Make a key of a member or of the project itself; returns the row and the secret, which is not stored.

    With `sha256` the caller already has the secret, and sends its hash only.
    """
    secret = None if sha256 else SECRET_PREFIX + secrets.token_urlsafe(32)
    row = {
        "id": ids.new_id(ids.KEY),
        "project": project,
        "name": name,
        "role": role.value,
        "scopes": scopes,
        "member": member,
        "hash": hash_of(secret) if secret else bytes.fromhex(sha256 or ""),
        "hint": secret[:_HINT_CHARACTERS] + "…" if secret else "",
        "created_us": now_us(),
        "expires_us": expires_us,
    }
    inserted(tx, keys, **row)
    return tx.execute(_keys.where(keys.c.id == row["id"])).mappings().one(), secret


def key(connection: sa.Connection, id_: str) -> sa.RowMapping | None:
    return first(connection, _KEY, key=id_)


def key_of_secret(connection: sa.Connection, secret: str) -> sa.RowMapping | None:
    """Return the key with this secret, if it is neither expired nor revoked."""
    found = key_of_hash(connection, hash_of(secret))
    return found if found is not None and usable(found) else None


def key_of_hash(connection: sa.Connection, digest: bytes) -> sa.RowMapping | None:
    return first(connection, _KEY_OF_HASH, digest=digest)


def name_of(connection: sa.Connection, actor: str) -> str:
    """Return the name of who did something: of the member or the key's person, else of the key; empty if unknown."""
    found = key(connection, actor)
    person = sa.select(users).join(members, members.c.user == users.c.id)
    row = first(connection, person.where(members.c.id == (actor if found is None else found["member"])))
    if row is not None:
        return row["email"] or row["name"]
    return "" if found is None else found["name"]


def role_of(row: sa.RowMapping) -> AccessRole:
    """Return the role of a member or a key. A person's key is limited to the person's present role."""
    role = AccessRole(row["role"])
    return lesser(role, AccessRole(row["member_role"])) if row.get("member_role") else role


def usable(key: sa.RowMapping) -> bool:
    """Return whether a key is neither expired nor revoked, and its person is still a confirmed member."""
    expires_us = key["expires_us"]
    ended = key["revoked_us"] is not None or key["member_removed_us"] is not None or lapsed(key)
    return not ended and (expires_us is None or expires_us > now_us())


def lapsed(person: sa.RowMapping) -> bool:
    """Return whether the identity provider's last confirmation of the person is too old."""
    return person["vouched_until_us"] is not None and person["vouched_until_us"] <= now_us()


def revoke(tx: sa.Connection, id_: str) -> None:
    tx.execute(sa.update(keys).where(keys.c.id == id_, keys.c.revoked_us.is_(None)).values(revoked_us=now_us()))


def any_key(connection: sa.Connection) -> bool:
    return first(connection, sa.select(keys.c.id).limit(1)) is not None


def new_project(tx: sa.Connection, name: str, unix_user: str | None) -> sa.RowMapping:
    """Make a project. Raises `IntegrityError` if the name is taken."""
    return inserted(
        tx, projects, id=ids.new_id(ids.PROJECT), name=name, unix_user=unix_user, created_us=now_us(), version=1
    )


def project(connection: sa.Connection, id_or_name: str) -> sa.RowMapping | None:
    """Return a project by its id or name."""
    wanted = (projects.c.id == id_or_name) | (projects.c.name == id_or_name)
    return first(connection, sa.select(projects).where(wanted))


def all_projects(connection: sa.Connection) -> list[sa.RowMapping]:
    return list(connection.execute(sa.select(projects).order_by(projects.c.id)).mappings())


def change_project(tx: sa.Connection, id_: str, changes: dict[str, Any]) -> None:
    """Change a project. Raises `IntegrityError` if the name is taken."""
    changed(tx, projects, id_, changes)


def as_project(row: sa.RowMapping) -> Project:
    return told(Project, row)


def as_key(row: sa.RowMapping) -> ApiKey:
    return told(ApiKey, row, role=role_of(row))
