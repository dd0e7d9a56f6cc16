"""Which relays a worker reads its weights off, by what the environment says of its site."""

from pathlib import Path

import pytest
import torch

from elastic import wire
from elastic.weights import relay
from elastic.weights.directory import DirectoryRelay
from elastic.weights.publisher import Publisher
from elastic.worker.weights import WeightsPuller
from tests.worker.conftest import KEY, ordered, welcome_to


@pytest.fixture
def welcome(tmp_path: Path) -> wire.Welcome:
    publisher = Publisher(DirectoryRelay(tmp_path / "relay"), "run", {}, key=KEY)
    publisher.publish(0, {"w": torch.ones(1000, dtype=torch.bfloat16)})
    publisher.close()
    return welcome_to(str(tmp_path / "relay"), "of the run")


def pulled(welcome: wire.Welcome) -> bool:
    applied = WeightsPuller()(welcome, ordered(0)).apply()
    assert isinstance(applied, dict)
    assert isinstance(applied["w"], torch.Tensor)
    return torch.equal(applied["w"], torch.ones(1000, dtype=torch.bfloat16))


def test_workers_of_a_site_have_one_copy_between_them(
    welcome: wire.Welcome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    near = tmp_path / "near"
    monkeypatch.setenv("ELASTIC_SITE", str(near))
    assert pulled(welcome)
    there = DirectoryRelay(near).list_keys()
    assert any("/keyframe.bin/" in key for key in there)
    for key in DirectoryRelay(tmp_path / "relay").list_keys("versions/00000000/"):
        (tmp_path / "relay" / key).write_bytes(b"nobody reads this again")
    assert pulled(welcome)
    assert DirectoryRelay(near).list_keys() == there


def test_the_site_has_a_token_of_its_own(welcome: wire.Welcome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    opened: dict[str, str | None] = {}

    def open_relay(url: str, token: str | None = None) -> DirectoryRelay:
        opened[url] = token
        return DirectoryRelay(Path(url))

    monkeypatch.setattr(relay, "open_relay", open_relay)
    for variable, value in (("ELASTIC_SITE", str(tmp_path / "near")), ("ELASTIC_SITE_TOKEN", "of the site")):
        monkeypatch.setenv(variable, value)
    assert pulled(welcome)
    assert opened == {welcome.relay: "of the run", str(tmp_path / "near"): "of the site"}


def test_without_a_site_only_the_runs_relay_is_used(
    welcome: wire.Welcome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("ELASTIC_SITE", raising=False)
    assert pulled(welcome)
    assert {path.name for path in tmp_path.iterdir()} == {"relay"}
