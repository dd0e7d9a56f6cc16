"""Requests that change something: whole or nothing, once for an Idempotency-Key, in the audit log."""

import secrets
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from elastic.server.problems import TYPES
from tests.server.conftest import Site, Submission


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=8)
@given(asked=st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 2)), min_size=1, max_size=8))
def test_a_key_is_good_for_one_thing(site: Site, submission: Submission, asked: list[tuple[str, int]]) -> None:
    """Whatever is repeated in whatever order, there is one run for each key, and each repetition has its answer."""
    client, first = site.client(), dict[str, tuple[int, str]]()
    before, salt = len(all_runs(client)), secrets.token_hex(4)
    for key, max_restarts in asked:
        answer = client.post(
            "/v1/runs", json=submission(max_restarts=max_restarts), headers={"idempotency-key": f"{key}-{salt}"}
        )
        if key not in first:
            assert answer.status_code == 201
            assert "idempotent-replayed" not in answer.headers
            first[key] = max_restarts, answer.text
        elif first[key][0] == max_restarts:
            assert (answer.status_code, answer.text) == (201, first[key][1])
            assert answer.headers["idempotent-replayed"] == "true"
            assert answer.headers["location"].endswith(answer.json()["id"])
        else:
            assert (answer.status_code, answer.json()["type"]) == (422, "/problems/idempotency-mismatch")
    assert len(all_runs(client)) == before + len(first)


def test_a_submission_is_checked_once(site: Site, submission: Submission) -> None:
    """What its repetition would be refused for by now says nothing on the run that goes on."""
    client, headers, model = site.client(), {"idempotency-key": "k"}, site.settings.models[0] / "policy"
    run = client.post("/v1/runs", json=submission(), headers=headers).json()["id"]
    model.rename(model.with_name("elsewhere"))
    again = client.post("/v1/runs", json=submission(), headers=headers)
    assert (again.status_code, again.json().get("id")) == (201, run)


def test_two_at_once_make_one(site: Site, submission: Submission) -> None:
    def submit(_: int) -> str:
        return site.client().post("/v1/runs", json=submission(), headers={"idempotency-key": "k"}).json()["id"]

    with ThreadPoolExecutor(4) as pool:
        assert len(set(pool.map(submit, range(4)))) == 1
    assert len(all_runs(site.client())) == 1


def test_keys_are_of_who_uses_them(site: Site, submission: Submission) -> None:
    from elastic.protocol.api import AccessRole

    clients = [site.client(site.key(project, AccessRole.RUNNER)) for project in ("ours", "theirs")]
    made = [c.post("/v1/runs", json=submission(), headers={"idempotency-key": "k"}).json()["id"] for c in clients]
    assert made[0] != made[1]


def test_what_was_refused_is_not_remembered(site: Site, submission: Submission) -> None:
    client, headers = site.client(), {"idempotency-key": "k"}
    wrong = submission()
    wrong["config"]["run"]["steps"] = 0
    assert client.post("/v1/runs", json=wrong, headers=headers).status_code == 400
    assert all_runs(client) == []
    assert client.post("/v1/runs", json=submission(), headers=headers).status_code == 201


def test_a_secret_is_shown_once(site: Site) -> None:
    client, headers = site.client(), {"idempotency-key": "k"}
    made, again = (client.post("/v1/keys", json={"name": "k"}, headers=headers).json() for _ in range(2))
    assert made["secret"]
    assert again == made | {"secret": None}


def test_what_is_edited_must_be_what_was_read(site: Site, submission: Submission) -> None:
    client = site.client()
    made = client.post("/v1/runs", json=submission())
    place, etag = made.headers["location"], made.headers["etag"]
    change = {"caps": {"spot": 3}, "budget_usd": 2.5}
    assert client.patch(place, json=change).json()["type"] == "/problems/precondition-required"
    changed = client.patch(place, json=change, headers={"if-match": etag})
    assert (changed.json()["caps"], changed.json()["budget_usd"]) == ({"spot": 3}, 2.5)
    assert client.patch(place, json=change, headers={"if-match": etag}).status_code == 412
    assert client.get(place).headers["etag"] == changed.headers["etag"]
    wrong = client.patch(place, json={"caps": {"nobody": 3}}, headers={"if-match": changed.headers["etag"]})
    assert wrong.json()["type"] == "/problems/invalid-configuration"


def test_stopping_and_resuming(site: Site, submission: Submission) -> None:
    client = site.client()
    place = client.post("/v1/runs", json=submission()).headers["location"]
    assert client.post(f"{place}/resume").json()["type"] == "/problems/run-active"
    assert client.delete(place).json()["type"] == "/problems/run-active"
    assert client.post(f"{place}/stop").status_code == 200
    assert client.post(f"{place}/stop", json={"force": True}).json()["generation"] == 3
    assert client.post(f"{place}/stop", json={"force": True}).json()["generation"] == 3


@pytest.mark.parametrize(
    ("content", "media_type", "status"),
    [
        (b"{}", "text/plain", 415),
        (b"{", "application/json", 400),
        (b"[]", "application/json", 400),
        (b"\xff\xfe", "application/json", 400),
        (b"{}", "application/json", 400),
        (b'{"config": {}, "more": 1}', "application/json", 400),
        (b" " * (5 * 2**20), "application/json", 413),
    ],
)
def test_bodies_that_are_none(shared_site: Site, content: bytes, media_type: str, status: int) -> None:
    answer = shared_site.client().post("/v1/runs", content=content, headers={"content-type": media_type})
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    body = answer.json()
    assert TYPES[body["type"].removeprefix("/problems/")].status == status
    assert body["request_id"] == answer.headers["x-request-id"]


def test_another_name_is_not_this_server(shared_site: Site) -> None:
    assert shared_site.client().get("/v1", headers={"host": "evil.example"}).status_code == 421


def all_runs(client: Any) -> list[dict[str, Any]]:
    return client.get("/v1/runs", params={"limit": 100}).json()["data"]


def test_what_can_be_done_is_said(shared_site: Site) -> None:
    """The first test of its file makes the server that they share."""
    answer = shared_site.client().request("OPTIONS", "/v1/keys/key_x")
    assert (answer.status_code, answer.headers["allow"]) == (405, "DELETE, GET")
