"""Pages: whoever walks through a list sees every entry once, newest first, whatever comes and goes meanwhile."""

import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from elastic.server import ids
from elastic.server.store import Store, audit
from elastic.server.store.pages import Cursor, page
from elastic.server.store.tables import audit as table
from tests.seeds import examples
from tests.server.conftest import Site, Submission


def add(store: Store, count: int) -> list[str]:
    with store.writing() as tx:
        for _ in range(count):
            audit.write(tx, actor="a", action="x", resource="r", project=None, status=200, request_id="q")
        return list(tx.execute(sa.select(table.c.id).order_by(table.c.id.desc())).scalars())


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=examples(12, 30))
@given(count=st.integers(0, 25), limit=st.integers(1, 12), joins=st.lists(st.integers(0, 3), max_size=4))
def test_a_walk_sees_every_entry_once(site: Site, count: int, limit: int, joins: list[int]) -> None:
    with site.store.writing() as tx:
        tx.execute(sa.delete(table))
    there = add(site.store, count)
    seen: list[str] = []
    after, more = "", True
    while more:
        with site.store.reading() as connection:
            rows, more = page(connection, table, [], Cursor(limit, after))
        assert len(rows) <= limit
        seen += [row["id"] for row in rows]
        after = seen[-1] if seen else ""
        if joins:
            add(site.store, joins.pop())
    assert [id_ for id_ in seen if id_ in there] == there
    assert len(set(seen)) == len(seen)
    for backwards in seen[1:3]:
        with site.store.reading() as connection:
            rows, _ = page(connection, table, [], Cursor(100, "", backwards))
        assert [row["id"] for row in rows][-1] > backwards


def test_lists_say_whether_there_is_more(site: Site, submission: Submission) -> None:
    client = site.client()
    made = [client.post("/v1/runs", json=submission()).json()["id"] for _ in range(3)]
    first = client.get("/v1/runs", params={"limit": 2}).json()
    assert first["has_more"]
    assert first["url"] == "/v1/runs"
    last = client.get("/v1/runs", params={"limit": 2, "starting_after": first["data"][-1]["id"]}).json()
    assert not last["has_more"]
    assert sorted(run["id"] for run in first["data"] + last["data"]) == sorted(made)


@pytest.mark.parametrize("name", ["starting_after", "ending_before"])
def test_a_cursor_of_another_list_is_refused(site: Site, name: str) -> None:
    client = site.client()
    for cursor in (ids.new_id(ids.KEY), "run_", "", "🙂", "x" * 60):
        answer = client.get("/v1/runs", params={name: cursor})
        assert (answer.status_code, answer.json()["type"]) == (400, "/problems/invalid-cursor")
    both = {"starting_after": ids.new_id(ids.RUN), "ending_before": ids.new_id(ids.RUN)}
    assert client.get("/v1/runs", params=both).status_code == 400
    for limit in ("0", "101", "many"):
        assert client.get("/v1/runs", params={"limit": limit}).json()["type"] == "/problems/invalid-request"


def test_ids_sort_by_age() -> None:
    made = [ids.new_id(ids.RUN, ms) for ms in range(0, 2**48, 2**43 + 12345)]
    assert made == sorted(made)
    assert all(ids.is_id(one, ids.RUN) and not ids.is_id(one, ids.KEY) for one in made)
