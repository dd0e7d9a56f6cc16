"""From one whole version to the next, wherever the writing is stopped."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.weights.codecs import CODECS
from elastic.weights.codecs.base import Bits
from elastic.weights.codecs.sums import apply_update, kept_small, tile_sums
from elastic.weights.directory import DirectoryRelay
from elastic.weights.layout import Tiles
from elastic.weights.puller import Puller
from elastic.weights.records import TensorEntry, state_of
from elastic.weights.sharding import whole
from elastic.weights.staging import Overwrite, ResidentWeights, StagedVersion
from tests.seeds import examples
from tests.weights.signed import TRUST

TILE = 16
ENTRIES = (
    TensorEntry(name="a", shape=(10, 5), dtype="bfloat16", offset=0),
    TensorEntry(name="b", shape=(40,), dtype="bfloat16", offset=100),
    TensorEntry(name="c", shape=(3,), dtype="bfloat16", offset=180),
)

many = settings(max_examples=examples(10, 25), deadline=None)


class Stopped(BaseException):
    """In the place of whatever ends a thread's work in the middle."""


class Weights:
    """Versions 0, 1, … of `ENTRIES`, of which a worker hosts some, and the overwrites between them."""

    def __init__(self, seed: int, hosted: tuple[bool, ...]) -> None:
        self._rng = np.random.default_rng(seed)
        self.hosted = hosted
        self.tiles = Tiles(ENTRIES, hosted, TILE)
        self.size = int(self.tiles.ends[-1])
        self.bits = [self._rng.integers(0, 1 << 16, self.size, dtype=np.uint16)]
        for _ in range(3):
            moved = self._rng.random(self.size) < self._rng.choice([0.0, 0.1, 1.0])
            new = self._rng.integers(0, 1 << 16, self.size, dtype=np.uint16)
            self.bits.append(np.where(moved, new, self.bits[-1]))

    def resident(self, version: int, bits: Bits) -> ResidentWeights:
        sums = np.zeros(len(self.tiles.ends), np.uint64)
        sums[self.tiles.hosted] = tile_sums(self.bits[version], self.tiles.ends[self.tiles.hosted])
        return ResidentWeights(version, "run", {}, ENTRIES, self.hosted, bits, {TILE: (state_of(sums), sums)})

    def overwrites(self, path: list[int], codec: str, bucket_tiles: int) -> list[Overwrite]:
        found: list[Overwrite] = []
        for base, version in pairwise(path):
            for first in range(0, len(self.tiles.ends), bucket_tiles):
                for _, elements, ends in self.tiles.pieces(first, bucket_tiles):
                    old, new = self.bits[base][elements], self.bits[version][elements]
                    encoded = CODECS[codec].encode(old, new, ends)
                    decoded = CODECS[codec].decode(encoded.shared, encoded.payload, encoded.payload_ends, old, ends)
                    found.append((elements, decoded))
        return found

    def staged(self, path: list[int], base: ResidentWeights, codec: str, bucket_tiles: int) -> StagedVersion:
        overwrites = self.overwrites(path, codec, bucket_tiles)
        return StagedVersion(self.resident(path[-1], base.bits), base.version, overwrites)


class StoppedAfter(list[Overwrite]):
    """Who writes these the first time is stopped half-way through the bucket after so many."""

    def __init__(self, overwrites: list[Overwrite], writes: int) -> None:
        super().__init__(overwrites)
        self._writes = writes

    def __iter__(self) -> Iterator[Overwrite]:
        whole, self._writes = self._writes, len(self)
        yield from self[:whole]
        if whole < len(self):
            elements, update = self[whole]
            half = update.value.size // 2
            index = np.arange(half, dtype=np.uint32) if update.index is None else update.index[:half]
            yield elements, replace(update, index=index, value=update.value[:half])
            raise Stopped


cases = {
    "seed": st.integers(0, 2**30),
    "codec": st.sampled_from(sorted(CODECS)),
    "bucket_tiles": st.integers(1, 9),
    "hosted": st.sampled_from([(True, True, True), (True, False, True), (False, True, False)]),
    "writes": st.integers(0, 20),
}


@many
@given(**cases)
def test_who_was_stopped_while_writing_goes_on_to_the_whole_version(
    tmp_path_factory, seed, codec, bucket_tiles, hosted, writes
):
    weights = Weights(seed, hosted)
    shard = whole({entry.name: entry.shape for entry, here in zip(ENTRIES, hosted, strict=True) if here})
    puller = Puller(DirectoryRelay(tmp_path_factory.mktemp("relay")), TRUST, shard=shard)
    first = weights.resident(0, weights.bits[0].copy())
    puller.apply(StagedVersion(first))
    staged = weights.staged([0, 1, 2], first, codec, bucket_tiles)
    staged.overwrites = StoppedAfter(staged.overwrites, writes)
    try:
        puller.apply(staged)
    except Stopped:
        assert puller.audit() == [], "what is written over just now is not looked at"
    for _ in range(2):
        assert puller.resident is staged.weights
        assert np.array_equal(first.bits, weights.bits[2])
        assert puller.audit() == []
        puller.apply(staged)
    late = weights.staged([0, 1], first, codec, bucket_tiles)
    with pytest.raises(ValueError, match="version 1 was staged over 0; held is 2"):
        puller.apply(late)
    puller.apply(weights.staged([2, 3], staged.weights, codec, bucket_tiles))
    assert puller.version == 3
    assert np.array_equal(first.bits, weights.bits[3])


@many
@given(**cases)
def test_an_overwrite_is_kept_in_no_more_than_a_copy(seed, codec, bucket_tiles, hosted, writes):
    weights = Weights(seed, hosted)
    for elements, update in weights.overwrites([0, 1], codec, bucket_tiles):
        old, new = (bits[elements] for bits in weights.bits[:2])
        kept = kept_small(update, old, update.ends)
        assert kept.value.nbytes + (0 if kept.index is None else kept.index.nbytes) <= old.nbytes
        for each in (kept, update):
            bits = old.copy()
            apply_update(each, bits)
            assert np.array_equal(bits, new)


@many
@given(**cases)
def test_patterns_after_a_chain_are_known_before_it_is_written(seed, codec, bucket_tiles, hosted, writes):
    weights = Weights(seed, hosted)
    overwrites = weights.overwrites([0, 1, 2], codec, bucket_tiles)
    begin, end = sorted((writes % (weights.size + 1), seed % (weights.size + 1)))
    found = StagedVersion(weights.resident(2, weights.bits[0]), 0, overwrites).patterns(slice(begin, end))
    assert np.array_equal(found, weights.bits[2][begin:end])
