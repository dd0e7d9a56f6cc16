"""Who may do what: every route of the API's description, for every role, on their own things and on others'."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest

from elastic.protocol.api import AccessRole
from elastic.server import ids
from elastic.server.permissions import SERVER_WIDE, Action, allows
from elastic.server.store import members
from tests.server.conftest import Site, Submission

EMPTY = hashlib.sha256().hexdigest()
BODIES = {
    "/v1/projects": {"name": "new"},
    "/v1/keys": {"name": "new", "role": "viewer"},
    "/v1/projects/{project}/secrets/{secret}": {"value": "shh"},
    "/v1/projects/{project}/credentials/aws": {"access_key_id": "A" * 16, "secret_access_key": "s" * 40},
    "/v1/projects/{project}/credentials/modal": {"token_id": "ak-1", "token_secret": "as-1"},
    "/v1/webhooks": {"url": "https://example.com/hook"},
    "/v1/webhooks/{webhook}": {"enabled": False},
    "/v1/runs/{run}": {"labels": {"a": "b"}},
    "/v1/projects/{project}/retention": {"logs_days": 30},
    "/v1/projects/{project}/quota": {"weight": 2.0},
    "/v1/providers/{provider}": {"gpus": 16},
    "/v1/projects/{project}": {"name": "renamed"},
    "/v1/projects/{project}/members/{member}": {"role": "viewer"},
    "/v1/uploads": {"name": "new", "files": [{"path": "a", "bytes": 0, "sha256": EMPTY}]},
    "/v1/me/keys": {"name": "mine"},
    "/v1/session": {"project": "ours"},
    "/v1/pools/{pool}/jobs": {"config": {}},
    "/v1/pools/{pool}/jobs/dry-run": {"config": {}},
}
OPEN = {"/healthz", "/readyz", "/v1"}
MISSING = ("{trajectory}", "{checkpoint}", "{vendor}", "report", "agents")
"""What these name is not there."""
SIGN_IN = {"/v1/session/oidc", "/v1/session/oidc/callback"}
"""Open as well, where there is an identity provider."""


def operations(site: Site) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in site.app.openapi()["paths"].items():
        for method, operation in methods.items():
            yield method, path, operation


def test_every_route_says_who_may(shared_site: Site) -> None:
    """Every route is looked at."""
    for method, path, operation in operations(shared_site):
        action = operation.get("x-action")
        assert (action is None) == (path in OPEN | SIGN_IN), (method, path)
        assert bool(operation.get("security")) == (action is not None), (method, path)


def test_nobody_gets_in_without_a_key(shared_site: Site) -> None:
    for key in ("elastic_nothing", "x" * 10_000):
        client = shared_site.client(key)
        for method, path, _ in operations(shared_site):
            answer = client.request(method, filled(path, {}), params={"follow": "false"}, json={})
            assert answer.status_code == (200 if path in OPEN else 404 if path in SIGN_IN else 401), (method, path)


@pytest.mark.parametrize("role", list(AccessRole))
def test_roles_and_owners(shared_site: Site, submission: Submission, role: AccessRole) -> None:
    """What a role allows is allowed in one's own project. Of another's, whoever asks hears that there is nothing."""
    client = shared_site.client(shared_site.key("ours", role))
    own, others = (things(shared_site, submission, project) for project in ("ours", "theirs"))
    # What is deleted is deleted last.
    for method, path, operation in sorted(operations(shared_site), key=lambda one: one[0] == "delete"):
        if path in OPEN | SIGN_IN:
            continue
        action = Action(operation["x-action"])
        may = allows(role, action) and action not in SERVER_WIDE
        for owner, names in (("ours", own), ("theirs", others)):
            body = BODIES.get(path, submission() if method == "post" and path.startswith("/v1/runs") else None)
            if path.endswith("/members"):
                body = {"email": f"{role}@example.com", "role": "viewer"}
            body = submission() if path in ("/v1/runs", "/v1/runs/dry-run") else body
            if method == "post" and path.endswith(("/stop", "/resume")):
                body = {}
            answer = client.request(
                method, filled(path, names), json=body, params={"follow": "false"}, headers={"if-match": '"0"'}
            )
            where = (role, method, path, owner, answer.status_code, answer.text[:200])
            if not may:
                assert answer.status_code == 403, where
            elif owner == "theirs" and "{" in path and "{provider}" not in path:
                assert answer.status_code == 404, where
                assert "theirs" not in answer.text, where
            else:
                assert answer.status_code not in (401, 403, 422), where
                assert answer.status_code < 500, where
                # It has no pool; tests/server/test_pools.py has one.
                if "{" in path and "{provider}" not in path and "{pool}" not in path:
                    assert answer.status_code != 404 or path.endswith(MISSING), where


def test_lists_have_only_ones_own(shared_site: Site, submission: Submission) -> None:
    things(shared_site, submission, "theirs")
    client = shared_site.member(AccessRole.ADMIN)
    audit = client.get("/v1/audit", params={"limit": 100}).json()["data"]
    assert {entry["project"] for entry in audit} <= {shared_site.projects["ours"]}
    for path in ("/v1/runs", "/v1/keys", "/v1/projects", "/v1/providers", "/metrics"):
        assert shared_site.projects["theirs"] not in client.get(path).text
        assert "theirs" not in client.get(path).text
    assert client.get("/v1/runs", params={"project": "theirs"}).status_code == 404
    assert client.post("/v1/runs", json=submission(project="theirs")).status_code == 404
    assert client.post("/v1/keys", json={"name": "k", "project": "theirs"}).status_code == 404


def test_who_is_of_no_project_lists_those_of_one(shared_site: Site) -> None:
    shared_site.member(AccessRole.ADMIN, "theirs").post("/v1/keys", json={"name": "k"})
    for path in ("/v1/keys", "/v1/audit"):
        listed = [
            shared_site.client().get(path, params={"limit": 100, "project": name}).json()["data"]
            for name in ("ours", "theirs")
        ]
        assert [{one["project"] for one in some} for some in listed] == [
            {shared_site.projects[n]} for n in ("ours", "theirs")
        ]
        assert shared_site.member(AccessRole.ADMIN).get(path, params={"project": "theirs"}).status_code == 404


def test_nobody_hands_on_more_than_they_have(shared_site: Site) -> None:
    client = shared_site.member(AccessRole.ADMIN)
    assert client.post("/v1/keys", json={"name": "k", "server_wide": True}).status_code == 403
    limited = client.post("/v1/keys", json={"name": "l", "role": "admin", "scopes": ["keys:write", "keys:read"]}).json()
    narrow = shared_site.client(limited["secret"])
    assert narrow.get("/v1/runs").status_code == 403
    assert narrow.post("/v1/keys", json={"name": "m", "role": "runner"}).status_code == 403
    assert narrow.post("/v1/keys", json={"name": "m", "role": "admin", "scopes": ["keys:read"]}).status_code == 201
    refused = client.post("/v1/keys", json={"name": "k", "role": "viewer", "scopes": ["runs:write"]})
    assert (refused.status_code, refused.json()["errors"][0]["pointer"]) == (400, "#/scopes")


def test_keys_end(shared_site: Site) -> None:
    admin = shared_site.client()
    made = admin.post("/v1/keys", json={"name": "k", "project": "ours"}).json()
    client = shared_site.client(made["secret"])
    assert client.get("/v1/me").json()["project"] == shared_site.projects["ours"]
    assert made["secret"] not in admin.get("/v1/keys", params={"limit": 100}).text
    assert admin.delete(f"/v1/keys/{made['id']}").status_code == 204
    assert client.get("/v1/me").status_code == 401
    assert admin.get(f"/v1/keys/{made['id']}").json()["revoked_at"] is not None
    for shown in ({"x-api-key": made["secret"]}, {"authorization": "Basic !"}, {}):
        fresh = shared_site.client()
        del fresh.headers["authorization"]
        assert fresh.get("/v1/me", headers=shown).status_code == 401


def test_a_key_is_shown_in_any_of_three_ways(shared_site: Site) -> None:
    client = shared_site.client()
    del client.headers["authorization"]
    assert client.get("/v1/me", headers={"x-api-key": shared_site.admin}).status_code == 200
    assert client.get("/v1/me", auth=("anybody", shared_site.admin)).status_code == 200
    assert client.get("/v1/me", headers={"authorization": f"bearer {shared_site.admin}"}).status_code == 200


async def test_what_was_begun_with_a_key_ends_with_it(shared_site: Site) -> None:
    """However long the rest of a request takes, it is carried out for who may do it then."""
    content = bytes(10_000)
    digest = hashlib.sha256(content).hexdigest()
    upload = {"name": "m", "project": "ours", "files": [{"path": "m.bin", "bytes": len(content), "sha256": digest}]}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(shared_site.app), base_url="http://127.0.0.1") as client:
        admin = {"authorization": f"Bearer {shared_site.admin}"}
        made = (await client.post("/v1/uploads", json=upload, headers=admin)).json()["id"]
        for method, path, whole, pieces in (
            ("POST", "/v1/keys", b'{"name": "back-door", "role": "admin"}', 2),
            ("PUT", f"/v1/uploads/{made}/files/{digest}", content, 50),
        ):
            key = (
                await client.post("/v1/keys", json={"name": "k", "role": "admin", "project": "ours"}, headers=admin)
            ).json()
            sent = 0

            async def body(whole: bytes = whole, pieces: int = pieces, id_: str = key["id"]) -> AsyncIterator[bytes]:
                nonlocal sent
                for place in range(0, len(whole), len(whole) // pieces):
                    if sent == 1:
                        assert (await client.delete(f"/v1/keys/{id_}", headers=admin)).status_code == 204
                    await asyncio.sleep(0.05)
                    sent += 1
                    yield whole[place : place + len(whole) // pieces]

            shown = {"authorization": f"Bearer {key['secret']}", "content-type": "application/json"}
            answer = await client.request(method, path, content=body(), headers=shown)
            assert answer.status_code == 401
            assert sent <= 25, "the rest of a file is not waited for"


def test_refusals_are_in_the_audit_log(shared_site: Site) -> None:
    viewer = shared_site.member(AccessRole.VIEWER)
    refused = viewer.post("/v1/projects", json={"name": "x"})
    assert refused.json()["action"] == Action.SERVER_WRITE
    entries = shared_site.client().get("/v1/audit", params={"limit": 100}).json()["data"]
    (noted,) = [e for e in entries if e["request_id"] == refused.json()["request_id"]]
    me = viewer.get("/v1/me").json()
    assert (noted["status"], noted["actor"], noted["actor_name"]) == (403, me["key"], me["name"])


def things(site: Site, submission: Submission, project: str) -> dict[str, str]:
    """One of each in a project, by what paths call it."""
    admin = site.client()
    run = admin.post("/v1/runs", json=submission(project=project)).json()["id"]
    key = admin.post("/v1/keys", json={"name": "k", "project": project}).json()["id"]
    hook = admin.post("/v1/webhooks", json={"url": "https://example.com/", "project": project}).json()["id"]
    with site.store.writing() as tx:
        person = members.person_of_email(tx, f"{ids.new_id(ids.USER)}@example.com")
        member = members.add(tx, site.projects[project], person, AccessRole.ADMIN, members.GIVEN)["id"]
    upload = admin.post("/v1/uploads", json={**BODIES["/v1/uploads"], "project": project}).json()["id"]
    assert admin.put(f"/v1/uploads/{upload}/files/{EMPTY}").json()["state"] == "ready"
    place = f"/v1/projects/{site.projects[project]}/secrets/HF_TOKEN"
    assert admin.put(place, json={"value": "shh"}).status_code == 200
    return {
        "run": run,
        "key": key,
        "project": site.projects[project],
        "webhook": hook,
        "member": member,
        "upload": upload,
    }


def filled(path: str, names: dict[str, str]) -> str:
    known = {"run": ids.new_id(ids.RUN), "key": ids.new_id(ids.KEY), "project": ids.new_id(ids.PROJECT)}
    known |= {"provider": "spot-replay", "trajectory": "none", "checkpoint": "1"}
    known |= {"webhook": ids.new_id(ids.WEBHOOK), "secret": "HF_TOKEN"}
    known |= {"member": ids.new_id(ids.MEMBER), "upload": ids.new_id(ids.UPLOAD), "digest": EMPTY} | names
    for name, value in known.items():
        path = path.replace(f"{{{name}}}", value)
    return path


async def test_who_is_nobody_is_told_so_before_anything_is_read(shared_site: Site) -> None:
    """However slowly a body comes: without a key it is not waited for."""
    for method, path, operation in operations(shared_site):
        if "requestBody" not in operation or path in SIGN_IN:
            continue
        said: list[Any] = []

        async def receive() -> Any:
            raise AssertionError("the body was asked for")

        async def send(message: Any, said: list[Any] = said) -> None:
            said.append(message)

        headers = [(b"host", b"127.0.0.1"), (b"content-type", b"application/json"), (b"content-length", b"100")]
        scope = {
            "type": "http",
            "method": method.upper(),
            "path": filled(path, {}),
            "raw_path": b"",
            "query_string": b"",
        }
        scope |= {"headers": headers, "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2), "scheme": "http"}
        await shared_site.app({**scope, "http_version": "1.1", "root_path": "", "state": {}}, receive, send)
        assert said[0]["status"] == 401, path
