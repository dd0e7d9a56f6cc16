"""People, their memberships, and whose a key or a session is."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    op.create_table(
        "users",
        sa.Column("id", sa.String(length=40), nullable=False),
        sa.Column(
            "email",
            sa.String(length=254),
            nullable=True,
            comment="in lower case; one that an admin gave, or an issuer verified",
        ),
        sa.Column(
            "issuer", sa.String(length=255), nullable=True, comment="who says who this is; null until the first sign-in"
        ),
        sa.Column("subject", sa.String(length=255), nullable=True, comment="what the issuer calls this person"),
        sa.Column("name", sa.String(length=200), nullable=False),
        sa.Column("created_us", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_users")),
        sa.UniqueConstraint("email", name=op.f("uq_users_email")),
    )
    op.create_index(op.f("ix_users_issuer_subject"), "users", ["issuer", "subject"], unique=True)
    op.create_table(
        "members",
        sa.Column("id", sa.String(length=40), nullable=False),
        sa.Column("project", sa.String(length=40), nullable=False),
        sa.Column("user", sa.String(length=40), nullable=False),
        sa.Column("role", sa.String(length=16), nullable=False),
        sa.Column(
            "source",
            sa.String(length=16),
            nullable=False,
            comment="given by an admin, or mapped from a claim at sign-in",
        ),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("created_us", sa.BigInteger(), nullable=False),
        sa.Column("removed_us", sa.BigInteger(), nullable=True, comment="null while this is a membership"),
        sa.ForeignKeyConstraint(["project"], ["projects.id"], name=op.f("fk_members_project")),
        sa.ForeignKeyConstraint(["user"], ["users.id"], name=op.f("fk_members_user")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_members")),
    )
    op.create_index(op.f("ix_members_project_user"), "members", ["project", "user"], unique=True)
    op.create_index(op.f("ix_members_user"), "members", ["user"], unique=False)
    # Sessions last for hours: browsers sign in again.
    op.drop_table("sessions")
    with op.batch_alter_table("keys") as batch:
        batch.add_column(
            sa.Column(
                "member",
                sa.String(length=40),
                nullable=True,
                comment="whose it is; null for a key of the project itself",
            )
        )
        batch.create_foreign_key(op.f("fk_keys_member"), "members", ["member"], ["id"])
        batch.create_index(op.f("ix_keys_member"), ["member"], unique=False)
    op.create_table(
        "sessions",
        sa.Column("hash", sa.LargeBinary(length=32), nullable=False),
        sa.Column("key", sa.String(length=40), nullable=True, comment="that signed in; else a member did"),
        sa.Column("member", sa.String(length=40), nullable=True),
        sa.Column("created_us", sa.BigInteger(), nullable=False),
        sa.Column("expires_us", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["key"], ["keys.id"], name=op.f("fk_sessions_key")),
        sa.ForeignKeyConstraint(["member"], ["members.id"], name=op.f("fk_sessions_member")),
        sa.PrimaryKeyConstraint("hash", name=op.f("pk_sessions")),
    )
    op.create_index(op.f("ix_sessions_expires_us"), "sessions", ["expires_us"], unique=False)
    op.create_index(op.f("ix_sessions_member"), "sessions", ["member"], unique=False)
