"""zstd over another codec's tiles: for gap8, less than two thirds of the bytes at some of the speed."""

from itertools import pairwise

import numpy as np
import zstandard

from elastic.weights.codecs.base import (
    PADDING,
    Bits,
    BucketUpdate,
    Buffer,
    Codec,
    CodecError,
    EncodedBucket,
    Ends,
    check_decode,
)

_LEVEL = 1
_EXPANSION_MAX = 5
"""Bytes a changed element of the inner codec takes at most, and an unchanged one."""

_TILE_BYTES_MAX = 1024


class Compressed:
    def __init__(self, inner: Codec) -> None:
        self._inner = inner
        self.name = f"{inner.name}_zstd"

    def encode(self, old: Bits, new: Bits, tile_ends: Ends) -> EncodedBucket:
        bucket = self._inner.encode(old, new, tile_ends)
        compressor = zstandard.ZstdCompressor(_LEVEL)
        data = memoryview(bucket.payload)
        parts = [compressor.compress(data[begin:end]) for begin, end in pairwise([0, *bucket.payload_ends])]
        ends = np.cumsum([len(part) for part in parts], dtype=np.int64)
        return bucket._replace(payload=b"".join([*parts, bytes(PADDING)]), payload_ends=ends)

    def decode(self, shared: Buffer, payload: Buffer, payload_ends: Ends, old: Bits, tile_ends: Ends) -> BucketUpdate:
        check_decode(payload, payload_ends, old, tile_ends)
        data = memoryview(payload).cast("B")
        parts = [
            _decompress(data[begin:end], _EXPANSION_MAX * int(size) + _TILE_BYTES_MAX)
            for (begin, end), size in zip(pairwise([0, *payload_ends]), np.diff([0, *tile_ends]), strict=True)
        ]
        ends = np.cumsum([len(part) for part in parts], dtype=np.int64)
        return self._inner.decode(shared, b"".join([*parts, bytes(PADDING)]), ends, old, tile_ends)


def _decompress(data: memoryview, size_max: int) -> bytes:
    try:
        if not 0 <= zstandard.get_frame_parameters(data).content_size <= size_max:
            raise CodecError(f"compressed tile says it is larger than {size_max} bytes")
        return zstandard.ZstdDecompressor(max_window_size=1 << 27).decompress(data, size_max)
    except zstandard.ZstdError as error:
        raise CodecError(f"compressed tile: {error}") from error
