"""Messages as the run keeps them for calls that name an earlier answer: bytes, compressed. Pure."""

import json
import zlib
from collections.abc import Iterable
from typing import Any

from elastic.front.rendering.messages import Messages
from elastic.protocol.front_messages import HISTORY_BYTES_MAX

LEVEL = 1
"""Text halves at once; more would take longer than it saves."""


def packed(messages: Messages, most: int = HISTORY_BYTES_MAX) -> bytes:
    """Empty for more than `most` bytes. Any text is as it was, unpaired surrogates included."""
    said = json.dumps(messages, ensure_ascii=False, separators=(",", ":"))
    piece = zlib.compress(said.encode("utf-8", "surrogatepass"), LEVEL)
    return piece if len(piece) <= most else b""


def unpacked(pieces: Iterable[bytes]) -> list[dict[str, Any]]:
    """The messages of all pieces, one behind the other."""
    messages: list[dict[str, Any]] = []
    for piece in pieces:
        messages += json.loads(zlib.decompress(piece).decode("utf-8", "surrogatepass"))
    return messages
