"""Sessions of browsers in the store: each was signed in by a key, or as a member, and ends with it."""

import hashlib
import secrets

import sqlalchemy as sa

from elastic.server.store.database import now_us
from elastic.server.store.people import hash_of
from elastic.server.store.rows import first
from elastic.server.store.tables import sessions, used_nonces

_FIND = sa.select(sessions).where(
    sessions.c.hash == sa.bindparam("digest"), sessions.c.expires_us > sa.bindparam("now_us")
)


def begin(tx: sa.Connection, lasts_s: float, *, key: str | None = None, member: str | None = None) -> str:
    """Make a session of a key or of a member; returns its secret, which is kept nowhere. Expired ones are dropped."""
    secret, at_us = secrets.token_urlsafe(32), now_us()
    tx.execute(sa.delete(sessions).where(sessions.c.expires_us <= at_us))
    row = {"hash": hash_of(secret), "key": key, "member": member}
    tx.execute(sa.insert(sessions).values(**row, created_us=at_us, expires_us=at_us + int(lasts_s * 1e6)))
    return secret


def use_nonce(tx: sa.Connection, nonce: str, lasts_s: float) -> bool:
    """Whether a sign-in's nonce comes for the first time; it does not from now on. Old ones are dropped."""
    at_us, digest = now_us(), hash_of(nonce)
    tx.execute(sa.delete(used_nonces).where(used_nonces.c.expires_us <= at_us))
    if first(tx, sa.select(used_nonces.c.hash).where(used_nonces.c.hash == digest)) is not None:
        return False
    tx.execute(sa.insert(used_nonces).values(hash=digest, expires_us=at_us + int(lasts_s * 1e6)))
    return True


def end(tx: sa.Connection, secret: str) -> None:
    tx.execute(sa.delete(sessions).where(sessions.c.hash == hash_of(secret)))


def find(connection: sa.Connection, secret: str) -> sa.RowMapping | None:
    """The session with this secret, unless it has expired: its `key`, or its `member`."""
    return first(connection, _FIND, digest=hash_of(secret), now_us=now_us())


def change_member(tx: sa.Connection, secret: str, member: str) -> None:
    """Have a person's session be in another of their projects."""
    tx.execute(sa.update(sessions).where(sessions.c.hash == hash_of(secret)).values(member=member))


def csrf_token(secret: str) -> str:
    """Return the token that a session's pages send with their writes. It is derived from the secret and does not
    reveal it."""
    return hashlib.sha256(b"csrf\0" + secret.encode()).hexdigest()
