"""`elastic providers` of a configuration, and `elastic doctor` where a vendor's client is missing."""

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path

import pytest

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
