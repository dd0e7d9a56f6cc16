"""Sessions of browsers in the store: each was signed in by a key, and ends with it."""

import hashlib
import secrets

import sqlalchemy as sa

from elastic.server.store.database import now_us
from elastic.server.store.people import hash_of, usable
from elastic.server.store.tables import keys, sessions


def begin(tx: sa.Connection, key: str, lasts_s: float) -> str:
    """Make a session of a key; returns its secret, which is kept nowhere. Expired ones are dropped."""
    secret, at_us = secrets.token_urlsafe(32), now_us()
    tx.execute(sa.delete(sessions).where(sessions.c.expires_us <= at_us))
    row = {"hash": hash_of(secret), "key": key, "created_us": at_us, "expires_us": at_us + int(lasts_s * 1e6)}
    tx.execute(sa.insert(sessions).values(**row))
    return secret


def end(tx: sa.Connection, secret: str) -> None:
    tx.execute(sa.delete(sessions).where(sessions.c.hash == hash_of(secret)))


def key_of_session(connection: sa.Connection, secret: str) -> sa.RowMapping | None:
    """The key that this session was signed in by, while both are valid."""
    wanted = sa.select(keys).join(sessions, sessions.c.key == keys.c.id)
    wanted = wanted.where(sessions.c.hash == hash_of(secret), sessions.c.expires_us > now_us())
    found = connection.execute(wanted).mappings().first()
    return found if found is not None and usable(found) else None


def csrf_token(secret: str) -> str:
    """What pages of a session show with their writes: follows from its secret, which it does not tell."""
    return hashlib.sha256(b"csrf\0" + secret.encode()).hexdigest()
