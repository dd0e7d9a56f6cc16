"""For how long it holds what an identity provider has said of people, and by what it is asked again."""

import sqlalchemy as sa

from elastic.server.store.database import now_us
from elastic.server.store.tables import keys, members, refresh_tokens, sessions, users


def vouched(tx: sa.Connection, person: str, lasts_s: float, sealed: bytes | None) -> None:
    """The provider has said who somebody is: that holds for so long. `sealed` is what to ask again by, if any."""
    at_us = now_us()
    tx.execute(sa.update(users).where(users.c.id == person).values(vouched_until_us=at_us + int(lasts_s * 1e6)))
    tx.execute(sa.delete(refresh_tokens).where(refresh_tokens.c.person == person))
    if sealed is not None:
        tx.execute(sa.insert(refresh_tokens).values(person=person, sealed=sealed, checked_us=at_us))


def ended(tx: sa.Connection, person: str) -> None:
    """The provider lets somebody in no more: their sessions end, and their keys rest until they sign in again."""
    tx.execute(sa.update(users).where(users.c.id == person).values(vouched_until_us=now_us()))
    tx.execute(sa.delete(refresh_tokens).where(refresh_tokens.c.person == person))
    tx.execute(
        sa.delete(sessions).where(sessions.c.member.in_(sa.select(members.c.id).where(members.c.user == person)))
    )


def due(connection: sa.Connection, checked_before_us: int) -> list[sa.RowMapping]:
    """The people of whom the provider was not asked since then, and who have a session or a key to be asked for."""
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
    """Whether it is on this server to ask now: a refresh token is used once, whoever else has seen that it is due."""
    mine = sa.update(refresh_tokens).where(refresh_tokens.c.person == person, refresh_tokens.c.checked_us == checked_us)
    return tx.execute(mine.values(checked_us=now_us())).rowcount == 1
