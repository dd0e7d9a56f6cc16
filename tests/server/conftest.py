"""A server's application over a store of its own, with two projects and a key for every role in each."""

import ast
import asyncio
import contextlib
import functools
import os
import re
import socket
import sys
import tempfile
import threading
import tomllib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from elastic import server as server_package
from elastic.protocol.api import AccessRole
from elastic.protocol.http_server import serving
from elastic.server.api.app import create_app
from elastic.server.serving import first_key, open_store
from elastic.server.settings import ServerSettings
from elastic.server.store import Store, people
from elastic.server.store.database import migrate, sqlite_path
from elastic.system import tenant_files
from tests.server.postgres import PostgresCluster
from tests.server.postgres import cluster as postgresql_cluster

Submission = Callable[..., dict[str, Any]]
"""The fixture `submission`."""
CONFIG = """
[run]
name = "small"
steps = 2
[model]
checkpoint = "policy"
[rollout]
groups = 2
group_size = 4
max_turns = 3
max_tokens_per_turn = 8
[trainer]
updates_per_step = 1
checkpoint_every_steps = 1
[seeding]
window_s = 0.2
reserved_engines = 2
[engine]
max_batch = 4
max_context_tokens = 192
[engine.pacing]
prefill_tokens_per_s = 8000
decode_step_s = { 1 = 0.02 }
[providers.spot]
trace = "rlboost-a"
max_workers = 1
"""


class Answering(httpx.BaseTransport):
    """Has an application answer each request to its end, on a loop of its own: in the caller's thread, or in another
    where that one has a loop already."""

    def __init__(self, app: Any) -> None:
        self._asking = httpx.ASGITransport(app, raise_app_exceptions=False)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return asyncio.run(self._answered(request))
        with ThreadPoolExecutor(1) as beside:
            return beside.submit(asyncio.run, self._answered(request)).result()

    async def _answered(self, request: httpx.Request) -> httpx.Response:
        request.read()
        answer = await self._asking.handle_async_request(request)
        return httpx.Response(answer.status_code, headers=answer.headers.raw, content=await answer.aread())


@dataclass
class Site:
    """A server without a runner: what is asked of it stays as it was acknowledged."""

    settings: ServerSettings
    store: Store
    app: Any
    admin: str
    projects: dict[str, str]
    keys: dict[tuple[str, AccessRole], str]

    def client(self, key: str = "") -> httpx.Client:
        """A client that shows this key; the server-wide admin's unless given."""
        headers = {"authorization": f"Bearer {key or self.admin}"}
        return httpx.Client(
            base_url="http://127.0.0.1", headers=headers, transport=Answering(self.app), follow_redirects=True
        )

    def submitted(self, body: dict[str, Any]) -> str:
        """The id of a run that the admin submits."""
        return self.client().post("/v1/runs", json=body).json()["id"]

    def member(self, role: AccessRole, project: str = "ours") -> httpx.Client:
        """A client with the key of this role in the project."""
        return self.client(self.key(project, role))

    def key(self, project: str, role: AccessRole) -> str:
        return self.keys[project, role]


@contextlib.contextmanager
def served(app: Any) -> Iterator[str]:
    """The application at a URL, on a loop and a thread of its own."""
    loop, ready, over = asyncio.new_event_loop(), threading.Event(), asyncio.Event()
    listener = socket.create_server(("127.0.0.1", 0))

    async def serve() -> None:
        async with serving(app, listener):
            ready.set()
            await over.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert ready.wait(30)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join(30)
        loop.close()
        listener.close()


_TOUCHES = {
    "open",
    "os.listdir",
    "os.scandir",
    "os.mkdir",
    "os.remove",
    "os.rename",
    "os.rmdir",
    "os.chmod",
    "os.chown",
}
_TOUCHES |= {"os.link", "os.symlink", "os.truncate", "os.utime", "shutil.rmtree", "sqlite3.connect"}
_RUN_FILE = re.compile(r"/server/runs/[^/]+")
_SERVER = str(Path(server_package.__file__).parent)
_strayed: list[str] = []


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    """Note where the server touches by itself what is in a run's directory. The directory lies in one of its own."""
    if event not in _TOUCHES or not arguments or not isinstance(arguments[0], str | bytes | Path):
        return
    path = os.fsdecode(arguments[0])
    found = _RUN_FILE.search(path)
    if found is None or (event in ("open", "os.mkdir") and found.end() == len(path)):
        return
    by: list[tuple[str, int]] = []
    frame = sys._getframe(1)
    while frame is not None:
        file, line = frame.f_code.co_filename, frame.f_lineno
        if file == tenant_files.__file__:
            return
        if file.startswith(_SERVER):
            by.append((file, line))
        frame = frame.f_back
    if by and not any(line in _lines_as_owner(file) for file, line in by):
        _strayed.append(f"{event} {path} by {by[0][0]}:{by[0][1]}")


@functools.cache
def _lines_as_owner(file: str) -> frozenset[int]:
    """Return the lines of a module that run within `as_owner`."""
    parts = ast.walk(ast.parse(Path(file).read_text()))
    blocks = [part for part in parts if isinstance(part, ast.With)]
    return frozenset(
        line
        for block in blocks
        if any("as_owner(" in ast.unparse(item) for item in block.items)
        for line in range(block.lineno, (block.end_lineno or block.lineno) + 1)
    )


sys.addaudithook(_watch)


@pytest.fixture(autouse=True)
def files_of_tenants_are_opened_in_one_place() -> Iterator[None]:
    """Holds, for every test of the server, that only `tenant_files` touches what is in a run's directory."""
    _strayed.clear()
    yield
    assert _strayed == []


@pytest.fixture(scope="session")
def cluster() -> Iterator[PostgresCluster]:
    """A PostgreSQL for the tests that want one, with many databases."""
    with postgresql_cluster() as made:
        yield made


BOTH = ["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)]


@pytest.fixture(scope="session", params=BOTH)
def new_database(request: pytest.FixtureRequest) -> Callable[[Path], str]:
    """Makes URLs of new databases, for SQLite in a directory: every test is about both kinds."""
    if request.param == "sqlite":
        return lambda directory: f"sqlite:///{directory / 'elastic.sqlite'}"
    cluster = request.getfixturevalue("cluster")
    return lambda _: cluster.new_database()


@dataclass(frozen=True)
class Known:
    """Whom a server knows: its first admin, and two projects with a key for every role in each."""

    admin: str
    projects: dict[str, str]
    keys: dict[tuple[str, AccessRole], str]


def known_to(store: Store) -> Known:
    """Have a new store know them."""
    admin = first_key(store)
    assert admin is not None
    projects: dict[str, str] = {}
    keys: dict[tuple[str, AccessRole], str] = {}
    with store.writing() as tx:
        for name in ("ours", "theirs"):
            projects[name] = people.new_project(tx, name, None)["id"]
            for role in AccessRole:
                _, secret = people.new_key(
                    tx, project=projects[name], name=f"{name}-{role}", role=role, scopes=[], expires_us=None
                )
                assert secret is not None
                keys[name, role] = secret
    return Known(admin, projects, keys)


@functools.cache
def _sqlite_file() -> tuple[bytes, Known]:
    """A database of SQLite of no home, as a file. To make one takes ten times as long as to copy it."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "elastic.sqlite"
        store = Store(f"sqlite:///{file}")
        migrate(store)
        known = known_to(store)
        store.close()
        return file.read_bytes(), known


def make_site(home: Path, database: str = "") -> Site:
    models = home / "models"
    (models / "policy").mkdir(parents=True)
    (home / "server").mkdir()
    settings = ServerSettings(
        home=home / "server",
        database=database,
        models=(models,),
        shared_trust=True,
        feed_interval_s=0.01,
        check_timeout_s=120.0,
    )
    known = None
    if (file := sqlite_path(settings.database_url)) is not None:
        content, known = _sqlite_file()
        file.write_bytes(content)
    store = open_store(settings)
    known = known or known_to(store)
    return Site(settings, store, create_app(store, settings), known.admin, known.projects, known.keys)


@pytest.fixture
def site(tmp_path: Path, new_database: Callable[[Path], str]) -> Iterator[Site]:
    made = make_site(tmp_path, new_database(tmp_path))
    yield made
    made.store.close()


@pytest.fixture(scope="module")
def shared_site(tmp_path_factory: pytest.TempPathFactory, new_database: Callable[[Path], str]) -> Iterator[Site]:
    """One for all tests of a module: each brings what it looks at."""
    home = tmp_path_factory.mktemp("site")
    made = make_site(home, new_database(home))
    yield made
    made.store.close()


@pytest.fixture
def submission() -> Submission:
    """The body of a submission, with these fields besides."""

    def make(**fields: Any) -> dict[str, Any]:
        return {"config": tomllib.loads(CONFIG), "providers": ["spot"], **fields}

    return make
