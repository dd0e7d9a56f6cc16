"""What a weights version is made of. The manifest is written last: where there is one, its blob is complete."""

import math
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, NoReturn

import msgspec

from elastic.weights.errors import WeightsCorrupted
from elastic.weights.relay import REQUESTS
from elastic.weights.signing import Trust

SCHEMA_VERSION = 3

Natural = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
"""Room is left to add to it in 64 bits."""

DTYPE_BYTES = {"bfloat16": 2}


class TensorEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor: its row-major elements, little-endian, at `offset` of the blob."""

    name: str
    shape: tuple[Natural, ...]
    dtype: str
    offset: Natural
    begin: tuple[Natural, ...] = ()
    """Where it begins in the full tensor of this name, if it is only a cell of that."""

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """A keyframe: one version of a run's weights, all of them in one blob."""

    signed_as: ClassVar[str] = "keyframe"

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
    """Of all tiles (`elastic.weights.codecs.sums`), eight little-endian bytes each; base64 in JSON."""
    schema_version: int = SCHEMA_VERSION


def decode_manifest(data: bytes, trust: Trust) -> Manifest:
    """Raises `WeightsForged` or `WeightsCorrupted` unless `data` is a signed, consistent manifest of this schema."""
    manifest = trust.open(data, Manifest, SCHEMA_VERSION)
    size_bytes = check_tensors(manifest.tensors)
    if size_bytes != manifest.blob_bytes:
        _refuse(f"its tensors have {size_bytes} bytes, its blob {manifest.blob_bytes}")
    check_sums(manifest.tile_sums, count_tiles(manifest.tensors, manifest.tile_elements))
    return manifest


def check_tensors(tensors: Sequence[TensorEntry]) -> int:
    """How many bytes they take. Raises `WeightsCorrupted` unless they follow each other without gaps."""
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


def count_tiles(tensors: Sequence[TensorEntry], tile_elements: int) -> int:
    """How many tiles of at most `tile_elements` they have, none across two (`elastic.weights.layout`)."""
    if tile_elements < 1:
        _refuse(f"tiles of {tile_elements} elements")
    return sum(-(-math.prod(tensor.shape) // tile_elements) for tensor in tensors)


def check_sums(tile_sums: bytes, tiles: int) -> None:
    """Raises `WeightsCorrupted` unless there is one for each tile."""
    if len(tile_sums) != 8 * tiles:
        _refuse(f"it has {tiles} tiles, and the sums of {len(tile_sums) / 8:g}")


def manifest_key(version: int) -> str:
    return f"{version_prefix(version)}manifest.json"


def keyframe_key(version: int) -> str:
    return f"{version_prefix(version)}keyframe.bin"


def request_key(version: int) -> str:
    """Put by a worker that cannot get to `version` from anything on the relay."""
    return f"{REQUESTS}keyframe-{version:08d}"


def version_prefix(version: int) -> str:
    """All keys of a version begin with this."""
    return f"versions/{version:08d}/"


def version_of(key: str) -> int | None:
    """The version that a key belongs to, if to any."""
    match key.split("/"):
        case ["versions", digits, _] if digits.isdecimal():
            return int(digits)
    return None


def _refuse(problem: str) -> NoReturn:
    raise WeightsCorrupted(f"manifest: {problem}")
