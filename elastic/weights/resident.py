"""What a worker holds of a version, and what takes it to the next one.

A delta is decoded into *overwrites* while the version before is still served; only when all of them are there and
verified are they written over the patterns. Writing them again, from the first on, is a no-op, so who was stopped in
between begins again.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from elastic.weights.codecs.base import BucketUpdate
from elastic.weights.codecs.sums import apply_update, tile_sums
from elastic.weights.layout import tile_counts, tile_ends
from elastic.weights.manifest import TensorEntry
from elastic.weights.plan import PublishedUpdate
from elastic.weights.source import PullReport
from elastic.weights.tensors import Bits

Overwrite: TypeAlias = tuple[slice, BucketUpdate]
"""Consecutive elements of the held weights, and their new patterns."""
NOTHING_PULLED = PullReport(size_bytes=0, full_bytes=0)


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


class ResidentWeights(NamedTuple):
    """Whole, verified weights of one version."""

    version: int
    run: str
    model: dict[str, Any]
    """The model's `config.json`."""
    tensors: tuple[TensorEntry, ...]
    hosted: tuple[bool, ...]
    """Which of the tensors these are."""
    bits: Bits
    """Of the hosted tensors, one after the other."""
    state: dict[int, tuple[str, npt.NDArray[np.uint64]]]
    """Tile size → what identifies the weights, and their tiles' sums; of further sizes made when first asked for."""

    def audited(self, first: int = 0) -> Iterator[tuple[int, bool]]:
        """Each hosted tile, from `first` on and around, and whether its recomputed sum is the one maintained."""
        size, (_, sums) = next(iter(self.state.items()))
        tiles = Tiles(self.tensors, self.hosted, size)
        hosted = np.flatnonzero(tiles.hosted)
        for tile in np.roll(hosted, -np.searchsorted(hosted, first)).tolist():
            bits = self.bits[tiles.elements(slice(tile, tile + 1))]
            yield tile, bool(tile_sums(bits, np.array([bits.size]))[0] == sums[tile])


@dataclass(eq=False)
class StagedVersion:
    """A version on its way in: `weights` is what there will be once `overwrites` are written, in order.

    Without a `base` its patterns are memory of its own, into which every change goes at once.
    """

    weights: ResidentWeights
    base: int | None = None
    overwrites: list[Overwrite] = field(default_factory=list[Overwrite])
    path: tuple[PublishedUpdate, ...] = ()
    report: PullReport = NOTHING_PULLED

    def patterns(self, elements: slice) -> Bits:
        """These elements after `overwrites`; a copy only where there are any."""
        touching = [each for each in self.overwrites if each[0].start < elements.stop and elements.start < each[0].stop]
        if not touching:
            return self.weights.bits[elements]
        changed = self.weights.bits[elements].copy()
        for span, update in touching:
            index = np.arange(update.value.size) if update.index is None else update.index.astype(np.int64)
            place = index + (span.start - elements.start)
            inside = (place >= 0) & (place < changed.size)
            changed[place[inside]] = update.value[inside]
        return changed

    def change(self, elements: slice, update: BucketUpdate, old: Bits, tile_ends: npt.NDArray[np.int64]) -> None:
        """These elements' patterns, which were `old`, become those of `update`."""
        if self.base is None:
            apply_update(update, old)
        else:
            self.overwrites.append((elements, kept_small(update, old, tile_ends)))

    def write(self) -> None:
        for elements, update in self.overwrites:
            apply_update(update, self.weights.bits[elements])


def kept_small(update: BucketUpdate, old: Bits, tile_ends: npt.NDArray[np.int64]) -> BucketUpdate:
    """The same in no more memory than a copy of that."""
    if update.index is None or 3 * update.value.size <= old.size:
        return update
    new = old.copy()
    apply_update(update, new)
    return BucketUpdate(None, new, tile_ends, update.sum_changes)
