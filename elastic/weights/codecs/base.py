"""The contract of a codec: from (old, new) bf16 patterns to bytes, and from bytes and old to what to overwrite.

A *bucket* is a stretch of flat bf16 patterns, cut into *tiles* of about a million elements. Tiles are encoded
together and share what is worth sharing (`EncodedBucket.shared`: entropy tables), but each is decodable alone.
Patterns are 16-bit integers throughout: no codec ever computes with a weight, so NaNs and negative zeros are
nothing special.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from elastic.weights.blobs import Buffer

Bits = npt.NDArray[np.uint16]
Ends = npt.NDArray[np.int64]

TILE_ELEMENTS = 1 << 20
"""Large enough that a tile's own header is below 1 % of its delta, small enough to be decoded in cache."""

TILE_ELEMENTS_MAX = 1 << 24
"""The largest tile that encoders and decoders accept."""

BUCKET_ELEMENTS_MAX = 1 << 31

PADDING = 8
"""Bytes after the last tile of an encoded payload, so that decoders may load words without looking at its end."""


class CodecError(ValueError):
    """Bytes that no encoder wrote, or a base that is not the one they were encoded against."""


class EncodedBucket(NamedTuple):
    shared: bytes
    payload: bytes
    """The tiles' bytes, one after the other, and `PADDING`."""
    payload_ends: Ends
    """Where each tile's bytes end."""
    changed: Ends
    """Changed elements of each tile."""
    sum_changes: npt.NDArray[np.uint64]
    """The change of each tile's sum (`elastic.weights.codecs.sums`), mod 2^64."""

    @property
    def size_bytes(self) -> int:
        return len(self.shared) + len(self.payload)


@dataclass(frozen=True)
class BucketUpdate:
    """New patterns: `value[i]` goes to `index[i]` of the bucket; with `index` None, `value` is all of it.

    Tile t's updates are those from `ends[t - 1]` to `ends[t]`, and change its sum by `sum_changes[t]`.
    """

    index: npt.NDArray[np.uint32] | None
    value: Bits
    ends: Ends
    sum_changes: npt.NDArray[np.uint64]


class Codec(Protocol):
    """A lossless format. Codecs keep no state and may be used from several threads."""

    @property
    def name(self) -> str:
        """How manifests call it."""
        ...

    def encode(self, old: Bits, new: Bits, tile_ends: Ends) -> EncodedBucket:
        """Encode `new` against `old`: flat, contiguous, of equal size; tile t ends before `tile_ends[t]`."""
        ...

    def decode(self, shared: Buffer, payload: Buffer, payload_ends: Ends, old: Bits, tile_ends: Ends) -> BucketUpdate:
        """The update that makes of `old`, which is only read, what was encoded.

        Whatever the bytes, it holds at most 32 bytes for each element of `old`, and 2 MiB. Raises `CodecError`.
        A bucket may be decoded in parts, with the payload (and 8 bytes behind it) and the elements of some tiles.
        """
        ...


def check_encode(old: Bits, new: Bits, tile_ends: Ends) -> None:
    """Check the arguments of `Codec.encode`. Raises `ValueError`."""
    if old.shape != new.shape or old.ndim != 1 or old.dtype != np.uint16 or new.dtype != np.uint16:
        raise ValueError(f"expected two flat uint16 arrays (found {old.dtype}{old.shape}, {new.dtype}{new.shape})")
    _check_tiles(old, tile_ends)


def check_decode(payload: Buffer, payload_ends: Ends, old: Bits, tile_ends: Ends) -> None:
    """Raises `CodecError` unless tiles and payloads fit each other and their arrays.

    Compiled code looks at no bounds but those of a tile and of its bytes, so this is what it relies on.
    """
    _check_tiles(old, tile_ends)
    size = memoryview(payload).nbytes
    if len(payload_ends) != len(tile_ends) or not ascend(payload_ends, size - PADDING):
        raise CodecError(f"payload of {size} bytes does not hold {len(tile_ends)} tiles and {PADDING} bytes more")


def ascend(ends: Ends, last: int) -> bool:
    """Whether `ends` go up from 0 to `last`. Compared, not subtracted: differences of what anybody wrote may wrap."""
    edges = np.concatenate([[0], ends])
    return bool((edges[:-1] <= edges[1:]).all() and edges[-1] == last)


def flat(bits: Bits) -> Bits:
    """A read-only view, so that compiled code meets one type of array only."""
    view = np.ascontiguousarray(bits).view()
    view.flags.writeable = False
    return view


def as_bytes(data: Buffer) -> npt.NDArray[np.uint8]:
    view = np.frombuffer(data, np.uint8)  # type: ignore[arg-type]
    view.flags.writeable = False
    return view


def as_ends(ends: Ends) -> Ends:
    return np.ascontiguousarray(ends, np.int64)


def _check_tiles(old: Bits, tile_ends: Ends) -> None:
    if old.size > BUCKET_ELEMENTS_MAX or not ascend(tile_ends, old.size):
        raise CodecError(f"tiles do not add up to the {old.size} elements given")
    largest = np.diff(tile_ends, prepend=0).max(initial=0)
    if largest > TILE_ELEMENTS_MAX:
        raise CodecError(f"tile of {largest} elements; at most {TILE_ELEMENTS_MAX} are allowed")
