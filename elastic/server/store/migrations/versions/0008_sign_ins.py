"""Sign-ins with an identity provider that were finished."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    op.create_table(
        "used_nonces",
        sa.Column("hash", sa.LargeBinary(length=32), nullable=False),
        sa.Column("expires_us", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("hash", name=op.f("pk_used_nonces")),
        comment="of sign-ins that were finished",
    )
    op.create_index(op.f("ix_used_nonces_expires_us"), "used_nonces", ["expires_us"], unique=False)
