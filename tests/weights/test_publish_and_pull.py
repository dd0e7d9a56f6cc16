from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from benchmarks._throttle import RelayAround
from elastic.weights.blobs import Buffer
from elastic.weights.directory import DirectoryRelay
from elastic.weights.errors import BlobConflict, BlobNotFound, RelayUnavailable, WeightsCorrupted, WeightsForged
from elastic.weights.publisher import Publisher, publish_keyframe
from elastic.weights.puller import Puller
from elastic.weights.records import SCHEMA_VERSION, Manifest, keyframe_key, manifest_key
from elastic.weights.relay import REQUESTS, Relay
from elastic.weights.signing import SigningKey
from elastic.weights.versions import collect_garbage, discard_all, published_versions
from tests.seeds import examples
from tests.weights.signed import KEY, TRUST, assert_same, pull

MODEL = {"model_type": "qwen3", "hidden_size": 8}

many = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=examples(8, 20))


def from_bits(shape: tuple[int, ...], patterns: list[int]) -> Tensor:
    return torch.tensor(patterns, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(shape)


@st.composite
def tensors_of_both_types(draw: st.DrawFn) -> Tensor:
    shape, exact = tuple(draw(st.lists(st.integers(0, 4), max_size=3))), draw(st.booleans())
    size = torch.Size(shape).numel() * (1 + exact)
    tensor = from_bits((size,), draw(st.lists(st.integers(0, 0xFFFF), min_size=size, max_size=size)))
    return tensor.view(torch.float32 if exact else torch.bfloat16).view(shape)


named_tensors = st.dictionaries(st.text(min_size=1, max_size=12), tensors_of_both_types(), max_size=6)


def republish(relay: Relay, version: int, tensors: dict[str, Tensor]) -> Manifest:
    discard_all(relay)
    return publish_keyframe(relay, "run", version, tensors, MODEL, KEY)


def small() -> dict[str, Tensor]:
    return {"a": torch.arange(12, dtype=torch.bfloat16).view(3, 4), "b": torch.ones(5, dtype=torch.bfloat16)}


@many
@given(tensors=named_tensors, version=st.integers(0, 10**9), chunk_bytes=st.integers(1, 64))
@example(tensors={"nothing": torch.empty(0)}, version=0, chunk_bytes=1)
def test_weights_arrive_bit_for_bit(relay: Relay, tensors: dict[str, Tensor], version: int, chunk_bytes: int):
    """A property over tensors and sizes of pieces."""
    published = republish(relay, version, tensors)
    puller = Puller(relay, TRUST, chunk_bytes=chunk_bytes)
    staged = puller.stage(version)
    assert TRUST.open(relay.get(manifest_key(version)), Manifest, SCHEMA_VERSION) == published
    assert staged.report.size_bytes == staged.report.full_bytes == published.blob_bytes
    assert (staged.weights.version, staged.weights.model) == (version, MODEL)
    assert_same(puller.apply(staged), tensors)


def test_every_bit_pattern_survives(relay: Relay):
    every = {"all": from_bits((256, 256), list(range(0x10000)))}
    publish_keyframe(relay, "run", 1, every, MODEL, KEY)
    assert_same(pull(relay, TRUST, 1), every)


def test_a_strided_tensor_is_published_in_row_major_order(tmp_path: Path):
    tensors = {"t": small()["a"].t(), "scalar": torch.tensor(1.5, dtype=torch.bfloat16)}
    publish_keyframe(DirectoryRelay(tmp_path), "run", 1, tensors, MODEL, KEY)
    pulled = pull(DirectoryRelay(tmp_path), TRUST, 1)
    assert torch.equal(pulled["t"], tensors["t"])
    assert pulled["scalar"].shape == ()


def test_a_version_is_there_only_with_its_manifest(relay: Relay):
    publish_keyframe(relay, "run", 1, small(), MODEL, KEY)
    relay.delete(manifest_key(1))
    assert published_versions(relay) == []
    with pytest.raises(BlobNotFound):
        pull(relay, TRUST, 1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int8])
def test_only_bfloat16_and_float32_are_published(tmp_path: Path, dtype: torch.dtype):
    relay = DirectoryRelay(tmp_path)
    with pytest.raises(ValueError, match="tensor a: dtype"):
        publish_keyframe(relay, "run", 1, {"a": torch.ones(2, dtype=dtype)}, MODEL, KEY)
    assert relay.list_keys() == []


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"schema_version": 9}, "schema version 9"),
        ({"kind": "sketch"}, "kind"),
        ({"blob_bytes": 33}, "33"),
        ({"tensors": []}, "0 bytes"),
        ({"tensors": [{"name": "a", "shape": [17], "dtype": "float8", "offset": 0}]}, "allowed: bfloat16"),
        ({"tensors": [{"name": "a", "shape": [17], "dtype": "bfloat16", "offset": 2}]}, "begins at byte 2"),
        ({"tile_elements": 0}, "tiles of 0 elements"),
        ({"tile_sums": b"\0" * 8}, "it has 2 tiles, and the sums of 1"),
        ({"tensors": [{"name": "a", "shape": [n], "dtype": "bfloat16", "offset": 0} for n in (0, 17)]}, "twice"),
    ],
)
def test_a_manifest_that_does_not_add_up_is_refused(tmp_path: Path, change: dict[str, object], problem: str):
    manifest = publish_keyframe(DirectoryRelay(tmp_path), "run", 1, small(), MODEL, KEY)
    forged = KEY.seal(msgspec.convert({**msgspec.to_builtins(manifest), **change}, ForgedManifest))  # type: ignore[arg-type]
    with pytest.raises(WeightsCorrupted, match=problem):
        TRUST.open(forged, Manifest, SCHEMA_VERSION)


class ForgedManifest(Manifest, frozen=True, kw_only=True):
    """Properly sealed, whatever it says."""

    kind: str  # type: ignore[assignment]


class Faulty(RelayAround):
    """A relay whose `get` follows a script of faults before it works; remembers what was asked of it."""

    def __init__(self, relay: Relay, faults: dict[int, int]) -> None:
        super().__init__(relay)
        self._faults = dict(faults)
        self.fetched: list[tuple[str, int]] = []

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        if self._faults.get(start, 0) > 0 and key.endswith(".bin"):
            self._faults[start] -= 1
            raise RelayUnavailable(f"{key}: connection lost at byte {start}")
        self.fetched.append((key, start))
        return super().get(key, start, length)


def test_a_broken_transfer_goes_on_where_it_broke(tmp_path: Path):
    relay = Faulty(DirectoryRelay(tmp_path), faults={0: 1, 16: 2, 32: 1})
    publish_keyframe(relay, "run", 1, small(), MODEL, KEY)
    pulled = pull(relay, TRUST, 1, chunk_bytes=16)
    assert_same(pulled, small())
    assert sorted(start for key, start in relay.fetched if key == keyframe_key(1)) == [0, 16, 32]


def test_a_relay_that_stays_away_is_given_up_in_time(tmp_path: Path):
    relay = Faulty(DirectoryRelay(tmp_path), faults={16: 10**9})
    publish_keyframe(relay, "run", 1, small(), MODEL, KEY)
    with pytest.raises(RelayUnavailable, match="byte 16"):
        pull(relay, TRUST, 1, timeout_s=1.0, chunk_bytes=16)
    with pytest.raises(RelayUnavailable, match="not pulled in time"):
        pull(relay, TRUST, 1, timeout_s=0)


class GoneWhenAsked(RelayAround):
    """A relay that is away from when a keyframe is asked for."""

    away = False

    def put(self, key: str, *parts: Buffer) -> None:
        super().put(key, *parts)
        self.away = key.startswith(REQUESTS)

    def list_keys(self, prefix: str = "") -> list[str]:
        if self.away:
            raise RelayUnavailable("away")
        return super().list_keys(prefix)


def test_what_was_refused_is_told_also_when_nothing_else_came_in_time(tmp_path: Path):
    relay = GoneWhenAsked(DirectoryRelay(tmp_path))
    thief = Publisher(relay, "run", MODEL, key=SigningKey())
    for version in (1, 2):
        thief.publish(version, {"a": torch.full((20,), version, dtype=torch.bfloat16)})
    thief.close()
    with pytest.raises(WeightsForged, match="not signed"):
        Puller(relay, TRUST).pull(2, 1.0, follow=True)
    assert relay.away


def test_publishing_again_is_harmless_and_never_changes_a_version(relay: Relay):
    publish_keyframe(relay, "run", 1, small(), MODEL, KEY)
    publish_keyframe(relay, "run", 1, small(), MODEL, KEY)
    with pytest.raises(BlobConflict):
        publish_keyframe(relay, "run", 1, {"a": torch.zeros(17, dtype=torch.bfloat16)}, MODEL, KEY)
    assert_same(pull(relay, TRUST, 1), small())


@many
@given(
    versions=st.sets(st.integers(0, 30), max_size=8),
    keep=st.integers(1, 4),
    pulled=st.sets(st.integers(0, 30), max_size=2),
)
def test_garbage_is_what_nobody_needs(relay: Relay, versions: set[int], keep: int, pulled: set[int]):
    """A property over versions that are kept and pulled."""
    discard_all(relay)
    for version in versions:
        publish_keyframe(relay, "run", version, small(), MODEL, KEY)
    deleted = collect_garbage(relay, keep, pulled)
    kept = {*sorted(versions)[-keep:], *(versions & pulled)}
    assert deleted == sorted(versions - kept)
    assert published_versions(relay) == sorted(kept)
    assert len(relay.list_keys()) == 2 * len(kept)
    for version in kept:
        assert_same(pull(relay, TRUST, version), small())


def test_garbage_includes_what_a_killed_trainer_left_but_not_what_is_being_published(relay: Relay):
    for version in (2, 4):
        publish_keyframe(relay, "run", version, small(), MODEL, KEY)
    relay.put(keyframe_key(1), b"left behind")
    relay.put(keyframe_key(5), b"under way")
    assert collect_garbage(relay, 2) == [1]
    assert relay.list_keys(keyframe_key(5)) == [keyframe_key(5)]


def test_garbage_collection_keeps_at_least_one_version(relay: Relay):
    with pytest.raises(ValueError, match="keep_versions"):
        collect_garbage(relay, 0)


def test_a_resumed_run_publishes_its_versions_anew(relay: Relay):
    for version in (1, 2):
        publish_keyframe(relay, "run", version, small(), MODEL, KEY)
    relay.put(keyframe_key(3), b"cut off")
    assert discard_all(relay) == [1, 2, 3]
    other = {"a": torch.zeros(2, dtype=torch.bfloat16)}
    resumed = SigningKey()
    for version in (2, 3):
        publish_keyframe(relay, "run", version, other, MODEL, resumed)
        assert_same(pull(relay, resumed.trust("run"), version), other)
