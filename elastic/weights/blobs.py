"""Blobs on a relay, and their keys."""

import re

from elastic.weights.errors import InvalidKey

Buffer = bytes | bytearray | memoryview

_SEGMENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")


def check_key(key: str) -> str:
    """`key` itself; raises `InvalidKey` unless it is segments of letters, digits and `._-`, apart by `/`."""
    if not all(_SEGMENT.fullmatch(segment) for segment in key.split("/")):
        raise InvalidKey(f"blob key {key!r}: expected segments of letters, digits and ._- apart by /")
    return key
