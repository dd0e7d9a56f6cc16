"""The store's connections: transactions that are whole or nothing, and errors in our own words."""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.exc import ArgumentError, DBAPIError, IntegrityError, NoSuchModuleError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

BUSY_TIMEOUT_S = 5.0
POOL = 20
"""Connections that are kept; beyond these a request waits for one."""
POOL_TIMEOUT_S = 5.0
CONNECT_TIMEOUT_S = 5
DIALECTS = ("sqlite", "postgresql")
_WRITES = "elastic_writes"


class StoreError(ValueError):
    """The store cannot be used as it was asked to; the message says why."""


class StoreUnavailable(Exception):
    """The database does not answer, or cannot write now. It may come back."""


def now_us() -> int:
    return time.time_ns() // 1_000


class Store:
    """A database, by its URL: `sqlite:///PATH` or `postgresql://…`. Threads may share it."""

    def __init__(self, url: str) -> None:
        self.engine = _engine(url)

    @property
    def is_sqlite(self) -> bool:
        return self.engine.dialect.name == "sqlite"

    @contextlib.contextmanager
    def reading(self) -> Iterator[sa.Connection]:
        """A view of one moment. Raises `StoreUnavailable`."""
        with _translated(), self.engine.connect() as connection:
            yield connection

    @contextlib.contextmanager
    def writing(self) -> Iterator[sa.Connection]:
        """One transaction, durable once this is left without an error, else without any effect.

        Raises `StoreUnavailable`.
        """
        with (
            _translated(),
            self.engine.connect().execution_options(**{_WRITES: True}) as connection,
            connection.begin(),
        ):
            yield connection

    def close(self) -> None:
        self.engine.dispose()


def migrate(store: Store) -> None:
    """Bring the database's tables to this version's. Raises `StoreError` for those of a newer one."""
    from alembic import command
    from alembic.config import Config as AlembicConfig
    from alembic.runtime.migration import MigrationContext
    from alembic.script import ScriptDirectory

    config = AlembicConfig()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    known = {revision.revision for revision in ScriptDirectory.from_config(config).walk_revisions()}
    with store.writing() as connection:
        found = MigrationContext.configure(connection).get_current_revision()
        if found is not None and found not in known:
            raise StoreError(
                f"the database is of revision {found}, which a newer elastic made; this one knows {max(known)}"
            )
        config.attributes["connection"] = connection
        command.upgrade(config, "head")


def _engine(url: str) -> sa.Engine:
    try:
        parsed = sa.make_url(url)
    except ArgumentError:
        raise StoreError("--database: not a URL; allowed: sqlite:///PATH, postgresql://USER@HOST/NAME") from None
    dialect = parsed.get_backend_name()
    if dialect not in DIALECTS:
        raise StoreError(f"--database: found {dialect!r}; allowed: {', '.join(DIALECTS)}")
    if dialect == "sqlite":
        return _sqlite(parsed)
    if parsed.drivername == "postgresql":
        parsed = parsed.set(drivername="postgresql+psycopg")
    try:
        return sa.create_engine(
            parsed,
            pool_size=POOL,
            max_overflow=0,
            pool_timeout=POOL_TIMEOUT_S,
            pool_pre_ping=True,
            connect_args={"connect_timeout": CONNECT_TIMEOUT_S},
        )
    except (ModuleNotFoundError, NoSuchModuleError) as error:
        raise StoreError(f"--database: {error}; `pip install elastic-rl[server]` brings what is needed") from None


def _sqlite(url: sa.URL) -> sa.Engine:
    engine = sa.create_engine(
        url,
        pool_size=POOL,
        max_overflow=0,
        pool_timeout=POOL_TIMEOUT_S,
        poolclass=sa.QueuePool,
        connect_args={"timeout": BUSY_TIMEOUT_S, "check_same_thread": False},
    )

    @event.listens_for(engine, "connect")
    def _connected(connection: Any, _: Any) -> None:  # pyright: ignore[reportUnusedFunction]
        # The driver begins no transactions; `_begins` does.
        connection.isolation_level = None
        for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON"):
            connection.execute(f"PRAGMA {pragma}")

    @event.listens_for(engine, "begin")
    def _begins(connection: sa.Connection) -> None:  # pyright: ignore[reportUnusedFunction]
        # Who writes says so at once: a transaction that has read first could not wait for another's end.
        writes = connection.get_execution_options().get(_WRITES, False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

    return engine


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except IntegrityError:
        raise
    except (DBAPIError, PoolTimeoutError) as error:
        what = str(error.orig if isinstance(error, DBAPIError) else error)
        raise StoreUnavailable(what.partition("\n")[0] or type(error).__name__) from error
