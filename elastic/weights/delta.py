"""What the change from one version to a later one is made of: buckets, and a manifest that is written after them.

Keys: `versions/VERSION/delta-BASE.json` for the manifest, `versions/VERSION/delta-BASE-NUMBER.bin` for a bucket, and
`versions/VERSION/delta-BASE.begun.json`, which is there before any of them. Trainer ranks that publish one version
together leave `versions/VERSION/delta-BASE.part-RANK.json` for the first of them, which writes the manifest. A delta
from nothing, by which they publish keyframes, is called `full` instead of `delta-BASE`.

A bucket is a 4-byte little-endian length, a msgpack `BucketHeader` of that length, the codec's shared part and its
payload; it says enough of itself to be decoded before the manifest is there, and nothing is trusted until then. All
but the buckets is signed by the trainer (`elastic.weights.signing`).
"""

import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, NoReturn

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from elastic.weights.blobs import Buffer
from elastic.weights.codecs import CODECS
from elastic.weights.codecs.base import PADDING, TILE_ELEMENTS_MAX, BucketUpdate, CodecError, EncodedBucket, ascend
from elastic.weights.errors import WeightsCorrupted
from elastic.weights.manifest import (
    Natural,
    TensorEntry,
    check_sums,
    check_tensors,
    count_tiles,
    version_prefix,
)
from elastic.weights.signing import Trust

SCHEMA_VERSION = 3

NOTHING = -1
"""The base version of a *full* delta: from weights of which every pattern is zero."""

BaseVersion = Annotated[int, msgspec.Meta(ge=NOTHING, le=1 << 62)]

TILES_MAX = 1 << 24
"""Of a version: 2^44 elements in tiles of the usual size."""

_LENGTH = struct.Struct("<I")
_HEADER_BYTES_MAX = 1 << 20


class BucketEntry(msgspec.Struct, frozen=True, array_like=True):
    """One bucket's blob: the tiles from `first_tile` on, `tiles` of them."""

    first_tile: Natural
    tiles: Natural
    codec: str
    size_bytes: Natural
    digest: str
    """BLAKE2b-256 of the blob, in hexadecimal."""


class DeltaManifest(msgspec.Struct, frozen=True, kw_only=True):
    """How to make `version` out of `base_version`.

    `base_state` and `state` identify the weights before and after, bit for bit (`state_of`). Whoever holds other
    weights than `base_state` has no use for this delta.
    """

    signed_as: ClassVar[str] = "delta"

    run: str
    version: Natural
    base_version: BaseVersion
    base_state: str
    state: str
    model: dict[str, Any]
    """The model's `config.json`."""
    tensors: tuple[TensorEntry, ...]
    changed: tuple[Natural, ...]
    """Changed elements of each tensor."""
    tile_elements: Natural
    tile_sums: bytes
    """Of the resulting tiles (`elastic.weights.codecs.sums`), eight little-endian bytes each; base64 in JSON."""
    buckets: tuple[BucketEntry, ...]
    schema_version: int = SCHEMA_VERSION

    @property
    def size_bytes(self) -> int:
        return sum(bucket.size_bytes for bucket in self.buckets)


class DeltaBegun(msgspec.Struct, frozen=True, kw_only=True):
    """Says that a delta is being encoded and what will be in it, so that a worker can follow bucket by bucket."""

    signed_as: ClassVar[str] = "begun delta"

    run: str
    version: Natural
    base_version: BaseVersion
    base_state: str
    model: dict[str, Any]
    tensors: tuple[TensorEntry, ...]
    tile_elements: Natural
    buckets: tuple[tuple[Natural, Natural], ...]
    """(first tile, tiles) of each."""
    schema_version: int = SCHEMA_VERSION


class PartOf(msgspec.Struct, frozen=True, kw_only=True):
    """Identifies the delta and the rank that a part belongs to."""

    run: str
    version: Natural
    base_version: BaseVersion
    rank: Natural
    layout: str
    """Identifies model, tensors, tiles and buckets (`layout_of`)."""
    base_state: str
    """Identifies the rank's own tiles before, bit for bit (`state_of`)."""


class DeltaPart(msgspec.Struct, frozen=True, kw_only=True):
    """One trainer rank's part of a delta, of several."""

    signed_as: ClassVar[str] = "part"

    of: PartOf
    buckets: tuple[BucketEntry, ...]
    changed: tuple[Natural, ...]
    """Of its tiles, as are the sums."""
    tile_sums: bytes
    schema_version: int = SCHEMA_VERSION

    @property
    def run(self) -> str:
        return self.of.run


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


def state_of(tile_sums: npt.NDArray[np.uint64]) -> str:
    """What identifies weights: a digest of their tiles' sums."""
    return xxhash.xxh3_128_hexdigest(tile_sums.astype("<u8").tobytes())


def layout_of(
    model: Mapping[str, Any], tensors: Sequence[TensorEntry], tile_elements: int, buckets: Iterable[tuple[int, int]]
) -> str:
    return xxhash.xxh3_128_hexdigest(
        msgspec.json.encode((model, tensors, tile_elements, list(buckets)), order="sorted")
    )


def delta_manifest_key(version: int, base_version: int) -> str:
    return f"{delta_prefix(version, base_version)}.json"


def bucket_key(version: int, base_version: int, number: int) -> str:
    return f"{delta_prefix(version, base_version)}-{number:05d}.bin"


def begun_key(version: int, base_version: int) -> str:
    return f"{delta_prefix(version, base_version)}.begun.json"


def part_key(version: int, base_version: int, rank: int) -> str:
    return f"{delta_prefix(version, base_version)}.part-{rank:05d}.json"


def base_of(key: str) -> int | None:
    """The base version of a delta manifest's key, None for any other key."""
    return _base_of(key, ".json")


def begun_base_of(key: str) -> int | None:
    """The base version of a `begun_key`, None for any other key."""
    return _base_of(key, ".begun.json")


def delta_prefix(version: int, base_version: int) -> str:
    """All keys of a delta begin with this."""
    return version_prefix(version) + ("full" if base_version == NOTHING else f"delta-{base_version:08d}")


def _base_of(key: str, ending: str) -> int | None:
    name = key.rpartition("/")[2]
    digits = name.removeprefix("delta-").removesuffix(ending)
    if name == f"full{ending}":
        return NOTHING
    return int(digits) if name == f"delta-{digits}{ending}" and digits.isdecimal() else None


def decode_begun(data: bytes, trust: Trust) -> DeltaBegun:
    """Raises as `decode_delta_manifest` does."""
    begun = trust.open(data, DeltaBegun, SCHEMA_VERSION)
    _check_tiles(begun)
    return begun


def begun_of(manifest: DeltaManifest) -> DeltaBegun:
    """What was announced of a delta that is complete."""
    return DeltaBegun(
        run=manifest.run,
        version=manifest.version,
        base_version=manifest.base_version,
        base_state=manifest.base_state,
        model=manifest.model,
        tensors=manifest.tensors,
        tile_elements=manifest.tile_elements,
        buckets=tuple((bucket.first_tile, bucket.tiles) for bucket in manifest.buckets),
    )


def decode_part(data: bytes, trust: Trust, of: PartOf, spans: Sequence[tuple[int, int]]) -> DeltaPart:
    """Raises `WeightsCorrupted` unless it is signed, belongs there, and has buckets of these (first tile, tiles)."""
    part = trust.open(data, DeltaPart, SCHEMA_VERSION)
    for field in of.__struct_fields__:
        expected, found = getattr(of, field), getattr(part.of, field)
        if found != expected:
            _refuse(f"part of rank {of.rank}: its {field} is {found}; expected {expected}")
    if [(bucket.first_tile, bucket.tiles) for bucket in part.buckets] != list(spans):
        _refuse(f"part of rank {of.rank}: its buckets are not those of the rank")
    tiles = sum(tiles for _, tiles in spans)
    if not 8 * tiles == 8 * len(part.changed) == len(part.tile_sums):
        _refuse(f"part of rank {of.rank}: of {len(part.changed)} tiles; expected {tiles}")
    return part


def decode_delta_manifest(data: bytes, trust: Trust) -> DeltaManifest:
    """Raises `WeightsForged` or `WeightsCorrupted` unless `data` is a signed, consistent manifest of this schema."""
    manifest = trust.open(data, DeltaManifest, SCHEMA_VERSION)
    tiles = _check_tiles(begun_of(manifest))
    check_sums(manifest.tile_sums, tiles)
    if len(manifest.changed) != len(manifest.tensors):
        _refuse(f"it has {len(manifest.tensors)} tensors, and says of {len(manifest.changed)} what changed")
    return manifest


def _check_tiles(begun: DeltaBegun) -> int:
    """Returns the number of tiles. Raises unless the buckets hold the tensors' tiles one after the other."""
    check_tensors(begun.tensors)
    tiles = count_tiles(begun.tensors, begun.tile_elements)
    if tiles > TILES_MAX or begun.tile_elements > TILE_ELEMENTS_MAX:
        _refuse(f"{tiles} tiles of {begun.tile_elements} elements; at most {TILES_MAX} of {TILE_ELEMENTS_MAX} are read")
    at = 0
    for first, count in begun.buckets:
        if first != at or count < 1:
            _refuse(f"its buckets do not follow each other at tile {at}")
        at += count
    if at != tiles:
        _refuse(f"its buckets have {at} tiles, its tensors {tiles}")
    return tiles


def _refuse(problem: str) -> NoReturn:
    raise WeightsCorrupted(f"delta: {problem}")
