"""Frames on a byte stream: a 4-byte big-endian length and a body. What all our protocols share."""

import struct
from typing import Annotated, Any, TypeAlias

import msgspec

MAX_FRAME_BYTES = 64 * 1024 * 1024
"""A group for the trainer is the largest frame; weights travel through relays, never here."""
SECONDS_MAX = 86_400.0
"""A day: more than anything takes that a peer is waited for."""

Seconds: TypeAlias = Annotated[float, msgspec.Meta(ge=0.0, le=SECONDS_MAX)]

_LENGTH = struct.Struct(">I")


class WireError(Exception):
    """The peer broke the protocol; the connection is of no further use."""


class UnreadableFrame(WireError):
    """A frame of no use, on a connection that is sound: its sender has to be given an answer."""

    def answer(self) -> Any:
        raise NotImplementedError


class RefusedFrame(msgspec.Struct, frozen=True, tag="Refused", array_like=True):
    """No session. `retry` says whether dialling again can help. It is the same in every version of every protocol."""

    reason: str
    retry: bool


def framed(body: bytes) -> bytes:
    return _LENGTH.pack(len(body)) + body


class FrameBuffer:
    """Cuts a byte stream into frame bodies, whatever the sizes in which it arrives.

    `max_frame_bytes` may be raised once the peer is known.
    """

    def __init__(self, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self.max_frame_bytes = max_frame_bytes
        self._partial = bytearray()
        self._needed = _LENGTH.size

    def feed(self, data: bytes) -> list[memoryview]:
        """Bodies that `data` completes. Raises `WireError` on a length beyond `max_frame_bytes`."""
        if self._partial:
            self._partial += data
            if len(self._partial) < self._needed:
                return []
            data = bytes(self._partial)
            self._partial.clear()
        view = memoryview(data)
        size = len(data)
        bodies: list[memoryview] = []
        at = 0
        self._needed = _LENGTH.size
        while size - at >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(data, at)
            if length > self.max_frame_bytes:
                raise WireError(f"frame of {length} bytes; at most {self.max_frame_bytes} are allowed here")
            end = at + _LENGTH.size + length
            if end > size:
                self._needed = end - at
                break
            bodies.append(view[at + _LENGTH.size : end])
            at = end
        if at < size:
            self._partial += view[at:]
        return bodies
