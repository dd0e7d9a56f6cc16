"""Blobs on a relay, and their keys."""

import re
from collections.abc import Iterator, Sequence

from elastic.weights.errors import InvalidKey

Buffer = bytes | bytearray | memoryview

_SEGMENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")


def check_key(key: str) -> str:
    """`key` itself; raises `InvalidKey` unless it is segments of letters, digits and `._-`, apart by `/`."""
    if not all(_SEGMENT.fullmatch(segment) for segment in key.split("/")):
        raise InvalidKey(f"blob key {key!r}: expected segments of letters, digits and ._- apart by /")
    return key


def pieces(parts: Sequence[Buffer], size_bytes: int) -> Iterator[bytes]:
    """The parts' concatenation, cut every so many bytes."""
    piece = bytearray()
    for part in parts:
        rest = memoryview(part).cast("B")
        while len(rest):
            room = size_bytes - len(piece)
            piece += rest[:room]
            rest = rest[room:]
            if len(piece) == size_bytes:
                yield bytes(piece)
                piece.clear()
    if piece:
        yield bytes(piece)
