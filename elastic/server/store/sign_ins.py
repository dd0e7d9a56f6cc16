"""The validity of an identity provider's statements about people, and the refresh tokens for new ones."""

import sqlalchemy as sa

from elastic.server.store.database import now_us
from elastic.server.store.tables import keys, members, refresh_tokens, sessions, users


def vouched(tx: sa.Connection, person: str, lasts_s: float, sealed: bytes | None) -> None:
    """Record the provider's statement about a person, valid for `lasts_s`. `sealed` is the refresh token, if any."""
    at_us = now_us()
    tx.execute(sa.update(users).where(users.c.id == person).values(vouched_until_us=at_us + int(lasts_s * 1e6)))
    tx.execute(sa.delete(refresh_tokens).where(refresh_tokens.c.person == person))
    if sealed is not None:
        tx.execute(sa.insert(refresh_tokens).values(person=person, sealed=sealed, checked_us=at_us))


def ended(tx: sa.Connection, person: str) -> None:
    """Record that the provider rejects a person: sessions end, and keys rest until the next sign-in."""
    tx.execute(sa.update(users).where(users.c.id == person).values(vouched_until_us=now_us()))
    tx.execute(sa.delete(refresh_tokens).where(refresh_tokens.c.person == person))
    tx.execute(
        sa.delete(sessions).where(sessions.c.member.in_(sa.select(members.c.id).where(members.c.user == person)))
    )


def due(connection: sa.Connection, checked_before_us: int) -> list[sa.RowMapping]:
    """Return the people who were not checked since `checked_before_us` and who have a session or a key."""
    at_us = now_us()
    session = (
        sa.select(sessions.c.hash)
        .join(members, members.c.id == sessions.c.member)
        .where(members.c.user == users.c.id, sessions.c.expires_us > at_us)
    )
    key = (
        sa.select(keys.c.id)
        .join(members, members.c.id == keys.c.member)
        .where(
            members.c.user == users.c.id,
            keys.c.revoked_us.is_(None),
            sa.or_(keys.c.expires_us.is_(None), keys.c.expires_us > at_us),
        )
    )
    wanted = (
        sa.select(refresh_tokens, users.c.subject)
        .join(users, users.c.id == refresh_tokens.c.person)
        .where(refresh_tokens.c.checked_us <= checked_before_us, sa.or_(session.exists(), key.exists()))
        .order_by(refresh_tokens.c.checked_us)
    )
    return list(connection.execute(wanted).mappings())


def claim(tx: sa.Connection, person: str, checked_us: int) -> bool:
    """Return whether this server checks the person now. A refresh token must be used once, by one server."""
    mine = sa.update(refresh_tokens).where(refresh_tokens.c.person == person, refresh_tokens.c.checked_us == checked_us)
    return tx.execute(mine.values(checked_us=now_us())).rowcount == 1
