"""Whatever the paths are called that people give, what is written there is read there, and nowhere else."""

import asyncio
import json
import re
import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import sqlalchemy as sa
from hypothesis import example, given, settings
from hypothesis import strategies as st

import traces
from elastic.compose.pool_config import load_pool
from elastic.config import JournalConfig, RunConfig, load_config, validate
from elastic.core import events as e
from elastic.engine.model.stored import read_config
from elastic.pool.journal import PoolJournal, read_entries
from elastic.pool.phases.files import load_phases
from elastic.protocol.run_control import socket_address
from elastic.runtime.journal import DirectoryStore, RunDirectory, event_row
from elastic.server.retention.rules import _said_bytes
from elastic.server.settings import ServerSettings
from elastic.server.store import Store
from elastic.server.store.database import sqlite_path
from elastic.simulation.jobs.simulate import load_workload
from elastic.system.given import expanded
from elastic.weights.relay import open_relay
from tests.seeds import examples

ROOT = Path(__file__).parents[1]
HOSTILE = ["#", "?", "%41", "%", "&", "=", " ", "'", '"', "\n", "\t", "\\", ":", ";", "[", "]", "{", "*", "$HOME", "~"]
FOREIGN = ["\N{LATIN SMALL LETTER E WITH ACUTE}", "\N{GRINNING FACE}", "-", "--", "a", "mode=ro", "file:"]
NAMES = st.lists(st.sampled_from(HOSTILE + FOREIGN), min_size=1, max_size=6).map("".join)


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("room")


def places(room: Path, name: str, slashes: int) -> Iterator[Path]:
    """A new, empty directory with this name, alone in its own; afterwards nothing else is there."""
    alone = room / "alone"
    shutil.rmtree(alone, ignore_errors=True)
    place = Path("/" * slashes + str(alone)[1:]) / name
    place.mkdir(parents=True)
    yield place
    assert [path.name for path in alone.iterdir()] == [name]


@settings(max_examples=examples(6, 15))
@example(name="exp#3", slashes=1)
@example(name="h?mode=ro", slashes=1)
@example(name="h50%25", slashes=1)
@example(name=":memory:", slashes=2)
@given(name=NAMES, slashes=st.sampled_from([1, 2]))
def test_files_are_where_they_were_said_to_be(room: Path, checkpoint: Path, name: str, slashes: int) -> None:
    for place in places(room, name, slashes):
        _run(place)
        _database(place)
        _pool(place)
        _inputs(place, checkpoint)
        asyncio.run(_socket(place))
        relay = open_relay(str(place / "relay"))
        relay.put("key", b"weights")
        assert [path.read_bytes() for path in (place / "relay").rglob("key*")] == [b"weights"]


def _run(place: Path) -> None:
    run = RunDirectory(place)
    with closing(run.begin_journal(validate(JournalConfig, {}, "test"), notes={"run": "hostile"})) as journal:
        journal.append(event_row(e.StopRequested(reason="enough"), 1))
        journal.durable().result()
    assert run.journal_paths() == [place / "journal.sqlite"]
    with run.newest_journal() as read:
        assert read.meta()["run"] == "hostile"
    assert _said_bytes(place / "journal.sqlite") == 0
    (place / "config.json").write_text("{}")
    assert DirectoryStore(place.parent).find(str(place)).path == place
    assert [found.name for found in DirectoryStore(place.parent).runs()] == [place.name]
    (place / "config.json").unlink()


def _database(place: Path) -> None:
    for url in (ServerSettings(home=place).database_url, f"sqlite:///{place / 'other.sqlite'}"):
        store = Store(url)
        with store.writing() as tx:
            tx.execute(sa.text("CREATE TABLE kept (x)"))
        store.close()
        assert sqlite_path(url) is not None
    assert {path.name for path in place.glob("*.sqlite")} >= {"elastic.sqlite", "other.sqlite"}


def _pool(place: Path) -> None:
    (place / "pool").mkdir()
    journal = PoolJournal(place / "pool")
    journal.close()
    assert read_entries(place / "pool") == []
    assert (place / "pool" / "journal.sqlite").is_file()


def _inputs(place: Path, checkpoint: Path) -> None:
    quoted = json.dumps(str(place), ensure_ascii=False)
    (place / "c.toml").write_text(f"[run]\ndirectory = {quoted}\n[model]\ncheckpoint = {quoted}\n")
    config = load_config(place / "c.toml", [f"run.certificate={quoted}", f"run.certificate_key={quoted}"])
    assert config.run.directory == config.model.checkpoint == config.run.certificate == place
    pool = (ROOT / "examples" / "pool.toml").read_text().replace("[pool]", f"[pool]\ndirectory = {quoted}")
    (place / "pool.toml").write_text(re.sub(r'^directory = "pools".*$', "", pool, flags=re.MULTILINE))
    assert load_pool(place / "pool.toml").path.parent == place
    shutil.copy(ROOT / "examples" / "jobs.toml", place / "jobs.toml")
    load_workload(place / "jobs.toml")
    (place / "phases.toml").write_text('[phases]\n"a:b" = "rollout"\n')
    load_phases(place / "phases.toml")
    (place / "trace.csv").write_text("any")
    assert traces.find(str(place / "trace.csv")) == place / "trace.csv"
    shutil.copytree(checkpoint, place / "checkpoint")
    assert read_config(place / "checkpoint") == read_config(checkpoint)


async def _socket(place: Path) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.readline())
        writer.close()

    with socket_address(place) as address:
        server = await asyncio.start_unix_server(answer, address)
    async with server:
        with socket_address(place) as address:
            reader, writer = await asyncio.open_unix_connection(address)
        writer.write(b"here\n")
        assert await reader.readline() == b"here\n"
        writer.close()


@given(name=NAMES)
def test_a_runs_name_is_no_path(name: str) -> None:
    if re.fullmatch(r"[a-zA-Z0-9][A-Za-z0-9._-]*", name) is None:
        with pytest.raises(ValueError, match="name: "):
            validate(RunConfig, {"name": name}, "test")


def test_a_home_is_put_where_a_path_begins_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert expanded(Path("~/runs")) == tmp_path / "runs"
    assert expanded("~") == str(tmp_path)
    assert [expanded(Path(name)) for name in ("/a/~", "a~/b", "-~")] == [Path("/a/~"), Path("a~/b"), Path("-~")]
    with pytest.raises(ValueError, match=r"no home directory is known for ~nobody-is-called-so"):
        expanded(Path("~nobody-is-called-so/runs"))
    (tmp_path / "c.toml").write_text('[run]\ndirectory = "~/runs"\n[model]\ncheckpoint = "~"\n')
    config = load_config(tmp_path / "c.toml", ["run.certificate=~/c", "run.certificate_key=~/k"])
    found = (config.run.directory, config.model.checkpoint, config.run.certificate, config.run.certificate_key)
    assert found == (tmp_path / "runs", tmp_path, tmp_path / "c", tmp_path / "k")
    (tmp_path / "trace.csv").write_text("any")
    assert traces.find("~/trace.csv") == tmp_path / "trace.csv"
    assert sqlite_path("sqlite:///~/kept.sqlite") == tmp_path / "kept.sqlite"


def test_sqlite_is_opened_in_one_place() -> None:
    """A path pasted into a URI means another file once it has a `#`, `?` or `%` in it."""
    rooms = ("elastic", "functions", "providers", "policies", "traces", "benchmarks", "infra", "examples")
    by_itself = re.compile(r"sqlite3\.connect\((?!\"\")|here\(\)\.connect\(|import connect|connect as ")
    allowed = {"elastic/system/sqlite.py", "elastic/testing/faults/shell/disk.py"}
    found = {
        str(path.relative_to(ROOT))
        for package in rooms
        for path in (ROOT / package).rglob("*.py")
        if "sqlite3" in (text := path.read_text(encoding="utf-8")) and by_itself.search(text)
    }
    assert found == allowed
