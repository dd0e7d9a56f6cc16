"""Secrets of projects: in the environment of the project's runs, and nowhere else."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from elastic.config import apply_override
from elastic.resources import AccessRole, RunPhase
from elastic.server.runner import RunnerLoop
from elastic.server.store.tables import secrets
from elastic.server.store.vault import KEY_FILE, Vault, VaultError
from tests.server.conftest import Site

VALUE = "s3cr3t-of-ours"
SHOWS_ITS_ENVIRONMENT = """
import json, os, sys
path = sys.argv[sys.argv.index("--resume") + 1]
open(path + "/seen.json", "w").write(json.dumps([sys.argv, dict(os.environ)]))
"""


def place(site: Site, name: str, project: str = "ours") -> str:
    return f"/v1/projects/{site.projects[project]}/secrets/{name}"


async def test_runs_of_the_project_have_it_and_nothing_else_does(
    site: Site, submission: Callable[..., dict[str, Any]]
) -> None:
    client = site.client()
    for project, value in (("ours", "old"), ("ours", VALUE), ("theirs", "of-theirs")):
        assert client.put(place(site, "HF_TOKEN", project), json={"value": value}).status_code == 200
    run = client.post("/v1/runs", json=submission(project="ours")).json()["id"]
    settings = replace(site.settings, command=(sys.executable, "-c", SHOWS_ITS_ENVIRONMENT))
    loop, seen = RunnerLoop(site.store, settings), settings.run_dir(run) / "seen.json"
    while client.get(f"/v1/runs/{run}").json()["phase"] != RunPhase.FINISHED:
        await loop.tick()
    command, environment = json.loads(seen.read_text())
    assert environment["HF_TOKEN"] == VALUE
    assert VALUE not in str(command)
    config: dict[str, Any] = {}
    apply_override(config, next(word for word in command if word.startswith("run.pass_env=")))
    assert config == {"run": {"pass_env": ["HF_TOKEN"]}}
    seen.unlink()
    for path in settings.home.rglob("*"):
        assert not path.is_file() or VALUE.encode() not in path.read_bytes(), path
    for path in ("/v1/audit", place(site, ""), f"/v1/runs/{run}", f"/v1/runs/{run}/logs?follow=false"):
        assert VALUE not in client.get(path.rstrip("/")).text


@pytest.mark.parametrize(
    "name",
    ["PATH", "LD_PRELOAD", "PYTHONPATH", "HTTPS_PROXY", "ELASTIC_SERVED", "CUDA_HOME", "NO-NAME", "lower", "A\0"],
)
def test_a_variable_of_the_systems_own_is_refused(shared_site: Site, name: str) -> None:
    answer = shared_site.client().put(place(shared_site, name.replace("\0", "%00")), json={"value": VALUE})
    assert answer.status_code == 400
    assert VALUE not in answer.text


@pytest.mark.parametrize("value", ["", "x" * 40_000, "a\0b", None, ["s3cr3t-of-ours"]])
def test_what_no_variable_can_have_is_refused_and_not_told(shared_site: Site, value: Any) -> None:
    answer = shared_site.client().put(place(shared_site, "A_TOKEN"), json={"value": value})
    assert answer.status_code == 400
    assert VALUE not in answer.text


def test_who_has_the_database_alone_has_no_secret(shared_site: Site, tmp_path: Path) -> None:
    client = shared_site.client(shared_site.key("ours", AccessRole.ADMIN))
    assert client.put(place(shared_site, "B_TOKEN"), json={"value": VALUE}).status_code == 200
    assert client.delete(place(shared_site, "C_TOKEN")).status_code == 404
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
    asked = [client.put(place(shared_site, "D_TOKEN"), json={"value": one}, headers=headers) for one in "aab"]
    assert [one.status_code for one in asked] == [200, 200, 422]
    assert asked[1].headers["idempotent-replayed"] == "true"
    assert asked[1].text == asked[0].text
