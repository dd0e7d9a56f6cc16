"""A tile's sum: of mix(index, pattern) over its elements, mod 2^64.

An update changes it by what it overwrites, in O(changed), and it says afterwards whether the whole tile is what
the trainer has. It guards against accidents (a wrong base, a bug, a flipped bit), not against forgers.
"""

# pyright: reportMissingImports=false
import numpy as np
import numpy.typing as npt
from numba import njit

from elastic.weights.codecs.base import Bits, BucketUpdate, Ends, as_ends, flat


@njit(inline="always")
def mix(index, pattern):  # type: ignore[no-untyped-def]
    """A 64-bit permutation of (index, pattern), after SplitMix64's finaliser."""
    x = (np.uint64(index) << np.uint64(16)) | np.uint64(pattern)
    x = (x + np.uint64(0x9E3779B97F4A7C15)) * np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(32)
    x *= np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(29))


def tile_sums(bits: Bits, tile_ends: Ends) -> npt.NDArray[np.uint64]:
    """Return the sum of each tile of a bucket, as an audit needs it. Elements are numbered within their tile."""
    sums = np.zeros(len(tile_ends), np.uint64)
    _sum(flat(bits), as_ends(tile_ends), sums)
    return sums


def zero_sums(tile_ends: Ends) -> npt.NDArray[np.uint64]:
    """The sums of tiles of which every pattern is zero."""
    sizes, which = np.unique(np.diff(tile_ends, prepend=0), return_inverse=True)
    return tile_sums(np.zeros(sizes.sum(), np.uint16), np.cumsum(sizes))[which]


def apply_update(update: BucketUpdate, bits: Bits) -> None:
    """Overwrite `bits`, a bucket, in place; doing it twice is the same as once."""
    if update.index is None:
        np.copyto(bits, update.value)
    else:
        _scatter(bits, update.index, update.value)


def kept_small(update: BucketUpdate, old: Bits, tile_ends: Ends) -> BucketUpdate:
    """Returns the same update of `old` in no more memory than a copy of that takes."""
    if update.index is None or 3 * update.value.size <= old.size:
        return update
    new = old.copy()
    apply_update(update, new)
    return BucketUpdate(None, new, tile_ends, update.sum_changes)


@njit(inline="always")
def sum_change(index, base, old, new):  # type: ignore[no-untyped-def]
    """Return by how much a tile's sum changes when `new` is written over `old` at `index - base`."""
    total = np.uint64(0)
    for i in range(index.size):
        position = np.int64(index[i]) - base
        total += mix(position, new[i]) - mix(position, old[i])
    return total


@njit(cache=True, nogil=True)
def _sum(bits, tile_ends, sums):  # type: ignore[no-untyped-def]
    begin = 0
    for tile in range(tile_ends.size):
        total = np.uint64(0)
        for i in range(begin, tile_ends[tile]):
            total += mix(i - begin, bits[i])
        sums[tile] = total
        begin = tile_ends[tile]


@njit(cache=True, nogil=True)
def _scatter(bits, index, value):  # type: ignore[no-untyped-def]
    for i in range(index.size):
        bits[index[i]] = value[i]
