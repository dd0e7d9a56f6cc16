"""What a weights version is made of. The manifest is written last: where there is one, its blob is complete."""

import math
from hashlib import blake2b
from typing import Any, Literal, NoReturn

import msgspec

from elastic.weights.errors import WeightsCorrupted

SCHEMA_VERSION = 1

DTYPE_BYTES = {"bfloat16": 2}

_CHECKSUM_BYTES = 32


class TensorEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor: its row-major elements, little-endian, at `offset` of the blob."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int

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
    """BLAKE2b-256 of the blob, in hexadecimal."""
    schema_version: int = SCHEMA_VERSION


class _Sealed(msgspec.Struct, frozen=True):
    """The manifest's own bytes with their checksum, so that a changed shape or name is noticed as well."""

    checksum: str
    manifest: msgspec.Raw


class _Schema(msgspec.Struct, frozen=True):
    schema_version: int


def new_checksum() -> blake2b:
    return blake2b(digest_size=_CHECKSUM_BYTES)


def encode_manifest(manifest: Manifest) -> bytes:
    body = msgspec.json.encode(manifest)
    return msgspec.json.encode(_Sealed(_checksum(body), msgspec.Raw(body)))


def decode_manifest(data: bytes) -> Manifest:
    """Raises `WeightsCorrupted` unless `data` is a whole, unchanged and consistent manifest of this schema."""
    try:
        sealed = msgspec.json.decode(data, type=_Sealed)
        body = bytes(sealed.manifest)
        if _checksum(body) != sealed.checksum:
            _refuse("its checksum does not match")
        schema_version = msgspec.json.decode(body, type=_Schema).schema_version
        if schema_version != SCHEMA_VERSION:
            _refuse(f"schema version {schema_version}; this program reads {SCHEMA_VERSION}")
        manifest = msgspec.json.decode(body, type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise WeightsCorrupted(f"manifest: {error}") from error
    _check_layout(manifest)
    return manifest


def manifest_key(version: int) -> str:
    return f"{version_prefix(version)}manifest.json"


def keyframe_key(version: int) -> str:
    return f"{version_prefix(version)}keyframe.bin"


def version_prefix(version: int) -> str:
    """All keys of a version begin with this."""
    return f"versions/{version:08d}/"


def version_of(key: str) -> int | None:
    """The version that a key belongs to, if to any."""
    match key.split("/"):
        case ["versions", digits, _] if digits.isdecimal():
            return int(digits)
    return None


def _check_layout(manifest: Manifest) -> None:
    at = 0
    names: set[str] = set()
    for tensor in manifest.tensors:
        if tensor.name in names:
            _refuse(f"tensor {tensor.name} is listed twice")
        if tensor.dtype not in DTYPE_BYTES:
            _refuse(f"tensor {tensor.name} has dtype {tensor.dtype}; allowed: {', '.join(DTYPE_BYTES)}")
        if min(tensor.shape, default=0) < 0:
            _refuse(f"tensor {tensor.name} has shape {tensor.shape}")
        if tensor.offset != at:
            _refuse(f"tensor {tensor.name} begins at byte {tensor.offset}, not {at}")
        names.add(tensor.name)
        at += tensor.size_bytes
    if at != manifest.blob_bytes:
        _refuse(f"its tensors have {at} bytes, its blob {manifest.blob_bytes}")


def _checksum(body: bytes) -> str:
    checksum = new_checksum()
    checksum.update(body)
    return checksum.hexdigest()


def _refuse(problem: str) -> NoReturn:
    raise WeightsCorrupted(f"manifest: {problem}")
