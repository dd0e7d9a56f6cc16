"""The runner, on processes as simple as can be: adopted, never begun twice, followed by others when they die."""

import asyncio
import contextlib
import dataclasses
import errno
import hashlib
import os
import signal
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from msgspec.structs import replace

from elastic.compose.run_endings import Ending
from elastic.compose.runs import private
from elastic.protocol.api import AccessRole, RunPhase
from elastic.server.history.apart import CannotBeRead
from elastic.server.retention import records
from elastic.server.runner import RunnerBusy, RunnerLoop, launching, retiring
from elastic.server.settings import ServerSettings
from elastic.server.store import people, runs, tables
from elastic.server.store.runs import HostedRunRow
from elastic.system.isolation import IsolatedLoop, LoopFaults
from elastic.system.processes import identity
from tests.server.conftest import Site, Submission, make_site

# A runner that is gone leaves its processes behind, as it should.
pytestmark = pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning")

PROCESS = """
import fcntl, os, signal, sqlite3, sys
from pathlib import Path
run = Path(sys.argv[sys.argv.index("--resume") + 1])
lock = (run / "lock").open("w")
try:
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    (run / "twice").touch()
    sys.exit(2)
if (run.parent.parent / "refuse").exists():
    print("error: the configuration is no good", file=sys.stderr)
    sys.exit(2)
number = len(list(run.glob("journal*.sqlite"))) + 1
path = run / ("journal.sqlite" if number == 1 else f"journal.{number}.sqlite")
with sqlite3.connect(path) as journal:
    journal.executescript('''TABLES''')
    journal.executemany("INSERT INTO meta VALUES (?, ?)", [("schema_version", "SCHEMA"), ("status", "running")])
def end(status, code):
    def act(*_):
        with sqlite3.connect(path) as journal:
            journal.execute("UPDATE meta SET value = ? WHERE key = 'status'", (status,))
        os._exit(code)
    return act
signal.signal(signal.SIGTERM, end("failed: interrupted", 130))
signal.signal(signal.SIGUSR1, end("finished", 0))
signal.signal(signal.SIGUSR2, end("failed: no capacity", 1))
(run / "pid").write_text(str(os.getpid()))
while True:
    signal.pause()
"""
WAIT_S = 60.0


@pytest.fixture
def quick(site: Site, tmp_path: Path) -> ServerSettings:
    from elastic.runtime.journal import SCHEMA_VERSION
    from elastic.runtime.journal.records import TABLES

    script, tables = tmp_path / "process.py", ";".join(table.create for table in TABLES.values())
    script.write_text(PROCESS.replace("SCHEMA", str(SCHEMA_VERSION)).replace("TABLES", tables))
    return dataclasses.replace(
        site.settings,
        command=(sys.executable, str(script)),
        tick_s=0.02,
        observe_s=0.05,
        restart_base_s=0.01,
        stop_patience_s=0.0,
    )


@contextlib.asynccontextmanager
async def running(
    site: Site,
    settings: ServerSettings,
    begin: launching.Begin = launching.begin,
    ending_of: launching.EndingOf = launching.ending,
) -> AsyncIterator[RunnerLoop]:
    """A runner, for a while; what it began goes on."""
    runner = RunnerLoop(site.store, settings, begin=begin, ending_of=ending_of)
    task = asyncio.create_task(runner.run())
    try:
        yield runner
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def row(site: Site, run: str) -> HostedRunRow:
    with site.store.reading() as connection:
        found = runs.find(connection, run)
    assert found is not None
    return found


def all_rows(site: Site) -> list[Any]:
    with site.store.reading() as connection:
        return list(connection.execute(sa.select(tables.runs.c.id)))


async def until(holds: Callable[[], Any]) -> Any:
    async with asyncio.timeout(WAIT_S):
        while not (found := holds()):  # noqa: ASYNC110 - other processes are waited for
            await asyncio.sleep(0.05)
        return found


async def process_of(site: Site, settings: ServerSettings, run: str, other_than: int = 0) -> int:
    """The id of the run's process, once it is up and the store knows it."""

    def up() -> int:
        with contextlib.suppress(OSError, ValueError):
            pid = int((settings.run_dir(run) / "pid").read_text())
            known = row(site, run).identity
            if pid != other_than and known is not None and known.pid == pid:
                return pid
        return 0

    return await until(up)


async def killed(pid: int) -> None:
    """Kill what an earlier runner began, and bury it: the parent of both is this process."""
    os.kill(pid, signal.SIGKILL)
    await asyncio.to_thread(os.waitpid, pid, 0)


@pytest.fixture
def submitted(site: Site, submission: Submission) -> Any:
    made: list[str] = []

    def submit(**fields: Any) -> str:
        made.append(site.client().post("/v1/runs", json=submission(**fields)).json()["id"])
        return made[-1]

    yield submit
    for run in made:
        with contextlib.suppress(OSError, ValueError):
            pid = int((site.settings.run_dir(run) / "pid").read_text())
            if identity(pid) is not None:
                os.kill(pid, signal.SIGKILL)


async def test_what_lives_is_adopted_and_never_begun_twice(site: Site, quick: ServerSettings, submitted: Any) -> None:
    run = submitted()
    async with running(site, quick):
        pid = await process_of(site, quick, run)
    for forgotten in (False, True, False):
        if forgotten:  # The former runner died right after it had begun the process.
            with site.store.writing() as tx:
                runs.observe(tx, run, process=None, phase=RunPhase.STARTING)
        async with running(site, quick) as runner:
            began_s = runner.ticked_s
            await until(lambda: runner.ticked_s > began_s)  # noqa: B023 - is awaited here
            assert await process_of(site, quick, run) == pid
    async with running(site, quick):
        os.kill(pid, signal.SIGUSR1)
        await until(lambda: row(site, run).phase is RunPhase.FINISHED)
    assert row(site, run).attempt == 1
    assert not row(site, run).managed
    assert not (quick.run_dir(run) / "twice").exists()


async def test_what_dies_is_followed_until_it_is_enough(site: Site, quick: ServerSettings, submitted: Any) -> None:
    run, pid = submitted(max_restarts=2), 0
    async with running(site, quick):
        for restarts in range(3):
            pid = await process_of(site, quick, run, other_than=pid)
            assert row(site, run).restarts == restarts
            os.kill(pid, signal.SIGKILL)
        await until(lambda: row(site, run).ended)
    ended = site.client().get(f"/v1/runs/{run}").json()
    assert (ended["phase"], ended["restarts"]) == ("failed", 2)
    assert "killed by SIGKILL; it has been started again 2 times" in ended["cause"]
    assert {one["type"]: one["reason"] for one in ended["conditions"]}["Ended"] == "Failed"


async def test_what_dies_while_nobody_looks_is_followed(site: Site, quick: ServerSettings, submitted: Any) -> None:
    run = submitted()
    async with running(site, quick):
        pid = await process_of(site, quick, run)
    await killed(pid)
    async with running(site, quick):
        await process_of(site, quick, run, other_than=pid)
    assert row(site, run).restarts == 1


async def test_a_full_disk_is_waited_for(site: Site, quick: ServerSettings, submitted: Any) -> None:
    """However long: no restart counts, and the run begins once there is room."""
    attempts, full = list[str](), True

    def begin(settings: ServerSettings, run: HostedRunRow, user: str | None, secrets: Mapping[str, str]) -> Any:
        attempts.append(run.id)
        if full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return launching.begin(settings, run, user, secrets)

    run = submitted(max_restarts=1)
    async with running(site, dataclasses.replace(quick, restart_max_s=0.05), begin):
        await until(lambda: len(attempts) >= 4)
        waiting = row(site, run)
        assert (waiting.restarts, waiting.ended) == (0, False)
        assert "No space left" in waiting.cause
        full = False
        await process_of(site, quick, run)


async def test_a_run_that_cannot_be_attended_to_delays_no_other(
    site: Site, quick: ServerSettings, submitted: Any
) -> None:
    stuck, goes_on = submitted(), threading.Event()

    def begin(settings: ServerSettings, run: HostedRunRow, user: str | None, secrets: Mapping[str, str]) -> Any:
        if run.id == stuck:
            goes_on.wait(WAIT_S)
        return launching.begin(settings, run, user, secrets)

    async with running(site, quick, begin) as runner:
        try:
            await process_of(site, quick, submitted())
            looked_s = runner.ticked_s
            await until(lambda: runner.ticked_s > looked_s)
            assert (row(site, stuck).phase, row(site, stuck).attempt) == (RunPhase.STARTING, 1)
        finally:
            goes_on.set()
        await process_of(site, quick, stuck)


async def test_what_goes_down_with_its_machine_does_not_count(
    site: Site, quick: ServerSettings, submitted: Any
) -> None:
    run = submitted(max_restarts=0)
    async with running(site, quick):
        pid = await process_of(site, quick, run)
    await killed(pid)
    process = row(site, run).process
    assert process is not None
    with site.store.writing() as tx:
        runs.observe(tx, run, process=replace(process, world="an earlier boot"))
    async with running(site, quick):
        await process_of(site, quick, run, other_than=pid)
    assert (row(site, run).restarts, row(site, run).cause) == (0, "its machine or container went down")


async def test_a_life(site: Site, quick: ServerSettings, submitted: Any) -> None:
    """Stopped, resumed, failed, resumed, finished, deleted; and stopped before it began."""
    run, client = submitted(), site.client()
    place = f"/v1/runs/{run}"
    async with running(site, quick) as runner:
        pid = await process_of(site, quick, run)
        assert client.delete(place).json()["type"] == "/problems/run-active"
        client.post(f"{place}/stop")
        runner.wake()
        await until(lambda: row(site, run).phase is RunPhase.STOPPED)
        assert client.post(f"{place}/stop").json()["type"] == "/problems/run-stopped"
        client.post(f"{place}/resume")
        pid = await process_of(site, quick, run, other_than=pid)
        os.kill(pid, signal.SIGUSR2)
        await until(lambda: row(site, run).phase is RunPhase.FAILED)
        assert row(site, run).cause == "no capacity"
        client.post(f"{place}/resume")
        pid = await process_of(site, quick, run, other_than=pid)
        os.kill(pid, signal.SIGUSR1)
        await until(lambda: row(site, run).phase is RunPhase.FINISHED)
        assert client.post(f"{place}/resume").json()["type"] == "/problems/run-finished"
        assert client.post(f"{place}/stop").json()["type"] == "/problems/run-finished"
        assert client.delete(place).status_code == 204
        assert client.get(place).status_code == 404
        await until(lambda: not quick.run_dir(run).exists())
        await until(lambda: not all_rows(site))
    early = submitted()
    client.post(f"/v1/runs/{early}/stop")
    async with running(site, quick):
        await until(lambda: row(site, early).phase is RunPhase.STOPPED)
    assert row(site, early).attempt == 0
    assert not quick.run_dir(early).exists()


async def test_a_forced_stop_ends_what_does_not_answer(site: Site, quick: ServerSettings, submitted: Any) -> None:
    run = submitted()
    async with running(site, quick) as runner:
        os.kill(await process_of(site, quick, run), signal.SIGSTOP)
        assert site.client().post(f"/v1/runs/{run}/stop", json={"force": True}).status_code == 200
        runner.wake()
        await until(lambda: row(site, run).phase is RunPhase.STOPPED)


async def test_bad_input_is_no_reason_to_try_again(site: Site, quick: ServerSettings, submitted: Any) -> None:
    (quick.home / "refuse").touch()
    run = submitted()
    async with running(site, quick):
        await until(lambda: row(site, run).ended)
    assert (row(site, run).phase, row(site, run).cause) == (RunPhase.FAILED, "the configuration is no good")
    assert row(site, run).attempt == 1


@pytest.mark.parametrize("new_database", ["sqlite"], indirect=True)
async def test_a_finished_run_whose_end_cannot_be_read_yet_is_not_begun_again(
    site: Site, quick: ServerSettings, submitted: Any
) -> None:
    late = [CannotBeRead("its files cannot be read now"), TimeoutError("its files are still being read")]

    def ending_of(settings: ServerSettings, run: HostedRunRow, status: int | None) -> Ending:
        if late:
            raise late.pop()
        return launching.ending(settings, run, status)

    run = submitted()
    async with running(site, quick, ending_of=ending_of):
        os.kill(await process_of(site, quick, run), signal.SIGUSR1)
        await until(lambda: row(site, run).ended)
    assert not late
    assert (row(site, run).phase, row(site, run).attempt) == (RunPhase.FINISHED, 1)


async def test_a_home_has_one_runner(site: Site, quick: ServerSettings) -> None:
    async with running(site, quick) as runner:
        began_s = runner.ticked_s
        await until(lambda: runner.ticked_s > began_s)
        with pytest.raises(RunnerBusy, match=f"process {os.getpid()} attends to its runs already"):
            await RunnerLoop(site.store, quick).run()
    async with running(site, quick) as runner:
        began_s = runner.ticked_s
        await until(lambda: runner.ticked_s > began_s)


@pytest.mark.parametrize("new_database", ["sqlite"], indirect=True)
async def test_a_database_that_goes_away_and_comes_back(site: Site, quick: ServerSettings, submitted: Any) -> None:
    """Runs go on meanwhile, and what was acknowledged before is done afterwards."""
    if not site.store.is_sqlite:
        pytest.skip("here it is a file that goes away")
    run = submitted()
    database = Path(str(site.store.engine.url.database))
    async with running(site, quick):
        pid = await process_of(site, quick, run)
        site.client().post(f"/v1/runs/{run}/stop")
        site.store.close()
        take_away(database)
        answer = await asyncio.to_thread(lambda: site.client().get("/v1/runs"))
        assert (answer.status_code, answer.json()["type"]) == (503, "/problems/unavailable")
        assert answer.headers["retry-after"]
        assert not (await asyncio.to_thread(lambda: site.client().get("/readyz"))).json()["ready"]
        bring_back(database)
        site.store.close()
        await until(lambda: row(site, run).phase is RunPhase.STOPPED)
    assert identity(pid) is None


def take_away(database: Path) -> None:
    """Put a directory where the database's file was."""
    for part in list(database.parent.glob(f"{database.name}*")):
        part.rename(part.with_name(f"away-{part.name}"))
    database.mkdir()


def bring_back(database: Path) -> None:
    database.rmdir()
    for part in list(database.parent.glob("away-*")):
        part.rename(part.with_name(part.name.removeprefix("away-")))


@pytest.fixture
def open_site() -> Iterator[Site]:
    """A server whose home lies where everybody may go, as in /var/lib."""
    with tempfile.TemporaryDirectory() as place, private():
        Path(place).chmod(0o711)
        made = make_site(Path(place))
        yield made
        made.store.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root begins processes of other users")
async def test_a_projects_processes_are_its_users_and_cannot_read_the_servers_files(
    open_site: Site, submission: Submission
) -> None:
    home = open_site.settings.home.resolve()
    own, others = (
        uploaded(open_site, open_site.client(open_site.key(project, AccessRole.RUNNER)))
        for project in ("ours", "theirs")
    )
    script = 'id -un > "$2/user"; cat "$0/elastic.sqlite" > "$2/stolen"; ls "$0" > "$2/seen"; '
    script += (
        f'cat {own} > "$2/own"; cat {others} > "$2/others"; echo more >> {own}; echo new > {own.parent}/new; exit 2'
    )
    settings = dataclasses.replace(open_site.settings, command=("/bin/sh", "-c", script, str(home)), tick_s=0.02)
    with open_site.store.writing() as tx:
        people.change_project(tx, open_site.projects["ours"], {"unix_user": "nobody"})
    run = open_site.client().post("/v1/runs", json=submission(project=open_site.projects["ours"])).json()["id"]
    async with running(open_site, settings):
        await until(lambda: row(open_site, run).ended)
    found = settings.run_dir(run)
    assert (found / "user").read_text().strip() == "nobody"
    assert (found / "stolen").read_bytes() == (found / "seen").read_bytes() == b""
    assert ((found / "own").read_bytes(), (found / "others").read_bytes()) == (b"data", b"")
    assert [path.read_bytes() for path in own.parent.iterdir()] == [b"data"]
    assert [path.name for path in home.iterdir() if path.is_file() and path.stat().st_mode & 0o077] == []


def uploaded(site: Site, client: Any) -> Path:
    """A file of an upload, where it lies."""
    file = {"path": "a", "bytes": 4, "sha256": hashlib.sha256(b"data").hexdigest()}
    upload = client.post("/v1/uploads", json={"name": "u", "files": [file]}).json()
    assert client.put(f"/v1/uploads/{upload['id']}/files/{file['sha256']}", content=b"data").status_code == 200
    return site.settings.uploads(upload["project"]).resolve() / upload["id"] / "a"


async def test_a_run_that_a_real_time_signal_ends_is_followed_by_another_process(
    site: Site, quick: ServerSettings, submitted: Callable[..., str]
) -> None:
    run = submitted()
    async with running(site, quick):
        pid = await process_of(site, quick, run)
        os.kill(pid, signal.SIGRTMIN + 5)
        await process_of(site, quick, run, other_than=pid)
    assert row(site, run).restarts == 1


async def test_a_run_that_cannot_be_looked_at_ends_no_others(
    site: Site, quick: ServerSettings, submitted: Callable[..., str]
) -> None:
    """It is said in its conditions, looked at again later, and the runner goes on; mended, it goes on as well."""
    poisoned, other = submitted(), submitted()
    config = row(site, poisoned).config

    def become(config: str) -> None:
        with site.store.writing() as tx:
            tx.execute(sa.update(tables.runs).where(tables.runs.c.id == poisoned).values(config=config))

    def told() -> list[str]:
        return [one.message for one in row(site, poisoned).conditions if one.type == "Attended"]

    become("[]")

    async with running(site, dataclasses.replace(quick, restart_max_s=0.2)) as runner:
        await process_of(site, quick, other)
        await until(told)
        assert "TypeError" in told()[0]
        assert runner.ticked_s > 0
        become(config)
        await process_of(site, quick, poisoned)
        await until(lambda: not told())
    assert row(site, poisoned).restarts == 0


def test_a_row_that_cannot_be_read_hides_no_others(site: Site, submitted: Callable[..., str]) -> None:
    """Retention goes on, too, and removes nothing that the run names."""
    poisoned, other, ended = submitted(), submitted(), submitted()

    with site.store.writing() as tx:
        runs.observe(tx, ended, phase=RunPhase.STOPPED.value, managed=False, ended_us=1)
        config = row(site, poisoned).config.replace("{", f'{{"of": "{ended}", ', 1)
        broken = {"config": config, "figures": {"steps": "many"}}
        tx.execute(sa.update(tables.runs).where(tables.runs.c.id == poisoned).values(**broken))
        records.change(tx, records.SERVER, {"runs_days": 1})
    faults = LoopFaults()
    retiring.retire(site.store, site.settings, IsolatedLoop("retention", faults))
    assert row(site, ended).wanted != runs.DELETE
    with site.store.reading() as connection:
        found = runs.managed(connection, attempting=IsolatedLoop("runs", faults).attempt)
    assert [run.id for run in found] == [other]
    assert f"runs, {poisoned}: its row" in faults.last
