"""Runs of a phase are found, not searched for."""

from alembic import op

revision = "0010"
down_revision = "0009"


def upgrade() -> None:
    op.create_index(op.f("ix_runs_phase_id"), "runs", ["phase", "id"], unique=False)
