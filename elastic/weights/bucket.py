"""One bucket of a delta as a blob.

A bucket's blob is a 4-byte little-endian length, a msgpack `BucketHeader` of that length, the codec's shared part and
its payload. It can be decoded before the manifest is there. Nobody may trust the result until then.
"""

import struct
from typing import NoReturn

import msgspec
import numpy as np
import numpy.typing as npt

from elastic.weights.blobs import Buffer
from elastic.weights.codecs import CODECS
from elastic.weights.codecs.base import PADDING, BucketUpdate, CodecError, EncodedBucket, ascend
from elastic.weights.errors import WeightsCorrupted
from elastic.weights.records import Natural

_LENGTH = struct.Struct("<I")
_HEADER_BYTES_MAX = 1 << 20


class BucketHeader(msgspec.Struct, frozen=True, array_like=True):
    codec: str
    shared_bytes: Natural
    payload_ends: list[Natural]
    """Where each tile's bytes end."""


class Bucket:
    """A bucket's blob, taken apart; raises `WeightsCorrupted` where that cannot be done."""

    def __init__(self, blob: Buffer) -> None:
        data = memoryview(blob)
        try:
            (length,) = _LENGTH.unpack_from(data)
            if length > _HEADER_BYTES_MAX:
                _refuse(f"header of {length} bytes")
            self.header = msgspec.msgpack.decode(data[_LENGTH.size : _LENGTH.size + length], type=BucketHeader)
        except (struct.error, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise WeightsCorrupted(f"bucket: {error}") from error
        if self.header.codec not in CODECS:
            _refuse(f"codec {self.header.codec}; this program knows {', '.join(CODECS)}")
        body = data[_LENGTH.size + length :]
        if self.header.shared_bytes > len(body):
            _refuse(f"shared part of {self.header.shared_bytes} bytes")
        self._shared, self._payload = body[: self.header.shared_bytes], body[self.header.shared_bytes :]
        ends = np.array(self.header.payload_ends, np.int64)
        if not ascend(ends, len(self._payload) - PADDING):
            _refuse(f"its tiles do not make {len(self._payload)} bytes")
        self._edges = np.concatenate([[0], ends])

    def decode(
        self, old: npt.NDArray[np.uint16], tile_ends: npt.NDArray[np.int64], first: int = 0, last: int | None = None
    ) -> BucketUpdate:
        """Tiles `first` to `last`, of which `old` is. Raises `WeightsCorrupted` for what does not decode against it."""
        tiles = len(self._edges) - 1
        last = tiles if last is None else last
        if not 0 <= first <= last <= tiles:
            _refuse(f"bucket of {tiles} tiles; expected are those from {first} to {last}")
        edges = self._edges[first : last + 1]
        payload = self._payload[edges[0] : edges[-1] + PADDING]
        try:
            return CODECS[self.header.codec].decode(self._shared, payload, edges[1:] - edges[0], old, tile_ends)
        except CodecError as error:
            raise WeightsCorrupted(f"bucket of codec {self.header.codec}: {error}") from error


def encode_bucket(codec: str, bucket: EncodedBucket) -> list[bytes]:
    """A blob's parts."""
    header = BucketHeader(codec, len(bucket.shared), bucket.payload_ends.tolist())
    body = msgspec.msgpack.encode(header)
    assert len(bucket.payload) >= PADDING
    return [_LENGTH.pack(len(body)) + body, bucket.shared, bucket.payload]


def _refuse(problem: str) -> NoReturn:
    raise WeightsCorrupted(f"delta: {problem}")
