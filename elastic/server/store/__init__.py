"""What the server keeps: projects, keys, runs, and who did what. SQLite in one file, or PostgreSQL."""

from elastic.server.store.database import Store, StoreError, StoreUnavailable, migrate, revisions

__all__ = ["Store", "StoreError", "StoreUnavailable", "migrate", "revisions"]
