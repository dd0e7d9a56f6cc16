"""Which webhooks' receivers do not answer, and until when they are left alone."""

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"


def upgrade() -> None:
    with op.batch_alter_table("webhooks") as webhooks:
        webhooks.add_column(
            sa.Column(
                "failures", sa.Integer(), nullable=False, server_default="0", comment="attempts in a row that failed"
            )
        )
        for name, words in (
            ("open_until_us", "until then its circuit is open, and nothing is sent"),
            ("claimed_until_us", "until then a server is sending to it"),
        ):
            webhooks.add_column(sa.Column(name, sa.BigInteger(), nullable=False, server_default="0", comment=words))
