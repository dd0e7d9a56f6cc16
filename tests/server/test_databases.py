"""Databases go away and come back, are of earlier versions, and have one runner at a time."""

import asyncio
import contextlib
import dataclasses
import os
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import sqlalchemy as sa

from elastic.server.api.app import create_app
from elastic.server.runner import RunnerBusy, RunnerLoop, loop
from elastic.server.store import Store, StoreError, StoreUnavailable, migrate
from elastic.server.store.migrations import versions
from tests.server import kept_tables
from tests.server.conftest import Site, Submission, make_site
from tests.server.postgres import PostgresCluster, cluster

LATER = """
import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.add_column("projects", sa.Column("later", sa.Integer(), nullable=False, server_default="7"))
"""


async def test_tables_of_an_earlier_version_go_forward(tmp_path: Path, new_database: Callable[[Path], str]) -> None:
    store = Store(new_database(tmp_path))
    with store.writing() as tx:
        kept_tables.make_tables(tx, "0001")
        added = "INSERT INTO projects (id, name, created_us, version) VALUES ('prj_1', 'old', 1, 1)"
        tx.execute(sa.text(added))
    later = tmp_path / "later"
    shutil.copytree(Path(versions.__file__).parent, later)
    (later / "0002_later.py").write_text(LATER)
    migrate(store, later)
    with store.reading() as connection:
        assert connection.execute(sa.text("SELECT id, name, later FROM projects")).all() == [("prj_1", "old", 7)]
    with pytest.raises(StoreError, match="revision 0002, which a newer elastic made; this one knows 0001"):
        migrate(store)
    store.close()


@pytest.fixture
def fragile() -> Iterator[PostgresCluster]:
    """A PostgreSQL that may go down."""
    with cluster() as made:
        yield made


@contextlib.asynccontextmanager
async def running(site: Site) -> AsyncIterator[tuple[RunnerLoop, "asyncio.Task[None]"]]:
    runner = RunnerLoop(site.store, dataclasses.replace(site.settings, tick_s=0.02))
    asyncio.get_running_loop().set_default_executor(threads := ThreadPoolExecutor())
    task = asyncio.create_task(runner.run())
    try:
        yield runner, task
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, RunnerBusy):
            await task
        threads.shutdown()  # What a cancelled call still does, it does before the store is closed.
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor())


async def looked(runner: RunnerLoop) -> None:
    """Until the runner has looked at everything once more."""
    async with asyncio.timeout(60):
        began_s = runner.ticked_s
        while runner.ticked_s <= began_s:  # noqa: ASYNC110 - a thread and a database are waited for
            await asyncio.sleep(0.01)


@pytest.mark.postgres
async def test_what_was_acknowledged_outlives_a_crash_of_the_database(
    tmp_path: Path, fragile: PostgresCluster, submission: Submission
) -> None:
    site = make_site(tmp_path, fragile.new_database())
    with contextlib.closing(site.store), site.client() as client:
        run = (await asyncio.to_thread(lambda: client.post("/v1/runs", json=submission()))).json()["id"]
        await asyncio.to_thread(client.post, f"/v1/runs/{run}/stop")
        async with running(site) as (runner, _):
            await looked(runner)
            await asyncio.to_thread(fragile.stop)
            for answer in [await asyncio.to_thread(client.get, "/v1/runs") for _ in range(2)]:
                assert (answer.status_code, answer.json()["type"]) == (503, "/problems/unavailable")
            assert (await asyncio.to_thread(client.get, "/readyz")).status_code == 503
            await asyncio.to_thread(fragile.start)
            await looked(runner)
            assert (await asyncio.to_thread(client.get, f"/v1/runs/{run}")).json()["phase"] == "stopped"
            assert (await asyncio.to_thread(client.get, "/readyz")).status_code == 200


@pytest.mark.postgres
async def test_a_database_that_hangs_holds_no_request(tmp_path: Path, fragile: PostgresCluster) -> None:
    made = make_site(tmp_path, fragile.new_database())
    settings = dataclasses.replace(made.settings, database_timeout_s=1.0)
    site = dataclasses.replace(made, app=create_app(made.store, settings))
    with contextlib.closing(site.store), site.client() as client:
        assert (await asyncio.to_thread(client.get, "/v1/runs")).status_code == 200
        with fragile.hanging():
            asked = [asyncio.to_thread(client.get, "/v1/me") for _ in range(6)]
            for answer in await asyncio.wait_for(asyncio.gather(*asked), 60):
                assert (answer.status_code, answer.json()["type"]) == (503, "/problems/unavailable")
                assert (answer.json()["detail"], answer.headers["retry-after"]) == (
                    "the database: no answer within 1 s",
                    "2",
                )
        assert (await asyncio.to_thread(client.get, "/v1/runs")).status_code == 200


@pytest.mark.postgres
async def test_a_database_has_one_runner_on_all_machines(tmp_path: Path, cluster: PostgresCluster) -> None:
    """A second one with the same path as its home, on another machine, where the lock in the home is another."""
    site = make_site(tmp_path, cluster.new_database())
    with contextlib.closing(site.store):
        async with running(site) as (runner, first):
            await looked(runner)
            os.rename(site.settings.home / loop.LOCK, tmp_path / "lock of another machine")
            with pytest.raises(RunnerBusy, match="another server or runner attends to its runs already"):
                await RunnerLoop(site.store, site.settings, leader_timeout_s=0.1).run()
            await looked(runner)
            assert not first.done()
        async with running(site) as (runner, _):
            await looked(runner)


@pytest.mark.postgres
def test_who_has_lost_the_database_does_not_lead(tmp_path: Path, fragile: PostgresCluster) -> None:
    url = fragile.new_database()
    first, second = Store(url), Store(url)
    with contextlib.closing(first), contextlib.closing(second), first.leading() as one, second.leading() as other:
        assert one.holds()
        assert not other.holds()
        fragile.stop()
        for claim in (one, other):
            with pytest.raises(StoreUnavailable):
                claim.holds()
        fragile.start()
        assert other.holds()
        assert not one.holds()
