"""The support bundle: what helps is in it, and no secret is, wherever one stands."""

import json
import os
import tarfile
from pathlib import Path

import pytest
import sqlalchemy as sa
from hypothesis import given
from hypothesis import strategies as st

from elastic.protocol.api import RunPhase
from elastic.server.settings import ServerSettings
from elastic.server.store.tables import runs
from elastic.server.store.vault import KEY_FILE
from elastic.server.support.bundle import write_bundle
from elastic.server.support.redaction import REMOVED, Redaction
from tests.server.conftest import Site, Submission

PLANTED = {
    "variable": "planted-in-a-variable",
    "secret": 'planted in a "secret" \\ of a project',
    "label": "planted-in-a-label",
    "config": "planted-in-a-configuration",
    "url": "planted-in-a-url",
    "header": "planted.in.a.header",
    "cookie": "planted-in-a-cookie",
    "setting": "planted-in-a-setting",
    "quoted": "planted in quotes, with a comma",
    "cause": "planted-in-a-cause",
    "file": "planted-in-a-file",
    "vendors": "as-Planted9InCredentials",
}


def content_of(bundle: Path) -> dict[str, str]:
    with tarfile.open(bundle) as opened:
        files = {member.name: opened.extractfile(member) for member in opened.getmembers()}
        return {name.removeprefix("elastic-support/"): file.read().decode() for name, file in files.items() if file}


def log_of(site: Site) -> str:
    lines = [
        f"fetching https://user:{PLANTED['url']}@example.com/x",
        f"authorization: Bearer {PLANTED['header']}",
        f"cookie: elastic_session={PLANTED['cookie']}; other={PLANTED['cookie']}",
        f"hub_token={PLANTED['setting']} and --api-key: {PLANTED['setting']}",
        json.dumps({"event": f'password="{PLANTED["quoted"]}"', "secret": PLANTED["quoted"]}),
        json.dumps({"environment": {"HF_TOKEN": PLANTED["secret"]}, "said": PLANTED["variable"]}),
        f"the key {site.admin} was shown",
        f"{PLANTED['vendors']} is refused in main",
        "-----BEGIN PRIVATE KEY-----\n" + PLANTED["file"] + "\n-----END PRIVATE KEY-----",
        "step 1/100 took 3 s, 512 tokens=512",
    ]
    return "\n".join(lines) + "\n"


def test_no_secret_is_in_it(
    site: Site,
    submission: Submission,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SOME_VENDORS_TOKEN", PLANTED["variable"])
    client = site.client()
    body = submission(labels={"note": PLANTED["label"]}, project="ours")
    run = client.post("/v1/runs", json=body).json()["id"]
    place = f"/v1/projects/{site.projects['ours']}/secrets/SECRET_HUB"
    assert client.put(place, json={"value": PLANTED["secret"]}).status_code == 200
    hook = {"url": f"https://example.com/{PLANTED['url']}", "events": ["run.failed"], "project": "ours"}
    signing = client.post("/v1/webhooks", json=hook).json()["secret"]
    vendors = {"token_id": PLANTED["vendors"].replace("as-", "ak-"), "token_secret": PLANTED["vendors"]}
    place = f"/v1/projects/{site.projects['ours']}/credentials/modal"
    assert client.put(place, json=vendors | {"environment": "main"}).status_code == 200
    cookie = client.post("/v1/session").cookies["elastic_session"]
    with site.store.writing() as tx:
        failed = {"phase": RunPhase.FAILED.value, "cause": f"exit 1: hub_token={PLANTED['cause']}"}
        tx.execute(sa.update(runs).values(**failed, config=json.dumps({"x": {"note": PLANTED["config"]}})))
    logs = site.settings.run_dir(run) / "logs"
    logs.mkdir(parents=True)
    (logs / "process.log").write_text(log_of(site))
    (site.settings.run_dir(run) / "secret").write_text(PLANTED["file"])
    server_log = tmp_path / "server.log"
    server_log.write_text(log_of(site) + f"signed by {signing}, for {cookie}\n")
    bundle = tmp_path / "bundle.tar.gz"
    assert write_bundle(bundle, site.settings, [{"what": "python", "ok": True}], [server_log]) == []
    assert bundle.stat().st_mode & 0o077 == 0
    content = content_of(bundle)
    whole = "\n".join(content.values())
    vault_key = (site.settings.home / KEY_FILE).read_text().strip()
    for what, secret in {
        **PLANTED,
        "key": site.admin,
        "signing": signing,
        "session": cookie,
        "vault": vault_key,
    }.items():
        for form in (secret, json.dumps(secret)[1:-1]):
            assert form not in whole, what
    for key in site.keys.values():
        assert key not in whole
    told = {name: json.loads(text) for name, text in content.items() if name.endswith(".json")}
    assert told["store.json"]["revision"] == told["store.json"]["revision_of_this_version"]
    assert told["health.json"]["database"] == "answers"
    assert told["versions.json"]["packages"]["elastic-rl"]
    (shown,) = told["runs.json"]
    assert (shown["id"], shown["phase"]) == (run, "failed")
    assert shown["conditions"][0]["type"] == "Accepted"
    assert "step 1/100 took 3 s, 512 tokens=512" in content[f"runs/{run}/process.log"]
    assert content["logs/server.log"].count(REMOVED) >= 8


def test_a_server_that_is_broken_has_one_too(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / KEY_FILE).write_text("no key at all")
    password = "planted-in-the-database"
    nobody = f"postgresql://user:{password}@127.0.0.1:1/elastic?connect_timeout=1"
    for database in (nobody, ""):
        settings = ServerSettings(home=home, database=database)
        missing = write_bundle(tmp_path / "bundle", settings, [], [tmp_path / "no.log"])
        content = content_of(tmp_path / "bundle")
        assert "no.log" in " ".join(missing)
        assert password not in "".join(content.values())
        assert json.loads(content["health.json"])["database"] != "answers"
        assert content["missing.txt"]
    assert os.listdir(home) == [KEY_FILE], "nothing is made where nothing was"


@given(secret=st.text(min_size=4, max_size=30), around=st.text(max_size=20))
def test_what_is_known_is_removed_in_every_form(secret: str, around: str) -> None:
    redaction = Redaction([secret])
    if secret in REMOVED or secret in around:
        return
    for form in (secret, json.dumps(secret)[1:-1]):
        told = redaction.text(f"{around} {form} {around}")
        assert secret.strip() in around + REMOVED or form not in told


@pytest.mark.parametrize(
    ("text", "secrets"),
    [
        ("postgresql://elastic:p@ss/w0rd@db", ("p@ss", "w0rd", "ss/w")),
        ("postgresql+psycopg://elastic:p@ss/w0rd@db/x?y=1 was refused", ("ss/w0rd",)),
        ('{"token": ["aaa-bbb-ccc", "ddd"]}', ("aaa-bbb-ccc", "ddd")),
        (json.dumps({"event": json.dumps({"tokens_and": 1, "api_key": [["one"], ["two"]]})}), ("one", "two")),
        ("password: correct horse battery staple", ("correct", "horse", "staple")),
        ("PASSWORD=correct horse, and so on", ("correct", "horse")),
        ("passphrase = correct horse", ("horse",)),
        ("token: {'a': 'secretvalue', 'b': {'c': 'deeper'}}", ("secretvalue", "deeper")),
        (json.dumps({"event": json.dumps({"secrets": {"HF": "aaa-bbb"}})}), ("aaa-bbb",)),
        ("tokens: ['aaa-bbb']", ("aaa-bbb",)),
        ("DATABASE_URL=postgres://u:p ss@h/db", ("p ss", "ss@")),
        ("postgresql://u:p'w@h/db", ("p'w",)),
        ("it dialled user:pass@host:5432/db", ("pass",)),
        ("to https://hooks.slack.com/services/T0/B0/xyz", ("xyz",)),
    ],
)
def test_what_looks_like_a_secret_goes_whole(text: str, secrets: tuple[str, ...]) -> None:
    shown = Redaction([]).text(f"before {text}\nafter 512 tokens=512")
    assert not [one for one in secrets if one in shown], shown
    assert shown.startswith("before ")
    assert shown.endswith("after 512 tokens=512")
