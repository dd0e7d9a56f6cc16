"""What a weights version is made of. The manifest is written last: where there is one, its blob is complete."""

import math
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, Literal, NoReturn, TypeVar

import msgspec

from elastic.weights.errors import WeightsCorrupted

SCHEMA_VERSION = 1

T = TypeVar("T")

DTYPE_BYTES = {"bfloat16": 2}

REQUESTS = "requests/"
"""Keys of workers' requests for a keyframe begin with this."""

_CHECKSUM_BYTES = 32


class TensorEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor: its row-major elements, little-endian, at `offset` of the blob."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    begin: tuple[int, ...] = ()
    """Where it begins in the full tensor of this name, if it is only a cell of that."""

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """One version of a run's weights.

    A keyframe stands alone; its `base_version` is None. Other kinds will name the version they are applied to.
    """

    run: str
    version: int
    kind: Literal["keyframe"]
    base_version: int | None = None
    model: dict[str, Any]
    """The model's `config.json`."""
    tensors: tuple[TensorEntry, ...]
    """In the blob's order, without gaps."""
    blob: str
    """Key of the blob."""
    blob_bytes: int
    blob_checksum: str
    """XXH3-128 of the blob, keyed by run, in hexadecimal."""
    schema_version: int = SCHEMA_VERSION


class _Sealed(msgspec.Struct, frozen=True):
    """The manifest's own bytes with their checksum, so that a changed shape or name is noticed as well."""

    checksum: str
    manifest: msgspec.Raw


class _Schema(msgspec.Struct, frozen=True):
    schema_version: int


def encode_manifest(manifest: Manifest) -> bytes:
    return seal(msgspec.json.encode(manifest))


def decode_manifest(data: bytes) -> Manifest:
    """Raises `WeightsCorrupted` unless `data` is a whole, unchanged and consistent manifest of this schema."""
    manifest = open_seal(data, Manifest, SCHEMA_VERSION)
    size_bytes = check_tensors(manifest.tensors)
    if size_bytes != manifest.blob_bytes:
        _refuse(f"its tensors have {size_bytes} bytes, its blob {manifest.blob_bytes}")
    return manifest


def seal(body: bytes) -> bytes:
    return msgspec.json.encode(_Sealed(_checksum(body), msgspec.Raw(body)))


def open_seal(data: bytes, kind: type[T], schema_version: int) -> T:
    """What was sealed, as a `kind`. Raises `WeightsCorrupted` if it is changed, or of another schema."""
    try:
        sealed = msgspec.json.decode(data, type=_Sealed)
        body = bytes(sealed.manifest)
        if _checksum(body) != sealed.checksum:
            _refuse("its checksum does not match")
        found = msgspec.json.decode(body, type=_Schema).schema_version
        if found != schema_version:
            _refuse(f"schema version {found}; this program reads {schema_version}")
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise WeightsCorrupted(f"manifest: {error}") from error


def check_tensors(tensors: Sequence[TensorEntry]) -> int:
    """How many bytes they take. Raises `WeightsCorrupted` unless they follow each other without gaps."""
    at = 0
    names: set[tuple[str, tuple[int, ...]]] = set()
    for tensor in tensors:
        if (tensor.name, tensor.begin) in names:
            _refuse(f"tensor {tensor.name} is listed twice")
        if tensor.dtype not in DTYPE_BYTES:
            _refuse(f"tensor {tensor.name} has dtype {tensor.dtype}; allowed: {', '.join(DTYPE_BYTES)}")
        if min(tensor.shape, default=0) < 0:
            _refuse(f"tensor {tensor.name} has shape {tensor.shape}")
        if tensor.begin and (len(tensor.begin) != len(tensor.shape) or min(tensor.begin) < 0):
            _refuse(f"tensor {tensor.name} of shape {tensor.shape} begins at {tensor.begin}")
        if tensor.offset != at:
            _refuse(f"tensor {tensor.name} begins at byte {tensor.offset}, not {at}")
        names.add((tensor.name, tensor.begin))
        at += tensor.size_bytes
    return at


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


def _checksum(body: bytes) -> str:
    return blake2b(body, digest_size=_CHECKSUM_BYTES).hexdigest()


def _refuse(problem: str) -> NoReturn:
    raise WeightsCorrupted(f"manifest: {problem}")
