"""How a worker gets its weights, by way of what its host is said to have."""

from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor

from elastic import wire
from elastic.core.types import WeightMode
from elastic.weights.directory import DirectoryRelay
from elastic.weights.errors import WeightsForged
from elastic.weights.link import Link
from elastic.weights.publisher import Publisher, publish_keyframe
from elastic.weights.signing import SigningKey
from elastic.weights.versions import discard_all
from elastic.worker import weights
from elastic.worker.weights import WeightsPuller
from tests.worker.conftest import KEY, ordered, welcome_to


def tensors(version: int) -> dict[str, Tensor]:
    values = torch.ones(1000)
    values[:version] = 2.0
    return {"w": values.bfloat16()}


@pytest.fixture
def welcome(tmp_path: Path) -> wire.Welcome:
    """Of a run with versions 0 to 3."""
    publisher = Publisher(DirectoryRelay(tmp_path / "relay"), "run", {}, key=KEY)
    for version in range(4):
        publisher.publish(version, tensors(version))
    publisher.close()
    return welcome_to(str(tmp_path / "relay"))


def assert_gives(applied: object, version: int) -> None:
    assert isinstance(applied, dict)
    assert torch.equal(applied["w"], tensors(version)["w"])


def test_a_version_is_in_force_when_it_is_applied_and_says_what_changed(welcome: wire.Welcome):
    pull = WeightsPuller()
    first = pull(welcome, ordered(1))
    assert first.changes is None
    assert_gives(first.apply(), 1)
    second = pull(welcome, ordered(2))
    assert second.changes is not None
    assert second.changes.base == 1
    ((name, index, values),) = second.changes.elements
    assert (name, index.tolist(), values.tolist()) == ("w", [1], [2.0])  # type: ignore[attr-defined]
    assert_gives(second.apply(), 2)
    assert_gives(second.apply(), 2)
    assert 0 < second.size_bytes < second.full_bytes == 2000


def test_what_a_later_pull_reads_is_not_written_over(welcome: wire.Welcome):
    pull = WeightsPuller()
    assert_gives(pull(welcome, ordered(0)).apply(), 0)
    superseded = pull(welcome, ordered(1))
    with pull._lock:
        assert superseded.apply() is None
    assert_gives(pull(welcome, ordered(3)).apply(), 3)


def test_what_an_audit_finds_wrong_is_pulled_anew(welcome: wire.Welcome):
    pull = WeightsPuller()
    assert pull.audit(), "nothing is kept yet"
    for version in (1, 2):
        applied = pull(welcome, ordered(version)).apply()
    assert isinstance(applied, dict)
    assert pull.audit()
    applied["w"][700] = 3.0
    assert not pull.audit()
    again = pull(welcome, ordered(2))
    assert [refusal.what for refusal in again.refused] == ["weights held as version 2"]
    assert again.size_bytes >= again.full_bytes
    assert_gives(again.apply(), 2)
    assert pull.audit()


def test_another_address_of_the_relay_costs_no_keyframe_and_another_trainer_does(welcome: wire.Welcome):
    pull = WeightsPuller()
    assert_gives(pull(welcome, ordered(1)).apply(), 1)
    moved = msgspec.structs.replace(welcome, relay=f"file://{welcome.relay}", relay_token="another")
    received_bytes = pull.received_bytes()
    pulled = pull(moved, ordered(2))
    assert 0 < pulled.size_bytes < pulled.full_bytes
    assert pull.received_bytes() == received_bytes + pulled.size_bytes
    assert_gives(pulled.apply(), 2)
    key = SigningKey()
    relay = DirectoryRelay(Path(welcome.relay))
    discard_all(relay)
    publish_keyframe(relay, "run", 3, tensors(3), {}, key)
    pulled = pull(moved, ordered(3, key))
    assert pulled.size_bytes >= pulled.full_bytes
    assert_gives(pulled.apply(), 3)


def test_a_successor_goes_on_from_what_was_kept(welcome: wire.Welcome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(weights.KEEP_VARIABLE, str(tmp_path / "kept"))
    predecessor, beside, successor = (WeightsPuller() for _ in range(3))
    assert_gives(predecessor(welcome, ordered(1)).apply(), 1)
    pulled = beside(welcome, ordered(2))
    assert pulled.size_bytes > pulled.full_bytes, "the other has it while it lives"
    leave(predecessor)
    pulled = successor(welcome, ordered(2))
    assert pulled.size_bytes < pulled.full_bytes
    assert_gives(pulled.apply(), 2)
    leave(beside)
    leave(successor)


def leave(pull: WeightsPuller) -> None:
    assert pull._puller is not None
    pull._puller._store.close()


@pytest.mark.parametrize("cap", ["fast", "0", "-1", "nan"])
def test_a_cap_that_is_none_is_refused(welcome: wire.Welcome, monkeypatch: pytest.MonkeyPatch, cap: str):
    monkeypatch.setenv(weights.CAP_VARIABLE, cap)
    with pytest.raises(ValueError, match=rf"ELASTIC_WEIGHTS_GBPS: must be a positive number \(found '{cap}'\)"):
        WeightsPuller()(welcome, ordered(1))


def test_a_cap_holds(welcome: wire.Welcome, monkeypatch: pytest.MonkeyPatch):
    sent: list[tuple[float, int]] = []
    monkeypatch.setattr(Link, "send", lambda link, size_bytes: sent.append((link.bytes_per_s, size_bytes)))
    monkeypatch.setenv(weights.CAP_VARIABLE, "0.5")
    assert_gives(WeightsPuller()(welcome, ordered(0)).apply(), 0)
    assert {rate for rate, _ in sent} == {0.5e9 / 8}
    assert sum(size for _, size in sent) > 2000


def test_a_trainer_with_another_key_is_believed_when_it_is_ordered_and_the_one_before_no_more(
    welcome: wire.Welcome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """As after a resume: what was kept of the one before is no base either, and what is staged is not put in force."""
    welcome = msgspec.structs.replace(welcome, pull_timeout_s=3.0)  # what comes of no pull is waited for
    monkeypatch.setenv(weights.KEEP_VARIABLE, str(tmp_path / "kept"))
    pull = WeightsPuller()
    assert_gives(pull(welcome, ordered(1)).apply(), 1)
    late, received = pull(welcome, ordered(2)), pull.received_bytes()
    relay, resumed = DirectoryRelay(tmp_path / "relay"), SigningKey()
    with pytest.raises(WeightsForged):
        pull(welcome, ordered(2, resumed))
    discard_all(relay)
    publisher = Publisher(relay, "run", {}, key=resumed)
    publisher.publish(2, tensors(500))
    publisher.close()
    again = pull(welcome, ordered(2, resumed))
    assert again.changes is None, "nothing that the one before has signed is built upon"
    assert_gives(again.apply(), 500)
    assert late.apply() is None
    assert pull.received_bytes() > received
    with pytest.raises(WeightsForged):
        pull(welcome, ordered(2))
    leave(pull)


@pytest.mark.parametrize("publisher", ["", "ab", "no hexadecimal"])
def test_an_order_that_names_no_publisher_gets_nothing(welcome: wire.Welcome, publisher: str):
    with pytest.raises(WeightsForged):
        WeightsPuller()(welcome, wire.PullWeights(0, WeightMode.FINISH, publisher))
