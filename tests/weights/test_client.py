"""A rank told where versions are: it has its share of them, verified, whoever publishes and wherever."""

import pickle
from functools import partial
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from elastic.weights.client import WeightsClient
from elastic.weights.directory import DirectoryRelay
from elastic.weights.errors import RelayError, VersionSuperseded, WeightsForged
from elastic.weights.placements import inferred
from elastic.weights.publisher import Publisher, publish_keyframe
from elastic.weights.signing import SigningKey
from elastic.weights.source import PullReport, RelaySource, TensorSource
from elastic.weights.versions import discard_all
from tests.weights.signed import KEY, assert_same

TIMEOUT_S = 30.0


def tensors(version: int) -> dict[str, Tensor]:
    values = torch.ones(1000)
    values[:version] = 2.0
    return {"w": values.bfloat16()}


@pytest.fixture
def source(tmp_path: Path) -> RelaySource:
    """The first of versions 0 to 3."""
    publisher = Publisher(DirectoryRelay(tmp_path / "relay"), "run", {}, key=KEY)
    for version in range(4):
        publisher.publish(version, tensors(version))
    publisher.close()
    return RelaySource(run="run", version=0, relay=str(tmp_path / "relay"), publisher=KEY.public)


def loaded(client: WeightsClient, source: RelaySource) -> tuple[PullReport, TensorSource]:
    report = client.stage(source, TIMEOUT_S)
    return report, client.apply(source)


def assert_is(weights: TensorSource, version: int) -> None:
    assert_same(weights.tensors, tensors(version))


def test_a_version_is_in_force_when_it_is_applied_and_says_what_changed(source: RelaySource):
    client = WeightsClient()
    _, first = loaded(client, replace(source, version=1))
    assert first.changes is None
    assert_is(first, 1)
    report = client.stage(replace(source, version=2), TIMEOUT_S)
    assert_is(first, 1)
    second = client.apply(replace(source, version=2))
    assert second.changes is not None
    assert second.changes.base == 1
    ((name, index, values),) = second.changes.elements
    assert (name, index.tolist(), values.tolist()) == ("w", [1], [2.0])  # type: ignore[attr-defined]
    assert_is(second, 2)
    assert_is(client.apply(replace(source, version=2)), 2)
    assert 0 < report.size_bytes < report.full_bytes == 2000


def test_what_a_later_pull_reads_is_not_written_over(source: RelaySource):
    client, later = WeightsClient(), replace(source, version=3)
    assert_is(loaded(client, source)[1], 0)
    superseded = replace(source, version=1)
    client.stage(superseded, TIMEOUT_S)
    with client._lock, pytest.raises(VersionSuperseded):
        client.apply(superseded)
    client.stage(later, TIMEOUT_S)
    with pytest.raises(VersionSuperseded):
        client.apply(superseded)
    assert_is(client.apply(later), 3)


def test_what_an_audit_finds_wrong_is_pulled_anew(source: RelaySource):
    client = WeightsClient()
    assert client.audit(), "nothing is held yet"
    for version in (1, 2):
        _, weights = loaded(client, replace(source, version=version))
    assert client.audit()
    weights.tensors["w"][700] = 3.0  # type: ignore[index]
    assert not client.audit()
    report, again = loaded(client, replace(source, version=2))
    assert [refusal.what for refusal in report.refused] == ["weights held as version 2"]
    assert report.size_bytes >= report.full_bytes
    assert_is(again, 2)
    assert client.audit()


def test_another_address_of_the_relay_costs_no_keyframe_and_another_trainer_does(source: RelaySource):
    client = WeightsClient()
    assert_is(loaded(client, replace(source, version=1))[1], 1)
    moved = replace(source, relay=f"file://{source.relay}", relay_token="another", version=2)
    received_bytes = client.received_bytes
    report, weights = loaded(client, moved)
    assert 0 < report.size_bytes < report.full_bytes
    assert client.received_bytes == received_bytes + report.size_bytes
    assert_is(weights, 2)
    key, relay = SigningKey(), DirectoryRelay(Path(source.relay))
    discard_all(relay)
    publish_keyframe(relay, "run", 3, tensors(3), {}, key)
    report, weights = loaded(client, replace(moved, version=3, publisher=key.public))
    assert report.size_bytes >= report.full_bytes
    assert_is(weights, 3)


def test_a_trainer_with_another_key_is_believed_when_it_is_named_and_the_one_before_no_more(source: RelaySource):
    """As after a resume: what the one before has signed is no base, and what is staged of it is not put in force."""
    client, late = WeightsClient(), replace(source, version=2)
    assert_is(loaded(client, replace(source, version=1))[1], 1)
    client.stage(late, TIMEOUT_S)
    received, resumed = client.received_bytes, SigningKey()
    named = replace(late, publisher=resumed.public)
    with pytest.raises(WeightsForged):
        client.stage(named, 2.0)
    relay = DirectoryRelay(Path(source.relay))
    discard_all(relay)
    publish_keyframe(relay, "run", 2, tensors(500), {}, resumed)
    _, again = loaded(client, named)
    assert again.changes is None, "nothing that the one before has signed is built upon"
    assert_is(again, 500)
    with pytest.raises(VersionSuperseded):
        client.apply(late)
    assert client.received_bytes > received
    with pytest.raises(WeightsForged):
        client.stage(late, TIMEOUT_S)


def test_a_relay_that_cannot_be_opened_leaves_what_is_held(source: RelaySource):
    client, moved = WeightsClient(), replace(source, version=2)
    assert_is(loaded(client, replace(source, version=1))[1], 1)
    for _ in range(2):
        with pytest.raises(RelayError, match="gopher"):
            client.stage(replace(moved, relay="gopher://somewhere"), TIMEOUT_S)
    report, weights = loaded(client, moved)
    assert 0 < report.size_bytes < report.full_bytes
    assert_is(weights, 2)


@pytest.mark.parametrize("publisher", ["", "ab", "no hexadecimal"])
def test_a_source_that_names_no_publisher_gives_nothing(source: RelaySource, publisher: str):
    with pytest.raises(WeightsForged):
        WeightsClient().stage(replace(source, publisher=publisher), TIMEOUT_S)


def test_a_source_travels_and_shows_no_token(source: RelaySource):
    secret = replace(source, relay_token="of the run", cache="near", cache_token="of the site")
    assert pickle.loads(pickle.dumps(secret)) == secret
    assert "of the" not in repr(secret)


def test_ranks_with_a_cache_have_one_copy_between_them(source: RelaySource, tmp_path: Path):
    cached = replace(source, cache=str(tmp_path / "near"))
    assert_is(loaded(WeightsClient(), cached)[1], 0)
    there = DirectoryRelay(tmp_path / "near").list_keys()
    assert any("/keyframe.bin/" in key for key in there)
    for key in DirectoryRelay(tmp_path / "relay").list_keys("versions/00000000/"):
        (tmp_path / "relay" / key).write_bytes(b"nobody reads this again")
    assert_is(loaded(WeightsClient(), cached)[1], 0)
    assert DirectoryRelay(tmp_path / "near").list_keys() == there


HIDDEN, FFN, HEADS, HEAD, EXPERTS = 4, 6, 4, 2, 4


def mixture(seed: int) -> dict[str, Tensor]:
    """One layer: attention with few key heads, and experts."""
    random = torch.Generator().manual_seed(seed)
    shapes = {
        "layer.self_attn.q_proj.weight": (HEADS * HEAD, HIDDEN),
        "layer.self_attn.k_proj.weight": (HEAD, HIDDEN),
        "layer.self_attn.v_proj.weight": (HEAD, HIDDEN),
        "layer.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD),
        "layer.norm.weight": (HIDDEN,),
    }
    for expert in range(EXPERTS):
        for part in ("gate_proj", "up_proj"):
            shapes[f"layer.mlp.experts.{expert}.{part}.weight"] = (FFN, HIDDEN)
        shapes[f"layer.mlp.experts.{expert}.down_proj.weight"] = (HIDDEN, FFN)
    return {name: torch.randn(shape, generator=random).bfloat16() for name, shape in shapes.items()}


def hosted(full: dict[str, Tensor], rank: int, expert_parallel: bool) -> dict[str, Tensor]:
    """What rank `rank` of two has of the full tensors: fused, sliced, and experts stacked."""
    attention = "layer.self_attn."
    heads = slice(rank * HEADS * HEAD // 2, (rank + 1) * HEADS * HEAD // 2)
    inner = slice(None) if expert_parallel else slice(rank * FFN // 2, (rank + 1) * FFN // 2)
    mine = range(rank * 2, rank * 2 + 2) if expert_parallel else range(EXPERTS)
    experts = [{p: full[f"layer.mlp.experts.{e}.{p}_proj.weight"] for p in ("gate", "up", "down")} for e in mine]
    return {
        "layer.self_attn.qkv_proj.weight": torch.cat(
            [
                full[f"{attention}q_proj.weight"][heads],
                full[f"{attention}k_proj.weight"],
                full[f"{attention}v_proj.weight"],
            ]
        ),
        "layer.self_attn.o_proj.weight": full[f"{attention}o_proj.weight"][:, heads],
        "layer.norm.weight": full["layer.norm.weight"],
        "layer.mlp.experts.w13_weight": torch.stack([torch.cat([e["gate"][inner], e["up"][inner]]) for e in experts]),
        "layer.mlp.experts.w2_weight": torch.stack([e["down"][:, inner] for e in experts]),
    }


@pytest.mark.parametrize("expert_parallel", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
def test_changes_take_a_ranks_live_parameters_to_the_published_bits(tmp_path: Path, rank: int, expert_parallel: bool):
    """Fused, sliced and stacked names: a keyframe, then deltas written into the parameters alone."""
    publisher = Publisher(DirectoryRelay(tmp_path), "run", {}, key=KEY)
    full = mixture(0)
    local = {name: tuple(tensor.shape) for name, tensor in hosted(full, rank, expert_parallel).items()}
    client = WeightsClient(partial(inferred, local=local, rank=rank, size=2))
    live: dict[str, Tensor] = {}
    for version in range(4):
        random = torch.Generator().manual_seed(version)
        for tensor in full.values():
            tensor.view(-1)[torch.randperm(tensor.numel(), generator=random)[: tensor.numel() // 12]] += 1
        publisher.publish(version, full)
        where = RelaySource(run="run", version=version, relay=str(tmp_path), publisher=KEY.public)
        _, weights = loaded(client, where)
        if version == 0:
            live = {name: tensor.clone() for name, tensor in weights.tensors.items()}  # type: ignore[attr-defined]
        else:
            assert weights.changes is not None
            assert weights.changes.base == version - 1
            for name, index, values in weights.changes.elements:
                live[name].view(-1)[index] = values  # type: ignore[index]
        for found in (live, weights.tensors):
            assert_same(found, hosted(full, rank, expert_parallel))
    publisher.close()
