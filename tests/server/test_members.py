"""Members: what a person may do follows from their membership alone, and ends with it."""

from typing import Any

import pytest

from elastic.protocol.api import AccessRole
from elastic.server.api.auth import COOKIE, CSRF_HEADER
from elastic.server.permissions import SERVER_WIDE, Action, allows
from elastic.server.store import members, sessions
from tests.server.conftest import Site


class Person:
    """Somebody who has signed in: a session in one of their projects."""

    def __init__(self, site: Site, email: str, **roles: AccessRole) -> None:
        self.site, self.email = site, email
        with site.store.writing() as tx:
            self.user = members.person_of_sign_in(tx, issuer="https://i", subject=email, email=email, name="")
            held = [members.add(tx, site.projects[p], self.user, r, members.GIVEN)["id"] for p, r in roles.items()]
            secret = sessions.begin(tx, 60.0, member=held[0])
        self.members = dict(zip(roles, held, strict=True))
        self.browser = site.client()
        del self.browser.headers["authorization"]
        self.browser.cookies.set(COOKIE, secret)
        self.browser.headers[CSRF_HEADER] = sessions.csrf_token(secret)

    def place(self, project: str) -> str:
        return f"/v1/projects/{self.site.projects[project]}/members/{self.members[project]}"

    def key(self, **fields: Any) -> Any:
        """A client with a key of theirs, for the project that their session is in."""
        made = self.browser.post("/v1/me/keys", json={"name": "mine", **fields})
        assert made.status_code == 201, made.text
        return self.site.client(made.json()["secret"])


def actions(client: Any) -> set[str]:
    return set(client.get("/v1/me").json()["actions"])


def allowed(role: AccessRole) -> set[str]:
    return {action.value for action in Action if allows(role, action) and action not in SERVER_WIDE}


def test_a_key_never_exceeds_its_person(site: Site) -> None:
    admin = site.member(AccessRole.ADMIN)
    person = Person(site, "ada@example.com", ours=AccessRole.ADMIN)
    Person(site, "other@example.com", ours=AccessRole.ADMIN)
    full, narrow = person.key(), person.key(role="runner", scopes=["runs:read", "runs:write"])
    for role in (AccessRole.ADMIN, AccessRole.VIEWER, AccessRole.RUNNER):
        etag = admin.get(person.place("ours")).headers["etag"]
        changed = admin.patch(person.place("ours"), json={"role": role}, headers={"if-match": etag})
        assert changed.json()["role"] == role
        assert admin.patch(person.place("ours"), json={"role": role}, headers={"if-match": etag}).status_code == 412
        assert actions(full) == actions(person.browser) == allowed(role)
        assert actions(narrow) == allowed(role) & {"runs:read", "runs:write"}
        stronger = [one for one in AccessRole if allowed(one) > allowed(role)]
        for one in stronger:
            assert person.browser.post("/v1/me/keys", json={"name": "k", "role": one}).status_code == 403
    assert narrow.post("/v1/me/keys", json={"name": "k"}).status_code == 403
    assert {key["role"] for key in full.get("/v1/me/keys").json()["data"]} == {"runner"}


def test_who_is_removed_is_out_at_once_and_their_keys_do_not_come_back(site: Site) -> None:
    admin = site.member(AccessRole.ADMIN)
    person = Person(site, "ada@example.com", ours=AccessRole.RUNNER, theirs=AccessRole.ADMIN)
    key = person.key()
    assert person.browser.put("/v1/session", json={"project": "theirs"}).json()["role"] == "admin"
    elsewhere = person.key()
    assert person.browser.put("/v1/session", json={"project": "ours"}).json()["role"] == "runner"
    by_key = site.client()
    by_key.headers["authorization"] = key.headers["authorization"]
    by_key.post("/v1/session")
    del by_key.headers["authorization"]
    assert by_key.get("/v1/me").status_code == 200
    assert admin.delete(person.place("ours")).status_code == 204
    assert [one.get("/v1/me").status_code for one in (key, by_key, person.browser, elsewhere)] == [401, 401, 401, 200]
    again = admin.post(
        f"/v1/projects/{site.projects['ours']}/members", json={"email": "Ada@Example.com", "role": "admin"}
    )
    assert again.status_code == 201
    assert [one.get("/v1/me").status_code for one in (key, by_key, person.browser)] == [401] * 3
    noted = admin.get("/v1/audit", params={"limit": 100}).json()["data"]
    assert sum("/members" in one["resource"] for one in noted) >= 2
    assert any(one["resource"] == "/v1/session" and one["status"] == 200 for one in noted)


def test_the_last_admin_stays(site: Site) -> None:
    one, other = (Person(site, f"{name}@example.com", ours=AccessRole.ADMIN) for name in "ab")
    client = site.member(AccessRole.ADMIN)
    place, any_version = f"/v1/projects/{site.projects['ours']}/members", {"if-match": "*"}
    assert one.browser.patch(other.place("ours"), json={"role": "runner"}, headers=any_version).status_code == 200
    for answer in (
        client.delete(one.place("ours")),
        client.patch(one.place("ours"), json={"role": "viewer"}, headers=any_version),
        one.browser.delete(one.place("ours")),
    ):
        assert (answer.status_code, answer.json()["type"]) == (409, "/problems/last-admin")
    assert client.patch(one.place("ours"), json={"role": "viewer"}).status_code == 428
    assert client.post(place, json={"email": "a@example.com"}).json()["type"] == "/problems/name-taken"
    assert client.patch(other.place("ours"), json={"role": "admin"}, headers=any_version).status_code == 200
    assert client.delete(one.place("ours")).status_code == 204


def test_nothing_tells_of_other_projects(site: Site) -> None:
    """Whether a person is known elsewhere shows in nothing that a project's admin sees."""
    known = Person(site, "known@example.com", theirs=AccessRole.ADMIN)
    admin = site.member(AccessRole.ADMIN)
    place = f"/v1/projects/{site.projects['ours']}/members"
    made = [admin.post(place, json={"email": f"{name}@example.com"}).json() for name in ("known", "new")]
    for one in made:
        del one["id"], one["created_at"], one["email"]
    assert made[0] == made[1]
    assert known.user not in admin.get(place).text
    assert admin.get(known.place("theirs")).status_code == 404
    assert admin.get(f"{place}/{known.members['theirs']}").status_code == 404
    assert admin.delete(f"{place}/{known.members['theirs']}").status_code == 404
    mine = Person(site, "mine@example.com", ours=AccessRole.ADMIN)
    for project in ("theirs", site.projects["theirs"], "nowhere"):
        assert mine.browser.put("/v1/session", json={"project": project}).status_code == 404
    assert [one["project_name"] for one in mine.browser.get("/v1/me").json()["memberships"]] == ["ours"]


def test_keys_of_projects_are_no_person(site: Site) -> None:
    client = site.member(AccessRole.ADMIN)
    for answer in (
        client.post("/v1/me/keys", json={"name": "k"}),
        client.get("/v1/me/keys"),
        client.put("/v1/session", json={"project": "ours"}),
    ):
        assert (answer.status_code, answer.json()["type"]) == (409, "/problems/not-a-person")


def test_a_secret_may_be_somebody_elses_and_is_never_sent(site: Site) -> None:
    """The command line makes it, and a browser that has signed in lets it in."""
    import hashlib

    person, secret = Person(site, "ada@example.com", ours=AccessRole.RUNNER), "elastic_made-by-a-terminal"
    body = {"name": "terminal", "sha256": hashlib.sha256(secret.encode()).hexdigest()}
    assert site.client(secret).get("/v1/me").status_code == 401
    made = person.browser.post("/v1/me/keys", json=body)
    assert made.json()["secret"] is None
    assert site.client(secret).get("/v1/me").json()["member"] == person.members["ours"]
    assert person.browser.post("/v1/me/keys", json=body).status_code == 409
    assert person.browser.delete(f"/v1/me/keys/{made.json()['id']}").status_code == 204
    assert site.client(secret).get("/v1/me").status_code == 401


@pytest.mark.parametrize("email", ["", "a", "a@", "@b.c", "a b@c.d", "a@b\n", "x" * 300 + "@b.c", "a\0@b.c"])
def test_what_is_no_address_is_refused(shared_site: Site, email: str) -> None:
    place = f"/v1/projects/{shared_site.projects['ours']}/members"
    assert shared_site.client().post(place, json={"email": email}).status_code == 400


def test_who_signs_in_is_who_was_meant(site: Site) -> None:
    """By what the issuer calls them; an address counts once, for who signs in with it first."""
    with site.store.writing() as tx:
        invited = members.person_of_email(tx, "a@example.com")
        first = members.person_of_sign_in(tx, issuer="i", subject="1", email="a@example.com", name="A")
        moved = members.person_of_sign_in(tx, issuer="i", subject="1", email="b@example.com", name="A")
        heir = members.person_of_sign_in(tx, issuer="i", subject="2", email="b@example.com", name="B")
        same = members.person_of_sign_in(tx, issuer="j", subject="1", email=None, name="")
        again = members.person_of_sign_in(tx, issuer="i", subject="2", email=None, name="B")
    assert invited == first == moved
    assert len({first, heir, same}) == 3
    assert again == heir
