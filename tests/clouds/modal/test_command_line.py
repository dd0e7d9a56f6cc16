"""`elastic modal deploy`, and what other commands say of what is on Modal."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elastic.system.modal import version
from tests.clouds.modal_server import Bench

pytestmark = [pytest.mark.clouds]


def command(*arguments: str, environment: dict[str, str] | None = None) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "elastic.cli", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_deploys_an_app_of_this_version_with_modules_of_ones_own(platform: Bench, tmp_path: Path) -> None:
    done = command("modal", "deploy", "--app", "elastic-two", "--module", "yaml", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["version"] == version()
    platform.remove("elastic-two")


def test_says_what_to_do_where_modal_does_not_let_us_in(
    platform: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = tmp_path / "ended"
    (tmp_path / "git").write_text(f"#!/bin/sh\nsleep 2\necho $1 >> {ended}\n")  # Modal's client asks it meanwhile.
    (tmp_path / "git").chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    platform.refuse_token(True)
    done = command("modal", "deploy")
    assert done.returncode == 2
    assert "modal token new" in done.stderr
    assert "Traceback" not in done.stderr
    assert sorted(ended.read_text().split()) == ["log", "remote", "rev-parse", "status"]


def test_doctor_and_offers_know_whether_the_app_is_there(
    platform: Bench, config: Path, elastic: Callable[..., Any]
) -> None:
    text = config.read_text()
    config.write_text(f'{text}\n[providers.modal]\ngpu = "H100"\n[rewards]\npool = "modal"\n')
    found = json.loads(elastic("doctor", config, "--json").out)["findings"]
    assert [one["ok"] for one in found if "modal" in one["what"]] == [True, True]
    (offer,) = json.loads(elastic("providers", "offers", config, "--providers", "modal", "--json").out)["modal"][
        "capacity"
    ]
    assert offer["usable"]
    assert offer["usd_per_gpu_hour"] > 3
    config.write_text(f'{text}\n[providers.modal]\napp = "another"\n')
    ended = elastic("doctor", config, "--json")
    (wrong,) = [one for one in json.loads(ended.out)["findings"] if one["what"].startswith("modal")]
    assert ended.code == 1
    assert "elastic modal deploy --app another" in wrong["hint"]


def test_a_run_that_cannot_use_modal_is_refused_before_it_begins(
    platform: Bench, config: Path, elastic: Callable[..., Any]
) -> None:
    ended = elastic("run", config, "--providers", "modal", "--set", "providers.modal.app=another")
    assert ended.code == 2
    assert "elastic modal deploy --app another" in ended.err
    assert platform.running() == []


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"MODAL_TOKEN_SECRET": None}, ("modal: ", "Token missing", "modal token new", "MODAL_TOKEN_SECRET")),
        ({"MODAL_TOKEN_SECRET": "as-another"}, ("modal: ", "Token validation failed", "modal token new")),
        ({"MODAL_SERVER_URL": "http://127.0.0.1:9"}, ("modal: ", "app 'elastic'", "is Modal reachable")),
        ({"environment": "nowhere"}, ("modal: ", "'nowhere'", "elastic modal deploy --environment nowhere")),
        ({"gpu": "V3"}, ("providers.modal", "GPU 'V3'", "H100", "usd_per_gpu_hour")),
        ({"cores": 1000}, ("providers.modal.cores", "64", "found 1000")),
        (
            {"rewards": "{app = 'another'}"},
            ("functions.frozenlake:reward", "app 'another'", "elastic modal deploy --app another"),
        ),
        ({"rewards": "{core = 4}"}, ("rewards.pool_settings", "core", "cores")),
    ],
)
def test_what_modal_can_never_do_ends_a_run_before_it_begins(
    platform: Bench, config: Path, refused: Callable[..., None], wrong: dict[str, Any], words: tuple[str, ...]
) -> None:
    """In a process of its own: Modal's client reads its credentials once."""
    started = len(platform.record()["containers"])
    settings = {"answer_timeout_s": 5.0, **{name: value for name, value in wrong.items() if name.islower()}}
    rewards = settings.pop("rewards", None)
    text = config.read_text() + "[providers.modal]\n"
    text += "".join(f"{name} = {json.dumps(value)}\n" for name, value in settings.items())
    if rewards is not None:
        text += f'[rewards]\nname = "frozenlake"\npool = "modal"\npool_settings = {rewards}\n'
    config.write_text(text)
    environment = os.environ | {"HOME": str(config.parent)} | {name: v for name, v in wrong.items() if name.isupper()}
    environment = {name: value for name, value in environment.items() if value is not None}
    done = command("run", str(config), "--providers", "modal", environment=environment)
    refused((done.returncode, done.stdout, " ".join(done.stderr.split())), *words)
    assert len(platform.record()["containers"]) == started
