"""What is said on connections to a pool's process, and between a node agent and its resident, and how the pool is
dialled.

After `Connection.watch` both ends send a message every third of the silence limit.
"""

import os
from collections.abc import Mapping
from typing import TypeAlias, TypeVar

import msgspec

from elastic.pool import messages as w
from elastic.protocol.connection import Connection, MessageCodec, Peer
from elastic.protocol.frames import WireError, framed

FRAME_BYTES_MAX = 2 * 1024 * 1024
POOL = Peer("the pool", pause_growth=1.15)
UNKNOWN_POOL = POOL._replace(changes=False)
"""A pool that has not welcomed the dialler yet: a wrong certificate may as well be of another machine."""

M = TypeVar("M")
W = TypeVar("W")
FromDialler: TypeAlias = w.FromJob | w.FromNodeAgent
PoolLink: TypeAlias = Connection[msgspec.Struct, M]
"""Either end of a connection, by what it hears."""

_encoder = msgspec.msgpack.Encoder()


def encoded(message: msgspec.Struct) -> bytes:
    """Encode one frame. Raises `WireError` if it is larger than its receiver accepts."""
    body = _encoder.encode(message)
    if len(body) > FRAME_BYTES_MAX:
        raise WireError(f"{type(message).__name__} of {len(body)} bytes; at most {FRAME_BYTES_MAX} are allowed")
    return framed(body)


def _codec(decoder: "msgspec.msgpack.Decoder[M]") -> MessageCodec[msgspec.Struct, M]:
    def decode(body: memoryview) -> M | None:
        try:
            message = decoder.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise WireError(str(error)) from error
        return None if isinstance(message, w.StillHere) else message

    return MessageCodec(encoded, decode, FRAME_BYTES_MAX, unread_bytes=4 * FRAME_BYTES_MAX, idle=w.StillHere())


def show_life(link: PoolLink[M], environment: Mapping[str, str] = os.environ) -> None:
    """Say from now on, on a resident's connection, that it lives, if its node agent listens for that."""
    if beat_s := environment.get(w.BEAT_VARIABLE, ""):
        link.beat(w.StillHere(), float(beat_s))


FROM_DIALLER = _codec(msgspec.msgpack.Decoder(FromDialler))
TO_JOB = _codec(msgspec.msgpack.Decoder(w.ToJob))
TO_NODE_AGENT = _codec(msgspec.msgpack.Decoder(w.ToNodeAgent))
TO_RESIDENT = _codec(msgspec.msgpack.Decoder(w.ToResident))
FROM_RESIDENT = _codec(msgspec.msgpack.Decoder(w.FromResident))
