"""The store's connections: transactions that are whole or nothing, and errors in our own words."""

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.exc import ArgumentError, DBAPIError, IntegrityError, InvalidatePoolError, NoSuchModuleError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from elastic.system.given import expanded
from elastic.system.sqlite import open_sqlite

BUSY_TIMEOUT_S = 5.0
POOL = 20
"""Connections that are kept; beyond these a request waits for one."""
POOL_TIMEOUT_S = 5.0
CONNECT_TIMEOUT_S = 5
STATEMENT_TIMEOUT_S = 15
"""On PostgreSQL, a statement that takes longer is given up, and so is a connection that is silent for so long."""
WRITERS_LOCK, LEADERS_LOCK = 0x656C6173_00000001, 0x656C6173_00000002
"""Numbers of PostgreSQL's advisory locks: who writes, and who attends to the runs of this database."""
MIGRATIONS = str(Path(__file__).parent / "migrations")
DIALECTS = ("sqlite", "postgresql")
CHECKED_AFTER_S = 1.0
_WRITES, _USED_S = "elastic_writes", "elastic_used_s"


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
        self._readers = self.engine
        if not self.is_sqlite:
            # Its transactions see what each statement finds: to begin and end one would be two more round trips.
            self._readers = self.engine.execution_options(isolation_level="AUTOCOMMIT")

    @property
    def is_sqlite(self) -> bool:
        return self.engine.dialect.name == "sqlite"

    @contextlib.contextmanager
    def reading(self) -> Iterator[sa.Connection]:
        """A view of one moment on SQLite, and of one moment for each statement on PostgreSQL. Raises
        `StoreUnavailable`."""
        with _translated(), self._readers.connect() as connection:
            yield connection

    @contextlib.contextmanager
    def writing(self) -> Iterator[sa.Connection]:
        """One transaction, durable once this is left without an error, else without any effect.

        Transactions that write come one after the other, on both databases: what one has read is so until it ends.
        Raises `StoreUnavailable`.
        """
        with (
            _translated(),
            self.engine.connect().execution_options(**{_WRITES: True}) as connection,
            connection.begin(),
        ):
            if not self.is_sqlite:
                connection.execute(sa.select(sa.func.pg_advisory_xact_lock(WRITERS_LOCK)))
            yield connection

    @contextlib.contextmanager
    def leading(self) -> Iterator["Leadership"]:
        """Apply to be the one process that attends to this database's runs."""
        leadership = Leadership(self.engine)
        try:
            yield leadership
        finally:
            leadership.close()

    def close(self) -> None:
        self.engine.dispose()


class Leadership:
    """A process's claim to be the only one that attends to a database's runs, whatever machine it is on.

    On PostgreSQL it holds as long as its connection does. A SQLite file's is the lock in the server's home.
    """

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine
        self._connection: sa.Connection | None = None
        self._closed = False
        self._lock = threading.Lock()

    def holds(self) -> bool:
        """Return whether this process leads. It becomes the leader if there is none. Raises `StoreUnavailable`."""
        if self._engine.dialect.name == "sqlite":
            return True
        if self._connection is not None:
            try:
                with _translated():
                    self._connection.execute(sa.select(1))
                return True
            except StoreUnavailable:
                with self._lock:
                    self._give_up()
                raise
        with _translated():
            connection = self._engine.connect()
            try:
                connection.execution_options(isolation_level="AUTOCOMMIT")
                leads = bool(connection.scalar(sa.select(sa.func.pg_try_advisory_lock(LEADERS_LOCK))))
            except BaseException:
                connection.close()
                raise
        with self._lock:
            if leads and not self._closed:
                self._connection = connection
                return True
        _cut(connection)
        return False

    def close(self) -> None:
        """Lead no more. Also while another thread asks."""
        with self._lock:
            self._closed = True
            self._give_up()

    def _give_up(self) -> None:
        if self._connection is not None:
            _cut(self._connection)
            self._connection = None


def _cut(connection: sa.Connection) -> None:
    """Close a connection that does not go back to the pool: its locks end with it."""
    connection.invalidate()
    connection.close()


def migrate(store: Store, versions: Path | None = None) -> None:
    """Make the tables of this version in a new database, or bring those of an earlier one to it, by the revisions in
    `versions`, which are this version's unless given. Raises `StoreError` for those of a newer version."""
    from alembic import command
    from alembic.config import Config as AlembicConfig
    from alembic.runtime.migration import MigrationContext
    from alembic.script import ScriptDirectory

    from elastic.server.store.tables import metadata

    config = AlembicConfig()
    config.set_main_option("script_location", MIGRATIONS.replace("%", "%%"))
    config.set_main_option("path_separator", "newline")
    config.set_main_option("version_locations", str(versions or f"{MIGRATIONS}/versions").replace("%", "%%"))
    scripts = ScriptDirectory.from_config(config)
    known = {revision.revision for revision in scripts.walk_revisions()}
    with store.writing() as connection:
        found = MigrationContext.configure(connection).get_current_revision()
        if found is not None and found not in known:
            raise StoreError(
                f"the database is of revision {found}, which a newer elastic made; this one knows {max(known)}"
            )
        if not store.is_sqlite:
            connection.execute(sa.text("SET LOCAL statement_timeout = 0"))
        config.attributes["connection"] = connection
        if found is None:
            metadata.create_all(connection)
            command.stamp(config, "head")
        elif found != scripts.get_current_head():
            command.upgrade(config, "head")


def revisions(connection: sa.Connection) -> tuple[str | None, str | None]:
    """The revision that the database is of, and this version's."""
    from alembic.runtime.migration import MigrationContext
    from alembic.script import ScriptDirectory

    return MigrationContext.configure(connection).get_current_revision(), ScriptDirectory(MIGRATIONS).get_current_head()


def sqlite_path(url: str) -> Path | None:
    """The file of a `sqlite:///PATH`, which is a path as it stands, whatever characters it has; None for another URL.
    Raises `StoreError`."""
    scheme, colon, rest = url.partition(":")
    if scheme != "sqlite" or not colon:
        return None
    if not rest.startswith("///") or rest == "///":
        raise StoreError(f"--database: found {url!r}; allowed: sqlite:///PATH, postgresql://USER@HOST/NAME")
    try:
        return expanded(Path(rest.removeprefix("///")))
    except ValueError as error:
        raise StoreError(f"--database: {error}") from error


def _engine(url: str) -> sa.Engine:
    if (path := sqlite_path(url)) is not None:
        return _sqlite(path)
    try:
        parsed = sa.make_url(url)
    except ArgumentError:
        raise StoreError("--database: not a URL; allowed: sqlite:///PATH, postgresql://USER@HOST/NAME") from None
    dialect = parsed.get_backend_name()
    if dialect not in DIALECTS:
        raise StoreError(f"--database: found {dialect!r}; allowed: {', '.join(DIALECTS)}")
    if not 0 < (parsed.port or 1) < 65_536:
        raise StoreError(f"--database: found port {parsed.port}; allowed: 1 to 65535")
    if parsed.drivername == "postgresql":
        parsed = parsed.set(drivername="postgresql+psycopg")
    try:
        engine = sa.create_engine(
            parsed,
            pool_size=POOL,
            max_overflow=0,
            pool_timeout=POOL_TIMEOUT_S,
            connect_args={
                "connect_timeout": CONNECT_TIMEOUT_S,
                "tcp_user_timeout": STATEMENT_TIMEOUT_S * 1_000,
                "options": f"-c statement_timeout={STATEMENT_TIMEOUT_S}s -c lock_timeout={BUSY_TIMEOUT_S:g}s",
            },
        )
    except (ModuleNotFoundError, NoSuchModuleError) as error:
        raise StoreError(
            f"--database: {error}; `pip install -e '.[server]'` in a clone of elastic brings what is needed"
        ) from None
    _check_idle(engine)
    return engine


def _check_idle(engine: sa.Engine) -> None:
    """Ask connections that were idle whether they still stand. To ask each time would be another round trip for every
    request; one that breaks while in use takes the others out of the pool with it."""

    @event.listens_for(engine, "checkout")
    def _checked_out(connection: Any, record: Any, _: Any) -> None:  # pyright: ignore[reportUnusedFunction]
        used_s = record.info.get(_USED_S)
        if used_s is None or time.monotonic() - used_s < CHECKED_AFTER_S:
            return
        try:
            engine.dialect.do_ping(connection)
        except engine.dialect.loaded_dbapi.Error as error:
            raise InvalidatePoolError from error

    @event.listens_for(engine, "checkin")
    def _checked_in(_: Any, record: Any) -> None:  # pyright: ignore[reportUnusedFunction]
        record.info[_USED_S] = time.monotonic()


def _sqlite(path: Path) -> sa.Engine:
    engine = sa.create_engine(
        sa.URL.create("sqlite", database=str(path)),
        creator=lambda: open_sqlite(path, "rwc", timeout_s=BUSY_TIMEOUT_S, any_thread=True),
        pool_size=POOL,
        max_overflow=0,
        pool_timeout=POOL_TIMEOUT_S,
        poolclass=sa.QueuePool,
    )

    @event.listens_for(engine, "connect")
    def _connected(connection: Any, _: Any) -> None:  # pyright: ignore[reportUnusedFunction]
        for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON"):
            connection.execute(f"PRAGMA {pragma}")

    @event.listens_for(engine, "begin")
    def _begins(connection: sa.Connection) -> None:  # pyright: ignore[reportUnusedFunction]
        # Who writes says so at once: a transaction that has read first could not wait for another's end.
        if connection.get_execution_options().get(_WRITES, False):
            connection.exec_driver_sql("BEGIN IMMEDIATE")
        else:
            # By the driver itself, for this is half of what a read takes; it waits for nobody and cannot fail.
            cast(Any, connection.connection.dbapi_connection).execute("BEGIN")

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
