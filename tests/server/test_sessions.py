"""Sessions of browsers: the cookie alone reads, writes need the session's token too, and both end with the key."""

from typing import Any

import pytest
import sqlalchemy as sa

from elastic.protocol.api import AccessRole
from elastic.server.api.auth import COOKIE, CSRF_HEADER
from elastic.server.store.people import hash_of
from elastic.server.store.tables import sessions
from tests.server.conftest import Site, Submission
from tests.server.test_access import OPEN, filled, operations


def signed_in(site: Site, key: str) -> tuple[Any, str]:
    """A client with a cookie and nothing else, and the token of its session."""
    browser = site.client(key)
    answer = browser.post("/v1/session")
    assert answer.status_code == 201, answer.text
    said = answer.headers["set-cookie"].lower()
    assert "httponly" in said
    assert "samesite=strict" in said
    assert ("secure" in said) == (browser.base_url.scheme == "https")
    del browser.headers["authorization"]
    return browser, answer.json()["csrf_token"]


@pytest.mark.parametrize("token", ["", "0" * 64, "another's"])
def test_no_write_without_the_sessions_token(shared_site: Site, submission: Submission, token: str) -> None:
    """Every route that writes is called."""
    browser, right = signed_in(shared_site, shared_site.key("ours", AccessRole.ADMIN))
    _, anothers = signed_in(shared_site, shared_site.key("ours", AccessRole.ADMIN))
    assert right != anothers
    headers = {CSRF_HEADER: anothers if token == "another's" else token}
    before = browser.get("/v1/runs").json()
    for method, path, _ in operations(shared_site):
        if method == "get" or path in OPEN:
            continue
        answer = browser.request(method, filled(path, {}), json=submission(), headers=headers)
        assert (answer.status_code, answer.json()["type"]) == (403, "/problems/stale-page"), (method, path)
    assert browser.get("/v1/runs").json() == before
    assert browser.post("/v1/runs", json=submission(), headers={CSRF_HEADER: right}).status_code == 201


def test_a_session_ends(shared_site: Site) -> None:
    admin = shared_site.client()
    made = admin.post("/v1/keys", json={"name": "k", "project": "ours", "role": "admin"}).json()
    (left, token), (revoked, _), (expired, _) = (signed_in(shared_site, made["secret"]) for _ in range(3))
    kept = left.cookies[COOKIE]
    assert left.delete("/v1/session", headers={CSRF_HEADER: token}).status_code == 204
    left.cookies.set(COOKIE, kept)
    assert left.get("/v1/me").status_code == 401
    with shared_site.store.writing() as tx:
        digest = hash_of(expired.cookies[COOKIE])
        tx.execute(sa.update(sessions).where(sessions.c.hash == digest).values(expires_us=1))
    assert [one.get("/v1/me").status_code for one in (revoked, expired)] == [200, 401]
    assert admin.delete(f"/v1/keys/{made['id']}").status_code == 204
    assert {revoked.get("/v1/me").status_code, expired.get("/v1/me").status_code} == {401}
    assert shared_site.client("elastic_nothing").post("/v1/session").status_code == 401


def test_a_session_makes_no_other(shared_site: Site) -> None:
    browser, token = signed_in(shared_site, shared_site.admin)
    assert browser.post("/v1/session", headers={CSRF_HEADER: token}).status_code == 401


def test_the_page_tells_nothing_by_itself(shared_site: Site) -> None:
    unauthenticated = shared_site.client("elastic_nothing")
    page = unauthenticated.get("/")
    assert page.status_code == 200
    assert "unsafe" not in page.headers["content-security-policy"]
    assert shared_site.projects["ours"] not in page.text
    for name in ("main.js", "page.css", "icon.svg"):
        assert f"/page/{name}" in page.text
        assert unauthenticated.get(f"/page/{name}").status_code == 200
    for name in ("index.html", "..%2fauth.py", "../auth.py", "nothing"):
        assert unauthenticated.get(f"/page/{name}").status_code == 404


def test_figures_are_told_and_end(shared_site: Site, submission: Submission) -> None:
    client = shared_site.client()
    run = client.post("/v1/runs", json=submission()).json()
    told = client.get(f"/v1/runs/{run['id']}/figures", params={"follow": "false"}).text
    assert told.startswith("event: run\ndata: ")
    assert run["id"] in told
    assert "run.ended" not in told
