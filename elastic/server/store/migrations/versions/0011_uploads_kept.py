"""For how long uploads are kept that nobody uses."""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"


def upgrade() -> None:
    with op.batch_alter_table("retention") as retention:
        retention.add_column(sa.Column("uploads_days", sa.Integer()))
