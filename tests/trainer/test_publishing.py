"""Ranks in processes of their own publish one version, with one key, and one of them dies in the middle."""

import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path

import pytest
import torch

from elastic.weights.directory import DirectoryRelay
from elastic.weights.publisher import Publisher, PublishSettings, TrainerRank
from elastic.weights.puller import Puller
from elastic.weights.relay import Buffer
from elastic.weights.sharding import whole
from elastic.weights.signing import SigningKey
from elastic.weights.versions import discard_all, published_versions
from tests.weights.ranks import assert_has, local_tensors, meshes_of, randomly_patterned

pytestmark = pytest.mark.trainers

SHAPES = {"a": (40, 5), "b": (30,), "c": (3,)}
FLOAT32 = ["b"]
RANKS = 2
FULL = [randomly_patterned(SHAPES, version, FLOAT32) for version in range(3)]


class Mortal(DirectoryRelay):
    """The process that uses it is killed as it puts one blob more than this."""

    def __init__(self, root: Path, puts: int) -> None:
        super().__init__(root)
        self._puts = puts

    def put(self, key: str, *parts: Buffer) -> None:
        if not self._puts:
            os.kill(os.getpid(), signal.SIGKILL)
        self._puts -= 1
        super().put(key, *parts)


def be_rank(line: Connection, root: Path, rank: int) -> None:
    """Told its key and how many blobs it puts, it publishes each version that it is told; answers come with these."""
    torch.set_num_threads(1)
    secret, puts = line.recv()
    shard = meshes_of(SHAPES, RANKS)[rank]
    share = TrainerRank.of_all(meshes_of(SHAPES, RANKS), float32=FLOAT32)[rank]
    settings = PublishSettings(bucket_elements=40, tile_elements=7, merge_every=1)
    publisher = Publisher(Mortal(root, puts), "run", {}, settings, share, SigningKey(secret))
    while True:
        version = line.recv()
        publisher.publish(version, local_tensors(FULL[version], shard))
        publisher.wait()
        line.send(version)


@contextmanager
def ranks(root: Path, key: SigningKey, puts: int = 1000) -> Iterator[list[tuple[SpawnProcess, Connection]]]:
    """Rank 1 is killed after so many puts."""
    context = multiprocessing.get_context("spawn")
    started: list[tuple[SpawnProcess, Connection]] = []
    for rank in range(RANKS):
        ours, theirs = context.Pipe()
        process = context.Process(target=be_rank, args=(theirs, root, rank), daemon=True)
        process.start()
        theirs.close()
        ours.send((key.secret, puts if rank else 1000))
        started.append((process, ours))
    yield started
    for process, line in started:
        process.kill()
        process.join()
        line.close()


def published(started: list[tuple[SpawnProcess, Connection]], version: int) -> None:
    for _, line in started:
        line.send(version)
    assert [line.recv() for _, line in started] == [version] * RANKS


def test_versions_of_processes_are_bit_exact_and_outlive_a_rank(tmp_path: Path) -> None:
    relay, every, key = DirectoryRelay(tmp_path), whole(SHAPES), SigningKey()
    puller = Puller(relay, key.trust("run"), shard=every)
    with ranks(tmp_path, key) as started:
        for version in range(2):
            published(started, version)
            assert_has(puller, every, version, FULL[version])
    # The next trainer has another key, and dies between two buckets of a version.
    discard_all(relay)
    with ranks(tmp_path, key := SigningKey(), puts=4) as started:
        for _, line in started:
            line.send(0)
        process, line = started[1]
        process.join()
        assert process.exitcode == -signal.SIGKILL
        with pytest.raises(EOFError):
            line.recv()
        assert published_versions(relay) == []
    # The one after it does not meet what was left.
    discard_all(relay)
    with ranks(tmp_path, key := SigningKey()) as started:
        for version in range(1, 3):
            published(started, version)
    for version in range(1, 3):
        assert_has(Puller(relay, key.trust("run"), shard=every), every, version, FULL[version])
