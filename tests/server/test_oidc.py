"""Sign-in with an identity provider: whoever is let in is who the issuer says, in the browser that asked, once."""

import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest
import sqlalchemy as sa
from joserfc.jwk import ECKey, RSAKey

from elastic.cli import login
from elastic.cli.account import account, account_path
from elastic.protocol.api import AccessRole
from elastic.server.api.app import create_app
from elastic.server.api.auth import COOKIE as SESSION
from elastic.server.api.auth import CSRF_HEADER
from elastic.server.api.routes.sign_in import COOKIE
from elastic.server.identity import oidc
from elastic.server.identity.oidc import IdentityProvider, SignedIn, mapped_roles
from elastic.server.identity.sign_ins import SignInChecks
from elastic.server.settings import ClaimMapping, OidcSettings
from elastic.server.store.database import now_us
from elastic.server.store.tables import refresh_tokens, sessions, users
from elastic.system.host import Host, on
from tests.server.conftest import Site, served
from tests.server.issuer import CLIENT_ID, CLIENT_SECRET, Issuer, serving_issuer

MAPPINGS = (
    ClaimMapping(claim="email", value="*@example.com", project="ours", role=AccessRole.VIEWER),
    ClaimMapping(claim="groups", value="rl", project="ours", role=AccessRole.RUNNER),
    ClaimMapping(claim="groups", value="rl", project="nowhere", role=AccessRole.ADMIN),
)


@pytest.fixture
def issuer() -> Iterator[Issuer]:
    with serving_issuer() as made:
        yield made


@pytest.fixture
def people(site: Site, issuer: Issuer) -> Site:
    """A server whose people sign in with the issuer."""
    settings = OidcSettings(
        issuer=issuer.url, client_id=CLIENT_ID, client_secret=CLIENT_SECRET, name="Tests", mappings=MAPPINGS
    )
    site.settings = replace(site.settings, oidc=settings)
    site.app = create_app(site.store, site.settings)
    return site


def browser(site: Site) -> Any:
    made = site.client()
    del made.headers["authorization"]
    made.follow_redirects = False
    return made


def to_issuer(client: Any, next_: str = "") -> str:
    """Begin; returns where the issuer sends the browser back to."""
    away = client.get("/v1/session/oidc", params={"next": next_})
    assert away.status_code == 303, away.text
    back = httpx.get(away.headers["location"])
    assert back.status_code == 302, back.text
    return back.headers["location"]


def sign_in(site: Site, next_: str = "") -> tuple[Any, Any]:
    client = browser(site)
    return client, client.get(to_issuer(client, next_))


def sessions_of(site: Site) -> int:
    with site.store.reading() as connection:
        return connection.execute(sa.select(sa.func.count()).select_from(sessions)).scalar_one()


def test_a_person_signs_in(people: Site, issuer: Issuer) -> None:
    issuer.claims = {"groups": ["x", "rl"]}
    client, back = sign_in(people, "/login/abc")
    assert (back.status_code, back.headers["location"]) == (303, "/#/login/abc")
    session, gone = back.headers.get_list("set-cookie")
    assert all(word in session.lower() for word in (SESSION, "httponly", "samesite=strict", "path=/"))
    assert re.match(rf'{COOKIE}="?"?;.*max-age=0', gone, re.IGNORECASE)
    me = client.get("/v1/me").json()
    assert (me["name"], me["role"], me["project"], me["key"]) == (
        "ada@example.com",
        "runner",
        people.projects["ours"],
        None,
    )
    assert client.post("/v1/me/keys", json={"name": "k"}).status_code == 403
    made = client.post("/v1/me/keys", json={"name": "k"}, headers={CSRF_HEADER: me["csrf_token"]})
    assert made.status_code == 201
    assert client.get("/v1").json()["sign_in"] == "Tests"


def test_what_the_browser_carries_meanwhile(people: Site, issuer: Issuer) -> None:
    client = browser(people)
    away = client.get("/v1/session/oidc")
    said = away.headers["set-cookie"].lower()
    assert all(word in said for word in ("httponly", "samesite=lax", "path=/v1/session/oidc"))
    query = parse_qs(urlsplit(away.headers["location"]).query)
    assert query["code_challenge_method"] == ["S256"]
    for secret in (query["state"][0], query["nonce"][0], CLIENT_SECRET):
        assert secret not in said
    assert CLIENT_SECRET not in repr(people.settings)
    for elsewhere in ("//evil.example", "/\\evil.example", "?x", "#", "javascript:alert(1)", "a b", "é", "x" * 300):
        assert client.get("/v1/session/oidc", params={"next": elsewhere}).status_code in (303, 400)
        if (answer := client.get("/v1/session/oidc", params={"next": elsewhere})).status_code == 303:
            back = client.get(httpx.get(answer.headers["location"]).headers["location"])
            assert back.headers["location"].startswith("/#"), elsewhere


WRONG: dict[str, Callable[[Issuer], Any]] = {
    "issuer": lambda one: one.claims.update(iss="https://evil.example"),
    "no issuer": lambda one: one.claims.update(iss=None),
    "audience": lambda one: one.claims.update(aud="somebody else"),
    "no audience": lambda one: one.claims.update(aud=None),
    "several audiences": lambda one: one.claims.update(aud=[CLIENT_ID, "another"]),
    "another party": lambda one: one.claims.update(aud=[CLIENT_ID, "another"], azp="another"),
    "expired": lambda one: one.claims.update(exp=int(time.time()) - 61),
    "no expiry": lambda one: one.claims.update(exp=None),
    "expiry that never is": lambda one: one.claims.update(exp="never"),
    "from the future": lambda one: one.claims.update(iat=int(time.time()) + 120),
    "not yet": lambda one: one.claims.update(nbf=int(time.time()) + 120),
    "nonce of another": lambda one: one.claims.update(nonce="another"),
    "no nonce": lambda one: one.claims.update(nonce=None),
    "no subject": lambda one: one.claims.update(sub=None),
    "subject": lambda one: one.claims.update(sub=["ada"]),
    "long subject": lambda one: one.claims.update(sub="a" * 300),
    "unsigned": lambda one: setattr(one, "algorithm", "none"),
    "public key for a shared secret": lambda one: setattr(one, "algorithm", "HS256"),
    "key of another": lambda one: setattr(one, "sign_with", RSAKey.generate_key(2048)),
    "kind of key": lambda one: (setattr(one, "algorithm", "ES256"), setattr(one, "sign_with", ECKey.generate_key())),
}


def test_no_other_token_lets_anybody_in(people: Site, issuer: Issuer) -> None:
    """Each way in which a token can be wrong, by a whole sign-in."""
    for what, wrong in WRONG.items():
        issuer.claims, issuer.algorithm, issuer.sign_with = {}, "RS256", None
        wrong(issuer)
        client, back = sign_in(people)
        assert (back.status_code, back.json()["type"]) == (403, "/problems/sign-in-refused"), (what, back.text)
        assert client.get("/v1/me").status_code == 401, what
    assert sessions_of(people) == 0


def test_clocks_may_be_a_little_apart(people: Site, issuer: Issuer) -> None:
    for apart in (-50, 50):
        now = int(time.time()) + apart
        issuer.claims = {"iat": now, "nbf": now, "exp": now + 1 if apart < 0 else now + 300}
        assert sign_in(people)[1].status_code == 303
    issuer.claims = {"aud": [CLIENT_ID, "another"], "azp": CLIENT_ID}
    assert sign_in(people)[1].status_code == 303


def test_keys_change(people: Site, issuer: Issuer) -> None:
    """Whole sign-ins before and after the issuer has other keys."""
    now_s = 0.0
    with on(Host(monotonic=lambda: now_s)):
        for _ in range(3):
            assert sign_in(people)[1].status_code == 303
            issuer.rotate()
            now_s += oidc.JWKS_AGAIN_S + 1
        assert sign_in(people)[1].status_code == 303
        issuer.rotate()
        assert sign_in(people)[1].status_code == 403, "nobody makes this server ask again and again"
        fetched = issuer.asked.count("/keys")
        assert sign_in(people)[1].status_code == 403
    assert issuer.asked.count("/keys") == fetched
    assert issuer.asked.count("/.well-known/openid-configuration") == 1


def test_a_sign_in_ends_once_in_the_browser_that_began_it(people: Site, issuer: Issuer) -> None:
    victim, attacker = browser(people), browser(people)
    place = to_issuer(attacker)
    for client in (victim, browser(people)):
        answer = client.get(place)
        assert (answer.status_code, answer.json()["type"]) == (403, "/problems/sign-in-refused")
    to_issuer(victim)
    assert victim.get(place).status_code == 403, "a state of another browser's"
    other = to_issuer(attacker)
    assert attacker.get(place).status_code == 403, "a state of a sign-in before"
    kept = dict(attacker.cookies)
    assert attacker.get(other).status_code == 403, "what came to nothing is over"
    attacker.cookies.update(kept)
    finished = to_issuer(attacker)
    kept = dict(attacker.cookies)
    assert attacker.get(finished).status_code == 303
    attacker.cookies.update(kept)
    again = finished.replace(parse_qs(urlsplit(finished).query)["code"][0], "another-code")
    assert attacker.get(again).status_code == 403
    assert sessions_of(people) == 1


def test_a_nonce_counts_once(people: Site, issuer: Issuer) -> None:
    """Although the issuer would let the same sign-in be finished twice."""
    client = browser(people)
    away = client.get("/v1/session/oidc").headers["location"]
    cookies = dict(client.cookies)
    first, second = (httpx.get(away).headers["location"] for _ in range(2))
    assert client.get(first).status_code == 303
    for name, value in cookies.items():
        client.cookies.set(name, value, path="/v1/session/oidc")
    assert client.get(second).status_code == 403
    assert sessions_of(people) == 1


@pytest.mark.parametrize("query", ["", "error=access_denied", "code=x", "state=x", "code=&state=", "error=<b>"])
def test_answers_that_are_none(people: Site, query: str) -> None:
    client = browser(people)
    to_issuer(client)
    answer = client.get(f"/v1/session/oidc/callback?{query}")
    assert (answer.status_code, answer.json()["type"]) == (403, "/problems/sign-in-refused")
    assert "<b>" not in answer.text
    said = browser(people).get("/v1/session/oidc/callback?code=x", headers={"accept": "text/html"})
    assert said.headers["location"] == "/#/refused/sign-in-refused"


def test_an_issuer_that_is_down(people: Site, issuer: Issuer) -> None:
    client, _ = sign_in(people)
    place, other = to_issuer(client), browser(people)
    issuer.broken = True
    down = client.get(place)
    assert (down.status_code, down.json()["type"]) == (503, "/problems/issuer-unavailable")
    assert client.get("/v1/me").status_code == 200, "sessions go on"
    fresh = people.client()
    people.app = create_app(people.store, people.settings)
    for accept, status in (("*/*", 503), ("text/html", 303)):
        answer = browser(people).get("/v1/session/oidc", headers={"accept": accept})
        assert answer.status_code == status
    assert fresh.get("/v1/me").status_code == 200, "keys sign in"
    issuer.broken = False
    assert other.get(to_issuer(other)).status_code == 303


def test_one_who_says_to_be_another_issuer(people: Site, issuer: Issuer) -> None:
    settings = people.settings.oidc
    assert settings is not None
    people.app = create_app(
        people.store,
        replace(people.settings, oidc=replace(settings, issuer=issuer.url.replace("127.0.0.1", "localhost"))),
    )
    assert browser(people).get("/v1/session/oidc").status_code == 503


def test_who_is_a_member_of_nothing(people: Site, issuer: Issuer) -> None:
    issuer.email, issuer.claims = "eve@elsewhere.example", {}
    client, back = sign_in(people)
    assert (back.status_code, back.json()["type"]) == (403, "/problems/no-membership")
    assert client.get("/v1/me").status_code == 401
    admin = people.member(AccessRole.ADMIN, "theirs")
    place = f"/v1/projects/{people.projects['theirs']}/members"
    assert admin.post(place, json={"email": "eve@elsewhere.example", "role": "viewer"}).status_code == 201
    client, back = sign_in(people)
    assert client.get("/v1/me").json()["project"] == people.projects["theirs"]


def test_an_address_that_nobody_verified_is_nobodys(people: Site, issuer: Issuer) -> None:
    admin = people.member(AccessRole.ADMIN)
    place = f"/v1/projects/{people.projects['ours']}/members"
    assert admin.post(place, json={"email": "ada@example.com", "role": "admin"}).status_code == 201
    for unverified in (False, None, "true", 1):
        issuer.claims = {"email_verified": unverified}
        assert sign_in(people)[1].status_code == 403, unverified


def test_claims_give_and_take(people: Site, issuer: Issuer) -> None:
    issuer.claims = {"groups": ["rl"]}
    client, _ = sign_in(people)
    me = client.get("/v1/me").json()
    key = client.post("/v1/me/keys", json={"name": "k"}, headers={CSRF_HEADER: me["csrf_token"]}).json()["secret"]
    assert people.client(key).get("/v1/me").json()["role"] == "runner"
    issuer.claims = {"groups": "other"}
    assert sign_in(people)[0].get("/v1/me").json()["role"] == "viewer"
    assert people.client(key).get("/v1/me").json()["role"] == "viewer"
    issuer.claims = {"groups": [], "email": None, "email_verified": None}
    assert sign_in(people)[1].status_code == 403
    assert people.client(key).get("/v1/me").status_code == 401
    assert client.get("/v1/me").status_code == 401


def looked_at(people: Site, recheck_s: float = 0.0) -> None:
    """The server looks again at whoever has signed in."""
    settings = people.settings.oidc
    assert settings is not None
    provider = IdentityProvider(replace(settings, recheck_s=recheck_s))
    SignInChecks(people.store, people.settings, provider).look()


def test_what_the_issuer_said_holds_for_so_long(people: Site, issuer: Issuer) -> None:
    """Without a refresh token: then sessions end, and keys rest until the next sign-in."""
    client, _ = sign_in(people)
    token = client.get("/v1/me").json()["csrf_token"]
    key = client.post("/v1/me/keys", json={"name": "k"}, headers={CSRF_HEADER: token}).json()["secret"]
    by_key = browser(people)
    by_key.post("/v1/session", headers={"authorization": f"Bearer {key}"})
    looked_at(people)
    assert issuer.asked.count("/token") == 1, "there is nothing to ask by"
    with people.store.writing() as tx:
        tx.execute(sa.update(users).values(vouched_until_us=now_us() - 1))
    program = people.member(AccessRole.VIEWER)
    assert [one.get("/v1/me").status_code for one in (client, people.client(key), by_key, program)] == [401] * 3 + [200]
    sign_in(people)
    assert [one.get("/v1/me").status_code for one in (people.client(key), by_key, program)] == [200] * 3
    with people.store.reading() as connection:
        until_us = connection.execute(sa.select(users.c.vouched_until_us)).scalar_one()
    assert 23.9 * 3600e6 < until_us - now_us() <= 24 * 3600e6


def test_the_issuer_is_asked_again(people: Site, issuer: Issuer) -> None:
    """What claims give they take while somebody stays; each refresh token is used once, and lies encrypted."""
    issuer.refreshes, issuer.claims = True, {"groups": ["rl"]}
    client, _ = sign_in(people)
    me = client.get("/v1/me").json()
    key = client.post("/v1/me/keys", json={"name": "k"}, headers={CSRF_HEADER: me["csrf_token"]}).json()["secret"]
    looked_at(people, recheck_s=60.0)
    assert len(issuer.refresh_tokens) == 1, "not yet"
    with people.store.writing() as tx:
        tx.execute(sa.update(users).values(vouched_until_us=now_us() - 1))
    issuer.claims = {}
    looked_at(people)
    assert people.client(key).get("/v1/me").json()["role"] == client.get("/v1/me").json()["role"] == "viewer"
    for _ in range(3):
        looked_at(people)
    assert len(issuer.refresh_tokens) == 5
    with people.store.reading() as connection:
        (sealed,) = connection.execute(sa.select(refresh_tokens.c.sealed)).scalars()
    assert issuer.refresh_tokens[-1].encode() not in sealed


@pytest.mark.parametrize("groups", [[], None])
def test_who_is_in_no_group_any_more_is_out(people: Site, issuer: Issuer, groups: list[str] | None) -> None:
    issuer.refreshes, issuer.email, issuer.claims = True, "ada@elsewhere.example", {"groups": ["rl"]}
    client, _ = sign_in(people)
    assert client.get("/v1/me").json()["role"] == "runner"
    issuer.claims = {"groups": groups}
    looked_at(people)
    assert client.get("/v1/me").status_code == 401


def test_who_is_removed_at_the_issuer_is_out(people: Site, issuer: Issuer) -> None:
    """Although an admin has made them a member; an issuer that is down, or broken, removes nobody."""
    issuer.refreshes = True
    client, _ = sign_in(people)
    me = client.get("/v1/me").json()
    key = client.post("/v1/me/keys", json={"name": "k"}, headers={CSRF_HEADER: me["csrf_token"]}).json()["secret"]
    admin = people.member(AccessRole.ADMIN)
    place = f"/v1/projects/{people.projects['ours']}/members/{me['member']}"
    etag = admin.get(place).headers["etag"]
    assert admin.patch(place, json={"role": "runner"}, headers={"if-match": etag}).status_code == 200
    issuer.broken = True
    looked_at(people)
    issuer.broken = False
    for refused in ({"error": "invalid_client"}, {"error": "temporarily_unavailable"}, {}):
        issuer.refused = refused
        looked_at(people)
    issuer.refused, issuer.subject = None, "eve"
    looked_at(people)
    issuer.subject = "ada"
    assert [one.get("/v1/me").status_code for one in (client, people.client(key))] == [200, 200]
    issuer.refused = {"error": "invalid_grant"}
    looked_at(people)
    assert [one.get("/v1/me").status_code for one in (client, people.client(key))] == [401, 401]
    assert sessions_of(people) == 0
    noted = people.client().get("/v1/audit", params={"limit": 1}).json()["data"]
    assert (noted[0]["actor"], noted[0]["status"]) == ("identity provider", 403)
    asked = issuer.asked.count("/token")
    looked_at(people)
    assert issuer.asked.count("/token") == asked
    issuer.refused = None
    again, _ = sign_in(people)
    assert [one.get("/v1/me").json()["role"] for one in (again, people.client(key))] == ["runner", "viewer"]


def test_two_servers_ask_once(people: Site, issuer: Issuer) -> None:
    issuer.refreshes = True
    client, _ = sign_in(people)
    with people.store.writing() as tx:
        tx.execute(sa.update(refresh_tokens).values(checked_us=0))
    both = [threading.Thread(target=looked_at, args=(people, 60.0)) for _ in range(2)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join(30)
    assert len(issuer.refresh_tokens) == 2
    assert client.get("/v1/me").status_code == 200


def test_the_highest_role_counts() -> None:
    def role(**claims: Any) -> dict[str, AccessRole]:
        return mapped_roles(MAPPINGS, SignedIn("s", claims.pop("email", None), "", claims))

    assert role() == role(groups=None) == role(groups=[1, {}]) == role(groups={"rl": 1}) == {}
    assert role(email="a@example.com") == {"ours": "viewer"}
    assert role(email="a@evil.example.com.evil") == {}
    assert role(email="a@example.com", groups="rl") == role(groups=["rl"]) == {"ours": "runner", "nowhere": "admin"}


def test_a_terminal_logs_in_by_a_page(
    people: Site,
    issuer: Issuer,
    tmp_path: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The secret stays in the terminal; the page is told its hash, and a person says yes."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("ELASTIC_API_KEY", raising=False)
    said: list[str] = []

    def log_in(address: str) -> None:
        with on(Host(sleep=lambda _: time.sleep(0.01))):
            login.login(address)

    with served(people.app) as address:
        terminal = threading.Thread(target=log_in, args=(address,))
        terminal.start()
        ends_s = time.monotonic() + 30
        while len(said) < 2:
            assert time.monotonic() < ends_s
            time.sleep(0.01)
            said += capsys.readouterr().err.splitlines()
        found = re.fullmatch(r"open (\S+)/#/login/([0-9a-f]{64})/(\S+)", said[0])
        assert found is not None
        assert found[1] == address
        assert login.code_of(found[2]) in said[1]
        assert not account_path().exists()
        client, _ = sign_in(people)
        token = client.get("/v1/me").json()["csrf_token"]
        body = {"name": found[3], "sha256": found[2]}
        assert client.post("/v1/me/keys", json=body, headers={CSRF_HEADER: token}).status_code == 201
        terminal.join(30)
    assert not terminal.is_alive()
    assert account_path().stat().st_mode & 0o777 == 0o600
    kept = account()
    assert kept.key not in str(said)
    assert people.client(kept.key).get("/v1/me").json()["member"] == client.get("/v1/me").json()["member"]
