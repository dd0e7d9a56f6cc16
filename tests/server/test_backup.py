"""What is backed up while a server runs is there again after a restore into nothing."""

import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from elastic.server.serving import open_store
from elastic.server.store import people, runs
from tests.server.conftest import Submission, make_site

BACKUP = Path(__file__).parents[2] / "infra" / "backup.py"


def test_what_was_saved_is_restored(
    tmp_path: Path, new_database: Callable[[Path], str], submission: Submission
) -> None:
    (tmp_path / "server").mkdir()
    database = new_database(tmp_path / "server")
    (tmp_path / "server").rmdir()
    external = "" if database.startswith("sqlite") else database
    site = make_site(tmp_path, external)
    home = site.settings.home
    with site.client() as client:
        run = client.post("/v1/runs", json=submission()).json()["id"]
        uploads = [site.settings.uploads("proj_x") / "upl_x" / name for name in ("no.sqlite", "no-wal", "runner.lock")]
        uploads[0].parent.mkdir(parents=True)
        for path in uploads:
            path.write_text("no database")
        (link := site.settings.storage("proj_x") / "link").parent.mkdir(parents=True)
        link.symlink_to(BACKUP)
        journal = site.settings.run_dir(run) / "journal.sqlite"
        journal.parent.mkdir()
        with sqlite3.connect(journal) as writer:
            writer.execute("PRAGMA journal_mode=WAL")
            writer.execute("CREATE TABLE events (seq INTEGER PRIMARY KEY)")
            writer.execute("INSERT INTO events VALUES (7)")

            def backup(what: str, *arguments: object) -> subprocess.CompletedProcess[str]:
                where = ("--home", home, *(("--database", external) if external else ()), *arguments)
                command = [sys.executable, str(BACKUP), what, *map(str, where)]
                return subprocess.run(command, capture_output=True, text=True, timeout=120)

            writer.commit()
            assert (saved := backup("save", tmp_path / "copy")).returncode == 0, saved.stderr
        writer.close()
        client.post("/v1/runs", json=submission()).raise_for_status()
    site.store.close()
    assert "is not empty" in backup("restore", tmp_path / "copy").stderr
    shutil.rmtree(home)
    assert (restored := backup("restore", tmp_path / "copy")).returncode == 0, restored.stderr
    store = open_store(site.settings)
    with store.reading() as connection:
        assert [found.id for found in runs.managed(connection)] == [run]
        assert people.key_of_secret(connection, site.admin) is not None
    store.close()
    assert [path.read_text() for path in uploads] == ["no database"] * 3
    assert link.is_symlink()
    with sqlite3.connect(journal) as reader:
        assert reader.execute("SELECT seq FROM events").fetchall() == [(7,)]
    reader.close()
