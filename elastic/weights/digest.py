"""BLAKE2b-256 of blobs: what signed manifests say of the bytes they name.

A keyframe is gigabytes, so it is hashed by pieces, each when it has arrived, on the threads that bring it; its digest
is that of its pieces' digests.
"""

import threading
from collections.abc import Iterable
from hashlib import blake2b

from elastic.system.cores import cores
from elastic.system.host import here
from elastic.weights.blobs import Buffer

DIGEST_BYTES = 32

PIECE_BYTES = 4 << 20
"""The bytes of a keyframe's piece. They are a part of the format: another size gives other digests."""

THREADS = min(4, cores())
"""Threads that hash pieces which are in memory already."""


def digest_of(*parts: Buffer) -> str:
    """Return the digest of the concatenated parts, in hexadecimal."""
    return _hashed(parts).hex()


def blob_digest_of(blob: memoryview) -> str:
    """Digest, by pieces, of a blob in memory. Other threads run meanwhile."""
    with here().executor(THREADS, "digest") as executor:
        pieces = (blob[start : start + PIECE_BYTES] for start in range(0, len(blob), PIECE_BYTES))
        return digest_of(*executor.map(lambda piece: _hashed((piece,)), pieces))


class ArrivingBlob:
    """The digest by pieces of a blob that arrives in `memory`, in any order. Threads may share it."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        starts = range(0, len(memory), PIECE_BYTES)
        self._missing = [min(PIECE_BYTES, len(memory) - start) for start in starts]
        self._digests = [b""] * len(starts)
        self._lock = threading.Lock()

    def landed(self, begin: int, end: int) -> None:
        """These bytes are there now. They are told once."""
        for number in range(begin // PIECE_BYTES, -(-end // PIECE_BYTES)):
            start = number * PIECE_BYTES
            piece = self._memory[start : start + PIECE_BYTES]
            with self._lock:
                self._missing[number] -= min(end, start + len(piece)) - max(begin, start)
                complete = not self._missing[number]
            if complete:
                self._digests[number] = _hashed((piece,))

    def digest(self) -> str:
        """Return the digest. All pieces must have arrived."""
        return digest_of(*self._digests)


def _hashed(parts: Iterable[Buffer]) -> bytes:
    digest = blake2b(digest_size=DIGEST_BYTES)
    for part in parts:
        digest.update(part)
    return digest.digest()
