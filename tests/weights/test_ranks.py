"""Several trainer ranks publish one version: what workers ask of them, and what becomes of it when one is gone."""

import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from elastic.system.host import Host, on
from elastic.weights.directory import DirectoryRelay
from elastic.weights.encoder import PART_TIMEOUT_S
from elastic.weights.errors import BlobNotFound, WeightsCorrupted
from elastic.weights.plan import PublishedUpdate
from elastic.weights.puller import Puller
from elastic.weights.records import NOTHING, REQUESTS, bucket_key, delta_manifest_key, part_key, request_key
from elastic.weights.sharding import whole
from elastic.weights.versions import published_updates, published_versions
from tests.weights.ranks import Trainer, assert_has, local_tensors, meshes_of, randomly_patterned
from tests.weights.signed import TRUST, damage, flip, put_in_force

SHAPES = {"a": (40, 5), "b": (30,), "c": (3,)}
EVERY = whole(SHAPES)


def trainer_of(relay: DirectoryRelay, ranks: int = 2, float32: Collection[str] = ()) -> Trainer:
    """No keyframe is due."""
    return Trainer(relay, SHAPES, meshes_of(SHAPES, ranks), [], float32, keyframe_every=100, merge_every=1)


@contextmanager
def answering(ranks: Trainer) -> Iterator[None]:
    """Meanwhile each rank looks for requests, as their processes do."""
    over = threading.Event()

    def look(rank: int) -> None:
        while not over.wait(0.01):
            ranks.publishers[rank].answer_requests()

    threads = [threading.Thread(target=look, args=(rank,)) for rank in range(len(ranks.publishers))]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


def keyframes(relay: DirectoryRelay) -> list[int]:
    return [update.version for update in published_updates(relay) if update.base is None]


def refused(relay: DirectoryRelay, version: int) -> None:
    """A worker finds nothing that leads to the version, and asks for a keyframe."""
    with pytest.raises(WeightsCorrupted):
        Puller(relay, TRUST).pull(version)
    assert relay.list_keys(REQUESTS) == [request_key(version)]


def answered(relay: DirectoryRelay) -> None:
    while relay.list_keys(REQUESTS):
        threading.Event().wait(0.005)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_keyframe_that_is_asked_for_is_put_at_once(tmp_path: Path, ranks: int):
    relay = DirectoryRelay(tmp_path)
    trainer = trainer_of(relay, ranks, ["b"])
    full = randomly_patterned(SHAPES, 1, ["b"])
    trainer.publish(0, randomly_patterned(SHAPES, 0, ["b"]))
    trainer.publish(1, full)
    damage(relay, delta_manifest_key(1, 0), flip)
    refused(relay, 1)
    with answering(trainer):
        answered(relay)
    assert keyframes(relay) == [0, 1]
    newcomer = Puller(relay, TRUST, shard=EVERY)
    assert put_in_force(newcomer, 1).path == (PublishedUpdate(1, None),)
    assert_has(newcomer, EVERY, 1, full)
    trainer.close()


def test_a_keyframe_that_is_damaged_is_mended_where_it_is(tmp_path: Path):
    """Whichever rank's bucket it is; what is right stays, so that pulls of it go on."""
    relay = DirectoryRelay(tmp_path)
    trainer = trainer_of(relay)
    full = randomly_patterned(SHAPES, 0)
    trainer.publish(0, full)
    buckets = [key for key in relay.list_keys() if key.endswith(".bin")]
    whole_before = {key: relay.get(key) for key in relay.list_keys("versions/")}
    for key in (buckets[0], buckets[-1]):
        damage(relay, key, flip)
    refused(relay, 0)
    with answering(trainer):
        answered(relay)
    assert {key: relay.get(key) for key in relay.list_keys()} == whole_before
    assert_has(Puller(relay, TRUST, shard=EVERY), EVERY, 0, full)
    trainer.close()


def test_the_next_version_waits_for_a_keyframe_that_is_asked_for(tmp_path: Path):
    """A rank that is ahead still has the version before, until rank 0 begins with the next one."""
    relay = DirectoryRelay(tmp_path)
    trainer = trainer_of(relay)
    first, second = trainer.publishers
    before, after = (randomly_patterned(SHAPES, version) for version in range(2))
    trainer.publish(0, before)
    damage(relay, bucket_key(0, NOTHING, 0), flip)
    refused(relay, 0)
    second.publish(1, local_tensors(after, trainer.layout[1]))
    answer = threading.Thread(target=first.answer_requests)
    answer.start()
    while relay.list_keys(part_key(0, NOTHING, 1)):
        threading.Event().wait(0.005)
    publish = threading.Thread(target=first.publish, args=(1, local_tensors(after, trainer.layout[0])))
    publish.start()
    while not second.answer_requests():
        threading.Event().wait(0.005)
    answer.join()
    publish.join()
    for version, full in enumerate((before, after)):
        assert_has(Puller(relay, TRUST, shard=EVERY), EVERY, version, full)
    trainer.close()


def test_nobody_asks_for_what_all_ranks_have_put(tmp_path: Path):
    relay = DirectoryRelay(tmp_path)
    trainer = Trainer(relay, SHAPES, meshes_of(SHAPES, 2), [])
    for version in range(3):
        trainer.publish(version, randomly_patterned(SHAPES, version))
        assert [publisher.answer_requests() for publisher in trainer.publishers] == [False, False]
    trainer.close()


def test_a_version_of_which_a_rank_died_can_be_published_again(tmp_path: Path):
    """Rank 1 dies between two of its buckets: the version is not there, nor is half of it when it is tried again."""
    relay = DirectoryRelay(tmp_path)
    trainer = trainer_of(relay)
    before, after = (randomly_patterned(SHAPES, version) for version in range(2))
    trainer.publish(0, before)
    first, second = trainer.publishers
    second.publish(1, local_tensors(after, trainer.layout[1]))
    lost = [key for key in relay.list_keys("versions/00000001/") if key.endswith(".bin")][-1]
    for key in (lost, part_key(1, 0, 1)):
        relay.delete(key)
    now_s = [0.0]

    def sleep(pause_s: float) -> None:
        now_s[0] += pause_s

    with on(Host(monotonic=lambda: now_s[0], sleep=sleep)), pytest.raises(BlobNotFound, match="part-00001"):
        first.publish(1, local_tensors(after, trainer.layout[0]))
    assert now_s[0] > 0.9 * PART_TIMEOUT_S
    assert published_versions(relay) == [0]
    resumed = trainer_of(relay)
    resumed.publish(1, after)
    assert_has(Puller(relay, TRUST, shard=EVERY), EVERY, 1, after)
    for each in (trainer, resumed):
        each.close()


def test_rank_0_reports_the_whole_version(tmp_path: Path):
    relay = DirectoryRelay(tmp_path)
    trainer = trainer_of(relay, float32=["c"])
    full = randomly_patterned(SHAPES, 0, ["c"])
    trainer.publish(0, full)
    moved = {name: tensor.clone() for name, tensor in full.items()}
    moved["a"][::20] += 1  # a row of each rank's
    second = threading.Thread(target=trainer.publishers[1].publish, args=(1, local_tensors(moved, trainer.layout[1])))
    second.start()
    report = trainer.publishers[0].publish(1, local_tensors(moved, trainer.layout[0]))
    second.join()
    assert report.changed == {"a": 10, "b": 0, "c": 0}
    assert report.full_bytes == sum(tensor.nbytes for tensor in full.values())
    assert report.size_bytes == sum(len(relay.get(k)) for k in relay.list_keys("versions/00000001/delta-00000000-"))
    trainer.close()
