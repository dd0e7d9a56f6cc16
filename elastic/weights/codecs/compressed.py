"""zstd over another codec's tiles: for gap8, less than two thirds of the bytes at some of the speed."""

from itertools import pairwise

import numpy as np
import zstandard

from elastic.weights.blobs import Buffer
from elastic.weights.codecs._zstd import LEVEL, decompress
from elastic.weights.codecs.base import (
    PADDING,
    Bits,
    BucketUpdate,
    Codec,
    EncodedBucket,
    Ends,
    check_decode,
)

_EXPANSION_MAX = 5
"""Bytes a changed element of the inner codec takes at most, and an unchanged one."""

_TILE_BYTES_MAX = 1024


class Compressed:
    def __init__(self, inner: Codec) -> None:
        self._inner = inner
        self.name = f"{inner.name}_zstd"

    def encode(self, old: Bits, new: Bits, tile_ends: Ends) -> EncodedBucket:
        bucket = self._inner.encode(old, new, tile_ends)
        compressor = zstandard.ZstdCompressor(LEVEL)
        data = memoryview(bucket.payload)
        parts = [compressor.compress(data[begin:end]) for begin, end in pairwise([0, *bucket.payload_ends])]
        ends = np.cumsum([len(part) for part in parts], dtype=np.int64)
        return bucket._replace(payload=b"".join([*parts, bytes(PADDING)]), payload_ends=ends)

    def decode(self, shared: Buffer, payload: Buffer, payload_ends: Ends, old: Bits, tile_ends: Ends) -> BucketUpdate:
        check_decode(payload, payload_ends, old, tile_ends)
        data = memoryview(payload).cast("B")
        parts = [
            decompress(data[begin:end], _EXPANSION_MAX * int(size) + _TILE_BYTES_MAX)
            for (begin, end), size in zip(pairwise([0, *payload_ends]), np.diff([0, *tile_ends]), strict=True)
        ]
        ends = np.cumsum([len(part) for part in parts], dtype=np.int64)
        return self._inner.decode(shared, b"".join([*parts, bytes(PADDING)]), ends, old, tile_ends)
