"""A chain of versions, pulled by workers that come, skip, fall behind and meet every kind of damage."""

import math
import threading
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from benchmarks._throttle import RelayAround
from elastic.system.host import Host, on
from elastic.weights.codecs import CODECS
from elastic.weights.directory import DirectoryRelay
from elastic.weights.errors import BlobNotFound, RelayError, RelayUnavailable, WeightsCorrupted, WeightsRefusal
from elastic.weights.plan import PublishedUpdate
from elastic.weights.publisher import Publisher, PublishSettings, publish_keyframe
from elastic.weights.puller import Puller
from elastic.weights.records import (
    base_of,
    begun_key,
    bucket_key,
    delta_manifest_key,
    keyframe_key,
    manifest_key,
)
from elastic.weights.relay import REQUESTS, Buffer, Relay
from elastic.weights.signing import SigningKey
from elastic.weights.source import WeightChanges
from elastic.weights.versions import discard_all, published_updates, published_versions, updates_in
from elastic.weights.waiting import POLL_S
from tests.seeds import examples
from tests.weights.signed import KEY, TRUST, assert_same, damage, flip, full_disk, opened, put_in_force

MODEL = {"model_type": "qwen3", "hidden_size": 8}
SMALL = PublishSettings(bucket_elements=64, tile_elements=16, keyframe_every=8, merge_every=3, keep_versions=4)

many = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=examples(5, 15))


class History:
    """Versions of some weights and their publisher; `tensors[v]` are those of version v. Some may be `float32`."""

    def __init__(
        self,
        relay: Relay,
        publish: PublishSettings = SMALL,
        seed: int = 0,
        key: SigningKey = KEY,
        float32: Collection[str] = (),
    ) -> None:
        self._float32 = float32
        self._rng = torch.Generator().manual_seed(seed)
        self.publisher = Publisher(relay, "run", MODEL, publish, key=key)
        self.tensors: list[dict[str, Tensor]] = []

    def step(self, share: float = 0.1) -> None:
        """Any patterns at all in about `share` of the places for one."""
        if self.tensors:
            self.tensors.append({name: self._moved(tensor, share) for name, tensor in self.tensors[-1].items()})
        else:
            shapes = {"embedding": (40, 5), "scalar": (), "empty": (0, 3), "norm": (7,)}
            types = {name: torch.float32 if name in self._float32 else torch.bfloat16 for name in shapes}
            zeros = {name: torch.zeros(shape, dtype=types[name]) for name, shape in shapes.items()}
            self.tensors.append({name: self._moved(tensor, 1.0) for name, tensor in zeros.items()})
        self.publisher.publish(len(self.tensors) - 1, self.tensors[-1])
        self.publisher.wait()

    def _moved(self, tensor: Tensor, share: float) -> Tensor:
        flat = tensor.view(-1).view(torch.int16)
        patterns = torch.randint(-(2**15), 2**15, flat.shape, generator=self._rng, dtype=torch.int32)
        moved = torch.rand(flat.shape, generator=self._rng) < share
        return torch.where(moved, patterns.to(torch.int16), flat).view(tensor.dtype).view(tensor.shape)


def assert_at(puller: Puller, history: History, version: int, **options: float) -> None:
    assert_same(puller.pull(version, **options), history.tensors[version])  # type: ignore[arg-type]
    assert puller.version == version
    assert puller.audit() == []


@pytest.fixture
def history(tmp_path: Path) -> History:
    history = History(DirectoryRelay(tmp_path / "relay"))
    for _ in range(4):
        history.step()
    return history


@pytest.fixture
def directory(tmp_path: Path, history: History) -> DirectoryRelay:
    return DirectoryRelay(tmp_path / "relay")


@many
@given(seed=st.integers(0, 2**30), data=st.data())
def test_every_path_ends_at_the_trainers_bits(tmp_path_factory: pytest.TempPathFactory, seed: int, data: st.DataObject):
    """A property over codecs and paths, each of which is published and pulled."""
    relay = DirectoryRelay(tmp_path_factory.mktemp("relay"))
    codec = data.draw(st.sampled_from([None, *CODECS]))
    publish = PublishSettings(
        bucket_elements=data.draw(st.sampled_from([1, 50, 1000])),
        tile_elements=data.draw(st.sampled_from([1, 7, 64, 1000])),
        keyframe_every=data.draw(st.integers(1, 5)),
        merge_every=data.draw(st.integers(1, 4)),
        keyframe_in_buckets=data.draw(st.booleans()),
        puts_at_once=data.draw(st.integers(1, 3)),
        keep_versions=data.draw(st.integers(1, 6)),
        codec=codec,
    )
    float32 = data.draw(st.sampled_from([(), ("norm",), ("scalar", "empty", "norm"), ("embedding", "scalar")]))
    history = History(relay, publish, seed, float32=float32)
    pullers = [Puller(relay, TRUST, chunk_bytes=50) for _ in range(2)]
    for _ in range(data.draw(st.integers(1, 9))):
        history.step(data.draw(st.sampled_from([0.0, 0.05, 1.0])))
        for puller in pullers:
            if data.draw(st.booleans()):
                assert_at(puller, history, len(history.tensors) - 1)
    assert_at(Puller(relay, TRUST), history, len(history.tensors) - 1)


def test_weights_of_which_some_are_float32_have_no_changes_by_element(tmp_path: Path):
    """Whoever has a copy of its own writes them whole: nearly all of a float32 tensor changes with every version."""
    relay = DirectoryRelay(tmp_path)
    history, puller = History(relay, float32=("norm",)), Puller(relay, TRUST)
    for version in range(2):
        history.step(0.02)
        staged = puller.stage(version)
        assert puller.changes(staged) is None
        assert_same(puller.apply(staged), history.tensors[version])


def test_over_every_relay_a_delta_is_what_is_pulled(relay: Relay):
    history = History(relay)
    history.step()
    puller = Puller(relay, TRUST)
    assert_at(puller, history, 0)
    history.step()
    pulled = put_in_force(puller, 1)
    assert pulled.path == (PublishedUpdate(1, 0),)
    assert 0 < pulled.report.size_bytes == sum(bucket.size_bytes for bucket in opened(relay, 1, 0).buckets)
    assert_at(puller, history, 1)
    assert puller.stage(1).report.size_bytes == 0


def test_a_worker_that_is_behind_pulls_one_merged_delta(history: History, directory: DirectoryRelay):
    assert PublishedUpdate(3, 0) in published_updates(directory)
    puller = Puller(directory, TRUST)
    assert_at(puller, history, 0)
    assert put_in_force(puller, 3).path == (PublishedUpdate(3, 0),)
    assert_at(puller, history, 3)


def patched(tensors: dict[str, Tensor], changes: WeightChanges) -> dict[str, Tensor]:
    copies = {name: tensor.clone() for name, tensor in tensors.items()}
    for name, index, values in changes.elements:
        copies[name].view(-1)[index] = values  # type: ignore[index]
    return copies


@many
@given(
    seed=st.integers(0, 2**30),
    share=st.sampled_from([0.0, 0.03, 0.9]),
    codec=st.sampled_from(["gap8", "exponent_class", "raw"]),
)
def test_whoever_has_a_copy_of_the_base_needs_only_the_changes(tmp_path_factory, seed: int, share: float, codec: str):
    relay = DirectoryRelay(tmp_path_factory.mktemp("relay"))
    publish = PublishSettings(bucket_elements=64, tile_elements=16, merge_every=1, codec=codec)
    history = History(relay, publish, seed)
    for _ in range(3):
        history.step(share)
    puller = Puller(relay, TRUST)
    assert puller.changes(puller.stage(0)) is None, "there is nothing before it"
    puller.pull(0)
    changes = puller.changes(puller.stage(2))
    assert changes is None or codec != "raw"
    assert changes is None or share < 0.9, "then they would take more memory than the tensors"
    assert changes is not None or share > 0 or codec == "raw"
    if changes is not None:
        assert_same(patched(history.tensors[0], changes), history.tensors[2])


def test_a_staged_version_leaves_the_served_one_as_it_is(history: History, directory: DirectoryRelay):
    puller = Puller(directory, TRUST, changes_share=1.0)
    served = puller.pull(0)
    directory.delete(delta_manifest_key(3, 0))
    staged = puller.stage(3)
    assert staged.path == (PublishedUpdate(1, 0), PublishedUpdate(2, 1), PublishedUpdate(3, 2))
    assert puller.version == 0
    assert_same(served, history.tensors[0])
    for _ in range(2):
        changes = puller.changes(staged)
        assert changes is not None
        assert_same(patched(history.tensors[0], changes), history.tensors[3])
        assert_same(puller.apply(staged), history.tensors[3])
        assert puller.version == 3
        assert puller.audit() == []


def test_what_was_staged_over_another_version_is_refused(history: History, directory: DirectoryRelay):
    puller = Puller(directory, TRUST)
    assert_at(puller, history, 1)
    late = puller.stage(2)
    assert_at(puller, history, 3)
    with pytest.raises(ValueError, match="version 2 was staged over 1; held is 3"):
        puller.apply(late)
    assert puller.audit() == []


@pytest.mark.parametrize(
    "change", [flip, lambda content: content[:-3], lambda content: b""], ids=["bit", "cut", "empty"]
)
@pytest.mark.parametrize("key", [bucket_key(2, 1, 1), delta_manifest_key(2, 1)], ids=["bucket", "manifest"])
def test_a_damaged_delta_is_replaced_by_another_way(history: History, directory: DirectoryRelay, key: str, change):
    puller = Puller(directory, TRUST)
    assert_at(puller, history, 1)
    damage(directory, key, change)
    with pytest.raises(WeightsCorrupted):
        puller.pull(2)
    assert puller.version == 1
    history.publisher.request_keyframe()
    history.step()
    assert_at(puller, history, 4)


def test_a_missing_bucket_is_replaced_by_a_keyframe(history: History, directory: DirectoryRelay):
    puller = Puller(directory, TRUST)
    assert_at(puller, history, 3)
    history.publisher.request_keyframe()
    history.step()
    directory.delete(bucket_key(4, 3, 0))
    assert_at(puller, history, 4)
    assert Puller(directory, TRUST).stage(4).path == (PublishedUpdate(4, None),)


def test_a_delta_from_another_run_or_for_another_base_is_refused(history: History, tmp_path: Path):
    other = DirectoryRelay(tmp_path / "other")
    foreign = History(other, seed=1)
    foreign.step()
    foreign.step()
    relay = DirectoryRelay(tmp_path / "relay")
    for key in [delta_manifest_key(1, 0), *(bucket_key(1, 0, number) for number in range(2))]:
        damage(relay, key, lambda _, key=key: other.get(key))
    puller = Puller(relay, TRUST)
    assert_at(puller, history, 0)
    with pytest.raises(WeightsCorrupted):
        puller.pull(1)
    assert puller.version == 0


class Dying(RelayAround):
    """A relay that fails every other `get` of a blob, and remembers what it delivered."""

    def __init__(self, relay: Relay) -> None:
        super().__init__(relay)
        self._asked: dict[tuple[str, int], int] = {}
        self.delivered: list[str] = []

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        self._asked[key, start] = self._asked.get((key, start), 0) + 1
        if self._asked[key, start] % 2:
            raise RelayUnavailable(f"{key}: gone")
        self.delivered.append(key)
        return super().get(key, start, length)


def test_a_broken_transfer_fetches_no_bucket_twice(history: History, directory: DirectoryRelay):
    relay = Dying(directory)
    assert_at(Puller(relay, TRUST), history, 2)
    blobs = [key for key in relay.delivered if key.endswith(".bin")]
    assert len(blobs) == len(set(blobs))


def test_a_full_disk_ends_the_publication_not_the_version_before(history: History, directory: DirectoryRelay):
    with full_disk(), pytest.raises(RelayError, match="No space left"):
        history.step()
    assert published_versions(directory)[-1] == 3
    assert_at(Puller(directory, TRUST), history, 3)
    history.publisher.publish(4, history.tensors[4])
    assert_at(Puller(directory, TRUST), history, 4)


def test_what_a_killed_trainer_left_of_a_version_is_not_pulled(history: History, directory: DirectoryRelay):
    directory.put(bucket_key(4, 3, 0), b"half a version")
    directory.put(keyframe_key(4), b"and half a keyframe")
    assert published_versions(directory)[-1] == 3
    with pytest.raises(BlobNotFound):
        Puller(directory, TRUST).pull(4)


class Killed(Exception):
    pass


class Mortal(RelayAround):
    """The relay of a trainer that is killed when no `put` is `left`."""

    left = math.inf

    def put(self, key: str, *parts: Buffer) -> None:
        if not self.left:
            raise Killed
        self.left -= 1
        super().put(key, *parts)


@many
@given(puts=st.integers(0, 14), back=st.integers(0, 1), seed=st.integers(1, 99))
def test_whoever_follows_a_trainer_that_is_killed_has_a_whole_version_before_and_after(
    tmp_path_factory: pytest.TempPathFactory, puts: int, back: int, seed: int
):
    directory = DirectoryRelay(tmp_path_factory.mktemp("relay"))
    mortal = Mortal(directory)
    history = History(mortal)
    for _ in range(3):
        history.step()
    follower = Puller(directory, TRUST)
    assert_at(follower, history, 2)
    mortal.left = puts
    with suppress(Killed):
        history.step()
    if 3 in published_versions(directory):
        assert_at(follower, history, 3, follow=True)
    else:
        with pytest.raises(RelayError):
            follower.pull(3, 0.02, follow=True)
        assert follower.version == 2
    resumed = History(directory, seed=seed)
    resumed.tensors = history.tensors[: 4 - back]
    discard_all(directory)
    resumed.publisher.publish(3 - back, resumed.tensors[-1])
    while len(resumed.tensors) < 6:
        resumed.step()
    for version in range(3 - back, 6):
        assert_at(follower if version > 3 else Puller(directory, TRUST), resumed, version, follow=True)


def test_what_was_begun_and_given_up_holds_nobody_up(tmp_path: Path):
    directory = DirectoryRelay(tmp_path)
    history = History(directory)
    history.step()
    follower = Puller(directory, TRUST)
    assert_at(follower, history, 0)
    for _ in range(3):
        history.step()
    for key in (delta_manifest_key(3, 0), bucket_key(3, 0, 0)):
        directory.delete(key)
    assert PublishedUpdate(3, 0) in updates_in(directory.list_keys(), coming=3)
    assert [update.version for update in follower.stage(3, follow=True).path] == [1, 2, 3]
    manifest = directory.get(delta_manifest_key(3, 2))
    for key in (delta_manifest_key(3, 2), begun_key(3, 0)):
        directory.delete(key)
    with ThreadPoolExecutor(1) as executor:
        pulled = executor.submit(follower.pull, 3, 60.0, follow=True)
        directory.put(delta_manifest_key(3, 2), manifest)
        assert_same(pulled.result(), history.tensors[3])
    history.step()
    assert_at(Puller(directory, TRUST), history, 4, follow=True)


def test_who_follows_what_is_damaged_waits_for_the_keyframe_that_it_asks_for(
    history: History, directory: DirectoryRelay
):
    for base in (0, 2):
        damage(directory, bucket_key(3, base, 0), flip)
    with ThreadPoolExecutor(1) as executor:
        pulled = executor.submit(Puller(directory, TRUST).stage, 3, 60.0, follow=True)
        while not history.publisher.answer_requests():
            assert not pulled.done()
        assert pulled.result().path == (PublishedUpdate(3, None),)


def test_waiting_for_the_trainer_is_told_from_the_wire(history: History, directory: DirectoryRelay):
    class Late(Mortal):
        """Of which one manifest is not there when first asked for."""

        def __init__(self, absent: int) -> None:
            super().__init__(directory)
            self.get, self._absent = self._get, absent

        def _get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
            if key == delta_manifest_key(2, 1) and self._absent:
                self._absent -= 1
                raise BlobNotFound(key)
            return directory.get(key, start, length)

    puller = Puller(Late(absent=4), TRUST)
    assert put_in_force(puller, 1, follow=True).report.encode_s == 0
    followed = puller.stage(2, follow=True).report
    assert followed.encode_s >= 3 * POLL_S, "once for what is to come, and three times for the manifest"
    assert min(followed.wire_s, followed.decode_s) > 0


class Timed(RelayAround):
    """A relay whose answers take time, on a clock of its own; nothing else does."""

    def __init__(self, relay: Relay, now_s: float, answer_s: float) -> None:
        super().__init__(relay)
        self._now_s = now_s
        self._answer_s = answer_s

    def asked(self) -> Relay:
        self._now_s += self._answer_s
        return self.relay

    def monotonic(self) -> float:
        return self._now_s


@pytest.mark.parametrize(("now_s", "answer_s"), [(0.1, 0.4), (0.2, 0.8), (0.2, 0.9)])
def test_no_part_of_a_pull_takes_less_than_no_time(
    history: History, directory: DirectoryRelay, now_s: float, answer_s: float
):
    relay = Timed(directory, now_s, answer_s)
    with on(Host(monotonic=relay.monotonic)):
        report = Puller(relay, TRUST).stage(0, timeout_s=1e9).report
    assert report.wire_s > 0
    assert min(report.encode_s, report.decode_s) >= 0


def test_garbage_collection_keeps_the_way_to_every_kept_version(tmp_path: Path):
    """A property over histories of versions, each of which is published and pulled."""
    relay = DirectoryRelay(tmp_path)
    history = History(relay)
    laggard = Puller(relay, TRUST)
    for version in range(30):
        history.step()
        if version % 11 == 0:
            assert_at(laggard, history, version)
        for kept in range(max(version - SMALL.keep_versions + 1, 0), version + 1):
            assert_at(Puller(relay, TRUST), history, kept)
    assert published_versions(relay)[0] >= 16
    assert relay.list_keys(manifest_key(0)) == []
    assert_at(laggard, history, 29)


def test_other_tensors_begin_anew_with_a_keyframe(history: History, directory: DirectoryRelay):
    other = {"a": torch.ones(3, dtype=torch.bfloat16)}
    puller = Puller(directory, TRUST)
    assert_at(puller, history, 3)
    assert history.publisher.publish(4, other).kind == "keyframe"
    assert torch.equal(puller.pull(4)["a"], other["a"])


def test_a_publication_tells_what_changed(tmp_path: Path):
    publisher = Publisher(DirectoryRelay(tmp_path), "run", MODEL, SMALL, key=KEY)
    tensors = {"a": torch.zeros(40, dtype=torch.bfloat16), "b": torch.zeros(30, dtype=torch.bfloat16)}
    publisher.publish(0, tensors)
    tensors["b"][3:8] = 1.0
    published = publisher.publish(1, tensors)
    assert (published.kind, published.changed, published.full_bytes) == ("delta", {"a": 0, "b": 5}, 140)
    publisher.close()


class Held(RelayAround):
    """A relay on which a version's manifest appears only when the test lets it."""

    def __init__(self, relay: Relay, key: str) -> None:
        super().__init__(relay)
        self._key = key
        self.pulled, self.release = threading.Event(), threading.Event()

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        content = super().get(key, start, length)
        if key.endswith(".bin") and not self.release.is_set():
            self.pulled.set()
        return content

    def put(self, key: str, *parts: Buffer) -> None:
        if key == self._key:
            assert self.pulled.wait(60), "the buckets are pulled before the manifest is there"
            self.release.set()
        super().put(key, *parts)


def test_a_version_is_followed_while_it_is_published(tmp_path: Path):
    relay = Held(DirectoryRelay(tmp_path), delta_manifest_key(1, 0))
    history = History(relay)
    history.step()
    puller = Puller(relay, TRUST)
    assert_at(puller, history, 0)
    relay.pulled.clear()
    with ThreadPoolExecutor(1) as executor:
        pulled = executor.submit(put_in_force, puller, 1, 60.0, follow=True)
        history.step()
        assert pulled.result().path == (PublishedUpdate(1, 0),)
    assert_at(puller, history, 1)


def test_what_is_under_way_and_damaged_is_refused(history: History, directory: DirectoryRelay, tmp_path: Path):
    last, damaged = delta_manifest_key(2, 1), bucket_key(2, 1, 1)
    manifest = directory.get(last)

    class Finishing(DirectoryRelay):
        """The rest of the version appears when the damaged bucket is read."""

        def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
            if key == damaged:
                self.put(last, manifest)
                publish_keyframe(self, "run", 2, history.tensors[2], MODEL, KEY)
            return super().get(key, start, length)

    puller = Puller(Finishing(tmp_path / "relay"), TRUST)
    assert_at(puller, history, 1)
    directory.delete(last)
    damage(directory, damaged, lambda content: content[:-12] + bytes(4) + content[-8:])
    staged = puller.stage(2, 60.0, follow=True)
    assert staged.path == (PublishedUpdate(2, None),), "and not what was under way"
    assert_same(puller.apply(staged), history.tensors[2])


def test_a_worker_that_nothing_leads_to_a_version_is_given_a_keyframe(history: History, directory: DirectoryRelay):
    assert not history.publisher.answer_requests(), "nobody has asked"
    for base in (0, 2):
        damage(directory, delta_manifest_key(3, base), flip)
    puller = Puller(directory, TRUST)
    with pytest.raises(WeightsCorrupted):
        puller.pull(3)
    assert history.publisher.answer_requests()
    assert directory.list_keys(REQUESTS) == []
    assert_at(puller, history, 3)
    assert not history.publisher.answer_requests()


@pytest.mark.parametrize("damaged", [flip, lambda content: content[:-1], lambda _: b""])
def test_a_damaged_keyframe_is_replaced_when_a_worker_refuses_it(
    history: History, directory: DirectoryRelay, damaged: Callable[[bytes], bytes]
):
    history.publisher.request_keyframe()
    history.step()
    history.publisher.wait()
    version = len(history.tensors) - 1
    damage(directory, keyframe_key(version), damaged)
    for key in directory.list_keys("versions/"):
        if base_of(key) is not None:
            directory.delete(key)
    puller = Puller(directory, TRUST)
    with pytest.raises(WeightsCorrupted):
        puller.pull(version)
    assert history.publisher.answer_requests()
    assert_at(puller, history, version)
    assert directory.list_keys(REQUESTS) == []


def test_a_version_that_is_not_there_yet_is_no_reason_to_ask(history: History, directory: DirectoryRelay):
    with pytest.raises(BlobNotFound):
        Puller(directory, TRUST).pull(9, 0.1)
    assert directory.list_keys(REQUESTS) == []


def test_what_an_audit_finds_wrong_is_no_base_for_another_version(history: History, directory: DirectoryRelay):
    puller = Puller(directory, TRUST)
    tensors = puller.pull(2)
    assert puller.audit() == []
    tensors["embedding"].view(torch.int16)[7, 3] ^= 1
    rested: list[float] = []
    assert puller.audit(rested.append) == [2]
    assert len(rested) == len(opened(directory, 2, 1).tile_sums) / 8
    staged = puller.stage(2)
    assert staged.path[0].base is None, "the same version, from a keyframe on"
    assert staged.report.refused == (
        WeightsRefusal("weights held as version 2", "audit: 1 tiles are wrong, first tile 2"),
    )
    puller.apply(staged)
    assert_at(puller, history, 2)
    assert puller.stage(3).report.refused == ()
    assert_at(puller, history, 3)


def test_what_is_refused_is_told_whether_anything_takes_its_place(history: History, directory: DirectoryRelay):
    puller = Puller(directory, TRUST)
    assert_at(puller, history, 2)
    damage(directory, bucket_key(3, 2, 0), flip)
    staged = puller.stage(3)
    assert staged.path[0].base is None
    assert {refusal.what for refusal in staged.report.refused} == {"delta of version 3 from 2"}
    assert all("digest of bucket 0" in refusal.reason for refusal in staged.report.refused)
    puller.apply(staged)
    assert_at(puller, history, 3)
    newcomer = Puller(directory, TRUST)
    damage(directory, manifest_key(0), lambda _: b"")
    with pytest.raises(WeightsCorrupted) as caught:
        newcomer.pull(2)
    assert [refusal.what for refusal in caught.value.refused] == ["keyframe of version 0"]


def test_an_audit_ends_when_another_version_is_put_in_force(history: History, directory: DirectoryRelay):
    puller = Puller(directory, TRUST)
    puller.pull(1)
    staged = puller.stage(2)
    rested: list[float] = []

    def rest(busy_s: float) -> None:
        rested.append(busy_s)
        puller.apply(staged)

    assert puller.audit(rest) == []
    assert len(rested) == 1
    assert_at(puller, history, 2)


def test_an_audit_goes_on_where_the_one_before_ended(history: History, directory: DirectoryRelay):
    """Where versions come faster than a whole audit takes, each tile still has its turn."""
    puller = Puller(directory, TRUST)
    tensors = puller.pull(1)
    history.step()

    def audit_one_tile(version: int, damaged: bool) -> list[int]:
        staged = puller.stage(version)
        tensors["embedding"].view(torch.int16)[7, 3] ^= damaged
        return puller.audit(lambda busy_s: puller.apply(staged))

    assert [audit_one_tile(version, damaged=version == 4) for version in (2, 3, 4)] == [[], [], [2]]


def test_a_keyframe_is_audited_before_a_delta_comes(history: History, directory: DirectoryRelay):
    puller = Puller(directory, TRUST)
    tensors = puller.pull(0)
    assert puller.audit() == []
    tensors["norm"].view(torch.int16)[6] ^= 1
    assert len(puller.audit()) == 1
    assert_at(puller, history, 0)
