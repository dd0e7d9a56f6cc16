"""Quotas, capacity that is shared, what runs are allotted and were told, retention."""

import json

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"

NANO_USD_PER_USD = 1_000_000_000


def upgrade() -> None:
    op.create_table(
        "quotas",
        sa.Column("project", sa.String(length=40), nullable=False),
        sa.Column("gpus", sa.JSON(), nullable=False),
        sa.Column("runs_max", sa.Integer()),
        sa.Column("usd_per_day", sa.Float()),
        sa.Column("budget_usd", sa.Float()),
        sa.Column("weight", sa.Float(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(["project"], ["projects.id"], name=op.f("fk_quotas_project")),
        sa.PrimaryKeyConstraint("project", name=op.f("pk_quotas")),
    )
    op.create_table(
        "accounts",
        sa.Column("project", sa.String(length=40), nullable=False),
        sa.Column("deleted_nano_usd", sa.BigInteger(), nullable=False, comment="what runs cost that are deleted"),
        sa.Column("day", sa.Integer(), nullable=False, comment="days since 1970, in UTC"),
        sa.Column("deleted_today_nano_usd", sa.BigInteger(), nullable=False),
        sa.Column("marks", sa.JSON(), nullable=False, comment="pairs of a time and what was spent until then"),
        sa.Column("warned", sa.JSON(), nullable=False, comment="of which limits it was said that they are nearly used"),
        sa.ForeignKeyConstraint(["project"], ["projects.id"], name=op.f("fk_accounts_project")),
        sa.PrimaryKeyConstraint("project", name=op.f("pk_accounts")),
    )
    op.create_table(
        "capacities",
        sa.Column("provider", sa.String(length=64), nullable=False),
        sa.Column("gpus", sa.Integer()),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("provider", name=op.f("pk_capacities")),
    )
    op.create_table(
        "retention",
        sa.Column("scope", sa.String(length=40), nullable=False, comment="a project, or `server` for all others"),
        sa.Column("runs_days", sa.Integer()),
        sa.Column("trajectories_days", sa.Integer()),
        sa.Column("checkpoints_days", sa.Integer()),
        sa.Column("logs_days", sa.Integer()),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("scope", name=op.f("pk_retention")),
    )
    for column in (
        sa.Column("needs", sa.JSON(), comment="what it asks of quotas; null where nobody has looked yet"),
        sa.Column("shares", sa.JSON(), comment="its share of capacity that is shared, by provider"),
        sa.Column("limits", sa.JSON(), comment="the caps and budget that its process is to have"),
        sa.Column("told", sa.JSON(), comment="those that its process has in its journal"),
        sa.Column("limits_number", sa.Integer(), nullable=False, server_default="0"),
        sa.Column("allotted_nano_usd", sa.BigInteger(), comment="the sum of its slices; null where it needs none"),
        sa.Column("cost_nano_usd", sa.BigInteger(), nullable=False, server_default="0"),
        sa.Column("day", sa.Integer(), nullable=False, server_default="0"),
        sa.Column("day_base_nano_usd", sa.BigInteger(), nullable=False, server_default="0"),
        sa.Column("warned", sa.Boolean(), nullable=False, server_default=sa.false()),
        sa.Column("waits", sa.JSON(), comment="why it does not begin yet: a reason and a message"),
        sa.Column("retired", sa.JSON(), comment="what retention has removed, or is about to; the run stays"),
    ):
        op.add_column("runs", column)
    runs = sa.table(
        "runs",
        sa.column("id", sa.String()),
        sa.column("figures", sa.JSON()),
        sa.column("cost_nano_usd", sa.BigInteger()),
    )
    connection = op.get_bind()
    for id_, figures in connection.execute(sa.select(runs.c.id, runs.c.figures)).all():
        said = json.loads(figures) if isinstance(figures, str) else figures
        cost = round(float(said.get("usd", 0.0)) * NANO_USD_PER_USD)
        connection.execute(sa.update(runs).where(runs.c.id == id_).values(cost_nano_usd=cost))
