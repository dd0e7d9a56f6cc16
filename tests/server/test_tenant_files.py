"""Directories that a project's user can change: the server follows no link there, waits for nobody, and asks nobody
but the run's own process."""

import asyncio
import contextlib
import itertools
import os
import pwd
import shutil
import socket
import sqlite3
import subprocess
import tarfile
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from elastic.protocol.run_control import SERVED_VARIABLE, SOCKET, RunOfAnotherUser
from elastic.runtime.journal import SqliteJournal
from elastic.runtime.journal.records import FRAME, TABLES
from elastic.server.history.journals import figures_of
from elastic.server.history.readers import PER_PROJECT, TenantReaders
from elastic.server.retention.rules import PARTS, RUN, TRAJECTORIES, bytes_of, remove
from elastic.server.runner import launching
from elastic.server.store import runs
from elastic.server.store.runs import HostedRunRow
from elastic.server.support.bundle import write_bundle
from elastic.system import tenant_files
from elastic.system.processes import identity
from tests.server.conftest import Site, Submission

SECRET = "only the server's user may read this"
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_text(SECRET)
    path.chmod(0o600)
    return path


@pytest.fixture
def nobodys() -> Iterator[Path]:
    """A directory of `nobody`, in one that it may walk through."""
    top = Path(tempfile.mkdtemp())
    top.chmod(0o711)
    account = pwd.getpwnam("nobody")
    (top / "run").mkdir(mode=0o700)
    os.chown(top / "run", account.pw_uid, account.pw_gid)
    yield top / "run"
    shutil.rmtree(top)


@pytest.fixture
def run(site: Site, submission: Submission) -> HostedRunRow:
    id_ = site.submitted(submission(project="ours"))
    for name in ("logs", "checkpoints"):
        (site.settings.run_dir(id_) / name).mkdir(parents=True)
    return row(site, id_)


def row(site: Site, id_: str) -> HostedRunRow:
    with site.store.reading() as connection:
        found = runs.find(connection, id_)
    assert found is not None
    return found


def test_links_pipes_and_odd_names_of_a_run_are_no_checkpoints_and_no_logs(
    site: Site, run: HostedRunRow, planted: Path
) -> None:
    directory, client = site.settings.run_dir(run.id), site.client()
    for name in ("checkpoints/1.safetensors", "logs/evil.log", "logs/process.log"):
        (directory / name).symlink_to(planted)
    os.mkfifo(directory / "checkpoints" / "2.safetensors")
    os.mkfifo(directory / "logs" / "pipe.log")
    for name in (b"logs/\xff.log", b"logs/.log", b"logs/a\nb.log", "checkpoints/\u0663.safetensors".encode()):
        (directory / os.fsdecode(name)).touch()
    (directory / "checkpoints" / f"{'9' * 200}.safetensors").touch()
    (directory / "checkpoints" / "3.safetensors").write_bytes(b"weights")
    (directory / "logs" / "good.log").write_text("a line\n")
    url = f"/v1/runs/{run.id}"
    assert [one["id"] for one in client.get(f"{url}/checkpoints").json()["data"]] == ["3"]
    assert [client.get(f"{url}/checkpoints/{n}").status_code for n in (1, 2, 3)] == [404, 404, 200]
    assert client.get(f"{url}/checkpoints/3").content == b"weights"
    assert client.get(f"{url}/log-sources").json() == ["good"]
    answers = {
        name: client.get(f"{url}/logs?follow=false&source={name}") for name in ("evil", "pipe", "process", "good")
    }
    assert {name: answer.status_code for name, answer in answers.items() if answer.status_code != 200} == {
        "evil": 404,
        "pipe": 404,
    }
    assert "a line" in answers["good"].text
    assert SECRET not in "".join(answer.text for answer in answers.values())
    for name in ("logs", "checkpoints"):
        shutil.rmtree(directory / name)
        (directory / name).symlink_to(planted.parent)
    planted.rename(planted.with_name("7.safetensors"))
    assert client.get(f"{url}/checkpoints").json()["data"] == []
    assert client.get(f"{url}/checkpoints/7").status_code == 404


@pytest.mark.parametrize("kind", ["link", "pipe", "links to nothing"])
def test_a_log_that_is_none_harms_its_own_run_only(site: Site, run: HostedRunRow, planted: Path, kind: str) -> None:
    log = site.settings.run_dir(run.id) / launching.LOG
    made = planted.parent / "made"
    if kind == "pipe":
        os.mkfifo(log)
    else:
        log.symlink_to(planted if kind == "link" else made)
    settings = replace(site.settings, command=("/bin/echo",))
    with pytest.raises(tenant_files.NotAFile):
        launching.begin(settings, run, None, {})
    assert planted.read_text() == SECRET
    assert not made.exists()


@as_root
def test_what_a_user_may_not_read_the_server_does_not_read_for_it(nobodys: Path, planted: Path) -> None:
    """A journal that is a link leads to what its user could read by itself; retention changes no more than that."""
    foreign = planted.parent / "foreign.sqlite"
    with sqlite3.connect(foreign) as database:
        database.execute("CREATE TABLE trajectories (token_ids BLOB, sampled BLOB)")
        database.execute("CREATE TABLE events (kind TEXT, body BLOB)")
        database.execute("INSERT INTO trajectories VALUES (x'0102', x'0304')")
    foreign.chmod(0o666)
    (nobodys / "journal.sqlite").symlink_to(foreign)  # Its directory is closed to `nobody`.
    assert figures_of(nobodys) is None
    assert bytes_of(nobodys, [TRAJECTORIES]) == 0
    with pytest.raises(OSError, match="denied"):
        remove(nobodys, TRAJECTORIES)
    with sqlite3.connect(foreign) as database:
        assert database.execute("SELECT LENGTH(token_ids) FROM trajectories").fetchone() == (2,)
    with tenant_files.as_owner(nobodys):
        with pytest.raises(PermissionError):
            planted.read_text()
        (nobodys / "own").write_text("")
        assert (nobodys / "own").stat().st_uid == nobodys.stat().st_uid
    assert planted.read_text() == SECRET, "the thread has its own rights again"


def test_a_journal_that_is_a_pipe_holds_nobody_up(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "journal.sqlite")
    assert figures_of(tmp_path) is None


@pytest.mark.parametrize("trap", ["journal.sqlite-journal", "start", "config.json", "device", "endless"])
def test_what_has_no_end_beside_a_journal_holds_nobody_up(site: Site, run: HostedRunRow, trap: str) -> None:
    directory = site.settings.run_dir(run.id)
    SqliteJournal(directory / "journal.sqlite").close()
    if trap == "device":
        (directory / "start").symlink_to("/dev/zero")
    elif trap == "endless":
        with (directory / "start").open("wb") as endless:
            endless.truncate(2**40)
    else:
        os.mkfifo(directory / trap)
    assert figures_of(directory) is None
    assert launching.ending(site.settings, run, None).how == "died"
    for what in ("report", "metrics", "workers"):
        assert site.client().get(f"/v1/runs/{run.id}/{what}").status_code in (200, 404, 503)


@pytest.mark.parametrize("made", ["view", "column", "trigger"])
def test_a_journal_that_would_compute_is_not_read(site: Site, run: HostedRunRow, made: str) -> None:
    directory = site.settings.run_dir(run.id)
    with contextlib.closing(sqlite3.connect(directory / "journal.sqlite")) as database:
        if made == "view":
            endless = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c)"
            for table in TABLES.values():
                columns = ", ".join(f'NULL AS "{name}"' for name in table.columns)
                database.execute(f'CREATE VIEW "{table.name}" AS {endless} SELECT {columns} FROM c WHERE x < 0')
        elif made == "trigger":
            for table in TABLES.values():
                database.execute(table.create)
            database.execute("INSERT INTO events VALUES (1, 1, ?, x'00')", (FRAME,))
            endless = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT max(x) FROM c"
            database.execute(f"CREATE TRIGGER t BEFORE DELETE ON events BEGIN SELECT ({endless}); END")
            database.commit()
        else:
            database.execute("CREATE TABLE meta (key TEXT, value TEXT AS (hex(zeroblob(500000000))))")
    assert figures_of(directory) is None
    assert site.client().get(f"/v1/runs/{run.id}/metrics").status_code == 503
    begun_s = time.monotonic()
    assert bytes_of(directory, [TRAJECTORIES]) == 0
    with pytest.raises(OSError, match="other tables than a journal"):
        remove(directory, TRAJECTORIES)
    assert time.monotonic() - begun_s < 5


async def test_slow_files_of_a_project_delay_that_project_alone() -> None:
    readers, over, reading = TenantReaders(), threading.Event(), itertools.count()

    def slow() -> None:
        next(reading)
        over.wait(30)

    ours = [asyncio.ensure_future(readers.of("ours")(slow)) for _ in range(100)]
    try:
        async with asyncio.timeout(10):
            assert await readers.of("theirs")(lambda: "read") == "read"
        await asyncio.sleep(0)
        assert next(reading) <= PER_PROJECT
    finally:
        over.set()
        await asyncio.gather(*ours)


def test_directories_however_deep_are_measured_and_removed(tmp_path: Path) -> None:
    top = tmp_path / "run"
    top.mkdir()
    place = os.open(top, os.O_RDONLY)
    for _ in range(1_500):
        os.mkdir("deeper", dir_fd=place)
        further = os.open("deeper", os.O_RDONLY, dir_fd=place)
        os.close(place)
        place = further
    os.close(place)
    assert tenant_files.size_bytes(top) == 0
    tenant_files.remove(top)
    assert not top.exists()


@as_root
def test_a_directory_is_handed_over_without_what_is_linked_in_it(nobodys: Path, planted: Path) -> None:
    (nobodys / "logs").symlink_to(planted.parent)
    (nobodys / "own").write_text("")
    with contextlib.suppress(OSError):  # Another file system.
        os.link(planted, nobodys / "twin")
    os.chown(nobodys / "own", nobodys.stat().st_uid, -1)
    daemon = pwd.getpwnam("daemon")
    tenant_files.hand_over(nobodys, daemon.pw_uid, daemon.pw_gid)
    assert (nobodys / "own").stat().st_uid == nobodys.stat().st_uid == daemon.pw_uid
    assert planted.stat().st_uid == planted.parent.stat().st_uid == 0


def test_what_is_removed_ends_at_links(tmp_path: Path, planted: Path) -> None:
    directory = tmp_path / "run"
    (directory / "logs" / "deep").mkdir(parents=True)
    (directory / "logs" / "deep" / "link").symlink_to(planted.parent)
    os.mkfifo(directory / "logs" / "pipe")
    (directory / "weights").symlink_to(planted.parent)
    for name in ("logs", "weights", "missing"):
        tenant_files.remove(directory, name)
    assert list(directory.iterdir()) == []
    tenant_files.remove(directory)
    tenant_files.remove(directory)
    assert not directory.exists()
    assert planted.read_text() == SECRET


def test_a_directory_that_is_a_link_itself_is_not_followed(tmp_path: Path) -> None:
    elsewhere, link = tmp_path / "elsewhere", tmp_path / "run"
    for name in ("logs", "checkpoints"):
        (elsewhere / name).mkdir(parents=True)
        (elsewhere / name / "file").write_text(SECRET)
    link.symlink_to(elsewhere)
    for part in PARTS:
        with pytest.raises(OSError, match=f"{link}: found a link"):
            remove(link, part)
    remove(link, RUN)
    assert not link.is_symlink()
    assert {path.read_text() for path in elsewhere.glob("*/file")} == {SECRET}
    assert len([*elsewhere.iterdir()]) == 2


@as_root
def test_the_bundle_has_no_file_behind_a_link(site: Site, run: HostedRunRow, planted: Path, tmp_path: Path) -> None:
    logs = site.settings.run_dir(run.id) / "logs"
    (logs / "shadow.log").symlink_to(planted)
    os.mkfifo(logs / "pipe.log")
    (logs / "good.log").write_text("a line\n")
    write_bundle(tmp_path / "bundle.tar.gz", site.settings, {})
    with tarfile.open(tmp_path / "bundle.tar.gz") as bundle:
        files = [member.name for member in bundle.getmembers() if run.id in member.name]
        assert [Path(name).name for name in files] == ["good.log"]


@contextlib.contextmanager
def listening(path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as listener:
        directory = os.open(path.parent, os.O_PATH)
        try:
            listener.bind(f"/proc/self/fd/{directory}/{path.name}")
        finally:
            os.close(directory)
        listener.listen()
        yield listener


def stop(site: Site, run: HostedRunRow) -> None:
    asyncio.run(launching.control_of(site.settings, run, 5.0).stop("stopped", "c"))


def test_another_runs_socket_is_told_nothing(site: Site, run: HostedRunRow, tmp_path: Path) -> None:
    """A link leads to the socket of another process, here of the same user's."""
    (site.settings.run_dir(run.id) / SOCKET).symlink_to(tmp_path / SOCKET)
    child = subprocess.Popen(["sleep", "60"])
    try:
        found = identity(child.pid)
        assert found is not None
        begun = replace(run, process=runs.RunProcess(found, launching.world(), 0))
        with listening(tmp_path / SOCKET) as listener:
            with pytest.raises(RunOfAnotherUser):
                stop(site, begun)
            connected, _ = listener.accept()
            with connected:
                assert connected.recv(100) == b""
    finally:
        child.kill()
        child.wait()


@as_root
def test_another_users_socket_is_told_nothing(site: Site, run: HostedRunRow) -> None:
    directory = site.settings.run_dir(run.id)
    with listening(directory / SOCKET):
        os.chown(directory, pwd.getpwnam("nobody").pw_uid, -1)
        with pytest.raises(RunOfAnotherUser):
            stop(site, run)


@contextlib.contextmanager
def pretending(mark: str, user: str | None) -> Iterator[int]:
    child = subprocess.Popen(
        ["/bin/sh", "-c", "printf .; exec sleep 60"],
        env={SERVED_VARIABLE: mark},
        user=user,
        cwd="/",
        stdout=subprocess.PIPE,
    )
    try:
        assert child.stdout is not None
        assert child.stdout.read(1) == b"."
        yield child.pid
    finally:
        child.kill()
        child.communicate()


def test_only_a_process_with_the_proof_is_adopted(site: Site, run: HostedRunRow) -> None:
    with pretending(run.id, None):
        assert launching.living(site.settings, run) is None
    with pretending(launching.proof_of(site.settings, run.id), None) as pid:
        assert launching.living(site.settings, run) == identity(pid)


@as_root
def test_only_a_process_of_the_runs_user_is_adopted(site: Site, run: HostedRunRow) -> None:
    with pretending(launching.proof_of(site.settings, run.id), "nobody") as pid:
        assert launching.living(site.settings, run) is None
        os.chown(site.settings.run_dir(run.id), pwd.getpwnam("nobody").pw_uid, -1)
        assert launching.living(site.settings, run) == identity(pid)
