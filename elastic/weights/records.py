"""What the trainer signs of a version, and the keys of all its objects. Pure.

A version is a keyframe, or a delta from an earlier version, or both. The record that makes it complete is written last:
where there is a manifest, all that it names is on the relay.

- Keyframe: `versions/VERSION/manifest.json` (`Manifest`) names one blob, `versions/VERSION/keyframe.bin`.
- Delta: `versions/VERSION/delta-BASE.begun.json` (`DeltaBegun`) comes first, then the buckets
  `versions/VERSION/delta-BASE-NUMBER.bin` (`elastic.weights.bucket`), then `versions/VERSION/delta-BASE.json`
  (`DeltaManifest`). Trainer ranks that publish one version together put `versions/VERSION/delta-BASE.part-RANK.json`
  (`DeltaPart`); rank 0 writes the manifest from these.
- Keyframe in cells: a delta from `NOTHING`. Its keys have `full` in the place of `delta-BASE`.
"""

import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, NoReturn

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from elastic.weights.codecs.base import TILE_ELEMENTS_MAX
from elastic.weights.errors import BlobNotFound, WeightsCorrupted, WeightsForged
from elastic.weights.relay import REQUESTS
from elastic.weights.signing import Trust

SCHEMA_VERSION = 4

NOTHING = -1
"""The base version of a *full* delta: from weights of which every pattern is zero."""

Natural = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
"""Room is left to add to it in 64 bits."""

BaseVersion = Annotated[int, msgspec.Meta(ge=NOTHING, le=1 << 62)]

TILES_MAX = 1 << 24
"""Most tiles of a version: 2^44 elements in tiles of the usual size."""

DTYPE_BYTES = {"bfloat16": 2, "float32": 4}


class TensorEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor: its row-major elements, little-endian, at `offset` of the blob.

    All that is made of a version (tiles, deltas, sums) takes it as 16-bit patterns, of which a float32 has two.
    """

    name: str
    shape: tuple[Natural, ...]
    dtype: str
    offset: Natural
    begin: tuple[Natural, ...] = ()
    """Where it begins in the full tensor of this name, if it is only a cell of that."""

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]

    @property
    def patterns(self) -> int:
        return self.size_bytes // 2


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """A keyframe: one version of a run's weights, all of them in one blob."""

    signed_as: ClassVar[str] = "keyframe"
    base_version: ClassVar[int] = NOTHING

    run: str
    version: Natural
    kind: Literal["keyframe"] = "keyframe"
    model: dict[str, Any]
    """The model's `config.json`."""
    tensors: tuple[TensorEntry, ...]
    """In the blob's order, without gaps."""
    blob: str
    """Key of the blob."""
    blob_bytes: Natural
    blob_digest: str
    """BLAKE2b-256 of the blob by pieces (`elastic.weights.digest`), in hexadecimal."""
    tile_elements: Natural
    tile_sums: bytes
    """Sums of all tiles (`elastic.weights.codecs.sums`), eight little-endian bytes each; base64 in JSON."""
    schema_version: int = SCHEMA_VERSION

    def check(self) -> None:
        size_bytes = _check_tensors(self.tensors)
        if size_bytes != self.blob_bytes:
            _refuse(f"its tensors have {size_bytes} bytes, its blob {self.blob_bytes}")
        _check_sums(self.tile_sums, _count_tiles(self.tensors, self.tile_elements))


class BucketEntry(msgspec.Struct, frozen=True, array_like=True):
    """One bucket's blob."""

    codec: str
    size_bytes: Natural
    digest: str
    """BLAKE2b-256 of the blob, in hexadecimal."""


class DeltaBegun(msgspec.Struct, frozen=True, kw_only=True):
    """Announces a delta that is being encoded and its layout, so that a worker can follow bucket by bucket.

    `base_state` identifies the weights before, bit for bit (`state_of`). A worker with other weights cannot use it.
    """

    signed_as: ClassVar[str] = "begun delta"

    run: str
    version: Natural
    base_version: BaseVersion
    base_state: str
    model: dict[str, Any]
    """The model's `config.json`."""
    tensors: tuple[TensorEntry, ...]
    tile_elements: Natural
    buckets: tuple[tuple[Natural, Natural], ...]
    """(first tile, number of tiles) of each bucket."""
    schema_version: int = SCHEMA_VERSION

    @property
    def announced(self) -> "DeltaBegun":
        return self

    def check(self) -> None:
        _check_buckets(self)


class DeltaManifest(msgspec.Struct, frozen=True, kw_only=True):
    """How to make one version out of another: what was `announced` of it before it was complete, and the result.

    `state` identifies the weights after it, bit for bit.
    """

    signed_as: ClassVar[str] = "delta"

    announced: DeltaBegun
    state: str
    changed: tuple[Natural, ...]
    """Changed patterns of each tensor."""
    tile_sums: bytes
    """Sums of the resulting tiles (`elastic.weights.codecs.sums`), eight little-endian bytes each; base64 in JSON."""
    buckets: tuple[BucketEntry, ...]
    schema_version: int = SCHEMA_VERSION

    @property
    def run(self) -> str:
        return self.announced.run

    @property
    def version(self) -> int:
        return self.announced.version

    @property
    def base_version(self) -> int:
        return self.announced.base_version

    def check(self) -> None:
        _check_sums(self.tile_sums, _check_buckets(self.announced))
        for what, found, expected in (
            ("tensors", self.changed, self.announced.tensors),
            ("buckets", self.buckets, self.announced.buckets),
        ):
            if len(found) != len(expected):
                _refuse(f"it has {len(expected)} {what}, and says something of {len(found)}")


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
    """One trainer rank's part of a delta that several ranks publish."""

    signed_as: ClassVar[str] = "part"

    of: PartOf
    buckets: tuple[BucketEntry, ...]
    changed: tuple[Natural, ...]
    """Changed patterns of each of its tiles."""
    tile_sums: bytes
    """Sums of its tiles, eight little-endian bytes each."""
    schema_version: int = SCHEMA_VERSION

    @property
    def run(self) -> str:
        return self.of.run

    def check(self) -> None:
        """Does nothing: only `open_part` knows which tiles are the rank's."""


def open_update(
    get: Callable[[str], bytes], version: int, base: int | None, trust: Trust, listed: Container[str] = ()
) -> Manifest | DeltaManifest | DeltaBegun:
    """Returns the record that says how to make `version` from `base` (None: from nothing).

    `get` reads a blob by its key and raises `BlobNotFound`. A complete update opens as its manifest, one that is still
    being published as its announcement. Keys that were `listed` are read first, since a site's workers ask for what is
    not there one after the other. Raises `BlobNotFound` where there is neither, `WeightsForged` unless the
    trainer signed the record for this update, and `WeightsCorrupted` for a record that contradicts itself.
    """
    base_version = NOTHING if base is None else base
    places: list[tuple[str, type[Manifest | DeltaManifest | DeltaBegun]]] = [
        (delta_manifest_key(version, base_version), DeltaManifest),
        (begun_key(version, base_version), DeltaBegun),
    ]
    if base is None:
        places.insert(0, (manifest_key(version), Manifest))
    places.sort(key=lambda place: place[0] not in listed)
    for number, (key, kind) in enumerate(places, 1):
        try:
            content = get(key)
        except BlobNotFound:
            if number == len(places):
                raise
            continue
        record = trust.open(content, kind, SCHEMA_VERSION)
        if (record.version, record.base_version) != (version, base_version):
            found = f"that of version {record.version} from {record.base_version}"
            raise WeightsForged(f"{kind.signed_as} of version {version}: it is {found}")
        return record
    raise AssertionError


def open_part(data: bytes, trust: Trust, of: PartOf, spans: Sequence[tuple[int, int]]) -> DeltaPart:
    """Returns the part in `data`. Raises `WeightsForged` or `WeightsCorrupted` unless the trainer signed it, it belongs
    to `of`, and it has buckets of these (first tile, number of tiles).
    """
    part = trust.open(data, DeltaPart, SCHEMA_VERSION)
    for field in of.__struct_fields__:
        expected, found = getattr(of, field), getattr(part.of, field)
        if found != expected:
            _refuse(f"part of rank {of.rank}: its {field} is {found}; expected {expected}")
    if len(part.buckets) != len(spans):
        _refuse(f"part of rank {of.rank}: its buckets are not those of the rank")
    tiles = sum(tiles for _, tiles in spans)
    if not 8 * tiles == 8 * len(part.changed) == len(part.tile_sums):
        _refuse(f"part of rank {of.rank}: of {len(part.changed)} tiles; expected {tiles}")
    return part


def state_of(tile_sums: npt.NDArray[np.uint64]) -> str:
    """Returns what identifies weights: a digest of their tiles' sums."""
    return xxhash.xxh3_128_hexdigest(tile_sums.astype("<u8").tobytes())


def layout_of(
    model: Mapping[str, Any], tensors: Sequence[TensorEntry], tile_elements: int, buckets: Iterable[tuple[int, int]]
) -> str:
    """Returns a digest that all ranks which publish one version must agree on."""
    return xxhash.xxh3_128_hexdigest(
        msgspec.json.encode((model, tensors, tile_elements, list(buckets)), order="sorted")
    )


def version_prefix(version: int) -> str:
    """All keys of a version begin with this."""
    return f"versions/{version:08d}/"


def delta_prefix(version: int, base_version: int) -> str:
    """All keys of a delta begin with this."""
    return version_prefix(version) + ("full" if base_version == NOTHING else f"delta-{base_version:08d}")


def manifest_key(version: int) -> str:
    return f"{version_prefix(version)}manifest.json"


def keyframe_key(version: int) -> str:
    return f"{version_prefix(version)}keyframe.bin"


def delta_manifest_key(version: int, base_version: int) -> str:
    return f"{delta_prefix(version, base_version)}.json"


def begun_key(version: int, base_version: int) -> str:
    return f"{delta_prefix(version, base_version)}.begun.json"


def part_key(version: int, base_version: int, rank: int) -> str:
    return f"{delta_prefix(version, base_version)}.part-{rank:05d}.json"


def bucket_key(version: int, base_version: int, number: int) -> str:
    return f"{delta_prefix(version, base_version)}-{number:05d}.bin"


def request_key(version: int) -> str:
    """A worker that cannot get to `version` from anything on the relay puts this."""
    return f"{REQUESTS}keyframe-{version:08d}"


def version_of(key: str) -> int | None:
    """Returns the version that a key belongs to, if any."""
    match key.split("/"):
        case ["versions", digits, _] if digits.isdecimal():
            return int(digits)
    return None


def base_of(key: str) -> int | None:
    """Returns the base version of a `delta_manifest_key`, None for any other key."""
    return _base_of(key, ".json")


def begun_base_of(key: str) -> int | None:
    """Returns the base version of a `begun_key`, None for any other key."""
    return _base_of(key, ".begun.json")


def _base_of(key: str, ending: str) -> int | None:
    name = key.rpartition("/")[2]
    digits = name.removeprefix("delta-").removesuffix(ending)
    if name == f"full{ending}":
        return NOTHING
    return int(digits) if name == f"delta-{digits}{ending}" and digits.isdecimal() else None


def _check_tensors(tensors: Sequence[TensorEntry]) -> int:
    """Returns the bytes that the tensors take. Raises `WeightsCorrupted` unless they follow each other without gaps."""
    at = 0
    names: set[tuple[str, tuple[int, ...]]] = set()
    for tensor in tensors:
        if (tensor.name, tensor.begin) in names:
            _refuse(f"tensor {tensor.name} is listed twice")
        if tensor.dtype not in DTYPE_BYTES:
            _refuse(f"tensor {tensor.name} has dtype {tensor.dtype}; allowed: {', '.join(DTYPE_BYTES)}")
        if tensor.begin and len(tensor.begin) != len(tensor.shape):
            _refuse(f"tensor {tensor.name} of shape {tensor.shape} begins at {tensor.begin}")
        if tensor.offset != at:
            _refuse(f"tensor {tensor.name} begins at byte {tensor.offset}, not {at}")
        names.add((tensor.name, tensor.begin))
        at += tensor.size_bytes
    return at


def _count_tiles(tensors: Sequence[TensorEntry], tile_elements: int) -> int:
    """Returns how many tiles of at most `tile_elements` the tensors have, none across two (`layout.tile_ends`)."""
    if tile_elements < 1:
        _refuse(f"tiles of {tile_elements} elements")
    return sum(-(-tensor.patterns // tile_elements) for tensor in tensors)


def _check_sums(tile_sums: bytes, tiles: int) -> None:
    if len(tile_sums) != 8 * tiles:
        _refuse(f"it has {tiles} tiles, and the sums of {len(tile_sums) / 8:g}")


def _check_buckets(begun: DeltaBegun) -> int:
    """Returns the number of tiles. Raises unless the buckets hold the tensors' tiles one after the other."""
    _check_tensors(begun.tensors)
    tiles = _count_tiles(begun.tensors, begun.tile_elements)
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
    raise WeightsCorrupted(f"record: {problem}")
