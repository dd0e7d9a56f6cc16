"""The store: the tables are those of the migrations, and a transaction is whole or nothing."""

import contextlib
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext

from elastic.server.serving import first_key, open_store
from elastic.server.settings import ServerSettings
from elastic.server.store import Store, StoreError, StoreUnavailable, migrate, people, revisions
from elastic.server.store.migrations import versions
from elastic.server.store.tables import metadata
from tests.server import kept_tables

CHAIN = re.compile(r'^revision = "(\d+)"\ndown_revision = (.*)$', re.MULTILINE)


@pytest.fixture
def store(tmp_path: Path, new_database: Callable[[Path], str]) -> Iterator[Store]:
    made = Store(new_database(tmp_path))
    migrate(made)
    yield made
    made.close()


def is_comment(difference: Any) -> bool:
    """Whether only comments differ, which PostgreSQL keeps, and no revision changes."""
    changes = difference if isinstance(difference, list) else [difference]
    return all(change[0] in ("modify_comment", "add_table_comment", "remove_table_comment") for change in changes)


@pytest.mark.parametrize("revision", kept_tables.revisions())
def test_databases_of_every_revision_get_the_tables_that_are_used(
    tmp_path: Path, new_database: Callable[[Path], str], revision: str
) -> None:
    """Whoever changes a table adds a revision that changes databases which exist."""
    with contextlib.closing(Store(new_database(tmp_path))) as store:
        with store.writing() as tx:
            kept_tables.make_tables(tx, revision)
        migrate(store)
        with store.reading() as connection:
            found = compare_metadata(MigrationContext.configure(connection), metadata)
            assert [one for one in found if not is_comment(one)] == []


def test_a_new_database_is_of_the_last_revision(store: Store) -> None:
    with store.reading() as connection:
        assert revisions(connection) == (kept_tables.revisions()[-1],) * 2
    migrate(store)


def test_revisions_are_one_chain() -> None:
    """Each follows the one whose number is before its own, so that whoever adds one sees who else did. The tables that
    each made are kept."""
    files = sorted(Path(versions.__file__).parent.glob("0*.py"))
    said = [(one[1], one[2]) for one in (CHAIN.search(file.read_text()) for file in files) if one is not None]
    numbers = [f"{number:04}" for number in range(1, len(files) + 1)]
    assert [file.name[:4] for file in files] == numbers == kept_tables.revisions()
    assert said == list(zip(numbers, ["None", *(f'"{one}"' for one in numbers)], strict=False))


def test_a_database_of_a_newer_version_is_refused(store: Store) -> None:
    with store.writing() as tx:
        tx.execute(sa.text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(StoreError, match=re.escape("revision 9999, which a newer elastic made")):
        migrate(store)


def test_a_database_of_another_home_is_refused(tmp_path: Path, new_database: Callable[[Path], str]) -> None:
    url = new_database(tmp_path)
    open_store(ServerSettings(home=tmp_path / "a", database=url)).close()
    with pytest.raises(StoreError, match="the runs of this database are in"):
        open_store(ServerSettings(home=tmp_path / "b", database=url))


@pytest.mark.parametrize("url", ["mysql://x/y", "not a url", ""])
def test_other_databases_are_refused(url: str) -> None:
    with pytest.raises(StoreError, match="--database"):
        Store(url)


def test_what_fails_leaves_nothing(store: Store) -> None:
    def half() -> None:
        with store.writing() as tx:
            people.new_project(tx, "half", None)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        half()
    with store.reading() as connection:
        assert people.project(connection, "half") is None


def test_the_first_key_is_made_once(store: Store) -> None:
    secret = first_key(store)
    assert secret is not None
    assert first_key(store) is None
    with store.reading() as connection:
        kept = connection.execute(sa.text("SELECT * FROM keys")).mappings().one()
        assert secret not in str(dict(kept))
        assert people.key_of_secret(connection, secret) is not None
        assert people.key_of_secret(connection, secret + "x") is None


def test_a_database_that_is_gone_is_unavailable(tmp_path: Path) -> None:
    store = Store(f"sqlite:///{tmp_path / 'nowhere' / 'store.sqlite'}")
    with pytest.raises(StoreUnavailable), store.reading():
        pass


def test_transactions_that_write_come_one_after_the_other(store: Store) -> None:
    """What one has read still holds when it writes."""
    names = [f"project-{number}" for number in range(8)]

    def add(name: str) -> None:
        with store.writing() as tx:
            before = len(people.all_projects(tx))
            made = people.new_project(tx, name, None)
            people.change_project(tx, made["id"], {"unix_user": f"u{before}"})

    threads = [threading.Thread(target=add, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with store.reading() as connection:
        seen = sorted(row["unix_user"] for row in people.all_projects(connection))
    assert seen == [f"u{number}" for number in range(8)]
