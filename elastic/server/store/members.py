"""People and their memberships in the store.

A person is never told of outside of their own sessions: what projects see is the membership, whose id says nothing
of other projects.
"""

import sqlalchemy as sa

from elastic.protocol.api import AccessRole, Membership, ProjectMember
from elastic.server import ids
from elastic.server.store.database import now_us
from elastic.server.store.people import role_of
from elastic.server.store.rows import changed, first, told
from elastic.server.store.tables import keys, members, projects, sessions, users

GIVEN, MAPPED = "given", "sign-in"
"""Origins of a membership: an admin, or a claim at a sign-in."""

with_person = (
    sa.select(members, users.c.email, users.c.name.label("person_name"), users.c.vouched_until_us)
    .join(users, users.c.id == members.c.user)
    .where(members.c.removed_us.is_(None))
    .subquery("with_person")
)
"""Present members, each with e-mail address and name."""


def person_of_email(tx: sa.Connection, email: str) -> str:
    """Return the id of the person with this address: a known person, or a new one who has not signed in yet."""
    found = tx.execute(sa.select(users.c.id).where(users.c.email == email)).scalar()
    return found or _new_person(tx, email=email)


def person_of_sign_in(tx: sa.Connection, *, issuer: str, subject: str, email: str | None, name: str) -> str:
    """Return the id of the person who has signed in, by the issuer's subject; `email` is an address that the issuer
    verified.

    A person who became a member by address is recognised at the first sign-in. If an address changes hands, its new
    owner gets nothing of the former owner.
    """
    known = first(tx, sa.select(users).where(users.c.issuer == issuer, users.c.subject == subject))
    holder = None if email is None else first(tx, sa.select(users).where(users.c.email == email))
    if known is None and holder is not None and holder["subject"] is None:
        known = holder
    if known is None:
        return _new_person(tx, issuer=issuer, subject=subject, name=name, email=None if holder else email)
    changes = {"issuer": issuer, "subject": subject, "name": name}
    if email is not None and holder is None:
        changes["email"] = email
    tx.execute(sa.update(users).where(users.c.id == known["id"]).values(**changes))
    return known["id"]


def _new_person(tx: sa.Connection, **fields: str | None) -> str:
    id_ = ids.new_id(ids.USER)
    tx.execute(sa.insert(users).values(**{"name": "", **fields}, id=id_, created_us=now_us()))
    return id_


def add(tx: sa.Connection, project: str, person: str, role: AccessRole, source: str) -> sa.RowMapping:
    """Make a person a member, perhaps again. The keys of an earlier membership stay revoked."""
    former = first(tx, sa.select(members).where(members.c.project == project, members.c.user == person))
    if former is None:
        id_ = ids.new_id(ids.MEMBER)
        row = {"project": project, "user": person, "role": role.value, "source": source}
        tx.execute(sa.insert(members).values(id=id_, version=1, created_us=now_us(), **row))
    else:
        id_ = former["id"]
        change(tx, id_, role, source, removed_us=None)
    made = find(tx, id_)
    assert made is not None
    return made


def find(connection: sa.Connection, id_: str) -> sa.RowMapping | None:
    """Return a present member with its person; None for a former member."""
    return first(connection, sa.select(with_person).where(with_person.c.id == id_))


def of_person(connection: sa.Connection, project: str, person: str) -> sa.RowMapping | None:
    return first(
        connection, sa.select(with_person).where(with_person.c.project == project, with_person.c.user == person)
    )


def change(tx: sa.Connection, id_: str, role: AccessRole, source: str, **fields: int | None) -> None:
    """Give a member another role. Their keys do no more than it allows, from the next request on."""
    changed(tx, members, id_, {"role": role.value, "source": source, **fields})


def remove(tx: sa.Connection, id_: str) -> None:
    """End a membership, with its keys and sessions."""
    at_us = now_us()
    tx.execute(sa.update(keys).where(keys.c.member == id_, keys.c.revoked_us.is_(None)).values(revoked_us=at_us))
    tx.execute(sa.delete(sessions).where(sessions.c.member == id_))
    changed(tx, members, id_, {"removed_us": at_us})


def is_last_admin(tx: sa.Connection, member: sa.RowMapping) -> bool:
    """Whether the project would have no admin without this one."""
    others = sa.select(members.c.id).where(
        members.c.project == member["project"],
        members.c.role == AccessRole.ADMIN.value,
        members.c.removed_us.is_(None),
        members.c.id != member["id"],
    )
    return member["role"] == AccessRole.ADMIN and first(tx, others.limit(1)) is None


def memberships(connection: sa.Connection, member: str) -> list[Membership]:
    """All memberships of the person who this member is."""
    person = sa.select(members.c.user).where(members.c.id == member).scalar_subquery()
    found = (
        sa.select(members, projects.c.name.label("project_name"))
        .join(projects, projects.c.id == members.c.project)
        .where(members.c.user == person, members.c.removed_us.is_(None))
        .order_by(members.c.id)
    )
    return [told(Membership, row, member=row["id"]) for row in connection.execute(found).mappings()]


def first_of(connection: sa.Connection, person: str) -> sa.RowMapping | None:
    """A membership of a person's: the oldest."""
    found = sa.select(members).where(members.c.user == person, members.c.removed_us.is_(None)).order_by(members.c.id)
    return first(connection, found.limit(1))


def map_claims(tx: sa.Connection, person: str, mapped: dict[str, AccessRole]) -> None:
    """Have the memberships that claims give be these, by project. What an admin has given stays as it is."""
    now = sa.select(members).where(members.c.user == person, members.c.removed_us.is_(None))
    held = {row["project"]: row for row in tx.execute(now).mappings().all()}
    for project, row in held.items():
        if row["source"] == MAPPED and project not in mapped:
            remove(tx, row["id"])
        elif row["source"] == MAPPED and row["role"] != mapped[project]:
            change(tx, row["id"], mapped[project], MAPPED)
    for project, role in mapped.items():
        if project not in held:
            add(tx, project, person, role, MAPPED)


def as_member(row: sa.RowMapping) -> ProjectMember:
    return told(ProjectMember, row, name=row["person_name"], role=role_of(row))
