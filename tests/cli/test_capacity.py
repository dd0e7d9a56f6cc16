"""`elastic providers` of a configuration, and `elastic doctor` where a vendor's client is missing."""

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from elastic.cli.doctor import findings_of
from elastic.config import load_config
from tests.cli.conftest import Ended

EC2 = """
[providers.ec2]
image = "ami-0123456789abcdef0"
instance_types = ["g5.xlarge"]
max_workers = 3
"""


@pytest.fixture
def clouds(config: Path) -> Path:
    path = config.with_name("clouds.toml")
    path.write_text(config.read_text() + EC2)
    return path


def test_sections_are_listed_with_their_kinds(elastic: Callable[..., Ended], clouds: Path) -> None:
    ended = elastic("providers", "list", str(clouds), "--json")
    assert ended.code == 0, ended.err
    listed = {one["provider"]: one for one in json.loads(ended.out)["providers"]}
    assert listed["ec2"] | {"kind": "ec2", "max_workers": 3, "asks_a_vendor": True} == listed["ec2"]
    assert listed["spot"] | {"kind": "spot-replay", "asks_a_vendor": False} == listed["spot"]
    assert "elastic providers prices" in elastic("providers", "list", str(clouds)).out


def test_who_asks_nobody_has_no_offers(elastic: Callable[..., Ended], config: Path) -> None:
    ended = elastic("providers", "offers", str(config), "--json")
    assert (ended.code, json.loads(ended.out)) == (0, {})


SILENT = """
import threading

from providers.base import ProviderSettings
from providers.processes import LocalProvider

answered = threading.Event()


class Silent(LocalProvider):
    Settings = ProviderSettings

    @classmethod
    def examine(cls, name, settings):
        answered.wait(60)


class Rude(Silent):
    @classmethod
    def examine(cls, name, settings):
        raise KeyError("nothing")
"""


@pytest.mark.skipif(importlib.util.find_spec("boto3") is not None, reason="boto3 is here")
def test_a_missing_client_is_named_with_what_installs_it(elastic: Callable[..., Ended], clouds: Path) -> None:
    ended = elastic("providers", "prices", str(clouds), "--providers", "ec2", "--json")
    (finding,) = json.loads(ended.out)["ec2"]["findings"]
    assert (ended.code, finding["ok"]) == (1, False)
    assert "pip install -e '.[aws]'" in finding["mend"]
    found = json.loads(elastic("doctor", str(clouds), "--json").out)["findings"]
    assert any(one["what"] == "ec2: boto3" and not one["ok"] for one in found)


def test_a_provider_that_is_none_is_refused(
    elastic: Callable[..., Ended], refused: Callable[..., None], config: Path
) -> None:
    refused(elastic("providers", "offers", str(config), "--providers", "moon"), "unknown provider 'moon'")


def test_doctor_says_who_has_not_answered_in_time_and_what_raises(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    about = tmp_path / "silent-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: silent\nVersion: 1\n")
    points = "[elastic.providers]\nsilent = silent_vendor:Silent\nrude = silent_vendor:Rude\n"
    (about / "entry_points.txt").write_text(points)
    (tmp_path / "silent_vendor.py").write_text(SILENT)
    monkeypatch.syspath_prepend(str(tmp_path))
    config.write_text(config.read_text() + "[providers.silent]\n[providers.rude]\n")
    findings = {one.what: one for one in findings_of(load_config(config), 0.2)}
    assert (findings["silent"].ok, findings["silent"].fault) == (False, "silent")
    assert findings["silent"].found == "no answer from the vendor of silent within 0.2 s"
    assert (findings["rude"].found, findings["rude"].fault) == ("KeyError: 'nothing'", "failed")
    sys.modules["silent_vendor"].answered.set()


def test_doctor_says_whose_package_cannot_be_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    about = tmp_path / "broken-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1\n")
    (about / "entry_points.txt").write_text("[elastic.engines]\nbroken = broken_engine:Engine\n")
    (tmp_path / "broken_engine.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    (found,) = [one for one in findings_of(None) if one.what == "elastic.engines" and not one.ok]
    assert (found.fault, found.hint) == ("broken", "mend broken 1, or uninstall it")
    assert found.found.startswith("found 'broken' of the package broken 1, whose broken_engine:Engine cannot be loaded")
