"""Secrets of projects, encrypted."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    op.create_table(
        "secrets",
        sa.Column("project", sa.String(length=40), nullable=False),
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("sealed", sa.LargeBinary(), nullable=False, comment="encrypted by the server's vault"),
        sa.Column("updated_us", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["project"], ["projects.id"], name=op.f("fk_secrets_project")),
        sa.PrimaryKeyConstraint("project", "name", name=op.f("pk_secrets")),
    )
