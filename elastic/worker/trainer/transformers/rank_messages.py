"""What passes between a trainer's first rank and its others, over pairs of connected sockets that only they have.

The first says what to do, and the others do it, one order after the other: each is answered.
"""

import contextlib
import os
import socket
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, TypeAlias

import msgspec

from elastic.protocol.wire import TrainGroupFrame, TrajectoryData
from elastic.system.parking import Switch


class _RankMessage(msgspec.Struct, frozen=True, tag=True, array_like=True):
    pass


class BeRank(_RankMessage, frozen=True):
    """The first message: be this rank of `size`, and meet the others in a `directory`. `config` is the run's."""

    rank: int
    size: int
    device: str
    directory: str
    timeout_s: float
    config: dict[str, Any]


class TrainShare(_RankMessage, frozen=True):
    group: TrainGroupFrame


class SkipShare(_RankMessage, frozen=True):
    index: int
    tokens: int
    trajectories: Sequence[TrajectoryData]


class UpdateShare(_RankMessage, frozen=True):
    pass


class CollectShards(_RankMessage, frozen=True):
    """Give the first rank the weights."""


class SaveShards(_RankMessage, frozen=True):
    path: str


class LoadShards(_RankMessage, frozen=True):
    path: str


class ParkShards(_RankMessage, frozen=True):
    pass


class ResumeShards(_RankMessage, frozen=True):
    pass


RankOrder: TypeAlias = (
    TrainShare | SkipShare | UpdateShare | CollectShards | SaveShards | LoadShards | ParkShards | ResumeShards
)


class RankDone(_RankMessage, frozen=True):
    """The order was carried out; what it cost, where it is one that costs."""

    switch: Switch | None = None


class RankRefused(_RankMessage, frozen=True):
    """The order cannot be carried out, and nothing has changed: on no rank."""

    why: str


ToRank: TypeAlias = BeRank | RankOrder
FromRank: TypeAlias = RankDone | RankRefused

_encoder = msgspec.msgpack.Encoder()
_to_rank = msgspec.msgpack.Decoder(ToRank)
_from_rank = msgspec.msgpack.Decoder(FromRank)


class RankLine:
    """One end of the connection. One thread sends and one receives; both raise `OSError` or `EOFError` at its end."""

    def __init__(self, descriptor: int, decoder: msgspec.msgpack.Decoder[Any]) -> None:
        self._connection = Connection(descriptor)
        self._decoder = decoder

    @classmethod
    def of_first(cls, descriptor: int) -> "RankLine":
        return cls(descriptor, _from_rank)

    @classmethod
    def of_rank(cls, descriptor: int) -> "RankLine":
        return cls(descriptor, _to_rank)

    def send(self, message: ToRank | FromRank) -> None:
        self._connection.send_bytes(_encoder.encode(message))

    def receive(self) -> Any:
        return self._decoder.decode(self._connection.recv_bytes())

    def hang_up(self) -> None:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self._connection.fileno())) as end:
            end.shutdown(socket.SHUT_RDWR)
