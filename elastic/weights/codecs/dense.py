"""All of the new patterns, for keyframes and for what changed too much to be worth a list of changes.

`raw` is the patterns themselves; `dense` is, tile by tile, their high and then their low bytes under zstd: exponents
compress, mantissas do not. Neither reads the base, except to say by how much sums change.
"""

from itertools import pairwise

import numpy as np
import zstandard

from elastic.weights.blobs import Buffer
from elastic.weights.codecs._zstd import LEVEL, decompress
from elastic.weights.codecs.base import (
    PADDING,
    Bits,
    BucketUpdate,
    CodecError,
    EncodedBucket,
    Ends,
    check_decode,
    check_encode,
)
from elastic.weights.codecs.sums import tile_sums


class Raw:
    name = "raw"

    def encode(self, old: Bits, new: Bits, tile_ends: Ends) -> EncodedBucket:
        check_encode(old, new, tile_ends)
        return _whole(old, new, tile_ends, [new.astype("<u2", copy=False).tobytes()], 2 * np.asarray(tile_ends))

    def decode(self, shared: Buffer, payload: Buffer, payload_ends: Ends, old: Bits, tile_ends: Ends) -> BucketUpdate:
        check_decode(payload, payload_ends, old, tile_ends)
        if not np.array_equal(payload_ends, 2 * np.asarray(tile_ends)):
            raise CodecError("raw tiles are not of two bytes an element")
        return _update(np.frombuffer(payload, "<u2", old.size), old, tile_ends)  # type: ignore[arg-type]


class Dense:
    name = "dense"

    def encode(self, old: Bits, new: Bits, tile_ends: Ends) -> EncodedBucket:
        check_encode(old, new, tile_ends)
        compressor = zstandard.ZstdCompressor(LEVEL)
        planes = new.astype("<u2", copy=False).view(np.uint8).reshape(-1, 2)
        parts = [compressor.compress(planes[begin:end, ::-1].T.tobytes()) for begin, end in pairwise([0, *tile_ends])]
        return _whole(old, new, tile_ends, parts, np.cumsum([len(part) for part in parts], dtype=np.int64))

    def decode(self, shared: Buffer, payload: Buffer, payload_ends: Ends, old: Bits, tile_ends: Ends) -> BucketUpdate:
        check_decode(payload, payload_ends, old, tile_ends)
        data = memoryview(payload).cast("B")
        value = np.empty(old.size, np.uint16)
        planes = value.view(np.uint8).reshape(-1, 2)
        spans = zip(pairwise([0, *tile_ends]), pairwise([0, *payload_ends]), strict=True)
        for (begin, end), (data_begin, data_end) in spans:
            part = decompress(data[data_begin:data_end], 2 * (end - begin))
            if len(part) != 2 * (end - begin):
                raise CodecError(f"dense tile of {len(part)} bytes; expected {2 * (end - begin)}")
            planes[begin:end, ::-1] = np.frombuffer(part, np.uint8).reshape(2, -1).T
        return _update(value, old, tile_ends)


def _whole(old: Bits, new: Bits, tile_ends: Ends, parts: list[bytes], payload_ends: Ends) -> EncodedBucket:
    changed = np.array([np.count_nonzero(old[b:e] != new[b:e]) for b, e in pairwise([0, *tile_ends])], np.int64)
    payload = b"".join([*parts, bytes(PADDING)])
    return EncodedBucket(b"", payload, payload_ends, changed, tile_sums(new, tile_ends) - tile_sums(old, tile_ends))


def _update(value: Bits, old: Bits, tile_ends: Ends) -> BucketUpdate:
    ends = np.asarray(tile_ends, np.int64)
    return BucketUpdate(None, value, ends, tile_sums(value, ends) - tile_sums(old, ends))
