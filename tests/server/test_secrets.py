"""Secrets of projects: in the environment of the project's runs, and nowhere else."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from hypothesis import given
from hypothesis import strategies as st

from elastic.protocol.api import AccessRole, RunPhase
from elastic.server.runner import RunnerLoop
from elastic.server.store.tables import secrets
from elastic.server.store.vault import KEY_FILE, Vault, VaultError
from elastic.server.vendors import WELL_KNOWN, WITHOUT_FILES, environment_of, may_name
from tests.server.conftest import Site, Submission

VALUE = "s3cr3t-of-ours"
SHOWS_ITS_ENVIRONMENT = """
import json, os, sys
path = sys.argv[sys.argv.index("--resume") + 1]
given = json.load(open(path + "/config.json"))
open(path + "/seen.json", "w").write(json.dumps([sys.argv, given, dict(os.environ)]))
"""


def place(site: Site, name: str, project: str = "ours") -> str:
    return f"/v1/projects/{site.projects[project]}/secrets/{name}"


async def test_runs_of_the_project_have_it_and_nothing_else_does(site: Site, submission: Submission) -> None:
    client = site.client()
    for project, value in (("ours", "old"), ("ours", VALUE), ("theirs", "of-theirs")):
        assert client.put(place(site, "HF_TOKEN", project), json={"value": value}).status_code == 200
    run = client.post("/v1/runs", json=submission(project="ours")).json()["id"]
    settings = replace(site.settings, command=(sys.executable, "-c", SHOWS_ITS_ENVIRONMENT))
    loop, seen = RunnerLoop(site.store, settings), settings.run_dir(run) / "seen.json"
    while client.get(f"/v1/runs/{run}").json()["phase"] != RunPhase.FINISHED:
        await loop.tick()
    command, given, environment = json.loads(seen.read_text())
    assert environment["HF_TOKEN"] == VALUE
    assert VALUE not in str((command, given))
    assert given["run"]["pass_env"] == sorted(["HF_TOKEN", *WITHOUT_FILES])
    seen.unlink()
    for path in settings.home.rglob("*"):
        assert not path.is_file() or VALUE.encode() not in path.read_bytes(), path
    for path in ("/v1/audit", place(site, ""), f"/v1/runs/{run}", f"/v1/runs/{run}/logs?follow=false"):
        assert VALUE not in client.get(path.rstrip("/")).text


@pytest.mark.parametrize(
    "name",
    [
        *("PATH", "LD_PRELOAD", "PYTHONPATH", "HTTPS_PROXY", "ELASTIC_SERVED", "CUDA_HOME", "NO-NAME", "lower", "A\0"),
        *("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE", "AWS_ACCESS_KEY_ID", "MODAL_CONFIG_PATH", "SSLKEYLOGFILE"),
        *("NVTX_INJECTION64_PATH", "INTEL_LIBITTNOTIFY64", "HSA_TOOLS_LIB", "SECRET_", "SECRETS", "A_SECRET_B", "aws"),
    ],
)
def test_only_names_of_the_projects_own_and_well_known_ones_are_allowed(shared_site: Site, name: str) -> None:
    answer = shared_site.client().put(place(shared_site, name.replace("\0", "%00")), json={"value": VALUE})
    assert answer.status_code == 400
    assert VALUE not in answer.text


@pytest.mark.parametrize("value", ["", "x" * 40_000, "a\0b", None, ["s3cr3t-of-ours"]])
def test_what_no_variable_can_have_is_refused_and_not_told(shared_site: Site, value: Any) -> None:
    answer = shared_site.client().put(place(shared_site, "SECRET_A"), json={"value": value})
    assert answer.status_code == 400
    assert VALUE not in answer.text


def test_who_has_the_database_alone_has_no_secret(shared_site: Site, tmp_path: Path) -> None:
    client = shared_site.member(AccessRole.ADMIN)
    assert client.put(place(shared_site, "SECRET_B"), json={"value": VALUE}).status_code == 200
    assert client.delete(place(shared_site, "SECRET_C")).status_code == 404
    with shared_site.store.reading() as connection:
        sealed = [bytes(row) for row in connection.execute(sa.select(secrets.c.sealed)).scalars()]
    assert all(VALUE.encode() not in one for one in sealed)
    Vault(tmp_path).sealed("another's")
    with pytest.raises(VaultError):
        Vault(tmp_path).opened(sealed[0])
    with pytest.raises(VaultError):
        Vault(tmp_path / "nowhere").opened(sealed[0])
    assert (shared_site.settings.home / KEY_FILE).stat().st_mode & 0o777 == 0o600


def test_a_repetition_is_told_from_another_value(shared_site: Site) -> None:
    """Although no record of what was asked has the value."""
    client, headers = shared_site.client(), {"idempotency-key": "k"}
    asked = [client.put(place(shared_site, "SECRET_D"), json={"value": one}, headers=headers) for one in "aab"]
    assert [one.status_code for one in asked] == [200, 200, 422]
    assert asked[1].headers["idempotent-replayed"] == "true"
    assert asked[1].text == asked[0].text


AWS = {"access_key_id": "AKIAIOSFODNN7EXAMPLE", "secret_access_key": "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"}
MODAL = {"token_id": "ak-abc", "token_secret": "as-def", "environment": "main"}


def credentials(site: Site, vendor: str) -> str:
    return f"/v1/projects/{site.projects['ours']}/credentials/{vendor}"


def test_vendors_credentials_are_kept_and_not_told(shared_site: Site) -> None:
    client = shared_site.member(AccessRole.ADMIN)
    for vendor, fields in (("aws", AWS), ("modal", MODAL)):
        answer = client.put(credentials(shared_site, vendor), json=fields)
        assert (answer.status_code, answer.json()["id"]) == (200, vendor)
    listed = client.get(credentials(shared_site, "").rstrip("/"))
    assert [one["id"] for one in listed.json()["data"]] == ["aws", "modal"]
    secret_names = {one["id"] for one in client.get(place(shared_site, "").rstrip("/")).json()["data"]}
    assert not secret_names & {"aws", "modal"}
    assert not any(value in listed.text for value in (*AWS.values(), *MODAL.values()))
    assert client.delete(credentials(shared_site, "aws")).status_code == 204
    assert client.delete(credentials(shared_site, "aws")).status_code == 404
    assert client.delete(credentials(shared_site, "HF_TOKEN")).status_code == 404
    for key in (shared_site.key("ours", AccessRole.RUNNER), shared_site.key("theirs", AccessRole.ADMIN)):
        assert shared_site.client(key).put(credentials(shared_site, "aws"), json=AWS).status_code in (403, 404)


@pytest.mark.parametrize(
    ("vendor", "fields"),
    [
        ("aws", {**AWS, "access_key_id": "a\nb"}),
        ("aws", {**AWS, "secret_access_key": "with a space in it, and more"}),
        ("aws", {**AWS, "session_token": "[profile x]\ncredential_process = sh"}),
        ("aws", {**AWS, "region": "../x"}),
        ("aws", {**AWS, "config_file": "/x"}),
        ("modal", {"token_id": "ak-abc"}),
        ("modal", {**MODAL, "token_secret": "def"}),
    ],
)
def test_each_field_of_credentials_is_checked(shared_site: Site, vendor: str, fields: dict[str, str]) -> None:
    answer = shared_site.client().put(credentials(shared_site, vendor), json=fields)
    assert answer.status_code == 400
    assert fields.get("secret_access_key", "?") not in answer.text
    assert fields.get("session_token", "?") not in answer.text


@given(st.text(alphabet="ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_", min_size=1, max_size=64))
def test_no_name_but_the_allowed_ones_becomes_a_variable(name: str) -> None:
    """Also one that an earlier version has kept."""
    environment, passed_on = environment_of({name: VALUE, "modal": json.dumps(MODAL)}, "somebody")
    assert (name in environment) == (name in passed_on) == may_name(name)
    assert not may_name(name) or name.startswith("SECRET_") or name in WELL_KNOWN
    assert environment["MODAL_TOKEN_SECRET"] == "as-def"
    assert "MODAL_TOKEN_SECRET" not in passed_on


def test_runs_of_the_servers_user_reach_no_vendors_files() -> None:
    opened = {"aws": json.dumps(AWS), "SECRET_X": "x", "AWS_CONFIG_FILE": "/evil"}
    environment, passed_on = environment_of(opened, None)
    assert environment["AWS_ACCESS_KEY_ID"] == AWS["access_key_id"]
    assert environment["AWS_CONFIG_FILE"] == environment["MODAL_CONFIG_PATH"] == "/dev/null"
    assert environment["AWS_EC2_METADATA_DISABLED"] == "true"
    assert set(WITHOUT_FILES) < set(passed_on)
    assert "AWS_CONFIG_FILE" not in environment_of(opened, "somebody")[0]


def test_a_profile_of_the_servers_user_is_refused(shared_site: Site, submission: Submission) -> None:
    body = submission(project="ours")
    body["config"]["providers"]["ec2"] = {"profile": "production"}
    for route in ("/v1/runs", "/v1/runs/dry-run"):
        answer = shared_site.client().post(route, json=body)
        assert answer.status_code == 400
        assert answer.json()["errors"][0]["pointer"] == "#/config/providers/ec2/profile"
