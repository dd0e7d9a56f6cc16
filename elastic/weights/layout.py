"""How a version's tensors lie in one flat array of 16-bit patterns, and how that is cut into tiles and buckets. Pure.

The array's elements are patterns: a bfloat16 is one, a float32 two, its low one first. Both sides derive the same tiles
from the same tensors: at most `tile_elements` each, none across two tensors, none empty. A bucket is a run of whole
tiles, the unit of encoding and transfer.
"""

from bisect import bisect_right
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from elastic.weights.codecs.sums import zero_sums
from elastic.weights.records import TensorEntry
from elastic.weights.sharding import Cell, breaks, owned


def tile_ends(tensors: Sequence[TensorEntry], tile_elements: int) -> npt.NDArray[np.int64]:
    """Where each tile ends, in elements from the first tensor's first."""
    ends: list[int] = []
    begin = 0
    for tensor in tensors:
        end = begin + tensor.patterns
        ends += range(begin + tile_elements, end, tile_elements)
        if end > begin:
            ends.append(end)
        begin = end
    return np.array(ends, np.int64)


class Layout:
    """How the versions of one model lie: their tensors or cells, the tiles of these, and who publishes which.

    With `cells`, no bucket crosses from what one trainer rank publishes, or one group of workers hosts, to another's.
    """

    def __init__(
        self,
        tensors: tuple[TensorEntry, ...],
        tile_elements: int,
        bucket_elements: int,
        cells: Sequence[Cell] = (),
        ranks: int = 1,
    ) -> None:
        self.tensors = tensors
        self.tile_elements = tile_elements
        self.ends = tile_ends(tensors, tile_elements)
        """Where each tile ends, in elements from the first tensor's first."""
        offsets = [*(entry.offset // 2 for entry in tensors), sum(entry.patterns for entry in tensors)]
        spans = bucket_tiles(self.ends, bucket_elements, [offsets[cell] for cell in breaks(cells)])
        self.buckets = tuple((first, last - first) for first, last in spans)
        """(first tile, number of tiles) of each bucket."""
        self.tensor_of_tile = np.repeat(np.arange(len(tensors)), _tile_counts(tensors, tile_elements))
        own = [owned(cells, rank) if cells else range(len(tensors)) for rank in range(ranks)]
        self.elements = [slice(offsets[each.start], offsets[each.stop]) for each in own]
        """The elements that each rank publishes."""
        self.tiles = [
            slice(*np.searchsorted(self.ends, [part.start, part.stop], side="right").tolist()) for part in self.elements
        ]
        """The tiles that each rank publishes."""

    @cached_property
    def zero_sums(self) -> npt.NDArray[np.uint64]:
        """Sums of the tiles where every pattern is zero."""
        return zero_sums(self.ends)


class Piece(NamedTuple):
    """Consecutive hosted tiles of one bucket."""

    tiles: slice
    elements: slice
    """The elements of these tiles in the held patterns."""
    ends: npt.NDArray[np.int64]
    """Where each tile ends, in elements from the piece's first."""


class Tiles:
    """The tiles of a version, and the places of the hosted ones in the held patterns."""

    def __init__(self, tensors: Sequence[TensorEntry], hosted: Sequence[bool], tile_elements: int) -> None:
        self.hosted = np.repeat(np.array(hosted, bool), _tile_counts(tensors, tile_elements))
        """Whether each tile is held."""
        sizes = np.diff(tile_ends(tensors, tile_elements), prepend=0)
        self.ends = np.cumsum(np.where(self.hosted, sizes, 0))
        """The end of each tile in the held patterns; a tile that is not held has no elements there."""

    def pieces(self, first: int, count: int) -> list[Piece]:
        """Returns what is held of the `count` tiles from `first` on."""
        edges = np.flatnonzero(np.diff(self.hosted[first : first + count], prepend=False, append=False)) + first
        found: list[Piece] = []
        for begin, end in edges.reshape(-1, 2).tolist():
            start, ends = int(self.ends[begin - 1]) if begin else 0, self.ends[begin:end]
            found.append(Piece(slice(begin, end), slice(start, int(ends[-1])), ends - start))
        return found


def bucket_tiles(
    ends: npt.NDArray[np.int64], bucket_elements: int, breaks: Sequence[int] = ()
) -> list[tuple[int, int]]:
    """(first tile, tile after the last) of each bucket: as many tiles as fit in `bucket_elements`, at least one.

    No bucket goes on beyond one of `breaks`, which are ends of tiles, ascending.
    """
    buckets: list[tuple[int, int]] = []
    first = 0
    while first < len(ends):
        begin = int(ends[first - 1]) if first else 0
        coming = bisect_right(breaks, begin)
        limit = min([begin + bucket_elements, *breaks[coming : coming + 1]])
        last = max(int(np.searchsorted(ends, limit, side="right")), first + 1)
        buckets.append((first, last))
        first = last
    return buckets


def _tile_counts(tensors: Sequence[TensorEntry], tile_elements: int) -> npt.NDArray[np.int64]:
    """How many tiles each tensor has."""
    return np.array([-(-tensor.patterns // tile_elements) for tensor in tensors], np.int64)
