"""What passes between a trainer's first rank and its others, over pairs of connected sockets that only they have.

The first says what to do, and the others do it, one order after the other: each is answered. What is published while
training goes on has a pair of its own.
"""

import threading
from collections.abc import Collection, Sequence
from multiprocessing.connection import Connection
from typing import Any, TypeAlias, dataclass_transform

import msgspec

from elastic.protocol.wire import TrainGroupFrame, TrajectoryData
from elastic.system.parking import Switch
from elastic.worker.publication import PublishingTerms, RelayPlace


@dataclass_transform(frozen_default=True, field_specifiers=(msgspec.field,))
class _RankMessage(msgspec.Struct, frozen=True, tag=True, array_like=True):
    pass


class BeRank(_RankMessage):
    """The first message: be this rank of `size`, and meet the others by the file that is open as `meeting`. `config` is
    the run's."""

    rank: int
    size: int
    device: str
    meeting: int
    timeout_s: float
    config: dict[str, Any]


class TrainShare(_RankMessage):
    group: TrainGroupFrame


class SkipShare(_RankMessage):
    index: int
    tokens: int
    trajectories: Sequence[TrajectoryData]


class UpdateShare(_RankMessage):
    pass


class HoldShards(_RankMessage):
    """Keep a copy of what is published of the weights as they are."""

    in_host_memory: bool


class BePublisher(_RankMessage):
    """Publish on these terms from now on, as the other pair of sockets says."""

    terms: PublishingTerms


class SaveShards(_RankMessage):
    path: str


class LoadShards(_RankMessage):
    path: str


class ParkShards(_RankMessage):
    pass


class ResumeShards(_RankMessage):
    pass


RankOrder: TypeAlias = (
    TrainShare
    | SkipShare
    | UpdateShare
    | HoldShards
    | BePublisher
    | SaveShards
    | LoadShards
    | ParkShards
    | ResumeShards
)


class PublishShards(_RankMessage):
    """Publish what is held, under this version; those that are `pulled` stay on the relay."""

    version: int
    pulled: Collection[int]


class FollowRelay(_RankMessage):
    """The relay is there from now on. This is not answered, and heard also while something is published."""

    place: RelayPlace


class RankDone(_RankMessage):
    """The order was carried out; what it cost, where it is one that costs."""

    switch: Switch | None = None


class RankPublished(_RankMessage):
    """This rank's part of the version is on the relay; what that took."""

    encode_s: float
    put_s: float


class RankRefused(_RankMessage):
    """The order cannot be carried out, and nothing has changed: on no rank. Or a version cannot be published."""

    why: str


ToRank: TypeAlias = BeRank | RankOrder | PublishShards | FollowRelay
FromRank: TypeAlias = RankDone | RankPublished | RankRefused

_encoder = msgspec.msgpack.Encoder()
_to_rank = msgspec.msgpack.Decoder(ToRank)
_from_rank = msgspec.msgpack.Decoder(FromRank)


class RankLine:
    """One end of the connection. One thread receives; both ways raise `OSError` or `EOFError` at its end."""

    def __init__(self, descriptor: int, decoder: msgspec.msgpack.Decoder[Any]) -> None:
        self._connection = Connection(descriptor)
        self._decoder = decoder
        self._sending = threading.Lock()

    @classmethod
    def of_first(cls, descriptor: int) -> "RankLine":
        return cls(descriptor, _from_rank)

    @classmethod
    def of_rank(cls, descriptor: int) -> "RankLine":
        return cls(descriptor, _to_rank)

    def fileno(self) -> int:
        return self._connection.fileno()

    def send(self, message: ToRank | FromRank) -> None:
        with self._sending:
            self._connection.send_bytes(_encoder.encode(message))

    def receive(self) -> Any:
        return self._decoder.decode(self._connection.recv_bytes())
