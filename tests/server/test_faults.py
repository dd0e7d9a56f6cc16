"""What a server meets: a full disk, a database that is gone, another server, slow readers, a great many keys."""

import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import event

from elastic.protocol.api import AccessRole, RunPhase
from elastic.protocol.api_client import Client
from elastic.server import ids
from elastic.server.api.app import create_app
from elastic.server.history.feeds import KEPT_EVENTS
from elastic.server.store import Store, people
from elastic.server.store.database import now_us
from elastic.server.store.tables import keys, runs
from tests.server.conftest import Site, Submission, make_site
from tests.server.test_client import url
from tests.server.test_streams import journal_of, write

__all__ = ["url"]


@pytest.fixture
def on_disk(tmp_path: Path) -> Iterator[Site]:
    """A server on SQLite."""
    made = make_site(tmp_path)
    yield made
    made.store.close()


def test_a_full_disk_refuses_what_it_cannot_keep(on_disk: Site, submission: Submission) -> None:
    full = threading.Event()

    @event.listens_for(on_disk.store.engine, "checkout")
    def _limited(connection: Any, *_: Any) -> None:
        # SQLite itself says so once it may not grow.
        pages = connection.execute("PRAGMA page_count").fetchone()[0]
        connection.execute(f"PRAGMA max_page_count = {pages if full.is_set() else 2**30}")

    client = on_disk.client()

    def submit(number: int) -> Any:
        body = submission(labels={f"l{n}": "x" * 250 for n in range(20)})
        return client.post("/v1/runs", json=body, headers={"idempotency-key": str(number)})

    acknowledged = [submit(0).json()["id"]]
    full.set()
    number = 1
    while (answer := submit(number)).status_code == 201 and number < 100:
        acknowledged.append(answer.json()["id"])
        number += 1
    assert (answer.status_code, answer.json()["type"]) == (503, "/problems/unavailable")
    assert "full" in answer.json()["detail"]
    assert int(answer.headers["retry-after"]) > 0

    def listed() -> list[str]:
        return [run["id"] for run in client.get("/v1/runs", params={"limit": 100}).json()["data"]]

    assert listed() == acknowledged[::-1], "what was refused left nothing, and what was acknowledged is there"
    full.clear()
    made = submit(number)
    assert made.status_code == 201
    assert submit(number).json()["id"] == made.json()["id"]
    assert listed() == [made.json()["id"], *acknowledged[::-1]]


@pytest.mark.parametrize("in_its_place", ["nothing", "no database"])
def test_a_database_that_is_gone_is_said_and_comes_back(
    on_disk: Site, submission: Submission, in_its_place: str
) -> None:
    client = on_disk.client()
    run = client.post("/v1/runs", json=submission()).json()["id"]
    assert client.get("/readyz").json() == {"ready": True, "reasons": []}
    on_disk.store.engine.dispose()
    path = Path(on_disk.store.engine.url.database or "")
    away = path.with_name("away")
    path.rename(away)
    if in_its_place == "no database":
        path.mkdir()
    not_ready = client.get("/readyz")
    assert (not_ready.status_code, not_ready.json()["ready"]) == (503, False)
    assert "database" in not_ready.json()["reasons"][0]
    assert client.get("/healthz").status_code == 200, "it lives"
    for path_ in ("/v1/me", f"/v1/runs/{run}", "/metrics"):
        refused = client.get(path_)
        assert (refused.status_code, refused.json()["type"]) == (503, "/problems/unavailable")
    on_disk.store.engine.dispose()
    if in_its_place == "no database":
        path.rmdir()
    for left in path.parent.glob(f"{path.name}*"):
        left.unlink()
    away.rename(path)
    assert client.get("/readyz").status_code == 200
    assert client.get(f"/v1/runs/{run}").json()["id"] == run


def test_two_servers_on_one_database_are_one(site: Site, submission: Submission) -> None:
    other_store = Store(site.settings.database_url)
    other = Site(site.settings, other_store, create_app(other_store, site.settings), site.admin, {}, {})
    clients = [site.client(), other.client()]

    def submit(number: int) -> str:
        headers = {"idempotency-key": str(number // 4)}
        answer = clients[number % 2].post("/v1/runs", json=submission(), headers=headers)
        while answer.status_code == 503:  # On a slow disk one may wait for the other too long, and is asked again.
            answer = clients[number % 2].post("/v1/runs", json=submission(), headers=headers)
        assert answer.status_code == 201, answer.text
        return answer.json()["id"]

    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(submit, range(16)))
    assert len(set(made)) == 4
    lists = [[run["id"] for run in client.get("/v1/runs").json()["data"]] for client in clients]
    assert lists[0] == lists[1] == sorted(set(made), reverse=True)
    key = clients[0].post("/v1/keys", json={"name": "k", "role": "viewer", "project": "ours"}).json()
    assert other.client(key["secret"]).get("/v1/me").status_code == 200
    assert clients[0].delete(f"/v1/keys/{key['id']}").status_code == 204
    assert other.client(key["secret"]).get("/v1/me").status_code == 401, "revoked is revoked everywhere, at once"
    other_store.close()


def test_ten_thousand_keys(site: Site) -> None:
    """As many keys as they are named for: a scan of them would show."""
    now, project = now_us(), site.projects["ours"]
    rows = [
        {
            "id": ids.new_id(ids.KEY),
            "project": project,
            "name": str(number),
            "role": "viewer",
            "scopes": [],
            "hash": people.hash_of(str(number)),
            "hint": "",
            "created_us": now,
        }
        for number in range(10_000)
    ]
    with site.store.writing() as tx:
        tx.execute(sa.insert(keys), rows)
        if site.store.is_sqlite:
            plan = tx.exec_driver_sql("EXPLAIN QUERY PLAN SELECT * FROM keys WHERE hash = x'00'").all()
            assert "USING INDEX" in str(plan), "a key is found, not searched for"
    for number in (0, 5_000, 9_999):
        assert site.client(str(number)).get("/v1/me").json()["name"] == str(number)
    admin, after, seen = site.member(AccessRole.ADMIN), "", list[str]()
    while True:
        asked = {"limit": 100, **({"starting_after": after} if after else {})}
        page = admin.get("/v1/keys", params=asked).json()
        seen += [key["id"] for key in page["data"]]
        if not page["has_more"]:
            break
        after = seen[-1]
    assert len(seen) == len(set(seen)) == 10_000 + len(AccessRole)
    assert seen == sorted(seen, reverse=True)


def test_a_slow_reader_holds_nobody_back_and_misses_nothing(url: str, site: Site, submission: Submission) -> None:
    run = site.submitted(submission())
    journal = journal_of(site.settings.run_dir(run), "a")
    names = [f"{number} {'x' * 800}" for number in range(2 * KEPT_EVENTS)]
    write(journal, names[0])
    host, _, port = url.removeprefix("http://").partition(":")
    slow = socket.socket()
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    slow.settimeout(60)
    slow.connect((host, int(port)))
    head = f"GET /v1/runs/{run}/events HTTP/1.1\r\nhost: {host}\r\nauthorization: Bearer {site.admin}\r\n"
    slow.sendall(f"{head}connection: close\r\n\r\n".encode())
    assert slow.recv(12) == b"HTTP/1.1 200"
    write(journal, *names[1:])
    journal.close()
    with site.store.writing() as tx:
        tx.execute(sa.update(runs).values(phase=RunPhase.FINISHED.value, managed=False))
    with Client(url, site.admin) as client:
        assert [event.data["reason"] for event in client.events(run) if event.id] == names
        assert client.me().key
    told = b""
    while part := slow.recv(2**20):
        told += part
    slow.close()
    lines = [line for line in told.decode().splitlines() if line.startswith("data: ")]
    assert [one["reason"] for one in map(json.loads, (line[6:] for line in lines)) if "reason" in one] == names
