"""The tables of the first version. A new database gets those of today at once; revisions after this one change older
databases."""

revision = "0001"
down_revision = None


def upgrade() -> None:
    """A database of no revision has nothing to be changed."""
