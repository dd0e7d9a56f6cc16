"""Jobs of pools that were submitted here, and the furthest step of a run."""

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"


def upgrade() -> None:
    op.create_table(
        "jobs",
        sa.Column("id", sa.String(length=40), nullable=False),
        sa.Column("project", sa.String(length=40), nullable=False),
        sa.Column("pool", sa.String(length=64), nullable=False),
        sa.Column("fingerprint", sa.String(length=64), nullable=False, comment="of the request that submitted it"),
        sa.Column("config", sa.Text(), nullable=False),
        sa.Column("train_gpus", sa.Integer(), nullable=False),
        sa.Column("usd", sa.Float(), nullable=False, comment="what it had cost when its pool was last asked"),
        sa.Column("created_us", sa.BigInteger(), nullable=False),
        sa.Column("ended_us", sa.BigInteger(), nullable=True, comment="when it was first seen to be over"),
        sa.ForeignKeyConstraint(["project"], ["projects.id"], name=op.f("fk_jobs_project")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_jobs")),
        comment="jobs of pools that were submitted here",
    )
    with op.batch_alter_table("runs") as runs:
        runs.add_column(sa.Column("furthest_step", sa.Integer(), nullable=False, server_default="0"))
        runs.alter_column("restarts", existing_type=sa.Integer(), comment="since it last came to another step")
    op.create_index(op.f("ix_jobs_project_ended_us"), "jobs", ["project", "ended_us"], unique=False)
