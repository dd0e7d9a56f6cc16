"""Signatures: what the trainer signs, and what workers believe.

- The trainer makes a key when its process starts. The private half never leaves that process, but for the other ranks
  of the same trainer. So a trainer that is resumed has another key, and nothing that the one before signed is believed
  any more.
- A signature covers the kind of record and the record's bytes, which name run, version and base and hold the BLAKE2b
  of every blob. A record is of no use under another run, version, base or kind.
- Only verified bytes are decoded. A party that can write to a relay, but has no key, can only withhold weights.

A signed record is JSON: `{"signature": hexadecimal, "manifest": the record}`.
"""

from typing import ClassVar, NamedTuple, Protocol, TypeVar

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from elastic.system.host import here
from elastic.weights.errors import WeightsCorrupted, WeightsForged

_PURPOSE = b"elastic weights\0"
"""A signature counts for nothing else."""

_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class Signable(Protocol):
    """A record that can be signed. `signed_as` tells its kind from all others."""

    signed_as: ClassVar[str]

    @property
    def run(self) -> str: ...

    @property
    def schema_version(self) -> int: ...

    def check(self) -> None:
        """Raises `WeightsCorrupted` for a record that contradicts itself."""
        ...


T = TypeVar("T", bound=Signable)


class _Signed(msgspec.Struct, frozen=True):
    signature: str
    manifest: msgspec.Raw


class _Schema(msgspec.Struct, frozen=True):
    schema_version: int


class SigningKey:
    """The trainer's Ed25519 key: a new one, or the one whose `secret` rank 0 has told. It is not shown or pickled."""

    def __init__(self, secret: bytes | None = None) -> None:
        self._private = Ed25519PrivateKey.from_private_bytes(secret or here().chance.randbytes(32))
        self.public = self._private.public_key().public_bytes_raw().hex()
        """The public key, in hexadecimal: workers verify signatures with it."""

    @property
    def secret(self) -> bytes:
        """The private half, for the trainer's other ranks only: its holder chooses the run's weights."""
        return self._private.private_bytes_raw()

    def seal(self, record: Signable) -> bytes:
        return self.seal_body(record.signed_as, msgspec.json.encode(record))

    def seal_body(self, kind: str, body: bytes) -> bytes:
        """`body`, the JSON of a record of this kind, with its signature."""
        signature = self._private.sign(_message(kind, body)).hex()
        return msgspec.json.encode(_Signed(signature, msgspec.Raw(body)))

    def trust(self, run: str) -> "Trust":
        return Trust(run, self.public)

    def __reduce__(self) -> str:
        raise TypeError("a signing key stays in its process")


class Trust(NamedTuple):
    """Whom a worker believes: the trainer of `run` that has the private half of `public` (hexadecimal)."""

    run: str
    public: str

    def open(self, data: bytes, kind: type[T], schema_version: int) -> T:
        """Returns the record in `data`. Raises `WeightsForged` unless this trainer signed it as such for this run.

        Raises `WeightsCorrupted` for another schema version, for what is signed but no such record, and for a record
        that contradicts itself.
        """
        try:
            signed = msgspec.json.decode(data, type=_Signed)
        except _UNREADABLE as error:
            raise WeightsForged(f"{kind.signed_as}: not signed by the run's trainer ({error})") from error
        body = bytes(signed.manifest)
        if not self._is_signed(signed.signature, _message(kind.signed_as, body)):
            raise WeightsForged(f"{kind.signed_as}: not signed by the run's trainer")
        try:
            found = msgspec.json.decode(body, type=_Schema).schema_version
            if found != schema_version:
                raise WeightsCorrupted(f"{kind.signed_as}: schema version {found}; this program reads {schema_version}")
            record = msgspec.json.decode(body, type=kind)
        except _UNREADABLE as error:
            raise WeightsCorrupted(f"{kind.signed_as}: {error}") from error
        if record.run != self.run:
            raise WeightsForged(f"{kind.signed_as}: it is of run {record.run}, not of {self.run}")
        record.check()
        return record

    def _is_signed(self, signature: str, message: bytes) -> bool:
        try:
            found = bytes.fromhex(signature)
            if found.hex() != signature:  # one way to write each
                return False
            Ed25519PublicKey.from_public_bytes(bytes.fromhex(self.public)).verify(found, message)
        except (InvalidSignature, ValueError):
            return False
        return True


def _message(kind: str, body: bytes) -> bytes:
    return b"".join((_PURPOSE, kind.encode(), b"\0", body))
