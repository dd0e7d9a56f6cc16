"""For how long it holds what an identity provider has said, and what it is asked again by."""

import time

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"

_DAY_US = 24 * 3600 * 1_000_000


def upgrade() -> None:
    op.create_table(
        "refresh_tokens",
        sa.Column("person", sa.String(length=40), nullable=False),
        sa.Column("sealed", sa.LargeBinary(), nullable=False, comment="encrypted by the server's vault"),
        sa.Column("checked_us", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["person"], ["users.id"], name=op.f("fk_refresh_tokens_person")),
        sa.PrimaryKeyConstraint("person", name=op.f("pk_refresh_tokens")),
        comment="by which the identity provider is asked again",
    )
    with op.batch_alter_table("users") as users:
        users.add_column(
            sa.Column(
                "vouched_until_us", sa.BigInteger(), comment="until then holds what their issuer has said of them"
            )
        )
    table = sa.table("users", sa.column("subject"), sa.column("vouched_until_us"))
    until_us = time.time_ns() // 1_000 + _DAY_US
    op.execute(sa.update(table).where(table.c.subject.is_not(None)).values(vouched_until_us=until_us))
