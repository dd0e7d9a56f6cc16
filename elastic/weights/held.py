"""What is held of a version, and the changes that make the next one of it.

A delta is decoded into *changes* while the version before is still served; only when all of them are there and
verified are they written over the patterns, tile by tile, and each tile's tag says which version it is of. So
writing a change again is a no-op, and who was stopped in between goes on where it stopped.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from elastic.weights.codecs.base import BucketUpdate
from elastic.weights.codecs.sums import apply_update, tile_sums
from elastic.weights.layout import tile_counts, tile_ends
from elastic.weights.manifest import TensorEntry
from elastic.weights.tensors import Bits

Tags = npt.NDArray[np.int64]
"""The version of each tile."""


class Tiles:
    """The tiles of a version, and where the hosted ones lie among what is held."""

    def __init__(self, tensors: Sequence[TensorEntry], hosted: Sequence[bool], tile_elements: int) -> None:
        self.hosted = np.repeat(np.array(hosted, bool), tile_counts(tensors, tile_elements))
        sizes = np.diff(tile_ends(tensors, tile_elements), prepend=0)
        self.ends = np.cumsum(np.where(self.hosted, sizes, 0))
        self.begins = np.concatenate([[0], self.ends])

    def runs(self, first: int, count: int) -> list[slice]:
        """Consecutive hosted tiles of a bucket."""
        edges = np.flatnonzero(np.diff(self.hosted[first : first + count], prepend=False, append=False)) + first
        return [slice(int(begin), int(end)) for begin, end in edges.reshape(-1, 2)]

    def elements(self, tiles: slice) -> slice:
        return slice(int(self.begins[tiles.start]), int(self.begins[tiles.stop]))


class Proof(NamedTuple):
    """What the trainer signed of a version: its manifest, as it was on the relay."""

    signed: bytes
    keyframe: bool
    """Whether it is a `Manifest`, of the whole blob, or a `DeltaManifest`."""


class Held(NamedTuple):
    """Whole, verified weights of one version."""

    version: int
    run: str
    model: dict[str, Any]
    tensors: tuple[TensorEntry, ...]
    hosted: tuple[bool, ...]
    """Which of the tensors these are."""
    bits: Bits
    """Of the hosted tensors, one after the other."""
    state: dict[int, tuple[str, npt.NDArray[np.uint64]]]
    """Tile size → what identifies the weights, and their tiles' sums; of further sizes made when first asked for."""
    proof: Proof

    def audited(self, first: int = 0) -> Iterator[tuple[int, bool]]:
        """Each hosted tile, from `first` on and around, and whether its recomputed sum is the one maintained."""
        size, (_, sums) = next(iter(self.state.items()))
        tiles = Tiles(self.tensors, self.hosted, size)
        hosted = np.flatnonzero(tiles.hosted)
        for tile in np.roll(hosted, -np.searchsorted(hosted, first)).tolist():
            bits = self.bits[tiles.elements(slice(tile, tile + 1))]
            yield tile, bool(tile_sums(bits, np.array([bits.size]))[0] == sums[tile])

    def wrong_tiles(self) -> list[int]:
        return [tile for tile, right in self.audited() if not right]


def kept_small(update: BucketUpdate, old: Bits, tile_ends: npt.NDArray[np.int64]) -> BucketUpdate:
    """The same update of `old` in no more memory than a copy of that."""
    if update.index is None or 3 * update.value.size <= old.size:
        return update
    new = old.copy()
    apply_update(update, new)
    return BucketUpdate(None, new, tile_ends, update.sum_changes)


class Change(NamedTuple):
    """What one delta, from `base` to `version`, does to consecutive tiles: `update` of elements `begin` to `end`."""

    base: int
    version: int
    first_tile: int
    begin: int
    end: int
    update: BucketUpdate

    def by_tile(self) -> Iterator[tuple[int, BucketUpdate]]:
        """Each tile's number and its part of the update."""
        index, value, ends, sums = self.update.index, self.update.value, self.update.ends, self.update.sum_changes
        for number, (first, last) in enumerate(pairwise([0, *ends.tolist()])):
            part = None if index is None else index[first:last]
            update = BucketUpdate(part, value[first:last], ends[number : number + 1] - first, sums[number : number + 1])
            yield self.first_tile + number, update

    def write(self, bits: Bits, tags: Tags) -> None:
        """Over all that is held; a tile that is of another version than `base` stays as it is."""
        whole = bits[self.begin : self.end]
        at = 0
        for tile, update in self.by_tile():
            size = update.value.size
            if tags[tile] == self.base:
                apply_update(update, whole if update.index is not None else whole[at : at + size])
                tags[tile] = self.version
            at += size

    def write_part(self, bits: Bits, begin: int) -> None:
        """Over the elements from `begin` on, which `bits` are."""
        value, index = self.update.value, self.update.index
        place = (np.arange(value.size) if index is None else index.astype(np.int64)) + (self.begin - begin)
        inside = (place >= 0) & (place < bits.size)
        bits[place[inside]] = value[inside]


def as_of(bits: Bits, changes: Iterable[Change], elements: slice) -> Bits:
    """These elements after `changes`; a copy only where there are any."""
    touching = [change for change in changes if change.begin < elements.stop and elements.start < change.end]
    if not touching:
        return bits[elements]
    changed = bits[elements].copy()
    for change in touching:
        change.write_part(changed, elements.start)
    return changed


@dataclass(frozen=True)
class Staged:
    """A verified version on its way in: `held` is what there will be once `changes` are written over its patterns.

    Without a `base` its patterns are memory of its own, and there is nothing to write.
    """

    held: Held
    base: int | None
    changes: Sequence[Change]
    tags: Tags

    @classmethod
    def over(cls, base: Held, held: Held, changes: Sequence[Change]) -> "Staged":
        tiles = max((len(sums) for _, sums in held.state.values()), default=0)
        return cls(held, base.version, changes, np.full(tiles, base.version, np.int64))

    @classmethod
    def afresh(cls, held: Held) -> "Staged":
        return cls(held, None, (), np.empty(0, np.int64))

    def write(self) -> None:
        for change in self.changes:
            change.write(self.held.bits, self.tags)
