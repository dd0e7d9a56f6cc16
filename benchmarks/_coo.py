"""Index and value of each changed element, 32 and 16 bits (ROSE §4.2): the baseline of the benchmarks.

Where ROSE sends differences and adds them, which loses a bit here and there, this sends the values.
"""

import numpy as np

from elastic.weights.blobs import Buffer
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


class Coo:
    """Checks and keeps no sums."""

    name = "coo"

    def encode(self, old: Bits, new: Bits, tile_ends: Ends) -> EncodedBucket:
        check_encode(old, new, tile_ends)
        index = np.flatnonzero(old != new).astype("<u4")
        counts = np.searchsorted(index, tile_ends).astype(np.int64)
        changed = np.diff(np.concatenate([[0], counts]))
        payload = b"".join([index.tobytes(), new[index].astype("<u2").tobytes(), bytes(PADDING)])
        return EncodedBucket(b"", payload, 6 * counts, changed, np.zeros(len(counts), np.uint64))

    def decode(self, shared: Buffer, payload: Buffer, payload_ends: Ends, old: Bits, tile_ends: Ends) -> BucketUpdate:
        check_decode(payload, payload_ends, old, tile_ends)
        total = int(payload_ends[-1]) // 6 if len(payload_ends) else 0
        index = np.frombuffer(payload, "<u4", total)  # type: ignore[arg-type]
        if total and index.max() >= old.size:
            raise CodecError("index beyond the bucket")
        value = np.frombuffer(payload, "<u2", total, 4 * total)  # type: ignore[arg-type]
        ends = np.searchsorted(index, tile_ends).astype(np.int64)
        return BucketUpdate(index, value, ends, np.zeros(len(ends), np.uint64))
