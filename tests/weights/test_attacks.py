"""Whoever can write where weights lie, but has no key of the trainer's, gets nothing of its own put in force.

Every attack was one: on a relay's files, over HTTP with a worker's token, among the workers of a site, and in the files
that a worker leaves to its successor.
"""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import msgspec
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from elastic.system.host import Host, on
from elastic.weights import publisher
from elastic.weights.directory import DirectoryRelay
from elastic.weights.errors import RelayError, RelayUnavailable, WeightsCorrupted, WeightsError, WeightsForged
from elastic.weights.http import HttpRelay
from elastic.weights.peer_cache import PeerCacheRelay
from elastic.weights.plan import PublishedUpdate
from elastic.weights.publisher import Publisher, PublishSettings, TrainerRank, publish_keyframe
from elastic.weights.puller import Puller
from elastic.weights.records import (
    NOTHING,
    begun_key,
    bucket_key,
    delta_manifest_key,
    keyframe_key,
    manifest_key,
    part_key,
    request_key,
)
from elastic.weights.relay import REQUESTS, Relay
from elastic.weights.rights import REQUESTS_OPEN, RelayRights
from elastic.weights.server import relay_app
from elastic.weights.sharding import cells, whole
from elastic.weights.signing import SigningKey
from elastic.weights.versions import published_versions
from tests.seeds import examples
from tests.weights.conftest import serve
from tests.weights.signed import KEY, TRUST, assert_same, opened, overwrite, sharing

SMALL = PublishSettings(bucket_elements=64, tile_elements=16, keyframe_every=8, merge_every=99, keep_versions=4)
MODEL = {"model_type": "qwen3"}
THIEF = SigningKey()

many = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=examples(12, 30), deadline=None
)


def weights(version: int) -> dict[str, Tensor]:
    """A tenth of the elements differ from those of the version before."""
    rng = np.random.default_rng(0)
    values = rng.integers(0, 1 << 14, 240, dtype=np.int16)
    for _ in range(version):
        values[rng.random(240) < 0.1] += 1
    bits = torch.from_numpy(values).view(torch.bfloat16)
    return {"a": bits[:200].view(20, 10), "b": bits[200:]}


def zeros() -> dict[str, Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in weights(0).items()}


def assert_sound(tensors: dict[str, Tensor], version: int) -> None:
    assert_same(tensors, weights(version))


@pytest.fixture
def directory(tmp_path: Path) -> DirectoryRelay:
    return DirectoryRelay(tmp_path / "relay")


@pytest.fixture
def trainer(directory: DirectoryRelay) -> Iterator[Publisher]:
    """It has published versions 0 to 3."""
    publisher = Publisher(directory, "run", MODEL, SMALL, key=KEY)
    for version in range(4):
        publisher.publish(version, weights(version))
        publisher.wait()
    yield publisher
    publisher.close()


def forge_keyframe(relay: Relay, version: int, key: SigningKey = THIEF, run: str = "run") -> None:
    for each in (manifest_key(version), keyframe_key(version)):
        relay.delete(each)
    publish_keyframe(relay, run, version, zeros(), MODEL, key, SMALL.tile_elements)


# Over HTTP, with a worker's token.


@pytest.fixture
def rights() -> RelayRights:
    return RelayRights()


@pytest.fixture
def url(directory: DirectoryRelay, rights: RelayRights) -> Iterator[str]:
    with serve(relay_app(directory, rights)) as url:
        yield url


def test_a_workers_token_reads_and_asks_and_does_nothing_else(
    trainer: Publisher, directory: DirectoryRelay, rights: RelayRights, url: str
):
    worker = HttpRelay(url, rights.issue("spot-1"))
    before = {key: directory.get(key) for key in directory.list_keys()}
    with pytest.raises(RelayError, match="403"):
        forge_keyframe(worker, 3)
    for key in (keyframe_key(4), manifest_key(4), begun_key(4, 3), delta_manifest_key(4, 3), "anything", "requests"):
        with pytest.raises(RelayError, match="403"):
            worker.put(key, b"junk")
    for key in before:
        with pytest.raises(RelayError, match="403"):
            worker.delete(key)
    assert {key: directory.get(key) for key in directory.list_keys()} == before
    assert worker.list_keys("versions/") == [*before]
    assert_sound(Puller(worker, TRUST).pull(3), 3)
    worker.put(request_key(3), b"")
    assert directory.list_keys(REQUESTS) == [request_key(3)]
    worker.close()


def test_a_worker_cannot_fill_the_disk_and_others_can_still_ask(
    directory: DirectoryRelay, rights: RelayRights, url: str
):
    greedy, honest = (HttpRelay(url, rights.issue(name)) for name in ("greedy", "honest"))
    with pytest.raises(RelayError, match="413"):
        greedy.put(f"{REQUESTS}large", bytes(1000))
    asked = [f"{REQUESTS}keyframe-{number}" for number in range(50)]
    for key in asked[:REQUESTS_OPEN]:
        greedy.put(key, b"")
    for key in asked[REQUESTS_OPEN:]:
        with pytest.raises(RelayUnavailable, match="429"):
            greedy.put(key, b"")
    assert directory.list_keys(REQUESTS) == asked[:REQUESTS_OPEN]
    honest.put(request_key(1), b"")
    for key in directory.list_keys():
        directory.delete(key)
    greedy.put(request_key(2), b"")
    assert directory.list_keys() == [request_key(2)]
    for each in (greedy, honest):
        each.close()


def test_a_token_that_was_revoked_is_nobodys(trainer: Publisher, rights: RelayRights, url: str):
    first, token = rights.issue("spot-1"), rights.issue("spot-1")
    assert first != token
    for offered, status in ((first, 401), (token, 200), (rights.owner, 200), ("none", 401), ("é", 401)):
        headers = {b"authorization": b"Bearer " + offered.encode()}
        assert httpx.get(f"{url}/blobs", headers=headers).status_code == status  # type: ignore[arg-type]
    assert rights.issue("spot-1", "known beforehand") == "known beforehand"
    for offered, status in ((token, 401), ("known beforehand", 200)):
        assert httpx.get(f"{url}/blobs", headers={"authorization": f"Bearer {offered}"}).status_code == status
    token = "known beforehand"
    rights.revoke("spot-1")
    rights.revoke("spot-1")
    assert httpx.get(f"{url}/blobs", headers={"authorization": f"Bearer {token}"}).status_code == 401
    assert httpx.get(f"{url}/blobs", headers={"authorization": f"Basic {rights.owner}"}).status_code == 401


# On the relay's own files.


def unsigned(content: bytes) -> bytes:
    """As it was before there were signatures: with a checksum that anybody can compute."""
    from hashlib import blake2b

    manifest = bytes(msgspec.json.decode(content, type=dict[str, msgspec.Raw])["manifest"])
    checksum = blake2b(manifest, digest_size=32).hexdigest()
    return msgspec.json.encode({"checksum": checksum, "signature": checksum * 2, "manifest": msgspec.Raw(manifest)})


def forge_renamed(relay: DirectoryRelay, change: Callable[[bytes], bytes]) -> None:
    """A keyframe that the trainer signed as version 9 becomes version 3's."""
    forge_keyframe(relay, 9, KEY)
    overwrite(relay, manifest_key(3), change(relay.get(manifest_key(9))))


FORGERIES: dict[str, Callable[[DirectoryRelay], None]] = {
    "zero keyframes by another key": lambda relay: forge_keyframe(relay, 3),
    "zero keyframes of another run": lambda relay: forge_keyframe(relay, 3, KEY, "another"),
    "zero keyframes of another version": lambda relay: forge_renamed(relay, lambda content: content),
    "an older keyframe": lambda relay: overwrite(relay, manifest_key(3), relay.get(manifest_key(0))),
    "an unsigned keyframe": lambda relay: forge_renamed(relay, unsigned),
    "junk": lambda relay: overwrite(relay, manifest_key(3), b"junk"),
    "nothing": lambda relay: overwrite(relay, manifest_key(3), b""),
    "a delta's manifest as a keyframe's": lambda relay: overwrite(
        relay, manifest_key(3), relay.get(delta_manifest_key(3, 2))
    ),
}


@pytest.mark.parametrize("forge", FORGERIES.values(), ids=FORGERIES)
def test_a_forged_keyframe_is_refused_and_a_sound_copy_taken(
    trainer: Publisher, directory: DirectoryRelay, forge: Callable[[DirectoryRelay], None]
):
    behind = Puller(directory, TRUST)
    assert_sound(behind.pull(2), 2)
    forge(directory)
    directory.delete(delta_manifest_key(3, 2))
    for puller, kept in ((behind, 2), (Puller(directory, TRUST), None)):
        with pytest.raises(WeightsCorrupted) as refused:
            puller.pull(3)
        assert puller.version == kept, "what it serves is what it served"
        assert "keyframe of version 3" in [refusal.what for refusal in refused.value.refused]
        assert directory.list_keys(REQUESTS) == [request_key(3)]
    assert trainer.answer_requests()
    for puller in (behind, Puller(directory, TRUST)):
        assert_sound(puller.pull(3), 3)


@pytest.mark.parametrize("kind", ["begun", "manifest"])
@pytest.mark.parametrize("forged", ["junk", "thief", "another run", "another version", "another base"])
def test_a_forged_delta_costs_nothing_but_itself(trainer: Publisher, directory: DirectoryRelay, kind: str, forged: str):
    """The base that is held is as good as before, so the chain that is there all along is taken."""
    manifest = opened(directory, 3, 2)
    change = {"another run": {"run": "another"}, "another version": {"version": 2}, "another base": {"base_version": 1}}
    begun = msgspec.structs.replace(manifest.announced, **{"base_version": 0} | change.get(forged, {}))
    record = msgspec.structs.replace(manifest, announced=begun)
    signed = (THIEF if forged == "thief" else KEY).seal(record if kind == "manifest" else begun)
    place = delta_manifest_key(3, 0) if kind == "manifest" else begun_key(3, 0)
    directory.put(place, b"junk" if forged == "junk" else signed)
    puller = Puller(directory, TRUST)
    assert_sound(puller.pull(0), 0)
    staged = puller.stage(3, follow=True)
    assert_sound(puller.apply(staged), 3)
    assert staged.path == (PublishedUpdate(1, 0), PublishedUpdate(2, 1), PublishedUpdate(3, 2))
    if kind == "manifest":
        ((what, reason),) = staged.report.refused
        assert what == "delta of version 3 from 0"
        assert "not signed" in reason or "it is of run another" in reason or "it is that of" in reason


def test_a_part_that_was_swapped_between_versions_is_refused(trainer: Publisher, directory: DirectoryRelay):
    puller = Puller(directory, TRUST)
    assert_sound(puller.pull(2), 2)
    overwrite(directory, bucket_key(3, 2, 0), directory.get(bucket_key(2, 1, 0)))
    with pytest.raises(WeightsCorrupted):
        puller.pull(3)
    assert_sound(Puller(directory, TRUST).pull(2), 2)
    assert trainer.answer_requests()
    assert_sound(puller.pull(3), 3)


@many
@given(data=st.data())
def test_a_changed_byte_of_any_blob_is_never_put_in_force(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
):
    """A property over the bytes of a relay: each example changes one, and pulls."""
    directory = DirectoryRelay(tmp_path_factory.mktemp("relay"))
    publisher = Publisher(directory, "run", MODEL, SMALL, key=KEY)
    for version in range(3):
        publisher.publish(version, weights(version))
    publisher.close()
    puller = Puller(directory, TRUST)
    if (base := data.draw(st.sampled_from([None, 0, 1]))) is not None:
        puller.pull(base)
    for _ in range(data.draw(st.integers(1, 3))):
        key = data.draw(st.sampled_from(directory.list_keys("versions/")))
        content = bytearray(directory.get(key))
        if content:
            content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
        cut = data.draw(st.sampled_from([0, 0, 1]))
        overwrite(directory, key, bytes(content[: len(content) - cut]))
    follow = data.draw(st.booleans())
    try:
        pulled = puller.pull(2, 0.05 if follow else 5.0, follow=follow)
    except WeightsError:
        assert puller.version == base
    else:
        assert_sound(pulled, 2)


def test_junk_where_the_trainer_is_about_to_publish_makes_room(trainer: Publisher, directory: DirectoryRelay):
    for key in (
        begun_key(4, 3),
        bucket_key(4, 3, 0),
        bucket_key(4, 3, 1),
        delta_manifest_key(4, 3),
        manifest_key(4),
        keyframe_key(4),
        begun_key(4, NOTHING),
    ):
        directory.put(key, b"junk")
    trainer.request_keyframe()
    trainer.publish(4, weights(4))
    trainer.wait()
    assert_sound(Puller(directory, TRUST).pull(4), 4)
    behind = Puller(directory, TRUST)
    behind.pull(3)
    assert_sound(behind.pull(4), 4)


def test_junk_before_the_first_version_makes_room(directory: DirectoryRelay):
    for key in (manifest_key(0), keyframe_key(0)):
        directory.put(key, b"junk")
    publisher = Publisher(directory, "run", MODEL, SMALL, key=KEY)
    publisher.publish(0, weights(0))
    publisher.close()
    assert_sound(Puller(directory, TRUST).pull(0), 0)


def test_who_follows_meets_junk_and_gets_the_version_all_the_same(trainer: Publisher, directory: DirectoryRelay):
    follower = Puller(directory, TRUST)
    follower.pull(3)
    directory.put(begun_key(4, 3), b"junk")
    with ThreadPoolExecutor(1) as executor:
        pulled = executor.submit(follower.pull, 4, 30.0, follow=True)
        while directory.list_keys(REQUESTS) == []:
            assert not pulled.done()
        trainer.publish(4, weights(4))
        trainer.wait()
        while not pulled.done():
            trainer.answer_requests()
        assert_sound(pulled.result(), 4)


def test_versions_that_nobody_published_push_none_off_the_relay(trainer: Publisher, directory: DirectoryRelay):
    for version in (2, 3, 50, 51, 52, 53, 99_999_999):
        overwrite(directory, manifest_key(version), b"junk")
    trainer.publish(4, weights(4))
    trainer.wait()
    puller = Puller(directory, TRUST)
    for version in range(5):
        assert_sound(puller.pull(version), version)


def test_another_ranks_part_counts_only_with_the_trainers_signature(directory: DirectoryRelay):
    shapes = {name: tuple(tensor.shape) for name, tensor in weights(0).items()}
    layout = [whole(shapes)] * 2
    plan = cells(shapes, layout, [])
    ranks = [
        Publisher(directory, "run", MODEL, SMALL, TrainerRank(plan, shard, rank, 2), key)
        for rank, (shard, key) in enumerate(zip(layout, (KEY, THIEF), strict=True))
    ]
    ranks[1].publish(0, weights(0))
    assert directory.list_keys(part_key(0, NOTHING, 1))
    with pytest.raises(WeightsForged, match="not signed"):
        ranks[0].publish(0, weights(0))
    assert published_versions(directory) == []
    for rank in ranks:
        rank.close()


# In a site.


class Poisoned(DirectoryRelay):
    """A near relay of which one worker replaces whatever another puts there."""

    def __init__(self, root: Path, forge: Callable[[str, bytes], bytes]) -> None:
        super().__init__(root)
        self._forge = forge

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        content = super().get(key, start, length)
        return content if ".claim-" in key else self._forge(key, content)


def forged_manifest(key: str, content: bytes) -> bytes:
    if "manifest.json" not in key:
        return bytes(len(content))
    manifest = msgspec.json.decode(content, type=dict[str, msgspec.Raw])["manifest"]
    return THIEF.seal_body("keyframe", bytes(manifest))


@pytest.mark.parametrize(
    "forge",
    [
        lambda key, content: bytes(len(content)),
        lambda key, content: b"",
        lambda key, content: content + b"\0",
        lambda key, content: content[:-1],
        forged_manifest,
    ],
    ids=["zeros", "nothing", "longer", "shorter", "signed by a worker"],
)
def test_a_peer_that_serves_forged_parts_is_done_without(
    trainer: Publisher, directory: DirectoryRelay, tmp_path: Path, forge: Callable[[str, bytes], bytes]
):
    near = Poisoned(tmp_path / "near", forge)
    first = PeerCacheRelay(directory, near, "first", TRUST)
    assert_sound(sharing(first).pull(0), 0)
    second = sharing(PeerCacheRelay(directory, near, "second", TRUST))
    for version in (0, 3):
        staged = second.stage(version)
        assert_sound(second.apply(staged), version)
        assert len(staged.report.refused) <= 2 * len(staged.path) + 2
    assert directory.list_keys(REQUESTS) == []


def test_a_key_stays_in_its_process():
    import copy
    import pickle

    for copied in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="stays in its process"):
            copied(SigningKey())


def test_requests_without_end_cost_the_trainer_a_keyframe_now_and_then(trainer: Publisher, directory: DirectoryRelay):
    directory.put(request_key(3), b"")
    assert trainer.answer_requests()
    directory.put(request_key(3), b"")
    assert not trainer.answer_requests()
    assert directory.list_keys(REQUESTS) == [request_key(3)], "it is answered later"
    with on(Host(monotonic=lambda: time.monotonic() + publisher.RENEW_S)):
        assert trainer.answer_requests()
        directory.put(request_key(3), b"")
    trainer.publish(4, weights(4))
    directory.put(request_key(4), b"")
    assert trainer.answer_requests(), "another version does not wait"
